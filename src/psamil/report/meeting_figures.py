"""What models with an arrangement say of kinds of tiles that meet (:mod:`psamil.models.arrangement`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psamil.evaluation.run_comparison import FinishedRun
from psamil.report.drawing import Figure, figure, shortened
from psamil.training.class_tasks import ClassificationTask
from psamil.training.fold import MODEL_FILE
from psamil.training.saved_model import SavedModel

INCH_PER_KIND = 0.3
COLOURS = "RdBu_r"


def meetings(runs: Sequence[FinishedRun]) -> Figure | None:
    """A panel for each output of each run with an arrangement; None if there is none."""
    from matplotlib.figure import Figure as Canvas

    found = [(run, weights) for run in runs if (weights := weights_of(run)) is not None]
    if not found:
        return None
    shown = [(run, weights[:, i], _title(run, i)) for run, weights in found for i in range(weights.shape[1])]
    side = 2.2 + INCH_PER_KIND * max(weights.shape[-1] for _, weights, _ in shown)
    canvas = Canvas(figsize=(len(shown) * (side + 0.4), side), layout="constrained")
    axes = canvas.subplots(1, len(shown), squeeze=False)[0]
    for axis, (run, weights, title) in zip(axes, shown, strict=True):
        mean = weights.mean(0)
        agreed = (np.sign(weights) == np.sign(weights[0])).all(0)
        most = max(float(np.abs(mean).max()), 1e-12)
        kinds = range(len(mean))
        drawn = axis.pcolormesh(kinds, kinds, mean, cmap=COLOURS, vmin=-most, vmax=most, edgecolors="#d9dce2")
        is_dark = np.abs(mean) > 0.6 * most
        for of, shade in ((agreed & is_dark, "#ffffff"), (agreed & ~is_dark, "#20242b")):
            rows, columns = np.nonzero(of)
            axis.plot(columns, rows, ".", color=shade, markersize=3, linestyle="none")
        axis.set(aspect="equal", xlabel="is surrounded by", title=title)
        names = [shortened(name, 24) for name in names_of(run, len(mean))]
        axis.set_xticks(kinds, names, rotation=90)
        axis.set_yticks(kinds, names)
        axis.invert_yaxis()
        axis.tick_params(length=0)
        axis.grid(False)
        canvas.colorbar(drawn, ax=axis, shrink=0.7, label="weight per deviation")
    caption = (
        "What it says that a tile of one kind (row) is surrounded by another (column) more often than their shares in "
        "the slide would have it: red speaks for, blue against, per standard deviation between slides. Sum over heads, "
        "mean over folds and seeds; where there is a dot, all of these models have the same sign. It is what models of "
        "this cohort learned, not a finding."
    )
    return figure("Kinds that meet", caption, canvas, "meetings")


def weights_of(run: FinishedRun) -> NDArray[np.float64] | None:
    """(models, n_out, kinds, kinds) summed over heads; None of a run without an arrangement."""
    found = []
    for _, job in run.jobs():
        arrangement = getattr(SavedModel.load(job / MODEL_FILE).model, "arrangement", None)
        if arrangement is None:
            return None
        found.append(arrangement.weight.detach().double().sum(1).numpy())
    return np.stack(found) if found else None


def names_of(run: FinishedRun, kinds: int) -> list[str]:
    """Of the features, as far as their files say them; numbers otherwise."""
    names = run.about.get("feature_names") or []
    return [str(name) for name in names] if len(names) == kinds else [str(i + 1) for i in range(kinds)]


def _title(run: FinishedRun, output: int) -> str:
    """For which class the weights speak."""
    task, name = run.task, shortened(run.name, 24)
    if not isinstance(task, ClassificationTask):
        return f"{name}, output {output + 1}"
    return f"{name}: {task.classes[1 if task.n_out == 1 else output]}"
