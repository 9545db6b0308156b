"""All metrics of predictions, with bootstrap intervals over patients."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from psamil.evaluation.intervals import Interval, bootstrap_interval
from psamil.evaluation.resampling import (
    Statistic,
    auc_statistic,
    concordance_statistic,
    mean_over_folds,
    statistic_of_rows,
)
from psamil.evaluation.scores import score
from psamil.training.metrics import Integers
from psamil.training.tasks import Task

RESAMPLES = 1000


def score_with_intervals(
    patients: pd.DataFrame, task: Task, thresholds: float | Mapping[float, float]
) -> dict[str, Interval]:
    """All metrics of a table of patients, or the mean over its folds of those of each fold.

    Classes, or event and censored, keep their numbers in the resamples.

    Args:
        patients: predictions; the column ``fold``, if there is one, says of which fold.
        task: of the predictions.
        thresholds: of the second class of two; of each fold, where there are folds.
    """
    names = patients["patient"].to_numpy()
    strata = {"classification": "truth", "survival": "event"}.get(task.kind)
    kinds = None if strata is None else patients[strata].to_numpy()
    folds = patients["fold"].to_numpy() if "fold" in patients else np.zeros(len(patients))
    scores_of: dict[bytes, dict[str, float]] = {}  # resamples are the same for all metrics

    def scores(rows: Integers) -> dict[str, float]:
        """Of rows of one fold."""
        key = rows.tobytes()
        if key not in scores_of:
            threshold = thresholds[folds[rows[0]]] if isinstance(thresholds, Mapping) else thresholds
            scores_of[key] = score(patients.iloc[rows], task, threshold)
        return scores_of[key]

    def statistic_of_fold(metric: str, rows: Integers) -> Statistic:
        quick = _quick_statistic(metric, patients.iloc[rows], task)
        return quick or statistic_of_rows(lambda drawn: scores(rows[drawn])[metric] if len(drawn) else np.nan)

    metrics = scores(np.flatnonzero(folds == folds[0])) if len(patients) else {}
    intervals = {}
    for metric in metrics:
        statistic = mean_over_folds(folds, lambda rows, metric=metric: statistic_of_fold(metric, rows))  # type: ignore[misc]
        intervals[metric] = bootstrap_interval(statistic, names, kinds, resamples=RESAMPLES)
    return intervals


def _quick_statistic(metric: str, patients: pd.DataFrame, task: Task) -> Statistic | None:
    """Of the metrics that can be taken of all resamples at once."""
    if metric == "auc":
        positive = task.classes[1]  # type: ignore[attr-defined]
        return auc_statistic(patients["truth"] == positive, patients[f"prob_{positive}"])
    if metric == "c_index":
        return concordance_statistic(patients["time"], patients["event"], patients["risk"])
    return None
