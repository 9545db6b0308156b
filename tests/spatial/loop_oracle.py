"""Slow, independent reference for distance-pruned posterior attention: plain loops, float64.

For tile i, head h, with d_ij = ||xy_i - xy_j|| and D the head dimension, the posterior weight on neighbour j is

    p_ij = f(d_ij | theta_h) exp(-||q_i - k_j||^2 / (2 sqrt(D))) / sum over neighbours of the same,
    o_ih = sum_j p_ij v_jh.

The spatial prior f, and the radius K = f^{-1}(tau | theta) where it has fallen to tau, are

    gaussian      f = exp(-d^2 / (2 theta^2))      K = theta sqrt(2 ln(1 / tau))
    exponential   f = exp(-theta d)                K = ln(1 / tau) / theta
    cauchy        f = 1 / (1 + (d / theta)^2)      K = theta sqrt(1 / tau - 1)

Neighbours of i are the tiles j of the same bag with d_ij^2 <= K_h^2 (1 + 1e-5); i itself always is one.
tau = 0 means no pruning (K infinite); tau > 1 has no radius, since f <= 1, and is an error.
Weights are computed in log space, with the largest logit subtracted before exponentiating.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

Weights = dict[tuple[int, int], tuple[list[int], list[float]]]


def _log_prior(sq_dist: float, theta: float, decay: str) -> float:
    if decay == "gaussian":
        return -sq_dist / (2.0 * theta**2)
    if decay == "exponential":
        return -theta * math.sqrt(sq_dist)
    if decay == "cauchy":
        return -math.log1p(sq_dist / theta**2)
    raise ValueError(f"unknown decay {decay!r}")


def _radius(theta: float, decay: str, tau: float) -> float:
    if not 0.0 <= tau <= 1.0:
        raise ValueError(f"tau must lie in [0, 1], got {tau}")
    if tau == 0.0:
        return math.inf
    if decay == "gaussian":
        return theta * math.sqrt(2.0 * math.log(1.0 / tau))
    if decay == "exponential":
        return math.log(1.0 / tau) / theta
    if decay == "cauchy":
        return theta * math.sqrt(1.0 / tau - 1.0)
    raise ValueError(f"unknown decay {decay!r}")


def posterior_weights_loop(
    q: np.ndarray,
    k: np.ndarray,
    xy: np.ndarray,
    theta: np.ndarray,
    *,
    decay: str,
    tau: float,
    offsets: Sequence[int] | np.ndarray | None = None,
) -> Weights:
    """Return {(i, h): (neighbour indices j ascending, their posterior weights)}, j indexing the packed tiles."""
    q, k, xy, theta = (np.asarray(a, dtype=np.float64) for a in (q, k, xy, theta))
    n, heads, dim = q.shape
    bounds = [0, n] if offsets is None else [int(o) for o in offsets]
    if bounds[0] != 0 or bounds[-1] != n or bounds != sorted(bounds):
        raise ValueError(f"offsets must rise from 0 to {n}, got {bounds}")
    weights: Weights = {}
    for start, stop in pairwise(bounds):
        for h in range(heads):
            theta_h = float(theta[h])
            sq_limit = _radius(theta_h, decay, float(tau)) ** 2 * (1.0 + 1e-5)
            for i in range(start, stop):
                neighbours: list[int] = []
                logits: list[float] = []
                for j in range(start, stop):
                    sq_dist = float(np.sum((xy[i] - xy[j]) ** 2))
                    if sq_dist <= sq_limit:
                        sq_feature = float(np.sum((q[i, h] - k[j, h]) ** 2))
                        neighbours.append(j)
                        logits.append(_log_prior(sq_dist, theta_h, decay) - sq_feature / (2.0 * math.sqrt(dim)))
                top = max(logits)
                unnormalised = [math.exp(logit - top) for logit in logits]
                total = math.fsum(unnormalised)
                weights[i, h] = (neighbours, [u / total for u in unnormalised])
    return weights


def posterior_attention_loop(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    xy: np.ndarray,
    theta: np.ndarray,
    *,
    decay: str,
    tau: float,
    offsets: Sequence[int] | np.ndarray | None = None,
) -> np.ndarray:
    """Return o of shape (n, heads, d), o_ih = sum_j p_ij v_jh."""
    v = np.asarray(v, dtype=np.float64)
    out = np.zeros_like(v)
    for (i, h), (neighbours, probs) in posterior_weights_loop(
        q, k, xy, theta, decay=decay, tau=tau, offsets=offsets
    ).items():
        for j, p in zip(neighbours, probs, strict=True):
            out[i, h] += p * v[j, h]
    return out
