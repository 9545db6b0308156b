"""Do high scores lie where the annotation says? Metrics of tiles and of lesions.

- :func:`patch_auc`, :func:`patch_f1`: tiles as samples, pooled over all slides or averaged over slides.
- ``froc_tile@6`` is ``tile_froc(slides).score()``: mean sensitivity of positive tiles at 1/4, 1/2, 1, 2, 4 and 8
  false-positive tiles per slide.
- ``aufroc_tile@8`` is ``tile_froc(slides).area()``: normalised area under the same curve up to 8.
- ``froc_lesion`` is ``lesion_froc(slides).score()``: as in the CAMELYON16 challenge, with detections on the tiles;
  lesions are those of the annotation (:mod:`psamil.slides.lesions`), or else groups of touching positive tiles.

Pooled metrics compare scores of different slides. They need scores on one scale: raw logits, not weights that sum to 1
in each slide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from psamil.errors import OptionError, ShapeError, one_of
from psamil.evaluation.froc import FrocCurve, froc_curve
from psamil.evaluation.lesions import label_lesions, local_maxima
from psamil.training.metrics import Floats, Integers, f1, roc_auc

ISOLATED_CELLS_UM = 275.0  # lesions whose major axis is shorter are isolated tumour cells
AVERAGES = ("pooled", "per slide")


@dataclass(frozen=True, eq=False)
class ScoredSlide:
    """Scores of the tiles of a slide and what the annotation says about them. Normal slides have no positive tile."""

    xy: Floats  # (n, 2) in tile steps
    scores: Floats  # (n,)
    positive: NDArray[np.bool_]  # (n,)
    lesions: Integers | None = None  # (n,) number of the lesion, 0 for none; else groups of touching positive tiles
    lesion_lengths_um: Mapping[int, float] = field(default_factory=dict)
    """Major axis of lesions, NaN where not known. Short ones (isolated tumour cells) are neither hits nor false
    positives. A lesion that has a length but no tile cannot be found and counts all the same. Needs ``lesions``;
    :func:`psamil.evaluation.lesions.lesion_lengths_um` measures them on tiles."""

    def __post_init__(self) -> None:
        n = len(self.scores)
        shapes = {"xy": (n, 2), "scores": (n,), "positive": (n,), "lesions": (n,)}
        for name, expected in shapes.items():
            values = getattr(self, name)
            if values is not None and values.shape != expected:
                raise ShapeError(f"{name} of a scored slide is {values.shape}, expected {expected}")
        if np.isnan(self.scores).any():
            raise OptionError(f"{int(np.isnan(self.scores).sum())} of {n} tile scores are NaN")
        if self.lesion_lengths_um and self.lesions is None:
            raise OptionError("lesion_lengths_um needs lesions, whose numbers its keys are")


def patch_auc(slides: Sequence[ScoredSlide], average: str = "pooled") -> float:
    """ROC AUC of tiles: of all slides together, or the mean over the slides that have tiles of both kinds."""
    return _averaged(slides, average, lambda slide: (slide.positive, slide.scores), roc_auc)


def patch_f1(slides: Sequence[ScoredSlide], threshold: float, average: str = "pooled") -> float:
    """F1 of tiles whose score reaches a threshold: of all slides together, or the mean over slides with positive tiles.

    The threshold comes from other slides, for example by :func:`psamil.training.metrics.threshold_of_best_f1`.
    """
    return _averaged(slides, average, lambda slide: (slide.positive, slide.scores >= threshold), f1)


def tile_froc(slides: Sequence[ScoredSlide]) -> FrocCurve:
    """The FROC curve whose targets are positive tiles and whose false positives are other tiles."""
    if not slides:
        raise OptionError("there are no slides to evaluate")
    scores, positive = (np.concatenate([getattr(slide, name) for slide in slides]) for name in ("scores", "positive"))
    positive = positive.astype(bool)
    return froc_curve(scores[positive], scores[~positive], targets=int(positive.sum()), slides=len(slides))


def lesion_froc(slides: Sequence[ScoredSlide], *, radius_steps: float = 1.5) -> FrocCurve:
    """The FROC curve whose targets are lesions.

    Detections are local maxima of the tile scores. A lesion is found with the highest score of the detections inside
    it; detections outside all lesions are false positives; those in isolated tumour cells do not count.

    Args:
        slides: all that were searched, also those without lesions.
        radius_steps: within which a detection silences its neighbours; 1.5 is the eight tiles around it.
    """
    found: list[float] = []
    false: list[Floats] = []
    targets = 0
    for slide in slides:
        lesions = label_lesions(slide.xy, slide.positive) if slide.lesions is None else slide.lesions
        lengths = slide.lesion_lengths_um
        known = sorted({*np.unique(lesions[lesions > 0]).tolist(), *lengths})
        wanted = [k for k in known if not lengths.get(k, np.nan) < ISOLATED_CELLS_UM]
        detections = local_maxima(slide.xy, slide.scores, radius_steps)
        hit = lesions[detections]
        found += [float(slide.scores[detections[hit == k]].max()) for k in wanted if (hit == k).any()]
        false.append(slide.scores[detections[hit == 0]])
        targets += len(wanted)
    return froc_curve(found, np.concatenate(false) if false else [], targets=targets, slides=len(slides))


def _averaged(
    slides: Sequence[ScoredSlide],
    average: str,
    truth_and_guess: Callable[[ScoredSlide], tuple[NDArray[np.bool_], NDArray[np.generic]]],
    metric: Callable[[NDArray[np.bool_], NDArray[np.generic]], float],
) -> float:
    if average not in AVERAGES:
        raise one_of("average", average, AVERAGES)
    pairs = [truth_and_guess(slide) for slide in slides]
    if average == "pooled":
        return metric(*(np.concatenate(parts) for parts in zip(*pairs, strict=True))) if pairs else np.nan
    values = np.array([metric(truth, guess) for truth, guess in pairs if truth.any()])
    defined = values[np.isfinite(values)]
    return float(defined.mean()) if len(defined) else np.nan
