"""Figures of finished runs: those of classes, survival by risk group, learned radii, similarity of heads, training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from psamil.errors import MissingExtraError
from psamil.evaluation.run_comparison import FinishedRun, read_history
from psamil.evaluation.survival_curves import high_risk, kaplan_meier, log_rank
from psamil.report.class_figures import calibration, confusion, precision_recall, roc
from psamil.report.drawing import (
    COLOURS,
    GREY,
    Figure,
    colour,
    dash,
    figure,
    legend_below,
    legend_label,
    panels,
    shortened,
    styled,
)
from psamil.report.meeting_figures import meetings
from psamil.report.tables import metric_title, p_text
from psamil.training.class_tasks import ClassificationTask, MultiLabelTask
from psamil.training.regression_task import RegressionTask
from psamil.training.survival_task import SurvivalTask


def figures_of(runs: Sequence[FinishedRun], *, planted_steps: tuple[float, float] | None = None) -> list[Figure]:
    """All figures that apply to these runs.

    Args:
        runs: on the same splits.
        planted_steps: of a simulated cohort: range of the interaction, and distance beyond which tiles lie that do not
            interact. A radius between them tells the two apart.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot", "a report with figures") from error
    task = runs[0].task
    makers: list[Callable[[], Figure | None]] = []
    if isinstance(task, ClassificationTask | MultiLabelTask):
        makers += [lambda: roc(runs), lambda: precision_recall(runs), lambda: calibration(runs)]
    if isinstance(task, ClassificationTask):
        makers.append(lambda: confusion(runs))
    if isinstance(task, SurvivalTask):
        makers.append(lambda: _survival(runs))
    if isinstance(task, RegressionTask):
        makers.append(lambda: _scatter(runs))
    makers += [lambda: _radii(runs, planted_steps), lambda: _similarity(runs), lambda: meetings(runs)]
    makers.append(lambda: _training(runs))
    with styled():
        return [drawn for drawn in (make() for make in makers) if drawn is not None]


def _survival(runs: Sequence[FinishedRun]) -> Figure | None:
    shown = [(run, groups) for run in runs if (groups := risk_groups(run)) is not None]
    if not shown:
        return None
    canvas, axes = panels(len(shown))
    for axis, (run, high) in zip(axes, shown, strict=True):
        times, events = run.patients["time"].to_numpy(), run.patients["event"].to_numpy()
        for i, (name, members) in enumerate((("low risk", ~high), ("high risk", high))):
            if not members.any():
                continue
            curve = kaplan_meier(times[members], events[members])
            x, steps = np.append(0, curve.times), {"step": "post", "color": COLOURS[i]}
            low, high_bound = np.append(1, curve.low), np.append(1, curve.high)
            axis.fill_between(x, low, high_bound, step="post", color=COLOURS[i], alpha=0.13, linewidth=0)
            axis.plot(x, np.append(1, curve.survival), drawstyle="steps-post", color=steps["color"], linestyle=dash(i))
            ends = curve.censored > 0
            axis.plot(curve.times[ends], curve.survival[ends], "|", color=COLOURS[i], markersize=5, markeredgewidth=0.8)
            axis.plot([], [], color=COLOURS[i], linestyle=dash(i), label=f"{name} (n = {int(members.sum())})")
        p_value = log_rank(times, events, high).p_value
        axis.set_title(f"{shortened(run.name)}\nlog-rank p = {p_text(p_value)}".replace("= <", "< "))
        axis.set(xlabel="time", ylabel="survival", ylim=(0, 1.02), xlim=(0, None))
        axis.legend(loc="best")
    caption = (
        "Kaplan-Meier curves with 95% intervals; ticks are censored patients. A test patient is of high risk above "
        "the median risk of the validation part of the same fold."
    )
    return figure("Survival by risk group", caption, canvas, "survival")


def risk_groups(run: FinishedRun) -> Any:
    """Who is of high risk, (n,), by the validation part of each fold; None if a fold has none."""
    folds, risks = run.patients["fold"].to_numpy(), run.patients["risk"].to_numpy()
    high = np.zeros(len(risks), dtype=bool)
    for fold in np.unique(folds):
        validation = run.validation(int(fold))
        if not len(validation):
            return None
        high[folds == fold] = high_risk(risks[folds == fold], reference=validation["risk"].to_numpy())
    return high


def _scatter(runs: Sequence[FinishedRun]) -> Figure:
    canvas, axes = panels(len(runs))
    for axis, (i, run) in zip(axes, enumerate(runs), strict=True):
        truth, value = run.patients["truth"].to_numpy(), run.patients["value"].to_numpy()
        ends = [min(truth.min(), value.min()), max(truth.max(), value.max())]
        axis.plot(ends, ends, color=GREY, linewidth=0.8)
        axis.scatter(truth, value, s=12, color=colour(i), alpha=0.6, linewidths=0)
        axis.set_title(shortened(run.name))
        axis.set(xlabel="truth", ylabel="predicted")
    return figure("Predicted and true values", "Test patients of all folds.", canvas, "scatter")


