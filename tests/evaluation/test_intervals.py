"""Resampling of patients, statistics of counts, and the coverage of intervals."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from psamil.errors import ShapeError
from psamil.evaluation.intervals import bootstrap_interval, fold_summary
from psamil.evaluation.resampling import (
    Patients,
    auc_statistic,
    concordance_statistic,
    mean_over_folds,
    statistic_of_rows,
)
from psamil.training.metrics import brier, concordance_index, roc_auc

counts_of_12 = arrays(np.int64, (4, 12), elements=st.integers(0, 3))
bits_of_12 = arrays(np.int64, 12, elements=st.integers(0, 1))
values_of_12 = arrays(np.int64, 12, elements=st.integers(0, 5))  # few, so that there are ties


def test_summary_over_folds() -> None:
    summary = fold_summary([0.5, np.nan, 0.7, 0.9])
    assert (summary.folds, summary.undefined) == (3, 1)
    np.testing.assert_allclose([summary.mean, summary.sd], [0.7, 0.2])
    assert np.isnan(fold_summary([np.nan]).mean)
    assert np.isnan(fold_summary([0.5]).sd)


def test_patients_are_drawn_whole_and_within_strata() -> None:
    patients = np.array(["a", "a", "b", "c", "c", "c", "d", "e"])
    labels = np.array([1, 1, 0, 1, 1, 1, 0, 0])
    counts = np.concatenate(list(Patients.of(patients, labels).resampled(600, seed=1)))
    assert counts.shape == (600, 8)
    for rows in ([0, 1], [3, 4, 5]):
        assert (counts[:, rows] == counts[:, rows[:1]]).all()
    first_rows = [0, 2, 3, 6, 7]  # of a, b, c, d, e
    np.testing.assert_array_equal(counts[:, [0, 3]].sum(1), 2)
    np.testing.assert_array_equal(counts[:, [2, 6, 7]].sum(1), 3)
    np.testing.assert_allclose(counts[:, first_rows].mean(0), 1, atol=0.12)


def test_a_patient_with_mixed_slides_has_a_stratum_of_its_own() -> None:
    assert Patients.of(["a", "a", "b", "c", "d"], [0, 1, 0, 1, 0]).strata.tolist() == [2, 1, 0, 1]
    with pytest.raises(ShapeError):
        Patients.of(["a", "b"], [0])


def test_seed_decides() -> None:
    people = Patients.of(np.arange(30))
    first, again, other = (np.concatenate(list(people.resampled(300, seed))) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_leaving_out_each_patient() -> None:
    (counts,) = Patients.of(["b", "a", "b"]).left_out()
    np.testing.assert_array_equal(counts, [[1, 0, 1], [0, 1, 0]])


@given(counts_of_12, bits_of_12, values_of_12)
def test_auc_of_counts_is_the_auc_of_repeated_rows(counts: np.ndarray, labels: np.ndarray, scores: np.ndarray) -> None:
    expected = statistic_of_rows(lambda rows: roc_auc(labels[rows], scores[rows]))(counts.astype(float))
    np.testing.assert_allclose(auc_statistic(labels, scores)(counts.astype(float)), expected)


@given(counts_of_12, bits_of_12, values_of_12, values_of_12)
def test_concordance_of_counts_is_that_of_repeated_rows(
    counts: np.ndarray, events: np.ndarray, times: np.ndarray, risks: np.ndarray
) -> None:
    expected = statistic_of_rows(lambda rows: concordance_index(times[rows], events[rows], risks[rows]))
    counted = concordance_statistic(times, events, risks)(counts.astype(float))
    np.testing.assert_allclose(counted, expected(counts.astype(float)))


def test_infinite_scores_tie_and_nan_scores_give_nan() -> None:
    assert auc_statistic([0, 1, 1], [-np.inf, -np.inf, np.inf])(np.ones((1, 3))) == 0.75
    assert np.isnan(auc_statistic([0, 1], [0.5, np.nan])(np.ones((1, 2))))
    assert np.isnan(concordance_statistic([1, 2], [1, 1], [0.5, np.nan])(np.ones((1, 2))))


def test_mean_over_folds_leaves_out_undefined_folds() -> None:
    labels, scores = np.array([0, 1, 0, 1, 1, 1]), np.array([0.1, 0.9, 0.8, 0.2, 0.5, 0.6])
    folds = np.array(["a", "a", "b", "b", "c", "c"])
    statistic = mean_over_folds(folds, lambda rows: auc_statistic(labels[rows], scores[rows]))
    counts = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1], [0, 1, 0, 1, 1, 1]], dtype=float)
    np.testing.assert_array_equal(statistic(counts), [0.5, 1.0, np.nan])


@pytest.mark.parametrize("measure", [np.mean, np.std])  # the second one is biased, its bounds move by up to 0.3
def test_bca_equals_scipy_for_independent_rows(measure: Callable[..., float]) -> None:
    values = np.random.default_rng(3).exponential(size=15)
    statistic = statistic_of_rows(lambda rows: measure(values[rows]))
    ours = bootstrap_interval(statistic, np.arange(15), resamples=10_000)
    theirs = stats.bootstrap((values,), measure, n_resamples=10_000, method="BCa", rng=np.random.default_rng(0))
    bounds = theirs.confidence_interval
    np.testing.assert_allclose([ours.low, ours.high], [bounds.low, bounds.high], atol=0.06)
    assert ours.estimate == pytest.approx(measure(values))


def test_intervals_cover_the_truth_for_few_patients() -> None:
    """35 patients. 300 simulated cohorts: the share within 0.95 ± 3 standard errors."""
    rng, shift, covered = np.random.default_rng(5), 1.9, 0
    truth = stats.norm.cdf(shift / np.sqrt(2))
    labels = np.repeat([1, 0], [10, 25])
    for _ in range(300):
        scores = rng.normal(size=35) + shift * labels
        interval = bootstrap_interval(auc_statistic(labels, scores), np.arange(35), labels, resamples=800)
        covered += interval.low <= truth <= interval.high
    assert 0.91 <= covered / 300 <= 0.99


def test_slides_of_a_patient_do_not_narrow_the_interval() -> None:
    rng = np.random.default_rng(2)
    labels = np.repeat([0, 1], 30)
    scores = rng.normal(size=60) + labels
    once = bootstrap_interval(auc_statistic(labels, scores), np.arange(60), labels)
    copied = np.tile(np.arange(60), 5)
    five_times = bootstrap_interval(auc_statistic(labels[copied], scores[copied]), copied, labels[copied])
    np.testing.assert_allclose([five_times.low, five_times.high], [once.low, once.high])


def test_undefined_and_degenerate_intervals() -> None:
    one_class = bootstrap_interval(auc_statistic([1, 1, 1], [0.1, 0.2, 0.3]), np.arange(3))
    assert np.isnan([one_class.estimate, one_class.low, one_class.high]).all()
    perfect = bootstrap_interval(auc_statistic([0, 0, 1, 1], [1, 2, 3, 4]), np.arange(4), [0, 0, 1, 1])
    assert (perfect.estimate, perfect.low, perfect.high) == (1, 1, 1)
    nobody = bootstrap_interval(statistic_of_rows(lambda rows: brier([], [])), [])
    assert np.isnan(nobody.estimate)


@settings(max_examples=30, deadline=None)
@given(bits_of_12, values_of_12, st.integers(0, 5))
def test_interval_is_ordered_and_in_range(labels: np.ndarray, scores: np.ndarray, seed: int) -> None:
    interval = bootstrap_interval(auc_statistic(labels, scores), np.arange(12), labels, resamples=200, seed=seed)
    if np.isfinite(interval.estimate):
        assert 0 <= interval.low <= interval.high <= 1


def test_fast_enough_for_a_thousand_patients() -> None:
    rng = np.random.default_rng(0)
    labels, scores = np.arange(1000) % 2, rng.normal(size=1000)
    start = time.process_time()
    bootstrap_interval(auc_statistic(labels, scores), np.arange(1000), labels, resamples=2000)
    assert time.process_time() - start < 5  # takes about 0.2 s
