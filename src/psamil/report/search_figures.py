"""The trials of a search of settings: their scores in the order of the search, and over each of the settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from psamil.files import atomic_write
from psamil.report.drawing import colour, legend_below, panels, shortened, styled
from psamil.report.paper_figures.figure_files import require_matplotlib
from psamil.report.tables import metric_title

DPI = 150
BETWEEN_FOLDS = 0.12  # of the distance between two trials, or two values that are no numbers


def save_trials(
    trials: Mapping[int, pd.DataFrame], path: Path, *, names: Collection[str], logarithmic: Collection[str] = ()
) -> list[Path]:
    """Draws ``path`` as PNG and SVG.

    Args:
        trials: of each outer fold: "trial", the settings, "metric", "mean" and "status", which is "chosen" for one.
        path: of the pictures, without what they end in.
        names: of the settings.
        logarithmic: those of them that were drawn by orders of magnitude.
    """
    require_matplotlib()
    from matplotlib.ticker import LogLocator, NullFormatter

    with styled():
        canvas, axes = panels(1 + len(names), sharey=True)
        for i, (fold, table) in enumerate(trials.items()):
            drawn = {"color": colour(i), "label": f"outer fold {fold}"}
            aside = BETWEEN_FOLDS * (i - (len(trials) - 1) / 2)
            _draw(axes[0], table["trial"] + aside, table, drawn)
            for axis, name in zip(axes[1:], names, strict=True):
                _draw(axis, _places(axis, trials, fold, name, aside), table, drawn)
        metric = next(of for table in trials.values() for of in table["metric"].dropna())
        axes[0].set(xlabel="trial, in the order of the search", ylabel=f"{metric_title(metric)}, mean of inner folds")
        axes[0].xaxis.get_major_locator().set_params(integer=True)
        for axis, name in zip(axes[1:], names, strict=True):
            axis.set_xlabel(shortened(name))
            if name in logarithmic:
                axis.set_xscale("log")
                axis.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
                axis.xaxis.set_major_formatter("{x:g}")
                axis.xaxis.set_minor_formatter(NullFormatter())
        axes[0].scatter([], [], marker="*", s=110, color="#2b2f36", label="chosen")
        legend_below(canvas, axes[0])
        pictures = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
        for picture in pictures:
            with atomic_write(picture) as temporary:
                about = {"metadata": {"Date": None}} if picture.suffix == ".svg" else {}
                canvas.savefig(temporary, dpi=DPI, format=picture.suffix[1:], **about)
    return pictures


def _draw(axis: Any, places: pd.Series[Any], table: pd.DataFrame, drawn: dict[str, Any]) -> None:
    """A dot for each trial that has a score, a star for the one that was chosen."""
    chosen = table["status"] == "chosen"
    axis.scatter(places[~chosen], table["mean"][~chosen], s=22, alpha=0.75, linewidths=0, zorder=2.5, **drawn)
    axis.scatter(places[chosen], table["mean"][chosen], marker="*", s=110, color=drawn["color"], zorder=3)


def _places(axis: Any, trials: Mapping[int, pd.DataFrame], fold: int, name: str, aside: float) -> pd.Series[Any]:
    """Numbers are where they are; other values stand one after the other, the folds beside each other."""
    values = trials[fold][name]
    if is_numeric_dtype(values) and not is_bool_dtype(values):
        return values
    known = list(dict.fromkeys(_title(value) for table in trials.values() for value in table[name]))
    axis.set_xticks(range(len(known)), [shortened(value, 16) for value in known])
    axis.set_xlim(-0.6, len(known) - 0.4)
    return values.map(lambda value: known.index(_title(value)) + aside)


def _title(value: Any) -> str:
    return "null" if value is None else str(value)
