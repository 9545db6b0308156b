"""How sure a number is: spread over folds, and bootstrap intervals over patients.

The two answer different questions. The standard deviation over folds shows how much training and test sets of this size
vary; the interval over patients shows what other patients of the same population would have given with these models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from psamil.evaluation.resampling import Patients, Statistic
from psamil.training.metrics import Floats, Integers

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class FoldSummary:
    """Mean and standard deviation (n - 1) over the folds in which a metric is defined."""

    mean: float
    sd: float
    folds: int
    undefined: int  # folds left out, such as those with one class only


@dataclass(frozen=True)
class Interval:
    """A value on the data with its interval; NaN where the metric is not defined."""

    estimate: float
    low: float
    high: float
    level: float = LEVEL


def fold_summary(values: ArrayLike) -> FoldSummary:
    """Summary of a metric (folds,), NaN where it is not defined."""
    everything = np.asarray(values, dtype=np.float64)
    defined = everything[np.isfinite(everything)]
    mean = float(defined.mean()) if len(defined) else np.nan
    sd = float(defined.std(ddof=1)) if len(defined) > 1 else np.nan
    return FoldSummary(mean, sd, len(defined), len(everything) - len(defined))


def bootstrap_interval(
    statistic: Statistic,
    patients: ArrayLike,
    strata: ArrayLike | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
) -> Interval:
    r"""Bias-corrected and accelerated (BCa) interval of a statistic over resampled patients.

    Its bounds are quantiles of the resampled values, not at :math:`\alpha` but at
    :math:`\Phi(z_0 + (z_0 + z_\alpha) / (1 - a (z_0 + z_\alpha)))`. The bias :math:`z_0` is the normal quantile of the
    share of resampled values below the estimate; the acceleration a is the skewness of the influence of single
    patients, who are left out in turn. Plain percentiles are too narrow for the AUC of a few dozen patients.

    The interval has no width where all resamples agree, as with a perfect AUC: that is not certainty.

    >>> bootstrap_interval(auc_statistic(labels, scores), patients, strata=labels)

    Args:
        statistic: of counts, see :mod:`psamil.evaluation.resampling`.
        patients: (n,) the patient of each row; rows of a patient are drawn together.
        strata: (n,) groups that keep their number of patients: the classes, or event and censored.
    """
    people = Patients.of(patients, strata)
    if len(people.of_row) == 0:
        return Interval(np.nan, np.nan, np.nan, level)
    estimate = float(statistic(people.everybody())[0])
    drawn = np.concatenate([statistic(counts) for counts in people.resampled(resamples, seed)])
    drawn = drawn[np.isfinite(drawn)]
    if len(drawn) == 0 or not np.isfinite(estimate):
        return Interval(estimate, np.nan, np.nan, level)
    without = np.concatenate([statistic(counts) for counts in people.left_out()])
    shares = _corrected_shares(estimate, drawn, _acceleration(without, people.strata), level)
    low, high = np.quantile(drawn, shares).tolist()
    return Interval(estimate, low, high, level)


def _corrected_shares(estimate: float, drawn: Floats, acceleration: float, level: float) -> Floats:
    below = ((drawn < estimate).mean() + (drawn <= estimate).mean()) / 2
    smallest = 1 / (len(drawn) + 1)
    bias = stats.norm.ppf(np.clip(below, smallest, 1 - smallest))
    shifted = bias + stats.norm.ppf([(1 - level) / 2, (1 + level) / 2])
    return np.asarray(stats.norm.cdf(bias + shifted / (1 - acceleration * shifted)), dtype=np.float64)


def _acceleration(without: Floats, strata: Integers) -> float:
    r"""Of a stratified sample, with :math:`l_i = \frac{n_s - 1}{n_s} (\bar\theta_{s} - \theta_{-i})` of patient i in s:

    .. math:: a = \frac{\sum_i l_i^3}{6 (\sum_i l_i^2)^{3/2}}

    Args:
        without: (patients,) the statistic without each patient; ignored where it is not defined.
        strata: (patients,).
    """
    influence = np.zeros(len(without))
    for stratum in np.unique(strata):
        members = np.flatnonzero((strata == stratum) & np.isfinite(without))
        n = len(members)
        if n > 1:
            influence[members] = (n - 1) / n * (without[members].mean() - without[members])
    spread = float((influence**2).sum())
    return float((influence**3).sum()) / (6 * spread**1.5) if spread > 1e-20 else 0.0


def percentile_bounds(values: Floats, level: float = LEVEL) -> tuple[float, float]:
    """The bounds between which the share ``level`` of the values lies."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2]).tolist()
    return low, high
