"""`psamil demo` on a few slides, and its report in a browser."""

import json
import os
import re
import shutil
import subprocess
import sys
from html import unescape

import pytest

from psamil.cli import main
from psamil.cli.demo import SHOWN_PER_CLASS
from psamil.files import read_json
from psamil.report.run_report import POLICY
from psamil.training.settings import TrainingSettings

LOOK = """<script>
const images = [...document.images].map(image => image.complete ? image.naturalWidth : -1);
const drawings = [...document.querySelectorAll("figure svg")].map(svg => svg.getBoundingClientRect().width);
const wider = document.documentElement.scrollWidth - window.innerWidth;
const found = document.createElement("pre");
found.id = "found";
found.textContent = JSON.stringify({images, drawings, wider, text: document.body.innerText});
document.body.append(found);
</script>"""


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A demo of eight slides, with an encoder that is quick and models that hardly train."""
    out = tmp_path_factory.mktemp("demo") / "out"
    settings = {
        "psa": TrainingSettings(model="psa", model_options={"heads": 2, "head_dim": 4}, epochs=1),
        "abmil": TrainingSettings(model="abmil", model_options={"hidden": 4}, epochs=1),
    }
    (out / "cohort" / "left over").mkdir(parents=True)  # by a demo that was stopped
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["psamil.cli.demo"], "SETTINGS", settings)
        patch.setattr(sys.modules["psamil.cli.demo"], "DEFAULT_ENCODER", "python:tests.cli.small_encoder:small_encoder")
        yield out, lambda: run("demo", "--out", str(out), "--slides", "8", "--folds", "2")


@pytest.fixture(scope="module")
def report(small):
    out, start = small
    assert start() == 0
    return out / "index.html"


def test_demo_goes_on_where_it_was_stopped(report, small, capsys):
    out, start = small
    weights = out / "psa" / "folds" / "0" / "seed-0" / "model.safetensors"
    features = next((out / "features").rglob("slide_000.h5"))
    before = [file.stat().st_mtime_ns for file in (weights, features)]
    capsys.readouterr()
    assert start() == 0
    printed = capsys.readouterr().out
    assert "drawing" not in printed
    assert "epoch 1/1" not in printed
    assert [file.stat().st_mtime_ns for file in (weights, features)] == before


def test_demo_tells_what_it_found(report, small, capsys):
    out, start = small
    assert start() == 0
    printed = capsys.readouterr().out
    for name in ("psa", "abmil"):
        metrics = read_json(out / name / "summary.json")["metrics"]
        assert f"{metrics['auc']['mean']:.3f}" in printed
        assert f"{metrics['patch_auc']['mean']:.3f}" in printed
    assert "Learned radii K in tile steps of 112 um" in printed
    assert f"wrote {report}" in printed


def test_report_in_a_browser(report, small, tmp_path):
    """No picture is broken or blocked by the page's own policy, nothing hangs over, numbers are those of the runs."""
    browser = shutil.which("chromium")
    if browser is None:
        if os.environ.get("CI"):
            pytest.fail("CI has no chromium to open the report in")
        pytest.skip("no chromium to open the report in")
    page = report.read_text(encoding="utf-8")
    assert page.count(POLICY) == 1
    copy = tmp_path / "index.html"  # whose policy lets it look at itself; its pictures are under the same rules
    copy.write_text(page.replace(POLICY, f"{POLICY}; script-src 'unsafe-inline'").replace("</body>", f"{LOOK}</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1200,1000"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [browser, *options, profile, "--dump-dom", copy.as_uri()]
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = json.loads(unescape(re.search(r'<pre id="found">(.*?)</pre>', dumped, re.DOTALL)[1]))
    assert len(found["images"]) == 2 * SHOWN_PER_CLASS  # one for each slide
    assert min(found["images"]) > 500
    assert len(found["drawings"]) >= 6
    assert min(found["drawings"]) > 100
    assert found["wider"] <= 0
    out, _ = small
    for name in ("psa", "abmil"):
        metrics = read_json(out / name / "summary.json")["metrics"]
        for metric in ("auc", "patch_auc", "froc_lesion"):
            assert f"{metrics[metric]['mean']:.3f}" in found["text"]
    assert "Slides and tile scores" in found["text"]
    assert "A tile step is 112 µm" in found["text"]
