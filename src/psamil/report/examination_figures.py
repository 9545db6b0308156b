"""What an examination shows, as figures and tables: heads, faithfulness, cost."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psamil.explain import OcclusionCurve
from psamil.report.drawing import GREY, Figure, colour, dash, figure, legend_below, panels, shortened, styled
from psamil.report.examination import SHARES, RunExamination

MATRIX_IN = 1.9
MATRICES_PER_LINE = 6
FEW_HEADS = 5  # whose similarities are written into the cells
GRID = np.array([0.0, *SHARES])
ORDERS = {"top": "highest scores first", "random": "at random", "lowest": "lowest scores first"}


def examination_figures(runs: Sequence[RunExamination]) -> list[Figure]:
    """All that apply."""
    with styled():
        return [drawn for drawn in (_similarity(runs), _occlusion(runs)) if drawn is not None]


def _similarity(runs: Sequence[RunExamination]) -> Figure | None:
    """One matrix per run, fold and layer, as in Figure 3 (c-d) of the paper."""
    from matplotlib.figure import Figure as Canvas

    shown = [
        (run.name, fold, layer, matrix, len(layers))
        for run in runs
        for fold, layers in run.similarity.items()
        for layer, matrix in enumerate(layers.numpy())
    ]
    if not shown:
        return None
    columns = min(len(shown), MATRICES_PER_LINE)
    lines = -(-len(shown) // columns)
    canvas = Canvas(figsize=(MATRIX_IN * columns, (MATRIX_IN + 0.3) * lines), layout="constrained")
    axes = list(canvas.subplots(lines, columns, squeeze=False).flat)
    for unused in axes[len(shown) :]:
        unused.set_axis_off()
    for axis, (name, fold, layer, matrix, layers) in zip(axes, shown, strict=False):
        title = f"{shortened(name, 20)}\nfold {fold}" + (f", layer {layer + 1}" if layers > 1 else "")
        _matrix(axis, matrix, title)
    caption = (
        "How alike heads are: 1 / the distance between what two of them make of a tile, averaged over tiles, then over "
        "test slides of the fold. The darker, the more alike. It depends on the scale of a model, so that cells are "
        "compared inside a matrix."
    )
    return figure("Similarity of heads", caption, canvas, "similarity")


def _matrix(axis: Any, matrix: NDArray[np.float64], title: str) -> None:
    heads = len(matrix)
    shares = np.where(np.isfinite(matrix), matrix, np.nan) / matrix[np.isfinite(matrix)].max(initial=1e-30)
    axis.pcolormesh(np.arange(heads), np.arange(heads), shares, cmap="Blues", vmin=0, vmax=1.25, edgecolors="#ffffff")
    for i in range(heads):
        axis.text(i, i, "–", ha="center", va="center", color=GREY, fontsize=7)
        for j in range(heads if heads <= FEW_HEADS else 0):
            if i != j:
                shade = "#ffffff" if shares[i, j] > 0.8 else "#20242b"
                text = f"{matrix[i, j]:#.2g}".rstrip(".") if np.isfinite(matrix[i, j]) else "∞"
                axis.text(j, i, text, ha="center", va="center", color=shade, fontsize=7)
    axis.set_title(title, fontsize=8, pad=3)
    axis.set_xticks(range(heads), [str(i + 1) for i in range(heads)])
    axis.set_yticks(range(heads), [str(i + 1) for i in range(heads)])
    axis.set_aspect("equal")
    axis.set_xlabel("head", fontsize=7, labelpad=1)
    axis.invert_yaxis()
    axis.tick_params(length=0, labelsize=7)
    axis.grid(False)


def _occlusion(runs: Sequence[RunExamination]) -> Figure | None:
    shown = [run for run in runs if run.occlusions]
    if not shown:
        return None
    canvas, axes = panels(len(shown), sharey=True)
    for axis, run in zip(axes, shown, strict=True):
        axis.axhline(0, color=GREY, linewidth=0.8)
        for i, (order, label) in enumerate(ORDERS.items()):
            curves = np.stack([change_on_grid(curve, order) for curve in run.occlusions])
            axis.plot(100 * GRID, curves.mean(0), color=colour(i), linestyle=dash(i), label=label)
        axis.set_title(shortened(run.name))
        axis.set(xlabel="tiles taken away (%)", ylabel=f"change of the {watched(run)}")
    legend_below(canvas, axes[0])
    caption = (
        "Tiles are taken away, and the prediction is watched: mean over test slides. If scores are faithful, it falls "
        "soonest without the tiles of the highest scores. Scores are not computed again while tiles go."
    )
    return figure("Are the tile scores faithful?", caption, canvas, "occlusion")


def change_on_grid(curve: OcclusionCurve, order: str) -> NDArray[np.float64]:
    """y(s) - y(0) at the shares of the grid; the shares of a slide are of whole tiles."""
    values = getattr(curve, order)
    values = values.mean(0) if values.ndim == 2 else values
    return np.interp(GRID, np.append(0, curve.shares), np.append(0, values - curve.whole))


def watched(run: RunExamination) -> str:
    """What the curves are of."""
    return "log-odds" if run.occlusions[0].watched.startswith("log-odds") else "prediction"


def faithfulness_rows(runs: Sequence[RunExamination]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table: how much sooner predictions fall than by chance."""
    head = ["run", "test slides", "falls further than by chance by", "slides where it does"]
    rows = []
    for run in runs:
        areas = [curve.area for curve in run.occlusions]
        if areas:
            middle = f"{fmean(areas):.3g} ({min(areas):.2g} to {max(areas):.2g}), {watched(run)}".replace("-", "−")
            rows.append(
                [run.name, str(len(areas)), middle.replace("log−", "log-"), f"{np.mean(np.array(areas) > 0):.0%}"]
            )
    return head, rows


def cost_rows(runs: Sequence[RunExamination]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table: parameters, what a prediction takes, and what training took."""
    head = [
        "run",
        "parameters",
        "tiles per slide",
        "FLOPs per slide",
        "FLOPs per tile",
        "ms per slide",
        "tiles per second",
        "s per epoch",
        "peak memory, MB",
    ]
    rows = []
    for run in runs:
        training = _training_cost(run)
        if not run.costs:
            rows.append([run.name, f"{run.parameters:,}", *"-----", *training])
            continue
        tiles, flops = sum(cost.tiles for cost in run.costs), sum(cost.flops for cost in run.costs)
        seconds = sum(cost.seconds for cost in run.costs)
        rows.append(
            [
                run.name,
                f"{run.parameters:,}",
                f"{median(cost.tiles for cost in run.costs):,.0f}",
                of_thousands(flops / len(run.costs)),
                of_thousands(flops / max(tiles, 1)),
                f"{1000 * seconds / len(run.costs):.3g}",
                f"{float(f'{tiles / seconds:.2g}'):,.0f}",
                *training,
            ]
        )
    return head, rows


def _training_cost(run: RunExamination) -> list[str]:
    """Seconds of an epoch, the median, and the highest peak of memory."""
    if not run.timing:
        return ["-", "-"]
    peaks_mb = [record["peak_memory_mb"] for record in run.timing if record["peak_memory_mb"] is not None]
    peak = f"{max(peaks_mb):,.0f}" if peaks_mb else "-"  # not every system tells
    return [f"{median(record['seconds'] for record in run.timing):.3g}", peak]


def of_thousands(value: float) -> str:
    """With the letter for the power of a thousand: 1.25 G."""
    for letter in ("", " k", " M", " G"):
        if value < 1000:
            return f"{value:.3g}{letter}"
        value /= 1000
    return f"{value:.3g} T"