def _training(runs: Sequence[FinishedRun]) -> Figure:
    canvas, (left, right) = panels(2)
    name = ""
    for i, run in enumerate(runs):
        histories = [read_history(job) for _, job in run.jobs()]
        scores = [key for key in histories[0][0] if key.startswith("validation")]
        name = scores[0].removeprefix("validation ") if scores else name
        for axis, key in ((left, "loss"), *((right, key) for key in scores[:1])):
            for history in histories:
                values = [np.nan if record.get(key) is None else record[key] for record in history]
                axis.plot(range(1, len(values) + 1), values, color=colour(i), alpha=0.3, linewidth=0.8)
            mean = _mean_of_epochs(histories, key)
            axis.plot(range(1, len(mean) + 1), mean, color=colour(i), linestyle=dash(i), label=legend_label(run.name))
    left.set(xlabel="epoch", ylabel="training loss", ylim=(0, None))
    right.set(xlabel="epoch", ylabel=f"validation {metric_title(name)}" if name else "no validation part")
    for axis in (left, right):
        axis.xaxis.get_major_locator().set_params(integer=True)
    legend_below(canvas, left)
    caption = "Thin: each fold and seed. Thick: their mean, over those that were still training."
    return figure("Training", caption, canvas, "training")


def _mean_of_epochs(histories: Sequence[Sequence[dict[str, Any]]], key: str) -> list[float]:
    longest = max(map(len, histories))
    means = []
    for epoch in range(longest):
        values = [history[epoch].get(key) for history in histories if epoch < len(history)]
        known = [value for value in values if value is not None]
        means.append(float(np.mean(known)) if known else np.nan)
    return means


def _radii(runs: Sequence[FinishedRun], planted_steps: tuple[float, float] | None) -> Figure | None:
    shown = [(run, layer) for run in runs for layer in range(_layers(run))]
    if not shown:
        return None
    canvas, axes = panels(len(shown), sharey=True)
    for axis, (run, layer) in zip(axes, shown, strict=True):
        for _, job in run.jobs():
            history = read_history(job)
            radii = np.array([record["radii_steps"][layer] for record in history])  # (epochs, heads)
            for head, curve in enumerate(radii.T):
                label = f"head {head + 1}" if job == run.jobs()[0][1] else None
                axis.plot(range(1, len(curve) + 1), curve, color=colour(head), linewidth=1.1, label=label)
        if planted_steps is not None:
            axis.axhspan(*planted_steps, color="#f0d9a0", alpha=0.6, linewidth=0, label="planted", zorder=0)
        several = _layers(run) > 1
        axis.set_title(shortened(run.name) + (f", layer {layer + 1}" if several else ""))
        axis.set(xlabel="epoch", ylabel="radius K (tile steps)", ylim=(0, None))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(loc="best", ncols=2)
    length = next((run.step_um for run, _ in shown if run.step_um is not None), None)
    caption = "Each line is a head in one fold and seed: how far it looks, where its prior has fallen to τ."
    if planted_steps is not None:
        caption += (
            f" Interacting tiles were planted within {planted_steps[0]:g} steps, others beyond {planted_steps[1]:g}: "
            "a radius in the band tells them apart."
        )
    if length is not None:
        caption += f" A tile step is {length:.4g} µm."
    return figure("Learned radii", caption, canvas, "radii")


def _similarity(runs: Sequence[FinishedRun]) -> Figure | None:
    histories = {i: [read_history(job) for _, job in run.jobs()] for i, run in enumerate(runs)}
    means = {i: _mean_of_epochs(of_run, "head_similarity") for i, of_run in histories.items() if of_run}
    shown = {i: mean for i, mean in means.items() if not np.isnan(mean).all()}
    if not shown:
        return None
    canvas, (axis,) = panels(1)
    for i, mean in shown.items():
        axis.plot(range(1, len(mean) + 1), mean, color=colour(i), linestyle=dash(i), label=legend_label(runs[i].name))
    axis.set(xlabel="epoch", ylabel="similarity of heads", ylim=(0, None))
    axis.xaxis.get_major_locator().set_params(integer=True)
    legend_below(canvas, axis)
    caption = (
        "How alike heads are on the validation parts: 1 / the distance between what two of them make of a tile, "
        "averaged over pairs, slides, folds and seeds. It depends on the scale of a model: compare how curves go."
    )
    return figure("Similarity of heads in training", caption, canvas, "dynamics")


def _layers(run: FinishedRun) -> int:
    jobs = run.jobs()
    return len(read_history(jobs[0][1])[0].get("radii_steps", [])) if jobs else 0
