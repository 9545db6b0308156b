"""Kaplan-Meier curves, the log-rank test, and groups of low and high risk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from psamil.errors import OptionError, ShapeError
from psamil.evaluation.intervals import LEVEL
from psamil.training.metrics import Floats, Integers


@dataclass(frozen=True, eq=False)
class SurvivalCurve:
    """A step function: ``survival[i]`` holds from ``times[i]`` until before ``times[i + 1]``."""

    times: Floats  # (m,) every distinct time of the data, ascending
    survival: Floats  # (m,)
    low: Floats  # (m,) interval of each point by itself; NaN after the last event where nobody is left
    high: Floats  # (m,)
    at_risk: Integers  # (m,) observed until just before
    events: Integers  # (m,) at this time
    censored: Integers  # (m,) at this time

    def at(self, times: ArrayLike) -> Floats:
        """Survival at any times: 1 before the first, and as at the last beyond it."""
        place = np.searchsorted(self.times, np.asarray(times, dtype=np.float64), side="right")
        return np.concatenate([[1.0], self.survival])[place]

    @property
    def median(self) -> float:
        """The first time at which survival is 1/2 or less; infinite if it never is."""
        reached = np.flatnonzero(self.survival <= 0.5 + 1e-9)  # a product that is 1/2 may be rounded up
        return float(self.times[reached[0]]) if len(reached) else np.inf


def kaplan_meier(times: ArrayLike, events: ArrayLike, *, level: float = LEVEL) -> SurvivalCurve:
    r"""The product-limit estimate :math:`S(t) = \prod_{t_i \le t} (1 - d_i / n_i)` of d events among n at risk.

    The interval is that of :math:`\log(-\log S)` with Greenwood's variance, which keeps it between 0 and 1:
    :math:`S^{\exp(\pm z \sigma)}`, :math:`\sigma^2 = \sum d_i / (n_i (n_i - d_i)) / (\log S)^2`.

    Args:
        times: (n,) of the event or of the end of observation.
        events: (n,) True where the event was seen.
    """
    time, event = _observations(times, events)
    distinct, at_risk, deaths, ended = _life_table(time, event)
    survival: Floats = np.cumprod(1 - deaths / at_risk, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):  # before the first event and after the last survivor
        sigma = np.sqrt(np.cumsum(deaths / (at_risk * (at_risk - deaths)))) / np.abs(np.log(survival))
        reach = np.exp(stats.norm.ppf((1 + level) / 2) * sigma)
        low, high = survival**reach, survival ** (1 / reach)
    certain = survival == 1
    low[certain], high[certain] = 1.0, 1.0
    low[survival == 0], high[survival == 0] = np.nan, np.nan
    return SurvivalCurve(distinct, survival, low, high, at_risk, deaths, ended - deaths)


@dataclass(frozen=True)
class LogRank:
    """Result of a log-rank test; NaN where there is nothing to compare."""

    statistic: float  # chi squared
    degrees: int
    p_value: float


def log_rank(times: ArrayLike, events: ArrayLike, groups: ArrayLike) -> LogRank:
    r"""Do the groups survive alike? The log-rank test of two or more groups.

    At each time with d events among n at risk, group g with :math:`n_g` at risk expects :math:`d n_g / n` events. The
    sums of observed minus expected, Z, have the covariance

    .. math:: V_{gh} = \sum_t d \frac{n - d}{n - 1} \frac{n_g}{n} \left([g = h] - \frac{n_h}{n}\right)

    and :math:`Z^T V^{-} Z` is chi squared with one degree of freedom less than there are groups.
    """
    time, event = _observations(times, events)
    names, group = np.unique(np.asarray(groups), return_inverse=True)
    if group.shape != time.shape:
        raise ShapeError(f"groups {group.shape} and times {time.shape} must be of one length")
    if len(names) < 2 or not event.any():
        return LogRank(np.nan, max(len(names) - 1, 0), np.nan)
    moments = np.unique(time[event])
    at_risk = np.stack([(time[group == g] >= moments[:, None]).sum(1) for g in range(len(names))])  # (groups, moments)
    deaths = np.stack([((time == moments[:, None]) & event & (group == g)).sum(1) for g in range(len(names))])
    n, d = at_risk.sum(0), deaths.sum(0)
    share = at_risk / n
    excess = (deaths - d * share).sum(1)
    weight = d * np.where(n > 1, (n - d) / np.maximum(n - 1, 1), 0)
    covariance = np.diag((weight * share).sum(1)) - (weight * share) @ share.T
    if not covariance.any():  # no time at which more than one group was at risk
        return LogRank(np.nan, len(names) - 1, np.nan)
    statistic = float(excess @ np.linalg.pinv(covariance, hermitian=True) @ excess)
    return LogRank(statistic, len(names) - 1, float(stats.chi2.sf(statistic, len(names) - 1)))


def high_risk(risks: ArrayLike, *, reference: ArrayLike) -> NDArray[np.bool_]:
    """True where a risk is above the median of the reference: risks of the training or validation part, by one model.

    The patients to be grouped must not be their own reference. Models of different folds differ in the scale of
    their risks: group each fold by its own reference, then join the groups.
    """
    known = np.asarray(reference, dtype=np.float64)
    if known.size == 0 or not np.isfinite(known).all():
        raise OptionError("risk groups need finite risks of the training or validation part as reference")
    return np.asarray(risks, dtype=np.float64) > np.median(known)


def _observations(times: ArrayLike, events: ArrayLike) -> tuple[Floats, NDArray[np.bool_]]:
    time, event = np.asarray(times, dtype=np.float64), np.asarray(events).astype(bool)
    if time.shape != event.shape or time.ndim != 1:
        raise ShapeError(f"times {time.shape} and events {event.shape} must be of one length")
    if not np.isfinite(time).all():
        raise OptionError(f"{int((~np.isfinite(time)).sum())} times are not finite; leave these patients out")
    return time, event


def _life_table(time: Floats, event: NDArray[np.bool_]) -> tuple[Floats, Integers, Integers, Integers]:
    """Distinct times; how many were at risk, had the event, and ended there in any way."""
    distinct, place = np.unique(time, return_inverse=True)
    ended = np.bincount(place, minlength=len(distinct)).astype(np.int64)
    deaths = np.bincount(place[event], minlength=len(distinct)).astype(np.int64)
    at_risk = len(time) - np.cumsum(ended) + ended
    return distinct, at_risk.astype(np.int64), deaths, ended
