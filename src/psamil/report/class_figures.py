"""Figures of runs that predict classes or yes/no labels: ROC, precision and recall, calibration, confusion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from psamil.evaluation.calibration import reliability_curve
from psamil.evaluation.run_comparison import FinishedRun, indicators
from psamil.evaluation.scores import chosen_classes, threshold_of
from psamil.report.drawing import (
    GREY,
    Figure,
    colour,
    dash,
    figure,
    legend_below,
    legend_label,
    panels,
    shortened,
)
from psamil.training.class_tasks import ClassificationTask
from psamil.training.metrics import Floats, Integers

GRID = np.linspace(0, 1, 101)
SHADES = ("#ffffff", "#0b6e99")  # of no patient and of all patients of a class


def roc(runs: Sequence[FinishedRun]) -> Figure:
    """Sensitivity over 1 - specificity."""
    canvas, axes = panels(1)
    axes[0].plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
    _mean_curves(axes[0], runs, roc_on_grid, ("auc", "macro_auc"))
    axes[0].set(xlabel="1 − specificity", ylabel="sensitivity", xlim=(0, 1), ylim=(0, 1.01), aspect="equal")
    legend_below(canvas, axes[0])
    return figure("ROC curves", _caption(runs, "mean AUC"), canvas, "roc")


def precision_recall(runs: Sequence[FinishedRun]) -> Figure:
    """Precision over recall, with the share of positive patients, which is what guessing gives."""
    canvas, axes = panels(1)
    axes[0].axhline(indicators(runs[0])[0].mean(), color=GREY, linewidth=0.8)
    _mean_curves(axes[0], runs, precision_on_grid, ("average_precision", "macro_average_precision"))
    axes[0].set(xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.01), aspect="equal")
    legend_below(canvas, axes[0])
    caption = _caption(runs, "mean average precision") + " Grey: the share of positive patients."
    return figure("Precision and recall", caption, canvas, "precision")


def _mean_curves(
    axis: Any, runs: Sequence[FinishedRun], curve: Callable[[Integers, Floats], Floats], metrics: Sequence[str]
) -> None:
    """The mean over folds and classes with one standard deviation, and in the legend the metric that it belongs to."""
    for i, run in enumerate(runs):
        curves = np.stack(list(_curves(run, curve)) or [np.full_like(GRID, np.nan)])
        mean, sd = curves.mean(0), curves.std(0)
        axis.fill_between(GRID, (mean - sd).clip(0), (mean + sd).clip(max=1), color=colour(i), alpha=0.13, linewidth=0)
        found = next(run.summary["metrics"][name]["mean"] for name in metrics if name in run.summary["metrics"])
        value = "" if found is None else f" ({found:.3f})"
        name = legend_label(run.name) + value
        axis.plot(GRID, mean, color=colour(i), linestyle=dash(i), label=name, clip_on=False)


def _curves(run: FinishedRun, curve: Callable[[Integers, Floats], Floats]) -> Iterator[Floats]:
    """A curve over the grid, for each fold and class that has both kinds of patients."""
    labels, scores = indicators(run)
    folds = run.patients["fold"].to_numpy()
    for fold in np.unique(folds):
        for column in range(labels.shape[1]):
            known = labels[folds == fold, column]
            if 0 < known.sum() < len(known):
                yield curve(known, scores[folds == fold, column])


def _caption(runs: Sequence[FinishedRun], metric: str) -> str:
    caption = f"Mean over folds; the band is one standard deviation. In brackets the {metric} of the folds."
    return caption + (" Each class against the others, averaged." if len(indicators(runs[0])[0].T) > 1 else "")


def roc_on_grid(labels: Integers, scores: Floats) -> Floats:
    """Sensitivity at 101 values of 1 - specificity; patients with equal scores are one slanted step."""
    order = np.argsort(-scores, kind="stable")
    last_of_ties = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    hits = np.concatenate([[0], np.cumsum(labels[order])[last_of_ties]]) / labels.sum()
    alarms = np.concatenate([[0], np.cumsum(1 - labels[order])[last_of_ties]]) / (1 - labels).sum()
    return np.interp(GRID, alarms, hits)


def precision_on_grid(labels: Integers, scores: Floats) -> Floats:
    """Precision at 101 values of recall: that of the highest threshold which reaches it. Its area is the AP."""
    order = np.argsort(-scores, kind="stable")
    last_of_ties = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    hits = np.cumsum(labels[order])[last_of_ties]
    precision = hits / (last_of_ties + 1)
    reaching = np.searchsorted(hits / labels.sum(), GRID - 1e-9)  # a recall of 0.3 is not always the 0.3 of the grid
    return precision[reaching]


def calibration(runs: Sequence[FinishedRun]) -> Figure:
    """How often a class occurs among patients who are said to have it with some probability."""
    canvas, axes = panels(1)
    axis = axes[0]
    axis.plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
    for i, run in enumerate(runs):
        labels, scores = indicators(run)
        curve = reliability_curve(labels.ravel(), scores.ravel(), bins=10)
        some = curve.counts > 0
        axis.plot(
            curve.predicted[some],
            curve.observed[some],
            color=colour(i),
            linestyle=dash(i),
            label=legend_label(run.name),
        )
        sizes = 6 + 90 * curve.counts[some] / curve.counts.sum()
        axis.scatter(curve.predicted[some], curve.observed[some], s=sizes, color=colour(i), zorder=3)
    axis.set(xlabel="predicted probability", ylabel="observed share", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    axis.set_aspect("equal")
    legend_below(canvas, axis)
    caption = (
        "Test patients of all folds in ten bins; the area of a dot is its share of them. "
        "Probabilities were scaled by a temperature from the validation part."
    )
    return figure("Calibration", caption, canvas, "calibration")


def confusion(runs: Sequence[FinishedRun]) -> Figure:
    """How many patients of each class were taken for which."""
    from matplotlib.colors import LinearSegmentedColormap

    task = runs[0].task
    assert isinstance(task, ClassificationTask)
    names = [shortened(name, 14) for name in task.classes]
    places = range(len(names))
    canvas, axes = panels(len(runs))
    for axis, run in zip(axes, runs, strict=True):
        counts = confusion_matrix(run)
        shares = counts / counts.sum(1, keepdims=True).clip(1)
        shading = {"cmap": LinearSegmentedColormap.from_list("share", SHADES), "vmin": 0, "vmax": 1}
        axis.pcolormesh(np.arange(len(names)), np.arange(len(names)), shares, edgecolors="#d9dce2", **shading)
        for i, j in np.ndindex(counts.shape):
            shade = "#ffffff" if shares[i, j] > 0.6 else "#20242b"
            axis.text(j, i, f"{counts[i, j]}\n{shares[i, j]:.0%}", ha="center", va="center", color=shade)
        axis.set_title(shortened(run.name))
        axis.set(xlabel="predicted", ylabel="truth", aspect="equal")
        axis.set_xticks(places, names)
        axis.set_yticks(places, names, rotation=90, va="center")
        axis.invert_yaxis()  # the first class on top
        axis.tick_params(length=0)
        axis.grid(False)
    how = "The threshold of a fold is from its validation part. " if task.n_out == 1 else ""
    caption = f"Test patients of all folds: how many, and their share of the true class. {how}".strip()
    return figure("Confusion", caption, canvas, "confusion")


def confusion_matrix(run: FinishedRun) -> Integers:
    """(classes, classes) test patients of all folds: rows are the truth, columns what was predicted."""
    task = run.task
    assert isinstance(task, ClassificationTask)
    counts = np.zeros((len(task.classes), len(task.classes)), dtype=np.int64)
    for fold in sorted(set(run.patients["fold"])):
        table = run.patients[run.patients["fold"] == fold]
        labels, chosen = chosen_classes(table, task, threshold_of(run.validation(int(fold)), task))
        np.add.at(counts, (labels, chosen), 1)
    return counts
