"""Training dynamics, as Figure 3 of the paper: how far each head looks after every epoch, and how alike heads are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from psamil.errors import DataError
from psamil.evaluation.run_comparison import FinishedRun, read_history
from psamil.report.drawing import PANEL, colour, shortened, styled
from psamil.report.paper_figures.figure_files import require_matplotlib, save_figure

PLANTED = "#f0d9a0"
LINE = 1.1


def draw_dynamics(
    runs: Mapping[str, Path],
    out: Path,
    *,
    planted_steps: Sequence[tuple[float, float]] = (),
    name: str = "figure-dynamics",
) -> list[Path]:
    """Writes figure-dynamics: a column for each run with heads, radii above similarity. Each line is a fold and seed.

    Args:
        runs: names and run directories.
        out: folder of the files.
        planted_steps: of a simulated cohort, for each interaction: its range, and the distance beyond which tiles lie
            that do not interact. A radius in between tells the two apart; the bands are drawn.
        name: of the files.
    """
    require_matplotlib()
    rows = [row for run, path in runs.items() for row in history_rows(run, path)]
    shown = list(dict.fromkeys(row["run"] for row in rows))
    if not shown:
        raise DataError(out, "cannot have this figure: no run has heads with a radius", "train psa")
    from matplotlib.figure import Figure as Canvas

    with styled():
        canvas = Canvas(figsize=(PANEL[0] * len(shown), 1.8 * PANEL[1]), layout="constrained")
        axes = canvas.subplots(2, len(shown), squeeze=False, sharey="row", sharex="col", height_ratios=(3, 2))
        for run, (above, below) in zip(shown, axes.T, strict=True):
            of_run = [row for row in rows if row["run"] == run]
            for i, band in enumerate(planted_steps):
                above.axhspan(*band, color=PLANTED, alpha=0.6, linewidth=0, label=None if i else "planted", zorder=0)
            _draw_radii(above, of_run)
            _draw_similarity(below, of_run)
            above.set_title(shortened(run))
            below.set_xlabel("epoch")
            below.xaxis.get_major_locator().set_params(integer=True)
        highest = max([*(row["radius_steps"] for row in rows), *(high for _, high in planted_steps)])
        axes[0, 0].set(ylabel="radius K (tile steps)", ylim=(0, 1.05 * highest))
        highest = max([row["head_similarity"] for row in rows if row["head_similarity"] is not None], default=1)
        axes[1, 0].set(ylabel="similarity of heads", ylim=(0, 1.05 * highest))
        handles = axes[0, 0].get_legend_handles_labels()
        canvas.legend(*handles, loc="outside lower center", ncols=8, title="each line is one training (fold and seed)")
        return save_figure(canvas, rows, out, name)


def history_rows(run: str, path: Path) -> list[dict[str, Any]]:
    """A row for each fold, seed, epoch, layer and head; none for a model without radii."""
    return [
        {
            "run": run,
            "fold": fold,
            "seed": job.name.removeprefix("seed-"),
            "epoch": epoch,
            "layer": layer + 1,
            "head": head + 1,
            "radius_steps": radius,
            "head_similarity": record.get("head_similarity"),
        }
        for fold, job in FinishedRun.load(path).jobs()
        for epoch, record in enumerate(read_history(job), start=1)
        for layer, radii in enumerate(record.get("radii_steps", []))
        for head, radius in enumerate(radii)
    ]


def _draw_radii(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    labelled: set[int] = set()
    for (*_, head), curve in _curves(rows, ("fold", "seed", "layer", "head"), "radius_steps"):
        label = None if head in labelled else f"head {head}"
        labelled.add(head)
        axis.plot(*curve, color=colour(head - 1), linewidth=LINE, label=label)


def _draw_similarity(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    once = [row for row in rows if row["layer"] == row["head"] == 1 and row["head_similarity"] is not None]
    for _, curve in _curves(once, ("fold", "seed"), "head_similarity"):
        axis.plot(*curve, color="#4a4e69", linewidth=LINE)
    if not once:
        axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", va="center")


def _curves(
    rows: Sequence[dict[str, Any]], keys: Sequence[str], value: str
) -> list[tuple[tuple[Any, ...], tuple[list[int], list[float]]]]:
    curves: dict[tuple[Any, ...], tuple[list[int], list[float]]] = {}
    for row in rows:
        epochs, values = curves.setdefault(tuple(row[key] for key in keys), ([], []))
        epochs.append(row["epoch"])
        values.append(row[value])
    return list(curves.items())
