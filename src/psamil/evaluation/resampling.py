r"""Resampling of patients, written as counts, and statistics that take counts.

A bootstrap resample draws patients with replacement; all rows (slides) of a patient come together. It is kept as how
often each row appears: a row of counts, c (n,). Statistics take many resamples at once, (resamples, n) -> (resamples,),
and counts of one give the value on the data themselves. ROC AUC and the concordance index are vectorised,
:func:`statistic_of_rows` lifts any other metric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from psamil.errors import ShapeError
from psamil.training.metrics import RISK_TOLERANCE, Floats, Integers

Statistic: TypeAlias = Callable[[Floats], Floats]

COUNTS_AT_ONCE = 256
ROWS_AT_ONCE = 512


@dataclass(frozen=True, eq=False)
class Patients:
    """Which rows belong to one patient, and which patients are drawn for one another."""

    of_row: Integers  # (n,) number of the patient of each row
    strata: Integers  # (patients,) number of the stratum of each patient

    @staticmethod
    def of(patients: ArrayLike, strata: ArrayLike | None = None) -> Patients:
        """From the patient and the stratum of each row, both (n,).

        Strata are classes, or event and censored: a resample has as many patients of each as the data. A patient whose
        rows differ belongs to the stratum of that combination.
        """
        names, of_row = np.unique(np.asarray(patients), return_inverse=True)
        if strata is None:
            return Patients(of_row, np.zeros(len(names), dtype=np.int64))
        kinds, stratum_of_row = np.unique(np.asarray(strata), return_inverse=True)
        if stratum_of_row.shape != of_row.shape:
            raise ShapeError(f"strata {stratum_of_row.shape} and patients {of_row.shape} must be of one length")
        belongs = np.zeros((len(names), len(kinds)), dtype=bool)
        belongs[of_row, stratum_of_row] = True
        return Patients(of_row, np.unique(belongs, axis=0, return_inverse=True)[1].reshape(-1))

    def everybody(self) -> Floats:
        """Counts (1, n) of the data themselves."""
        return np.ones((1, len(self.of_row)))

    def resampled(self, resamples: int, seed: int) -> Iterator[Floats]:
        """Counts (some, n) of bootstrap resamples, a batch at a time. The same seed gives the same resamples."""
        members = [np.flatnonzero(self.strata == stratum) for stratum in np.unique(self.strata)]
        rng = np.random.default_rng(seed)
        for start in range(0, resamples, COUNTS_AT_ONCE):
            batch = min(COUNTS_AT_ONCE, resamples - start)
            counts = np.empty((batch, len(self.strata)))
            for member in members:
                n = len(member)
                drawn = rng.integers(n, size=(batch, n)) + n * np.arange(batch)[:, None]
                counts[:, member] = np.bincount(drawn.ravel(), minlength=batch * n).reshape(batch, n)
            yield counts[:, self.of_row]

    def left_out(self) -> Iterator[Floats]:
        """Counts (some, n) that leave out one patient each, in order, a batch at a time."""
        for start in range(0, len(self.strata), COUNTS_AT_ONCE):
            chosen = np.arange(start, min(start + COUNTS_AT_ONCE, len(self.strata)))
            yield (self.of_row != chosen[:, None]).astype(np.float64)


def statistic_of_rows(metric: Callable[[Integers], float]) -> Statistic:
    """A metric of row numbers, some of them repeated: ``lambda rows: brier(labels[rows], probabilities[rows])``."""

    def statistic(counts: Floats) -> Floats:
        rows = np.arange(counts.shape[1])
        return np.array([metric(np.repeat(rows, resample)) for resample in counts.astype(np.int64)], dtype=np.float64)

    return statistic


def auc_statistic(labels: ArrayLike, scores: ArrayLike) -> Statistic:
    r"""Area under the ROC curve: the share of pairs of a positive and a negative that stand in the right order.

    .. math:: \frac{\sum_{i \in pos, j \in neg} c_i c_j ([s_i > s_j] + \tfrac12 [s_i = s_j])}{\sum_i c_i \sum_j c_j}

    Args:
        labels: (n,) 1 for the positive class, 0 for the other.
        scores: (n,). If one is NaN, so is the area.
    """
    positive, values = np.asarray(labels).astype(bool), np.asarray(scores, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    first_of_ties = np.flatnonzero(np.append(True, values[order][1:] != values[order][:-1]))

    def statistic(counts: Floats) -> Floats:
        if np.isnan(values).any():
            return np.full(len(counts), np.nan)
        positives = np.add.reduceat((counts * positive)[:, order], first_of_ties, axis=1)
        negatives = np.add.reduceat((counts * ~positive)[:, order], first_of_ties, axis=1)
        below = np.cumsum(negatives, axis=1) - negatives / 2
        return _ratio((positives * below).sum(1), positives.sum(1) * negatives.sum(1))

    return statistic


def concordance_statistic(times: ArrayLike, events: ArrayLike, risks: ArrayLike) -> Statistic:
    """Harrell's concordance index: the share of comparable pairs in which who has the event first has the higher risk.

    A pair (i, j) is comparable if i had the event, and j was observed for longer, or for the same time without event.
    Equal risks count one half.
    """
    time, event = np.asarray(times, dtype=np.float64), np.asarray(events).astype(bool)
    risk = np.asarray(risks, dtype=np.float64)
    first = np.flatnonzero(event)
    chunks = [first[start : start + ROWS_AT_ONCE] for start in range(0, len(first), ROWS_AT_ONCE)]

    def statistic(counts: Floats) -> Floats:
        if np.isnan(risk).any():
            return np.full(len(counts), np.nan)
        concordant, comparable = np.zeros(len(counts)), np.zeros(len(counts))
        for chunk in chunks:
            later = (time > time[chunk, None]) | ((time == time[chunk, None]) & ~event)  # (chunk, n)
            difference = risk[chunk, None] - risk
            ordered = np.where(np.abs(difference) <= RISK_TOLERANCE, 0.5, difference > 0)
            concordant += ((counts @ (later * ordered).T) * counts[:, chunk]).sum(1)
            comparable += ((counts @ later.T) * counts[:, chunk]).sum(1)
        return _ratio(concordant, comparable)

    return statistic


def mean_over_folds(folds: ArrayLike, statistic_of_fold: Callable[[Integers], Statistic]) -> Statistic:
    """The mean of a statistic that is taken in each fold by itself, as scores of different models do not compare.

    Folds in which it is not defined, such as a fold that has lost one of its classes in a resample, are left out of the
    mean of that resample.

    >>> mean_over_folds(folds, lambda rows: auc_statistic(labels[rows], scores[rows]))

    Args:
        folds: (n,) the fold of each row.
        statistic_of_fold: makes the statistic of the rows of a fold.
    """
    fold_of_row = np.asarray(folds)
    rows_of_folds = [np.flatnonzero(fold_of_row == fold) for fold in np.unique(fold_of_row)]
    statistics = [statistic_of_fold(rows) for rows in rows_of_folds]

    def statistic(counts: Floats) -> Floats:
        values = np.stack([one(counts[:, rows]) for one, rows in zip(statistics, rows_of_folds, strict=True)])
        return _ratio(np.nansum(values, axis=0), np.isfinite(values).sum(0).astype(np.float64))

    return statistic


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    """NaN where nothing was counted."""
    return np.divide(numerator, denominator, out=np.full_like(numerator, np.nan), where=denominator > 0)
