"""Are probabilities frequencies? Temperature scaling, and data for reliability diagrams."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_softmax, softmax

from psamil.errors import OptionError, ShapeError
from psamil.training.metrics import Floats, Integers

TEMPERATURES = (0.05, 20.0)  # between which it is sought


def fit_temperature(logits: ArrayLike, labels: ArrayLike) -> float:
    r"""The temperature T that gives the labels the highest likelihood under logits / T. For validation data only.

    .. math:: T = \arg\min_T -\sum_i \log \mathrm{softmax}(z_i / T)_{y_i}

    The order of scores, and with it AUC and the predicted class, stays. T is above 1 for an overconfident model. If
    every sample is classified rightly the likelihood grows without end as T goes to 0; the data then say nothing about
    confidence, and T is 1, as it is without data.

    Args:
        logits: (n,) of the positive class in binary tasks, or (n, classes).
        labels: (n,) index of the class. Several yes/no labels per sample: ravel logits and labels.
    """
    z, y = _checked(logits, labels)
    rows = np.arange(len(y))
    others = np.where(np.arange(z.shape[1]) == y[:, None], -np.inf, z).max(1)
    if (z[rows, y] > others).all():
        return 1.0

    def loss(log_temperature: float) -> float:
        return -float(log_softmax(z / np.exp(log_temperature), axis=1)[rows, y].sum())

    # convex in 1/T, so there is one minimum
    best = minimize_scalar(loss, bounds=np.log(TEMPERATURES).tolist(), method="bounded", options={"xatol": 1e-6})
    return float(np.exp(best.x))


def calibrated_probabilities(logits: ArrayLike, temperature: float) -> Floats:
    """Of the positive class for logits (n,), of each class for logits (n, classes)."""
    z = np.asarray(logits, dtype=np.float64) / temperature
    return np.asarray(softmax(z, axis=1) if z.ndim == 2 else expit(z), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class ReliabilityCurve:
    """Predicted probability against observed frequency in bins of equal width; NaN in empty bins."""

    predicted: Floats  # (bins,) mean probability
    observed: Floats  # (bins,) frequency
    counts: Integers  # (bins,)


def reliability_curve(labels: ArrayLike, probabilities: ArrayLike, bins: int = 15) -> ReliabilityCurve:
    """Bins (a, b] as in :func:`psamil.training.metrics.expected_calibration_error`, the mean gap of this curve.

    Args:
        labels: (n,) index of the class.
        probabilities: (n,) of the positive class, against how often it occurs; or (n, classes), of which the highest is
            taken, against how often it is right.
    """
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(labels)
    if len(p) != len(y):
        raise ShapeError(f"labels {y.shape} and probabilities {p.shape} must be of one length")
    hits, confidence = (y == p.argmax(1), p.max(1)) if p.ndim == 2 else (y == 1, p)
    bin_of = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    counts = np.bincount(bin_of, minlength=bins)

    def mean(values: ArrayLike) -> Floats:
        total = np.bincount(bin_of, weights=np.asarray(values, dtype=np.float64), minlength=bins)
        return np.divide(total, counts, out=np.full(bins, np.nan), where=counts > 0)

    return ReliabilityCurve(mean(confidence), mean(hits), counts)


def _checked(logits: ArrayLike, labels: ArrayLike) -> tuple[Floats, Integers]:
    """Logits (n, classes) and labels (n,)."""
    z, y = np.asarray(logits, dtype=np.float64), np.asarray(labels, dtype=np.int64)
    if z.ndim == 1:
        z = np.stack([np.zeros_like(z), z], axis=1)
    if z.ndim != 2 or z.shape[:1] != y.shape:
        raise ShapeError(f"logits {z.shape} must be (n,) or (n, classes) and labels {y.shape} must be (n,)")
    if not np.isfinite(z).all():
        raise OptionError(f"{int((~np.isfinite(z).all(1)).sum())} samples have logits that are not finite")
    return z, y
