"""All metrics with intervals: the same as metric by metric, of one table and of folds."""

import numpy as np
import pandas as pd
import pytest

from psamil.cohort import Classification
from psamil.evaluation import score_intervals
from psamil.evaluation.intervals import bootstrap_interval
from psamil.evaluation.resampling import statistic_of_rows
from psamil.evaluation.score_intervals import score_with_intervals
from psamil.evaluation.scores import score
from psamil.training.tasks import Task

TASK = Task.fit(Classification("label", ("no", "yes"), np.array([0, 1])))


@pytest.fixture
def patients():
    random = np.random.default_rng(0)
    truth = np.repeat(["no", "yes"], 12)
    p = (random.uniform(size=24) + (truth == "yes")) / 2
    table = {"patient": [f"p{i}" for i in range(24)], "truth": truth, "prob_no": 1 - p, "prob_yes": p}
    return pd.DataFrame({**table, "fold": np.tile([0, 1], 12)})


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr(score_intervals, "RESAMPLES", 60)


def test_intervals_of_a_table(patients):
    table = patients.drop(columns="fold")
    found = score_with_intervals(table, TASK, 0.4)
    assert found.keys() == score(table, TASK, 0.4).keys()
    for metric, interval in found.items():
        slow = statistic_of_rows(lambda rows, metric=metric: score(table.iloc[rows], TASK, 0.4)[metric])
        expected = bootstrap_interval(slow, table["patient"], table["truth"], resamples=60)
        assert (interval.estimate, interval.low, interval.high) == pytest.approx(
            (expected.estimate, expected.low, expected.high)
        )


def test_intervals_of_folds_are_of_the_mean_with_the_threshold_of_each(patients):
    thresholds = {0: 0.3, 1: 0.7}
    found = score_with_intervals(patients, TASK, thresholds)

    def mean(rows, metric):
        drawn = patients.iloc[rows]
        values = [
            score(drawn[drawn["fold"] == k], TASK, thresholds[k])[metric] for k in (0, 1) if k in set(drawn["fold"])
        ]
        return np.nanmean(values)

    for metric in ("auc", "accuracy", "balanced_accuracy", "average_precision"):
        slow = statistic_of_rows(lambda rows, metric=metric: mean(rows, metric))
        expected = bootstrap_interval(slow, patients["patient"], patients["truth"], resamples=60)
        interval = found[metric]
        assert (interval.estimate, interval.low, interval.high) == pytest.approx(
            (expected.estimate, expected.low, expected.high)
        )
    assert score_with_intervals(patients[:0], TASK, thresholds) == {}
