"""Ctrl-C and SIGTERM in the middle of work on a Ray cluster: one line, no lock, and another call goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from psamil.cli import main
from psamil.cohort import simulate
from psamil.evaluation import experiment
from psamil.training.fold import HISTORY_FILE

pytest.importorskip("ray")

LIMIT_S = 600  # of what a cluster may take on a busy machine; nothing here waits for so long unless it is broken
EPOCHS = 100_000  # more than there is time for: only a signal ends it
FIRST_RUN = {"train": "", "tune": "fold-0/trials/trial-0"}
# Whoever runs the tests in the background may have Ctrl-C ignored, and so would what it starts.
PSAMIL = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from psamil.cli import main; main()"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("stopping")
    simulate(home / "cohort", slides=16, tiles=50, dim=4)
    (home / "space.yaml").write_text("lr: [0.001, 0.01]\n")
    return home


def words_for(verb: str, home: Path, out: Path) -> list[str]:
    words = [verb, str(home / "cohort"), str(home / "cohort" / "labels.csv"), str(out), "--target", "label"]
    words += ["--folds", "2", "--cache", str(home / "cache"), "--training.model", "mean"]
    words += ["--training.epochs", str(EPOCHS), "--training.patience", str(EPOCHS)]
    return words + (["--space", str(home / "space.yaml"), "--inner", "2"] if verb == "tune" else [])


def last_epoch(training: Path) -> int | None:
    """The last one in the history of a training."""
    history = training / HISTORY_FILE
    lines = history.read_text().splitlines() if history.exists() else []
    return json.loads(lines[-1])["epoch"] if lines else None


@pytest.mark.parametrize(
    ("verb", "stop"),
    [("tune", signal.SIGINT), ("train", signal.SIGTERM)],
    ids=lambda value: getattr(value, "name", value),
)
def test_work_that_is_stopped_leaves_no_lock_and_can_be_gone_on_with(verb, stop, home, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    words, first = words_for(verb, home, out), (out / FIRST_RUN[verb] / "folds" / "0" / "seed-0")
    command = [sys.executable, "-c", PSAMIL, *words, "--engine", "ray"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + LIMIT_S
            while not last_epoch(first) and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            assert last_epoch(first), f"not two epochs within {LIMIT_S} s"
            process.send_signal(stop)
            _, told = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == 130, told
    assert told.splitlines()[-1] == "psamil: stopped"
    assert "Traceback" not in told
    assert not list(out.rglob("*lock"))
    assert not list(out.rglob(".ray"))

    before, went_on = last_epoch(first), {}
    train_fold = experiment.train_fold

    def train_an_epoch(cohort, split, settings, folder, report, on_step):
        def end(record):
            went_on[folder] = record["epoch"]
            raise KeyboardInterrupt

        return train_fold(cohort, split, settings, folder, end, on_step)

    monkeypatch.setattr(experiment, "train_fold", train_an_epoch)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 130, capsys.readouterr().err
    assert list(went_on) == [first]
    assert went_on[first] in (before, before + 1)  # the last one is done again if it was stopped before it was saved
