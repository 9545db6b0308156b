"""Figures of finished runs as SVG that can stand inside a page: ROC, calibration, survival, training, radii."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from psamil.errors import MissingExtraError
from psamil.evaluation.calibration import reliability_curve
from psamil.evaluation.run_comparison import FinishedRun, indicators, read_history
from psamil.evaluation.survival_curves import high_risk, kaplan_meier, log_rank
from psamil.report.tables import metric_title, p_text
from psamil.training.class_tasks import ClassificationTask, MultiLabelTask
from psamil.training.metrics import Floats, Integers
from psamil.training.regression_task import RegressionTask
from psamil.training.survival_task import SurvivalTask

COLOURS = ("#0b6e99", "#d1495b", "#6a994e", "#8d6a9f", "#c98a00", "#4a4e69", "#2a9d8f", "#9c6644")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
GREY = "#8a8f98"
STYLE: dict[Any, Any] = {
    "axes.edgecolor": "#5b616b",
    "axes.grid": True,
    "axes.labelcolor": "#2b2f36",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.size": 9,
    "font.family": "sans-serif",
    "grid.color": "#e6e8ec",
    "grid.linewidth": 0.7,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",  # text stays text: small files, and readers can select it
    "svg.hashsalt": "psamil",  # the same runs give the same bytes
    "text.parse_math": False,  # names of runs may hold dollar signs
    "xtick.color": "#5b616b",
    "ytick.color": "#5b616b",
}
PANEL = (3.25, 3.1)  # inches
MAX_COLUMNS = 3
GRID = np.linspace(0, 1, 101)


@dataclass(frozen=True)
class Figure:
    """An SVG element with what it shows."""

    title: str
    caption: str
    svg: str


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
        makers += [lambda: _roc(runs), lambda: _calibration(runs)]
    if isinstance(task, SurvivalTask):
        makers.append(lambda: _survival(runs))
    if isinstance(task, RegressionTask):
        makers.append(lambda: _scatter(runs))
    makers += [lambda: _radii(runs, planted_steps), lambda: _training(runs)]
    with _styled():
        return [figure for figure in (make() for make in makers) if figure is not None]


def _roc(runs: Sequence[FinishedRun]) -> Figure:
    canvas, axes = _panels(1)
    axis = axes[0]
    axis.plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
    for i, run in enumerate(runs):
        curves = np.stack(list(_roc_curves(run)) or [np.full_like(GRID, np.nan)])
        mean, sd = curves.mean(0), curves.std(0)
        axis.fill_between(GRID, (mean - sd).clip(0), (mean + sd).clip(max=1), color=_colour(i), alpha=0.13, linewidth=0)
        found = run.summary["metrics"][run.headline]["mean"]
        value = "" if found is None else f" ({found:.3f})"
        axis.plot(GRID, mean, color=_colour(i), linestyle=_dash(i), label=_label(run.name) + value, clip_on=False)
    axis.set(xlabel="1 − specificity", ylabel="sensitivity", xlim=(0, 1), ylim=(0, 1.01), aspect="equal")
    _legend_below(canvas, axis)
    caption = "Mean over folds; the band is one standard deviation. In brackets the mean AUC of the folds."
    if len(indicators(runs[0])[0].T) > 1:
        caption += " Each class against the others, averaged."
    return _figure("ROC curves", caption, canvas, "roc")


def _roc_curves(run: FinishedRun) -> Iterator[Floats]:
    """Sensitivity over the grid, for each fold and class that has both kinds of patients."""
    labels, scores = indicators(run)
    folds = run.patients["fold"].to_numpy()
    for fold in np.unique(folds):
        for column in range(labels.shape[1]):
            known = labels[folds == fold, column]
            if 0 < known.sum() < len(known):
                yield roc_on_grid(known, scores[folds == fold, column])


def roc_on_grid(labels: Integers, scores: Floats) -> Floats:
    """Sensitivity at 101 values of 1 - specificity; patients with equal scores are one slanted step."""
    order = np.argsort(-scores, kind="stable")
    last_of_ties = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    hits = np.concatenate([[0], np.cumsum(labels[order])[last_of_ties]]) / labels.sum()
    alarms = np.concatenate([[0], np.cumsum(1 - labels[order])[last_of_ties]]) / (1 - labels).sum()
    return np.interp(GRID, alarms, hits)


def _calibration(runs: Sequence[FinishedRun]) -> Figure:
    canvas, axes = _panels(1)
    axis = axes[0]
    axis.plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
    for i, run in enumerate(runs):
        labels, scores = indicators(run)
        curve = reliability_curve(labels.ravel(), scores.ravel(), bins=10)
        some = curve.counts > 0
        axis.plot(
            curve.predicted[some], curve.observed[some], color=_colour(i), linestyle=_dash(i), label=_label(run.name)
        )
        sizes = 6 + 90 * curve.counts[some] / curve.counts.sum()
        axis.scatter(curve.predicted[some], curve.observed[some], s=sizes, color=_colour(i), zorder=3)
    axis.set(xlabel="predicted probability", ylabel="observed share", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    axis.set_aspect("equal")
    _legend_below(canvas, axis)
    caption = (
        "Test patients of all folds in ten bins; the area of a dot is its share of them. "
        "Probabilities were scaled by a temperature from the validation part."
    )
    return _figure("Calibration", caption, canvas, "calibration")


def _survival(runs: Sequence[FinishedRun]) -> Figure | None:
    shown = [(run, groups) for run in runs if (groups := risk_groups(run)) is not None]
    if not shown:
        return None
    canvas, axes = _panels(len(shown))
    for axis, (run, high) in zip(axes, shown, strict=True):
        times, events = run.patients["time"].to_numpy(), run.patients["event"].to_numpy()
        for i, (name, members) in enumerate((("low risk", ~high), ("high risk", high))):
            if not members.any():
                continue
            curve = kaplan_meier(times[members], events[members])
            x, steps = np.append(0, curve.times), {"step": "post", "color": COLOURS[i]}
            low, high_bound = np.append(1, curve.low), np.append(1, curve.high)
            axis.fill_between(x, low, high_bound, step="post", color=COLOURS[i], alpha=0.13, linewidth=0)
            axis.plot(x, np.append(1, curve.survival), drawstyle="steps-post", color=steps["color"], linestyle=_dash(i))
            ends = curve.censored > 0
            axis.plot(curve.times[ends], curve.survival[ends], "|", color=COLOURS[i], markersize=5, markeredgewidth=0.8)
            axis.plot([], [], color=COLOURS[i], linestyle=_dash(i), label=f"{name} (n = {int(members.sum())})")
        p_value = log_rank(times, events, high).p_value
        axis.set_title(f"{_shortened(run.name)}\nlog-rank p = {p_text(p_value)}".replace("= <", "< "))
        axis.set(xlabel="time", ylabel="survival", ylim=(0, 1.02), xlim=(0, None))
        axis.legend(loc="best")
    caption = (
        "Kaplan-Meier curves with 95% intervals; ticks are censored patients. A test patient is of high risk above "
        "the median risk of the validation part of the same fold."
    )
    return _figure("Survival by risk group", caption, canvas, "survival")


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
    canvas, axes = _panels(len(runs))
    for axis, (i, run) in zip(axes, enumerate(runs), strict=True):
        truth, value = run.patients["truth"].to_numpy(), run.patients["value"].to_numpy()
        ends = [min(truth.min(), value.min()), max(truth.max(), value.max())]
        axis.plot(ends, ends, color=GREY, linewidth=0.8)
        axis.scatter(truth, value, s=12, color=_colour(i), alpha=0.6, linewidths=0)
        axis.set_title(_shortened(run.name))
        axis.set(xlabel="truth", ylabel="predicted")
    return _figure("Predicted and true values", "Test patients of all folds.", canvas, "scatter")


def _training(runs: Sequence[FinishedRun]) -> Figure:
    canvas, (left, right) = _panels(2)
    name = ""
    for i, run in enumerate(runs):
        histories = [read_history(job) for _, job in run.jobs()]
        scores = [key for key in histories[0][0] if key.startswith("validation")]
        name = scores[0].removeprefix("validation ") if scores else name
        for axis, key in ((left, "loss"), *((right, key) for key in scores[:1])):
            for history in histories:
                values = [np.nan if record.get(key) is None else record[key] for record in history]
                axis.plot(range(1, len(values) + 1), values, color=_colour(i), alpha=0.3, linewidth=0.8)
            mean = _mean_of_epochs(histories, key)
            axis.plot(range(1, len(mean) + 1), mean, color=_colour(i), linestyle=_dash(i), label=_label(run.name))
    left.set(xlabel="epoch", ylabel="training loss", ylim=(0, None))
    right.set(xlabel="epoch", ylabel=f"validation {metric_title(name)}" if name else "no validation part")
    for axis in (left, right):
        axis.xaxis.get_major_locator().set_params(integer=True)
    _legend_below(canvas, left)
    caption = "Thin: each fold and seed. Thick: their mean, over those that were still training."
    return _figure("Training", caption, canvas, "training")


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
    canvas, axes = _panels(len(shown), sharey=True)
    for axis, (run, layer) in zip(axes, shown, strict=True):
        for _, job in run.jobs():
            history = read_history(job)
            radii = np.array([record["radii_steps"][layer] for record in history])  # (epochs, heads)
            for head, curve in enumerate(radii.T):
                label = f"head {head + 1}" if job == run.jobs()[0][1] else None
                axis.plot(range(1, len(curve) + 1), curve, color=_colour(head), linewidth=1.1, label=label)
        if planted_steps is not None:
            axis.axhspan(*planted_steps, color="#f0d9a0", alpha=0.6, linewidth=0, label="planted", zorder=0)
        several = _layers(run) > 1
        axis.set_title(_shortened(run.name) + (f", layer {layer + 1}" if several else ""))
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
    return _figure("Learned radii", caption, canvas, "radii")


def _layers(run: FinishedRun) -> int:
    jobs = run.jobs()
    return len(read_history(jobs[0][1])[0].get("radii_steps", [])) if jobs else 0


def _panels(count: int, **options: Any) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure as Canvas

    columns = min(count, MAX_COLUMNS)
    rows = -(-count // columns)
    canvas = Canvas(figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained")
    axes = list(canvas.subplots(rows, columns, squeeze=False, **options).flat)
    for unused in axes[count:]:
        unused.set_axis_off()
    return canvas, axes[:count]


def _legend_below(canvas: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    width = canvas.get_size_inches()[0]
    columns = max(1, min(len(labels), int(width * 14 / (max(map(len, labels)) + 6))))
    canvas.legend(handles, labels, loc="outside lower center", ncols=columns)


def _label(name: str) -> str:
    """Matplotlib keeps names that begin with an underscore out of legends."""
    return "\u200b" + _shortened(name) if name.startswith("_") else _shortened(name)


def _shortened(name: str, length: int = 44) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _dash(i: int) -> Any:
    """Lines can be told apart without colour, too."""
    return DASHES[i % len(DASHES)]


@contextmanager
def _styled() -> Iterator[None]:
    from matplotlib import rc_context

    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the browser has more fonts
        yield


def _figure(title: str, caption: str, canvas: Any, prefix: str) -> Figure:
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    drawn = io.StringIO()
    FigureCanvasSVG(canvas).print_svg(drawn, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return Figure(title, caption, _inline(drawn.getvalue(), prefix, title))


def _inline(svg: str, prefix: str, title: str) -> str:
    """The element alone, without names of outside schemas, and with ids that no other figure of the page has."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", head) + f' role="img" aria-label="{title}"'
    svg = f"{head}>{rest}"
    svg = re.sub(r'(\sid=")', rf"\g<1>{prefix}-", svg)
    return re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{prefix}-", svg).replace("xlink:href", "href")
