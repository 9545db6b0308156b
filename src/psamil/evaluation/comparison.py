"""Is one run better than another? Tests for two runs on the same splits, and correction for several comparisons.

- Over folds: :func:`paired_t_test`, usual in the field although its folds share training data and are not independent,
  which makes it find differences too often; :func:`corrected_t_test` accounts for that.
- Over patients: :func:`paired_bootstrap` for any statistic, :func:`delong_test` for ROC AUC. Both take the trained
  models as given.

Differences are first minus second; tests are two-sided; intervals are of the difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from psamil.errors import OptionError, ShapeError
from psamil.evaluation.intervals import LEVEL, RESAMPLES, percentile_bounds
from psamil.evaluation.resampling import Patients, Statistic
from psamil.training.metrics import Floats

PAIRED_T_TEST = "paired t-test over folds"
BOOTSTRAP = "paired bootstrap over patients"


@dataclass(frozen=True)
class Comparison:
    """A difference with its interval and the p-value of no difference; NaN where they cannot be known."""

    test: str
    difference: float
    low: float
    high: float
    p_value: float


def paired_t_test(first: ArrayLike, second: ArrayLike, *, level: float = LEVEL) -> Comparison:
    """Student's paired t-test over folds. Folds in which a value is NaN are left out.

    Args:
        first, second: (folds,) the metric of two runs on the same test folds.
    """
    return _t_test(PAIRED_T_TEST, first, second, 0.0, level)


def corrected_t_test(first: ArrayLike, second: ArrayLike, *, test_to_train: float, level: float = LEVEL) -> Comparison:
    r"""Nadeau and Bengio's corrected resampled t-test over folds, for folds and repeats that share training data.

    The variance of the mean difference of k folds is taken as :math:`(1/k + n_{test}/n_{train}) s^2` instead of
    :math:`s^2/k`.

    Args:
        first, second: (folds,) the metric of two runs on the same test folds, of all repeats.
        test_to_train: samples of a test part per sample of a training part; 1/4 for five folds.
    """
    if not test_to_train > 0:
        raise OptionError(f"test_to_train is {test_to_train}; it must be above 0, such as 0.25 for five folds")
    return _t_test("corrected t-test over folds (Nadeau-Bengio)", first, second, test_to_train, level)


def _t_test(test: str, first: ArrayLike, second: ArrayLike, shared: float, level: float) -> Comparison:
    a, b = _paired(first, second)
    differences = (a - b)[np.isfinite(a - b)]
    k = len(differences)
    if k < 2:
        return Comparison(test, float(differences.mean()) if k else np.nan, np.nan, np.nan, np.nan)
    mean, error = float(differences.mean()), float(np.sqrt((1 / k + shared) * differences.var(ddof=1)))
    p_value = 2 * float(stats.t.sf(abs(mean) / error, k - 1)) if error > 0 else float(mean == 0)
    margin = float(stats.t.ppf((1 + level) / 2, k - 1)) * error
    return Comparison(test, mean, mean - margin, mean + margin, p_value)


def paired_bootstrap(
    first: Statistic,
    second: Statistic,
    patients: ArrayLike,
    strata: ArrayLike | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
) -> Comparison:
    r"""Bootstrap of the difference of two statistics, both taken on the same resampled patients.

    With :math:`d^*` the differences of B resamples, the p-value inverts the percentile interval:
    :math:`2 \min(1 + \#\{d^* \le 0\}, 1 + \#\{d^* \ge 0\}) / (B + 1)`, at most 1.

    Args:
        first, second: statistics of the same rows, see :mod:`psamil.evaluation.resampling`.
        patients, strata: (n,) as in :func:`psamil.evaluation.intervals.bootstrap_interval`.
    """
    test = BOOTSTRAP
    people = Patients.of(patients, strata)
    if len(people.of_row) == 0:
        return Comparison(test, np.nan, np.nan, np.nan, np.nan)
    difference = float((first(people.everybody()) - second(people.everybody()))[0])
    drawn = np.concatenate([first(counts) - second(counts) for counts in people.resampled(resamples, seed)])
    drawn = drawn[np.isfinite(drawn)]
    if len(drawn) == 0:
        return Comparison(test, difference, np.nan, np.nan, np.nan)
    tail = 1 + min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    return Comparison(test, difference, *percentile_bounds(drawn, level), min(1.0, 2 * tail / (len(drawn) + 1)))


def delong_test(
    labels: ArrayLike,
    first: ArrayLike,
    second: ArrayLike,
    folds: ArrayLike | None = None,
    *,
    level: float = LEVEL,
) -> Comparison:
    """DeLong's test of two correlated ROC AUCs. Rows must be independent: one per patient.

    With folds, AUCs are taken within each fold and averaged; folds without two patients of each class are left out.
    Each patient must then be in one fold only, as in a single cross-validation.

    Args:
        labels: (n,) 1 for the positive class, 0 for the other.
        first, second: (n,) scores of two runs.
        folds: (n,) the fold of each row.
    """
    positive = np.asarray(labels).astype(bool)
    scores = np.stack(_paired(first, second))
    fold_of_row = np.zeros(len(positive), dtype=np.int64) if folds is None else np.asarray(folds)
    parts = []
    for fold in np.unique(fold_of_row):
        rows = fold_of_row == fold
        if min((positive & rows).sum(), (~positive & rows).sum()) >= 2:
            parts.append(delong_covariance(positive[rows], scores[:, rows]))
    if not parts:
        return Comparison("DeLong over patients", np.nan, np.nan, np.nan, np.nan)
    contrast = np.array([1.0, -1.0])
    difference = float(np.mean([contrast @ aucs for aucs, _ in parts]))
    variance = sum(float(contrast @ covariance @ contrast) for _, covariance in parts) / len(parts) ** 2
    error = float(np.sqrt(max(variance, 0.0)))
    p_value = 2 * float(stats.norm.sf(abs(difference) / error)) if error > 1e-12 else float(abs(difference) < 1e-12)
    margin = float(stats.norm.ppf((1 + level) / 2)) * error
    return Comparison("DeLong over patients", difference, difference - margin, difference + margin, p_value)


def delong_covariance(labels: ArrayLike, scores: ArrayLike) -> tuple[Floats, Floats]:
    r"""ROC AUCs of several scores (m,) and their covariance (m, m), from ranks.

    With the share of negatives below each positive, :math:`V_i`, and of positives above each negative, :math:`W_j`
    (ties one half), the covariance is :math:`cov(V)/n_{pos} + cov(W)/n_{neg}`.

    Args:
        labels: (n,) at least two of each class.
        scores: (m, n).
    """
    positive, values = np.asarray(labels).astype(bool), np.asarray(scores, dtype=np.float64)
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    ranks = stats.rankdata(values, axis=1)
    below = (ranks[:, positive] - stats.rankdata(values[:, positive], axis=1)) / n_negative
    above = 1 - (ranks[:, ~positive] - stats.rankdata(values[:, ~positive], axis=1)) / n_positive
    covariance = np.atleast_2d(np.cov(below)) / n_positive + np.atleast_2d(np.cov(above)) / n_negative
    return below.mean(1), covariance


def holm(p_values: ArrayLike) -> Floats:
    """P-values of several comparisons, adjusted by Holm's step-down method. NaN stays NaN and is not counted."""
    given = np.asarray(p_values, dtype=np.float64)
    adjusted = np.full_like(given, np.nan)
    known = np.flatnonzero(np.isfinite(given))
    order = known[np.argsort(given[known], kind="stable")]
    adjusted[order] = np.minimum(1, np.maximum.accumulate(given[order] * np.arange(len(order), 0, -1)))
    return adjusted


def _paired(first: ArrayLike, second: ArrayLike) -> tuple[Floats, Floats]:
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1:
        raise ShapeError(f"values of two runs must be of one length, not of shapes {a.shape} and {b.shape}")
    return a, b
