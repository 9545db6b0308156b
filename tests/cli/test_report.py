"""`psamil report` as users start it."""

import pytest

from psamil.cli import main
from tests.evaluation.made_runs import make_run, make_splits
from tests.readers.layouts import corners, trident_attributes, write_trident


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


@pytest.fixture
def folders(tmp_path):
    splits = make_splits()
    return [make_run(tmp_path / name, splits, signal=s) for name, s in (("one", 2.0), ("two", 0.0))]


def test_without_features_it_says_what_is_left_out(folders, tmp_path, capsys):
    out = tmp_path / "new" / "report.html"
    assert run("report", *map(str, folders), "--out", str(out), "--names", "a", "b", "--title", "Two <runs>") == 0
    told = capsys.readouterr()
    assert f"wrote {out}" in told.out.replace("\n", "")
    assert "a: no heat maps" in told.err
    assert "--features" in told.err
    page = out.read_text(encoding="utf-8")
    assert "<h1>Two &lt;runs&gt;</h1>" in page
    assert "ROC curves" in page
    assert "a: no heat maps, heads, faithfulness and cost" in page
    assert "<img" not in page


def test_with_features_it_has_heat_maps(folders, tmp_path, capsys):
    import numpy as np

    slide = sorted(make_splits().folds[1].test)[0]
    features = np.random.default_rng(0).standard_normal((len(corners(512)), 2)).astype(np.float32)
    about = trident_attributes(slide=slide)
    write_trident(tmp_path / "features", slide, features=features, coords=corners(512), about=about)
    out = tmp_path / "report.html"
    assert run("report", str(folders[0]), "--features", str(tmp_path / "features"), "--out", str(out)) == 0
    page = out.read_text(encoding="utf-8")
    assert page.count("<img") == 1
    assert f'alt="{slide}' in page
    assert "<h2>Cost</h2>" in page
    assert run("report", str(folders[0]), "--features", str(tmp_path / "features"), "--out", str(out), "--cases=0") == 0
    assert "<img" not in out.read_text(encoding="utf-8")


def test_mistakes_end_in_one_line(folders, tmp_path, capsys):
    assert run("report", str(folders[0]), "--out", str(tmp_path)) == 2
    assert "is a folder" in capsys.readouterr().err
    assert run("report", str(folders[0]), "--cases=-1", "--out", str(tmp_path / "r.html")) == 2
    assert "cases must be 0 or more" in capsys.readouterr().err
    assert run("report", str(tmp_path / "none"), "--out", str(tmp_path / "r.html")) == 2
    assert "no run directory" in capsys.readouterr().err
    slides = tmp_path / "slides"
    slides.mkdir()
    known = str(folders[0])
    assert run("report", known, "--slides", str(slides), "--out", str(tmp_path / "r.html")) == 0  # nothing to show
