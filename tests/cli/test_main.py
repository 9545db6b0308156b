"""The command as users start it."""

import subprocess
import sys

import psamil


def test_the_package_runs_as_a_program(tmp_path):
    command = [sys.executable, "-m", "psamil"]
    assert (
        subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        .stdout.strip()
        .endswith(psamil.__version__)
    )
    made = subprocess.run(
        [*command, "simulate", str(tmp_path / "cohort"), "--slides", "2", "--tiles", "50"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout.strip() == f"wrote {tmp_path / 'cohort' / 'labels.csv'}"
    again = subprocess.run([*command, "simulate", str(tmp_path / "cohort")], capture_output=True, text=True)
    assert again.returncode == 2
    assert (
        again.stderr.strip() == f"psamil: {tmp_path / 'cohort'}: is not empty; choose a new folder, or delete this one"
    )
