"""Measures of predictions, in NumPy and float64.

A measure that the data do not define (an AUC with one class, a c-index without comparable pairs, anything of no samples
or of NaN scores) is NaN, never an exception or a stand-in value. Classes are indices; of two classes, 1 is the positive
one. Thresholds are chosen by functions of their own, to be given validation data, and are then applied as
``scores >= threshold``.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psamil.errors import ShapeError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

RISK_TOLERANCE = 1e-8
"""Risks that differ by no more than this are tied."""


def roc_auc(labels: ArrayLike, scores: ArrayLike) -> float:
    r"""Area under the ROC curve: the share of pairs (positive, negative) in which the positive scores higher.

    Ties count one half. With midranks r (the mean rank of equal scores),

        AUC = (sum_{positives} r_i - P (P + 1) / 2) / (P N)

    NaN with one class only.
    """
    is_positive, values = _binary(labels, scores)
    positives, negatives = int(is_positive.sum()), int((~is_positive).sum())
    if positives == 0 or negatives == 0 or np.isnan(values).any():
        return np.nan
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    midranks = (np.cumsum(sizes) - (sizes - 1) / 2)[group]
    return float((midranks[is_positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def average_precision(labels: ArrayLike, scores: ArrayLike) -> float:
    r"""AP = sum_k (recall_k - recall_{k-1}) precision_k over the distinct scores, from high to low.

    NaN without positives.
    """
    is_positive, values = _binary(labels, scores)
    if not is_positive.any() or np.isnan(values).any():
        return np.nan
    true, chosen, _ = _counts_by_threshold(is_positive, values)
    return float(np.sum(np.diff(true, prepend=0) / true[-1] * true / chosen))


def accuracy(labels: ArrayLike, predicted: ArrayLike) -> float:
    """Share of samples whose predicted class is right. NaN without samples."""
    labels, predicted = _classes(labels, predicted)
    return float(np.mean(labels == predicted)) if len(labels) else np.nan


def balanced_accuracy(labels: ArrayLike, predicted: ArrayLike) -> float:
    """Mean, over the classes that occur in the labels, of the share of their samples predicted right."""
    labels, predicted = _classes(labels, predicted)
    recalls = [float(np.mean(predicted[labels == label] == label)) for label in np.unique(labels)]
    return float(np.mean(recalls)) if recalls else np.nan


def f1(labels: ArrayLike, predicted: ArrayLike, positive: int = 1) -> float:
    """2 TP / (2 TP + FP + FN) of one class. NaN where it neither occurs nor is predicted."""
    labels, predicted = _classes(labels, predicted)
    true, chosen = labels == positive, predicted == positive
    either = int(true.sum() + chosen.sum())
    return 2 * int((true & chosen).sum()) / either if either else np.nan


def macro_f1(labels: ArrayLike, predicted: ArrayLike) -> float:
    """Mean of the F1 of every class that occurs or is predicted. NaN without samples."""
    labels, predicted = _classes(labels, predicted)
    values = [f1(labels, predicted, int(label)) for label in np.union1d(labels, predicted)]
    return float(np.mean(values)) if values else np.nan


def macro(metric: Callable[[Floats, Floats], float], indicators: ArrayLike, scores: ArrayLike) -> float:
    """Mean of a binary measure over the columns where it is defined; NaN where it is defined for none.

    Args:
        metric: for example :func:`roc_auc`.
        indicators: (n, columns) 0 or 1: several labels, or the :func:`one_hot` form of one class per sample.
        scores: (n, columns).
    """
    columns, values = _together(indicators, scores)
    each = np.array([metric(columns[:, k], values[:, k]) for k in range(columns.shape[1])])
    return float(np.mean(each[~np.isnan(each)])) if not np.isnan(each).all() else np.nan


def one_hot(labels: ArrayLike, n_classes: int) -> Integers:
    """(n, n_classes): 1 in the column of each sample's class."""
    return np.eye(n_classes, dtype=np.int64)[np.asarray(labels, dtype=np.int64)]


