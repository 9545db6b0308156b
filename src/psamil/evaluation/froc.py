"""Free-response ROC curves: sensitivity against false positives per slide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from psamil.errors import OptionError
from psamil.training.metrics import Floats

FALSE_POSITIVES_PER_SLIDE = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True, eq=False)
class FrocCurve:
    """From no detections at all, down the thresholds, to every detection. Sensitivity is NaN without targets."""

    thresholds: Floats  # (m,) descending, from infinity; a detection counts if its score is at least this
    false_positives: Floats  # (m,) per slide, ascending
    sensitivity: Floats  # (m,) share of the targets found, ascending

    def score(self, at: Sequence[float] = FALSE_POSITIVES_PER_SLIDE) -> float:
        """Mean sensitivity at these false positives per slide."""
        return float(self.sensitivity_at(at).mean())

    def area(self, up_to: float = 8.0) -> float:
        """Area under the curve up to this many false positives per slide, divided by it: between 0 and 1."""
        inside = self.false_positives <= up_to
        x = np.append(self.false_positives[inside], up_to)
        y = np.append(self.sensitivity[inside], self.sensitivity_at([up_to]))
        return float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2) / up_to)

    def sensitivity_at(self, false_positives: ArrayLike) -> Floats:
        """Linear between the points of the curve, as in the CAMELYON16 challenge; constant beyond its end."""
        return np.interp(np.asarray(false_positives, dtype=np.float64), self.false_positives, self.sensitivity)


def froc_curve(found: ArrayLike, false: ArrayLike, *, targets: int, slides: int) -> FrocCurve:
    """The curve of targets and false detections of all slides together.

    Args:
        found: (at most targets,) the highest score by which each target is found.
        false: scores of the detections that hit no target.
        targets: how many there are to find, in all slides.
        slides: how many there are, those without targets among them.
    """
    hits, misses = np.asarray(found, dtype=np.float64), np.asarray(false, dtype=np.float64)
    if slides < 1 or np.isnan(hits).any() or np.isnan(misses).any():
        raise OptionError(f"an FROC curve needs at least one slide and scores without NaN ({slides} slides given)")
    distinct = np.unique(np.concatenate([hits, misses]))[::-1]
    thresholds = np.append(np.inf, distinct[np.isfinite(distinct)])
    return FrocCurve(
        thresholds,
        _at_least(misses, thresholds) / slides,
        _at_least(hits, thresholds) / targets if targets else np.full(len(thresholds), np.nan),
    )


def _at_least(scores: Floats, thresholds: Floats) -> Floats:
    """How many scores reach each threshold."""
    return (len(scores) - np.searchsorted(np.sort(scores), thresholds, side="left")).astype(np.float64)
