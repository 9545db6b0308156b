"""How sure metrics of tiles are that are pooled over slides: the same of bootstrap resamples of the slides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from psamil.evaluation.froc import FrocCurve
from psamil.evaluation.intervals import LEVEL
from psamil.evaluation.localisation import ScoredSlide
from psamil.evaluation.resampling import Patients
from psamil.training.metrics import Floats, Integers

RESAMPLES = 500


@dataclass(frozen=True, eq=False)
class PooledTiles:
    """The tiles of all slides, sorted once: metrics of slides that appear several times, or not at all, are sums."""

    level: Integers  # (n,) number of the tile's score among the distinct ones, the highest first
    slide: Integers  # (n,)
    positive: NDArray[np.bool_]  # (n,)
    thresholds: Floats  # (levels,) falling

    @staticmethod
    def of(slides: Sequence[ScoredSlide]) -> PooledTiles:
        scores, positive = (
            np.concatenate([getattr(slide, name) for slide in slides]) for name in ("scores", "positive")
        )
        falling, level = np.unique(-scores, return_inverse=True)
        slide = np.repeat(np.arange(len(slides)), [len(slide.scores) for slide in slides])
        return PooledTiles(level.reshape(-1), slide, positive.astype(bool), -falling)

    def metrics(self, counts: Floats) -> dict[str, float]:
        """``patch_auc`` and ``froc_tile@6`` where slide s appears ``counts[s]`` times; NaN where not defined."""
        weights = counts[self.slide]
        hits, misses = (
            np.bincount(self.level[kind], weights[kind], minlength=len(self.thresholds))
            for kind in (self.positive, ~self.positive)
        )
        found, false = hits.cumsum(), misses.cumsum()
        if not len(found) or not found[-1]:
            return {"patch_auc": np.nan, "froc_tile@6": np.nan}
        auc = ((found - hits / 2) * misses).sum() / (found[-1] * false[-1]) if false[-1] else np.nan
        reached = np.isfinite(self.thresholds)
        points = (
            np.append(start, values[reached]) for start, values in ((np.inf, self.thresholds), (0, false), (0, found))
        )
        thresholds, false_positives, sensitivity = points
        curve = FrocCurve(thresholds, false_positives / counts.sum(), sensitivity / found[-1])
        return {"patch_auc": float(auc), "froc_tile@6": curve.score()}


def resampled_metrics(
    slides: Sequence[ScoredSlide], patients: Sequence[str], *, seed: int = 0
) -> dict[str, list[float]]:
    """Those of :meth:`PooledTiles.metrics`, of ``RESAMPLES`` resamples each.

    Patients are drawn with replacement, those with a lesion and those without apart, and come with all their slides.
    """
    if not slides:
        return {}
    tiles, strata = PooledTiles.of(slides), [bool(slide.positive.any()) for slide in slides]
    drawn = [counts for batch in Patients.of(patients, strata).resampled(RESAMPLES, seed) for counts in batch]
    every = [tiles.metrics(counts) for counts in drawn]
    return {name: [round(of[name], 6) for of in every] for name in every[0]}


def interval_over_folds(resamples: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Ends of the percentile interval of the mean over folds, from the (resamples,) of each; NaN is left out."""
    values = np.asarray(resamples, dtype=np.float64)
    defined = np.isfinite(values)
    known = defined.any(0)
    if not known.any():
        return np.nan, np.nan
    means = np.where(defined, values, 0)[:, known].sum(0) / defined[:, known].sum(0)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