def brier(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """Mean squared error of the probabilities.

    Of the positive class for (n,) probabilities, from 0 to 1; summed over the classes for (n, classes), from 0 to 2.
    """
    p = np.asarray(probabilities, dtype=np.float64)
    truth = np.asarray(labels) if p.ndim == 1 else one_hot(labels, p.shape[1])
    truth, p = _together(truth, p)
    return float(np.sum((p - truth) ** 2) / len(p)) if len(p) else np.nan


def expected_calibration_error(labels: ArrayLike, probabilities: ArrayLike, bins: int = 15) -> float:
    """Mean gap between probability and frequency: sum_b (n_b / n) |mean probability - frequency| over equal bins.

    For (n,) probabilities those of the positive class, against how often it occurs; for (n, classes) those of the most
    probable class, against how often it is right. A bin holds its upper bound.
    """
    p = np.asarray(probabilities, dtype=np.float64)
    if p.ndim == 1:
        hits, p = _together(labels, p)
    else:
        truth, best = _classes(labels, p.argmax(1))
        hits, p = _together(truth == best, p.max(1))
    if len(p) == 0 or np.isnan(p).any():
        return np.nan
    bin_of = np.clip(np.ceil(p * bins).astype(np.int64) - 1, 0, bins - 1)
    return float(np.abs(np.bincount(bin_of, weights=p - hits)).sum() / len(p))


def concordance_index(times: ArrayLike, events: ArrayLike, risks: ArrayLike) -> float:
    """Harrell's c-index: the share of comparable pairs in which the sample that has its event first has more risk.

    Samples i and j are comparable where i had its event at t_i < t_j, or at t_i = t_j while j was censored then; two
    events at the same time are not. Equal risks, up to ``RISK_TOLERANCE``, count one half. NaN without comparable
    pairs. Time O(n^2), memory O(n).
    """
    t, risk = _together(times, risks)
    t, event = _together(t, events)
    if np.isnan(risk).any():
        return np.nan
    censored = event == 0
    pairs, concordant = 0, 0.0
    for i in np.flatnonzero(~censored):
        ahead = risk[i] - risk[(t > t[i]) | ((t == t[i]) & censored)]
        pairs += len(ahead)
        concordant += float(np.sum(ahead > RISK_TOLERANCE) + 0.5 * np.sum(np.abs(ahead) <= RISK_TOLERANCE))
    return concordant / pairs if pairs else np.nan


def mean_absolute_error(values: ArrayLike, predicted: ArrayLike) -> float:
    """In the unit of the values. NaN without samples."""
    truth, guess = _together(values, predicted)
    return float(np.mean(np.abs(truth - guess))) if len(truth) else np.nan


def r2(values: ArrayLike, predicted: ArrayLike) -> float:
    """1 - sum (y - f)^2 / sum (y - mean y)^2. NaN where all values are equal."""
    truth, guess = _together(values, predicted)
    if len(truth) == 0 or np.ptp(truth) == 0:
        return np.nan
    return float(1 - np.sum((truth - guess) ** 2) / np.sum((truth - truth.mean()) ** 2))


def threshold_of_best_f1(labels: ArrayLike, scores: ArrayLike) -> float:
    """The threshold with the highest F1; of equal ones the highest. NaN without positives."""
    is_positive, values = _binary(labels, scores)
    if not is_positive.any() or np.isnan(values).any():
        return np.nan
    true, chosen, thresholds = _counts_by_threshold(is_positive, values)
    return float(thresholds[np.argmax(2 * true / (chosen + true[-1]))])


def threshold_of_best_balanced_accuracy(labels: ArrayLike, scores: ArrayLike) -> float:
    """The threshold with the highest balanced accuracy; of equal ones the highest. NaN with one class only.

    It is that of Youden's index as well: J = sensitivity + specificity - 1 = 2 (balanced accuracy) - 1.
    """
    is_positive, values = _binary(labels, scores)
    if not is_positive.any() or is_positive.all() or np.isnan(values).any():
        return np.nan
    true, chosen, thresholds = _counts_by_threshold(is_positive, values)
    false = chosen - true
    return float(thresholds[np.argmax(true * false[-1] - false * true[-1])])  # J times both counts: exact


def _counts_by_threshold(is_positive: NDArray[np.bool_], scores: Floats) -> tuple[Integers, Integers, Floats]:
    """True positives and predicted positives at each threshold, from high to low.

    Thresholds lie half-way between neighbouring distinct scores, the last one at the lowest score.
    """
    distinct, group = np.unique(scores, return_inverse=True)
    chosen = np.bincount(group)[::-1].cumsum()
    true = np.bincount(group[is_positive], minlength=len(distinct))[::-1].cumsum()
    upper, lower = distinct[1:], distinct[:-1]
    middle = lower / 2 + upper / 2
    between = np.where((middle > lower) & (middle <= upper), middle, upper)  # neighbouring floats have no middle
    return true, chosen, np.concatenate((distinct[:1], between))[::-1]


def _binary(labels: ArrayLike, scores: ArrayLike) -> tuple[NDArray[np.bool_], Floats]:
    truth, values = _together(labels, scores)
    return truth == 1, values


def _classes(labels: ArrayLike, predicted: ArrayLike) -> tuple[Integers, Integers]:
    truth, guess = _together(labels, predicted)
    return truth.astype(np.int64), guess.astype(np.int64)


def _together(first: ArrayLike, second: ArrayLike) -> tuple[Floats, Floats]:
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape:
        raise ShapeError(f"labels and predictions must have the same shape, got {a.shape} and {b.shape}")
    return a, b
