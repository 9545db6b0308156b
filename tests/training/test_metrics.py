"""Measures against scikit-learn and against loops, with ties; NaN where they are not defined."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics

from psamil.errors import ShapeError
from psamil.training import metrics

COARSE = st.integers(-3, 3).map(lambda step: step / 3)  # many ties
FINE = st.floats(-1e6, 1e6)
BINARY = st.lists(st.tuples(st.integers(0, 1), st.one_of(COARSE, FINE)), max_size=40)
CLASSES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30)
EMPTY: tuple[list[float], list[float]] = ([], [])
EXAMPLES = settings(max_examples=60, deadline=None)


def columns(rows, n: int = 2):
    return tuple(np.array(column) for column in zip(*rows, strict=True)) if rows else (np.array([]),) * n


@EXAMPLES
@given(BINARY)
def test_ranking_against_scikit_learn(rows) -> None:
    labels, scores = columns(rows)
    if 0 < labels.sum() < len(labels):
        assert metrics.roc_auc(labels, scores) == pytest.approx(sklearn_metrics.roc_auc_score(labels, scores))
    else:
        assert math.isnan(metrics.roc_auc(labels, scores))
    if labels.sum():
        expected = sklearn_metrics.average_precision_score(labels, scores)
        assert metrics.average_precision(labels, scores) == pytest.approx(expected)
    else:
        assert math.isnan(metrics.average_precision(labels, scores))


def test_auc_by_hand() -> None:
    assert metrics.roc_auc([0, 1, 0, 1], [1, 2, 2, 3]) == 3.5 / 4
    assert metrics.roc_auc([0, 1], [-np.inf, np.inf]) == 1.0
    assert metrics.roc_auc([0, 1, 1], [5, 5, 5]) == 0.5


@EXAMPLES
@given(CLASSES)
def test_classes_against_scikit_learn(rows) -> None:
    labels, predicted = columns(rows)
    assert metrics.accuracy(labels, predicted) == pytest.approx(sklearn_metrics.accuracy_score(labels, predicted))
    recall = sklearn_metrics.recall_score(labels, predicted, labels=np.unique(labels), average="macro", zero_division=0)
    assert metrics.balanced_accuracy(labels, predicted) == pytest.approx(recall)
    expected = sklearn_metrics.f1_score(labels, predicted, average="macro", zero_division=np.nan)
    assert metrics.macro_f1(labels, predicted) == pytest.approx(expected)
    labels, predicted = labels // 2, predicted // 2
    expected = sklearn_metrics.f1_score(labels, predicted, zero_division=np.nan)
    assert metrics.f1(labels, predicted) == pytest.approx(expected, nan_ok=True)


@EXAMPLES
@given(st.lists(st.tuples(st.integers(0, 2), *[st.floats(0.01, 1)] * 3), min_size=1, max_size=30))
def test_brier_and_macro_auc_against_scikit_learn(rows) -> None:
    labels, *parts = columns(rows)
    p = np.stack(parts, axis=1) / np.sum(parts, axis=0)[:, None]
    expected = sklearn_metrics.brier_score_loss(labels, p, labels=[0, 1, 2], scale_by_half=False)
    assert metrics.brier(labels, p) == pytest.approx(expected)
    yes = labels == 1
    expected = sklearn_metrics.brier_score_loss(yes, p[:, 1], pos_label=True)
    assert metrics.brier(yes, p[:, 1]) == pytest.approx(expected)
    if len(np.unique(labels)) == 3:
        expected = sklearn_metrics.roc_auc_score(labels, p, multi_class="ovr")
        assert metrics.macro(metrics.roc_auc, metrics.one_hot(labels, 3), p) == pytest.approx(expected)


def test_macro_leaves_out_what_is_undefined() -> None:
    labels, p = [0, 1, 0, 1], np.array([[0.9, 0.1, 0], [0.2, 0.8, 0], [0.3, 0.7, 0], [0.4, 0.6, 0]])
    expected = np.mean([metrics.roc_auc([1, 0, 1, 0], p[:, 0]), metrics.roc_auc(labels, p[:, 1])])
    assert metrics.macro(metrics.roc_auc, metrics.one_hot(labels, 3), p) == pytest.approx(expected)
    assert math.isnan(metrics.macro(metrics.roc_auc, metrics.one_hot([1, 1, 1, 1], 3), p))


@EXAMPLES
@given(st.lists(st.tuples(st.integers(0, 1), st.floats(0, 1)), min_size=1, max_size=40), st.sampled_from([1, 4, 15]))
def test_calibration_against_a_loop(rows, bins: int) -> None:
    labels, p = columns(rows)
    total = 0.0
    for b in range(bins):
        inside = (p * bins > b) & (p * bins <= b + 1) | ((p == 0) & (b == 0))
        if inside.any():
            total += inside.mean() * abs(p[inside].mean() - labels[inside].mean())
    assert metrics.expected_calibration_error(labels, p, bins) == pytest.approx(total)


def test_calibration_of_the_most_probable_class() -> None:
    p = np.array([[0.7, 0.2, 0.1], [0.1, 0.7, 0.2], [0.25, 0.25, 0.5], [0.5, 0.2, 0.3]])
    # 0.7: one of two right; 0.5: one of two right
    assert metrics.expected_calibration_error([0, 2, 2, 1], p, bins=10) == pytest.approx(0.5 * 0.2)


@EXAMPLES
@given(st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.one_of(COARSE, FINE)), max_size=25))
def test_concordance_against_a_double_loop(rows) -> None:
    times, events, risks = columns(rows, 3)
    good, pairs = 0.0, 0
    for i in range(len(rows)):
        for j in range(len(rows)):
            if i == j or not events[i]:
                continue
            if times[i] < times[j] or (times[i] == times[j] and not events[j]):
                pairs += 1
                tied = abs(risks[i] - risks[j]) <= 1e-8
                good += 0.5 if tied else float(risks[i] > risks[j])
    expected = good / pairs if pairs else math.nan
    assert metrics.concordance_index(times, events, risks) == pytest.approx(expected, nan_ok=True)


def test_concordance_by_hand() -> None:
    times, events = [1, 2, 2, 3], [True, True, False, True]
    # pairs (0,1), (0,2), (0,3), (1,2), (1,3); the censored sample and the last event lead no pair
    assert metrics.concordance_index(times, events, [4, 3, 2, 1]) == 1.0
    assert metrics.concordance_index(times, events, [1, 2, 3, 4]) == 0.0
    assert metrics.concordance_index(times, events, [4, 3, 3 + 1e-9, 5]) == (2 + 0.5) / 5
    assert math.isnan(metrics.concordance_index([1, 1], [True, True], [1, 2]))
    assert math.isnan(metrics.concordance_index([1, 2], [False, False], [1, 2]))


@EXAMPLES
@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), min_size=2, max_size=30))
def test_numbers_against_scikit_learn(rows) -> None:
    values, predicted = columns(rows)
    expected = sklearn_metrics.mean_absolute_error(values, predicted)
    assert metrics.mean_absolute_error(values, predicted) == pytest.approx(expected)
    if np.ptp(values) > 1e-6:
        assert metrics.r2(values, predicted) == pytest.approx(sklearn_metrics.r2_score(values, predicted))


@EXAMPLES
@given(BINARY)
def test_thresholds_are_the_best(rows) -> None:
    labels, scores = columns(rows)
    candidates = [*scores, np.inf]
    threshold = metrics.threshold_of_best_f1(labels, scores)
    if labels.sum():
        best = max(sklearn_metrics.f1_score(labels, scores >= t, zero_division=0) for t in candidates)
        assert metrics.f1(labels, scores >= threshold) == pytest.approx(best)
    else:
        assert math.isnan(threshold)
    threshold = metrics.threshold_of_best_balanced_accuracy(labels, scores)
    if 0 < labels.sum() < len(labels):
        best = max(sklearn_metrics.balanced_accuracy_score(labels, scores >= t) for t in candidates)
        assert metrics.balanced_accuracy(labels, scores >= threshold) == pytest.approx(best)
    else:
        assert math.isnan(threshold)


def test_thresholds_by_hand() -> None:
    assert metrics.threshold_of_best_f1([0, 0, 1, 1], [0.1, 0.2, 0.4, 0.9]) == pytest.approx(0.3)
    assert metrics.threshold_of_best_f1([0, 1, 1, 0], [0.1, 0.2, 0.4, 0.9]) == pytest.approx(
        0.15
    )  # the top one is wrong
    assert metrics.threshold_of_best_f1([1, 1], [0.1, 0.2]) == 0.1
    assert metrics.threshold_of_best_balanced_accuracy([0, 1], [0.8, np.nextafter(0.8, 1)]) == np.nextafter(0.8, 1)
    assert metrics.threshold_of_best_balanced_accuracy([0, 1], [0.9, 0.1]) == 0.1  # all scores are the wrong way round


@pytest.mark.parametrize(
    "metric",
    [
        metrics.roc_auc,
        metrics.average_precision,
        metrics.accuracy,
        metrics.balanced_accuracy,
        metrics.f1,
        metrics.macro_f1,
        metrics.brier,
        metrics.expected_calibration_error,
        metrics.mean_absolute_error,
        metrics.r2,
        metrics.threshold_of_best_f1,
        metrics.threshold_of_best_balanced_accuracy,
    ],
)
def test_no_samples_and_different_lengths(metric) -> None:
    assert math.isnan(metric(*EMPTY))
    with pytest.raises(ShapeError, match="same shape"):
        metric([0, 1], [0.5])


@pytest.mark.parametrize(
    "metric",
    [
        metrics.roc_auc,
        metrics.average_precision,
        metrics.brier,
        metrics.expected_calibration_error,
        metrics.mean_absolute_error,
        metrics.r2,
        metrics.threshold_of_best_f1,
        metrics.threshold_of_best_balanced_accuracy,
    ],
)
def test_scores_that_are_not_numbers(metric) -> None:
    assert math.isnan(metric([0, 1, 1], [0.1, np.nan, 0.9]))
    assert math.isnan(metrics.concordance_index([1, 2], [1, 1], [0.5, np.nan]))


def test_r2_of_equal_values() -> None:
    assert math.isnan(metrics.r2([2.0, 2.0], [1.0, 3.0]))
    assert math.isnan(metrics.r2([2.0], [1.0]))
