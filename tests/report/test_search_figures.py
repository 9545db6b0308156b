"""The picture of a search: every trial that has a score is in it, whatever its settings are."""

import re
from pathlib import Path

import pandas as pd
import pytest

from psamil.report.search_figures import save_trials


def drawn(folder: Path, values: list[object], **options) -> str:
    """The picture, as SVG, of trials with these values of a setting."""
    score, number = [0.5 + i / 10 for i in range(len(values))], range(len(values))
    status = ["chosen", *["finished"] * (len(values) - 1)]
    table = pd.DataFrame({"trial": number, "clip": values, "metric": "auc", "mean": score, "status": status})
    table["clip"] = pd.Series(values, dtype=None if all(isinstance(value, float) for value in values) else object)
    png, svg = save_trials({0: table, 1: table}, folder / "trials", names=["clip"], **options)
    assert png.read_bytes().startswith(b"\x89PNG")
    return svg.read_text()


def dots(picture: str) -> int:
    """In all panels, with the stars of chosen trials."""
    panels, _ = picture.split('id="legend_1"')
    groups = re.findall(r'<g id="PathCollection_\d+">(.*?)\n   </g>', panels, re.DOTALL)
    return sum(group.count("<use ") for group in groups)


@pytest.mark.parametrize("values", [[0.1, 0.2, 0.3], [None, 5.0, 1.0], ["a", "b", "c"], [True, None, "x"]], ids=str)
def test_every_trial_is_drawn_over_every_setting(values, tmp_path):
    picture = drawn(tmp_path, values)
    assert dots(picture) == 2 * 2 * 3  # folds, panels, trials
    assert all(text in picture for text in ("outer fold 0", "outer fold 1", ">clip<", ">chosen<"))


def test_null_stands_among_the_other_values(tmp_path):
    picture = drawn(tmp_path, [None, 5.0, 1.0])
    assert all(f">{value}<" in picture for value in ("null", "5.0", "1.0"))


def test_orders_of_magnitude(tmp_path):
    assert all(f">{value}<" in drawn(tmp_path, [1e-3, 1e-1, 1e-2], logarithmic=["clip"]) for value in ("0.001", "0.03"))
