"""Verbs as a user calls them, and the home of a small study: slides, their features and a run."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from psamil import fit
from psamil.cli import main
from tests.slides.made_slides import draw

ENCODER = "python:tests.cli.small_encoder:small_encoder"


def run_verb(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[Any, str, str]:
    """Exit code, standard output and standard error."""
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, args)))
    told = capsys.readouterr()
    return ended.value.code, told.out, told.err


def small_study(home: Path, **model: Any) -> Path:
    """Eight drawn slides (home/slides), features of a small encoder (features), labels (labels.csv) and a run (run)."""
    names = [f"s{i}" for i in range(8)]
    for i, name in enumerate(names):
        draw(home / "slides" / f"{name}.tif", side_px=384, seed=i)
    words = ["--encoder", ENCODER, "--tile-px", "64", "--workers", "1"]
    with pytest.raises(SystemExit) as ended:
        main(["extract", str(home / "slides"), "--out", str(home / "features"), *words])
    assert ended.value.code == 0
    pd.DataFrame({"slide_id": names, "label": ["no", "yes"] * 4}).to_csv(home / "labels.csv", index=False)
    options = {"target": "label", "folds": 2, "seeds": 1, "epochs": 1, "cache": home / "cache"}
    fit(home / "features", home / "labels.csv", home / "run", **options, **model)
    return home
