"""`psamil compare` and `psamil demo` as users start them."""

import sys

import pytest

from psamil.cli import _plain, main
from psamil.training.settings import TrainingSettings
from tests.evaluation.made_runs import make_run, make_splits


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


def test_folders_may_stand_before_and_after_options(tmp_path, capsys):
    splits = make_splits()
    one, two = (str(make_run(tmp_path / name, splits, signal=s)) for name, s in (("one", 2.0), ("two", 0.0)))
    out = tmp_path / "out"
    assert run("compare", one, "--out", str(out), two, "--names", "a [bold]", "b") == 0
    printed = capsys.readouterr().out
    assert "a [bold]" in printed
    assert "DeLong" in printed
    assert f"wrote {out / 'index.html'}" in printed.replace("\n", "")
    assert sorted(path.name for path in out.iterdir()) == ["index.html", "table.csv", "table.tex", "tests.csv"]


def test_other_splits_are_refused_in_one_line(tmp_path, capsys):
    one = make_run(tmp_path / "one", make_splits(), signal=1.0)
    two = make_run(tmp_path / "two", make_splits(seed=1), signal=1.0)
    assert run("compare", str(one), str(two), "--out", str(tmp_path / "out")) == 2
    assert "two: has other splits than" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_values_of_options_are_no_folders():
    words = list(_plain(["compare", "--reference", "best", "a", "--title=x", "b"]))
    assert words == ["compare", "--reference", "best", "--title=x", '["a", "b"]']
    assert list(_plain(["inspect", "a", "--labels", "b"])) == ["inspect", "a", "--labels", "b"]


def test_demo_goes_on_where_it_was_stopped(tmp_path, capsys, monkeypatch):
    small = {
        "psa": TrainingSettings(model="psa", model_options={"heads": 2, "head_dim": 4}, epochs=1),
        "abmil": TrainingSettings(model="abmil", model_options={"hidden": 4}, epochs=1),
    }
    monkeypatch.setattr(sys.modules["psamil.cli.demo"], "SETTINGS", small)
    (tmp_path / "out" / "cohort" / "left over").mkdir(parents=True)
    options = ("demo", "--out", str(tmp_path / "out"), "--slides", "18", "--tiles", "150", "--folds", "2")
    assert run(*options) == 0
    first = capsys.readouterr().out
    assert "Learned radii K" in first
    assert "planted" in (tmp_path / "out" / "index.html").read_text()
    weights = tmp_path / "out" / "psa" / "folds" / "0" / "seed-0" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert run(*options) == 0
    second = capsys.readouterr().out
    assert "simulating" not in second
    assert "epoch  1/1" not in second
    assert weights.stat().st_mtime_ns == before
