"""Cost analysis: the score of each model against the FLOPs of a training batch; bubbles are as large as the models.

FLOPs are counted (:mod:`psamil.report.paper_figures.flop_counter`) on one slide of ``tiles`` tiles on a lattice, with
the radii that were learned, and taken times the slides of a batch. For ``psa``, what the formulas say stands beside the
count in the CSV.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from psamil.evaluation.run_comparison import FinishedRun
from psamil.report.drawing import GREY, colour, shortened, styled
from psamil.report.paper_figures.figure_files import require_matplotlib, save_figure
from psamil.report.paper_figures.flop_counter import slide_of, training_flops
from psamil.report.paper_figures.log_axis import write_powers
from psamil.report.paper_figures.psa_flops import has_formula, psa_flops
from psamil.report.tables import metric_title
from psamil.training.fold import MODEL_FILE
from psamil.training.saved_model import SavedModel

TILES, BATCH_SLIDES = 5_000, 8
SIZE_IN = (7.6, 5.2)
SMALLEST_POINTS2, LARGEST_POINTS2 = 16.0, 900.0  # areas of bubbles
NAME_POINTS = 7.5  # height of the names
CONTROLS = ("size",)  # in the CSV alone: next to models, it costs nothing


def draw_cost(
    runs: Mapping[str, Path], out: Path, *, tiles: int = TILES, batch_slides: int = BATCH_SLIDES, title: str = ""
) -> list[Path]:
    """Writes figure-cost from finished runs.

    Args:
        runs: names and run directories.
        out: folder of the files.
        tiles: of the slide on which FLOPs are counted.
        batch_slides: slides of a batch, each of so many tiles.
        title: of the figure, for instance what was predicted.
    """
    require_matplotlib()
    rows = [_row(name, FinishedRun.load(path), tiles, batch_slides) for name, path in runs.items()]
    return draw_cost_of(rows, out, tiles=tiles, batch_slides=batch_slides, title=title)


def draw_cost_of(
    rows: Sequence[dict[str, Any]], out: Path, *, tiles: int = TILES, batch_slides: int = BATCH_SLIDES, title: str = ""
) -> list[Path]:
    """The same from what :func:`draw_cost` has found out, which is what its CSV holds."""
    from matplotlib.figure import Figure as Canvas

    shown = (row for row in rows if row["model"] not in CONTROLS and row["score"] is not None)  # others: in the CSV
    drawn = sorted(shown, key=lambda row: -row["parameters"])
    largest = max([*(row["parameters"] for row in drawn), 1])
    with styled():
        canvas = Canvas(figsize=SIZE_IN, layout="constrained")
        axis = canvas.subplots()
        for row in drawn:
            area, ours = _area(row["parameters"], largest), row["model"].startswith("psa")
            at = row["flops_per_batch"], row["score"]
            axis.scatter(*at, s=area, color=colour(1 if ours else 0), alpha=0.55, edgecolors="white")
        power = 10 ** math.floor(math.log10(largest))
        for parameters in (power / 10, power):
            label = f"{parameters:,.0f} parameters" if parameters >= 1 else None
            axis.scatter([], [], s=_area(parameters, largest), color=GREY, alpha=0.55, linewidths=0, label=label)
        axis.set(xscale="log", xlabel=f"FLOPs of a training batch ({batch_slides} slides of {tiles:,} tiles)")
        write_powers(axis.xaxis)
        axis.set(ylabel=metric_title(rows[0]["metric"]))
        axis.set_title(title)
        axis.margins(0.1)
        axis.set_axisbelow(True)
        canvas.legend(loc="outside lower center", ncols=2, handletextpad=1.2, columnspacing=3)
        canvas.draw_without_rendering()  # where things are is known after this
        _write_names(axis, drawn, largest)
        return save_figure(canvas, rows, out, "figure-cost")


def _write_names(axis: Any, rows: Sequence[dict[str, Any]], largest: float) -> None:
    """Each at the right or left of its bubble, as little above or below as keeps it from other names and bubbles.

    One that is moved has a line to its bubble.
    """
    scale = 72 / axis.figure.dpi
    places = [
        [scale * place for place in axis.transData.transform((row["flops_per_batch"], row["score"]))] for row in rows
    ]
    radii = [math.sqrt(_area(row["parameters"], largest)) / 2 for row in rows]
    taken = [(x - r, x + r, y - r, y + r) for (x, y), r in zip(places, radii, strict=True)]  # boxes, in points
    shifts = [sign * step * NAME_POINTS / 4 for step in range(60) for sign in ((1, -1) if step else (1,))]
    for i in sorted(range(len(rows)), key=lambda i: -rows[i]["score"]):
        name, (x, y), beside = shortened(rows[i]["run"], 24), places[i], radii[i] + 1.5
        width = NAME_POINTS * 0.62 * len(name)
        starts = {"left": x + beside, "right": x - beside - width}  # by the side on which the text is aligned
        options = [
            (side, shift, (start, start + width, y + shift - NAME_POINTS / 2, y + shift + NAME_POINTS / 2))
            for shift in shifts
            for side, start in starts.items()
        ]
        clear = (option for option in options if not any(_overlap(option[2], box) for box in taken))
        side, shift, box = next(clear, options[0])
        taken.append(box)
        line = {"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0}
        axis.annotate(
            name,
            (rows[i]["flops_per_batch"], rows[i]["score"]),
            (beside if side == "left" else -beside, shift),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=NAME_POINTS,
            arrowprops=line if abs(shift) > NAME_POINTS else None,
        )


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]


def _area(parameters: float, largest: float) -> float:
    return max(SMALLEST_POINTS2, LARGEST_POINTS2 * parameters / largest)


def _row(name: str, run: FinishedRun, tiles: int, batch_slides: int) -> dict[str, Any]:
    """The first model of the run stands for all: they differ in their radii alone."""
    _, job = run.jobs()[0]
    saved = SavedModel.load(job / MODEL_FILE)
    model, bag = saved.model, slide_of(tiles, saved.about["in_dim"])
    flops = training_flops(model, bag)
    by_formula = batch_slides * sum(part.both for part in psa_flops(model, bag)) if has_formula(model) else None
    score = run.summary["metrics"][run.headline]
    return {
        "run": name,
        "model": saved.about["settings"]["model"],
        "metric": run.headline,
        "score": score["mean"],
        "low": score.get("low"),
        "high": score.get("high"),
        "flops_per_batch": batch_slides * flops,
        "flops_by_formula": by_formula,
        "parameters": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        "tiles": tiles,
        "batch_slides": batch_slides,
    }
