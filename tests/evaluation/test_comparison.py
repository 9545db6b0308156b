"""Tests of two runs against outside implementations, naive formulas and simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from psamil.errors import OptionError, ShapeError
from psamil.evaluation.comparison import (
    corrected_t_test,
    delong_covariance,
    delong_test,
    holm,
    paired_bootstrap,
    paired_t_test,
)
from psamil.evaluation.resampling import auc_statistic
from psamil.training.metrics import roc_auc

FIRST, SECOND = [0.81, 0.78, 0.9, 0.7, 0.85], [0.75, 0.8, 0.83, 0.66, 0.8]


def two_models(rng: np.random.Generator, n: int, lift: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels and two correlated scores, the first better by ``lift``; rounded, so that there are ties."""
    labels = np.arange(n) % 3 == 0
    shared = rng.normal(size=n)
    first = shared + 0.7 * rng.normal(size=n) + (1 + lift) * labels
    second = shared + 0.7 * rng.normal(size=n) + labels
    return labels, first.round(1), second.round(1)


def test_paired_t_test_is_scipys() -> None:
    ours, theirs = paired_t_test(FIRST, SECOND), stats.ttest_rel(FIRST, SECOND)
    assert ours.p_value == pytest.approx(theirs.pvalue)
    bounds = theirs.confidence_interval(0.95)
    np.testing.assert_allclose([ours.low, ours.high], [bounds.low, bounds.high])
    assert ours.difference == pytest.approx(0.04)


def test_corrected_t_test_by_hand() -> None:
    """k = 5 and 1/4: the error is sqrt(1/5 + 1/4) s instead of sqrt(1/5) s, so t shrinks by 2/3."""
    t = stats.ttest_rel(FIRST, SECOND).statistic * 2 / 3
    assert corrected_t_test(FIRST, SECOND, test_to_train=0.25).p_value == pytest.approx(2 * stats.t.sf(t, 4))
    with pytest.raises(OptionError, match="test_to_train"):
        corrected_t_test(FIRST, SECOND, test_to_train=0)


def test_undefined_folds_are_left_out() -> None:
    with_gap = paired_t_test([*FIRST, np.nan], [*SECOND, 0.5])
    assert with_gap == paired_t_test(FIRST, SECOND)
    assert np.isnan(paired_t_test([0.5], [0.4]).p_value)
    assert np.isnan(paired_t_test([np.nan], [0.4]).difference)
    assert paired_t_test(FIRST, FIRST).p_value == 1
    with pytest.raises(ShapeError):
        paired_t_test(FIRST, SECOND[:4])


def naive_delong(labels: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The structural components by comparing every positive with every negative."""
    positives, negatives = scores[:, labels], scores[:, ~labels]
    right = (positives[:, :, None] > negatives[:, None]) + 0.5 * (positives[:, :, None] == negatives[:, None])
    of_positives, of_negatives = right.mean(2), right.mean(1)
    covariance = np.zeros((len(scores), len(scores)))
    for a in range(len(scores)):
        for b in range(len(scores)):
            for parts in (of_positives, of_negatives):
                deviations = (parts[a] - parts[a].mean()) * (parts[b] - parts[b].mean())
                covariance[a, b] += deviations.sum() / (parts.shape[1] - 1) / parts.shape[1]
    return right.mean((1, 2)), covariance


@given(st.integers(6, 60), st.integers(0, 1000))
def test_delong_equals_the_naive_formula(n: int, seed: int) -> None:
    labels, first, second = two_models(np.random.default_rng(seed), n)
    aucs, covariance = delong_covariance(labels, np.stack([first, second]))
    expected_aucs, expected_covariance = naive_delong(labels, np.stack([first, second]))
    np.testing.assert_allclose(aucs, expected_aucs)
    np.testing.assert_allclose(covariance, expected_covariance, atol=1e-12)
    assert aucs[0] == pytest.approx(roc_auc(labels, first))


def test_delong_and_bootstrap_hold_their_level_and_find_differences() -> None:
    """400 simulated cohorts without a difference, rejected at 5% within 3 standard errors; then with one."""
    rng, rejected = np.random.default_rng(8), np.zeros(2)
    for seed in range(400):
        labels, first, second = two_models(rng, 120)
        statistics = auc_statistic(labels, first), auc_statistic(labels, second)
        bootstrap = paired_bootstrap(*statistics, np.arange(120), labels, resamples=400, seed=seed)
        rejected += [delong_test(labels, first, second).p_value < 0.05, bootstrap.p_value < 0.05]
    assert ((rejected / 400 > 0.015) & (rejected / 400 < 0.085)).all(), rejected
    labels, first, second = two_models(rng, 300, lift=1.0)
    statistics = auc_statistic(labels, first), auc_statistic(labels, second)
    assert delong_test(labels, first, second).p_value < 1e-3
    assert paired_bootstrap(*statistics, np.arange(300), labels).p_value < 5e-3


def test_delong_and_bootstrap_agree_on_the_interval() -> None:
    labels, first, second = two_models(np.random.default_rng(1), 400, lift=0.3)
    delong = delong_test(labels, first, second)
    bootstrap = paired_bootstrap(auc_statistic(labels, first), auc_statistic(labels, second), np.arange(400), labels)
    assert bootstrap.difference == pytest.approx(delong.difference)
    np.testing.assert_allclose([bootstrap.low, bootstrap.high], [delong.low, delong.high], atol=0.005)


def test_delong_within_folds() -> None:
    """Means of the folds' differences and a variance that adds up; scales of folds do not matter."""
    labels, first, second = two_models(np.random.default_rng(4), 120)
    folds = np.repeat([0, 1, 2], 40)
    by_fold = delong_test(labels, first, second, folds)
    assert by_fold == delong_test(labels, first + 100 * folds, second, folds)
    single = [delong_test(labels[folds == k], first[folds == k], second[folds == k]) for k in range(3)]
    assert by_fold.difference == pytest.approx(np.mean([one.difference for one in single]))
    assert (by_fold.high - by_fold.low) ** 2 == pytest.approx(sum((one.high - one.low) ** 2 for one in single) / 9)


def test_equal_models_and_too_few_patients() -> None:
    labels, first, _ = two_models(np.random.default_rng(0), 30)
    statistic = auc_statistic(labels, first)
    assert delong_test(labels, first, first).p_value == 1
    assert paired_bootstrap(statistic, statistic, np.arange(30), labels, resamples=100).p_value == 1
    assert np.isnan(delong_test([1, 0, 0], [3, 2, 1], [1, 2, 3]).p_value)
    one_class = auc_statistic(np.ones(3), np.arange(3))
    assert np.isnan(paired_bootstrap(one_class, one_class, np.arange(3)).p_value)
    assert np.isnan(paired_bootstrap(one_class, one_class, []).p_value)


def test_holm_by_hand() -> None:
    adjusted = holm([0.04, 0.01, np.nan, 0.03])
    np.testing.assert_allclose(adjusted, [0.06, 0.03, np.nan, 0.06])
    np.testing.assert_allclose(holm([0.9, 0.8]), [1, 1])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_what_the_step_down_rule_rejects(p_values: list[float]) -> None:
    adjusted, level = holm(p_values), 0.05
    rejected = set()
    for rank, index in enumerate(np.argsort(p_values, kind="stable").tolist()):
        if p_values[index] * (len(p_values) - rank) > level:
            break
        rejected.add(index)
    assert {index for index, p in enumerate(adjusted) if p <= level} == rejected
