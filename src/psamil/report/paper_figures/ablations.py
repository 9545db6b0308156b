"""Ablations of PSA-MIL: the score, with its interval over patients, over the settings of one option at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from psamil.errors import DataError
from psamil.evaluation.run_comparison import FinishedRun
from psamil.models.psa import PSAMIL
from psamil.report.drawing import colour, dash, legend_below, panels, styled
from psamil.report.paper_figures.figure_files import require_matplotlib, save_figure
from psamil.report.tables import metric_title
from psamil.training.fold import MODEL_FILE
from psamil.training.saved_model import SavedModel

OPTIONS: dict[str, Callable[[PSAMIL], float]] = {
    "alpha": lambda model: model.alpha,
    "tau": lambda model: model.priors[0].tau,
    "k_max": lambda model: model.priors[0].k_max,
    "heads": lambda model: len(model.priors[0].free),
}
TITLES = {
    "alpha": "weight α of the diversity loss",
    "tau": "pruning threshold τ",
    "k_max": "largest radius K_max (tile steps)",
    "heads": "number of heads",
}
DODGE = 0.09  # between lines, in distances of settings


@dataclass(frozen=True)
class Setting:
    """A finished run of psa: its values of the options, and all else that was set."""

    run: str
    values: dict[str, float]
    decay: str
    others: str
    metric: str
    score: float
    low: float
    high: float

    def apart_from(self, option: str) -> tuple[Any, ...]:
        """What settings have in common that differ in this option alone."""
        return (self.others, *(value for name, value in self.values.items() if name != option))


def draw_ablations(runs: Mapping[str, Path], out: Path, *, name: str = "figure-ablations") -> list[Path]:
    """Writes the figure: a panel for every option of which runs differ, a line for all runs that differ in it alone.

    Args:
        runs: names and run directories of psa.
        out: folder of the files.
        name: of the files.
    """
    require_matplotlib()
    settings = [_setting(run, path) for run, path in runs.items()]
    shown = {option: lines for option in OPTIONS if (lines := lines_of(settings, option))}
    if not shown:
        cause = f"cannot have this figure: no two runs of psa differ in one of {', '.join(OPTIONS)} alone"
        raise DataError(out, cause, "train some that do")
    rows = [
        {
            "option": option,
            "value": setting.values[option],
            "decay": setting.decay,
            "run": setting.run,
            "metric": setting.metric,
            "score": setting.score,
            "low": setting.low,
            "high": setting.high,
        }
        for option, lines in shown.items()
        for line in lines
        for setting in line
    ]
    with styled():
        canvas, axes = panels(len(shown), sharey=True)
        for axis, (option, lines) in zip(axes, shown.items(), strict=True):
            _draw(axis, option, lines)
        axes[0].set_ylabel(metric_title(settings[0].metric))
        most = max(axes, key=lambda axis: len(axis.get_legend_handles_labels()[1]))
        if len(most.get_legend_handles_labels()[1]) > 1:
            legend_below(canvas, most)
        return save_figure(canvas, rows, out, name)


def lines_of(settings: Sequence[Setting], option: str) -> list[list[Setting]]:
    """Settings that differ in the option alone, by its value; where only one is left, it is no line."""
    lines: dict[tuple[Any, ...], list[Setting]] = {}
    for setting in settings:
        lines.setdefault(setting.apart_from(option), []).append(setting)
    ordered = (sorted(line, key=lambda setting: setting.values[option]) for line in lines.values())
    return [line for line in ordered if line[0].values[option] != line[-1].values[option]]


def _draw(axis: Any, option: str, lines: Sequence[Sequence[Setting]]) -> None:
    """Settings stand at equal distances: 0 has no place on a logarithmic axis."""
    values = sorted({setting.values[option] for line in lines for setting in line})
    for i, line in enumerate(lines):
        x = np.array([values.index(setting.values[option]) for setting in line]) + DODGE * (i - (len(lines) - 1) / 2)
        score, low, high = (np.array([getattr(s, part) for s in line]) for part in ("score", "low", "high"))
        error = np.maximum([score - low, high - score], 0)
        axis.errorbar(
            x,
            score,
            error,
            color=colour(i),
            linestyle=dash(i),
            marker="o",
            markersize=4,
            capsize=2.5,
            elinewidth=1,
            label=line[0].decay,
        )
    axis.set_xticks(range(len(values)), [f"{value:g}" for value in values])
    axis.set_xlabel(TITLES[option])


def _setting(name: str, path: Path) -> Setting:
    run = FinishedRun.load(path)
    _, job = run.jobs()[0]
    model = SavedModel.load(job / MODEL_FILE).model
    if not isinstance(model, PSAMIL):
        raise DataError(path, "is no run of psa", "leave it out of an ablation")
    settings = json.loads(json.dumps(run.about["settings"]))
    settings["model_options"] = {key: value for key, value in settings["model_options"].items() if key not in OPTIONS}
    score = run.summary["metrics"][run.headline]
    return Setting(
        run=name,
        values={option: value(model) for option, value in OPTIONS.items()},
        decay=model.priors[0].decay.name,
        others=json.dumps(settings, sort_keys=True),
        metric=run.headline,
        **{part: np.nan if score.get(part) is None else score[part] for part in ("low", "high")},
        score=np.nan if score["mean"] is None else score["mean"],
    )
