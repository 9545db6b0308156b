r"""The neighbour rule of the authors' released code, to compare with: the nearest tiles instead of those in a disc.

For tile i and head h, over the m_h = round(pi K_h^2) tiles of its slide nearest to it (all, if there are fewer),

    o_i = sum_j p_ij v_j,
    p_i. = softmax over j of  -||q_i - k_j||^2 / (2 sqrt d) + log(f(d_ij | theta_h) + FLOOR),

with K_h = f^{-1}(tau | theta_h): about as many tiles as the disc d_ij <= K_h holds. Where tissue fills the disc, the
rules differ at its rim; at edges and on fragments the nearest tiles lie beyond it, anywhere on the slide. The count has
no gradient.

Of equally far tiles, the authors take those that a sort happens to put first, so that the order of a file matters. Here
these are the ones of smaller y, then of smaller x: what a stable sort does with tiles that are listed row by row.

Time O(n^2 d), memory O(n): queries are taken in chunks, which the backward pass computes again.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from psamil.models.recompute import recomputed
from psamil.spatial import Decay, Layout

FLOOR = 1e-6
GRAIN_STEPS = 2.0**-16  # positions are rounded to it, so that equal distances are equal numbers
PAIRS_PER_CHUNK = 2**20  # of queries and keys


def nearest_counts(theta: Tensor, decay: Decay, tau: float) -> list[int]:
    """m_h of each head."""
    radii_steps = decay.radius(theta.detach().double().cpu(), tau).tolist()
    return [max(1, round(math.pi * radius**2)) for radius in radii_steps]


def nearest_attention(
    q: Tensor, k: Tensor, v: Tensor, theta: Tensor, *, decay: Decay, tau: float, layout: Layout
) -> Tensor:
    """(n, heads, d) in the dtype of q; bfloat16 and float16 are computed in float32.

    Args:
        q, k, v: (n, heads, d).
        theta: (heads,) parameters of the prior.
        decay, tau: of the prior.
        layout: of the positions of the tiles; attention stays inside each of its bags.
    """
    if len(q) == 0:
        return q + k + v  # nothing to attend to, nothing to differentiate
    counts = nearest_counts(theta, decay, tau)
    compute = torch.promote_types(q.dtype, torch.float32)
    queries, keys, values = (t.transpose(0, 1).to(compute) for t in (q, k, v))  # (heads, n, d)
    outputs = []
    for bag, (first, last) in zip(layout.bags, pairwise(layout.offsets), strict=True):
        xy = (bag.xy / GRAIN_STEPS).round() * GRAIN_STEPS
        order = _row_by_row(xy)
        sorted_keys, sorted_values = keys[:, first + order], values[:, first + order]
        size = max(16, PAIRS_PER_CHUNK // bag.n)
        for own, places in zip(queries[:, first:last].split(size, 1), xy.split(size), strict=True):
            chunk = own, sorted_keys, sorted_values, places, xy[order], theta.to(compute), decay, counts
            outputs.append(recomputed(_attend, *chunk))
    return torch.cat(outputs, 1).transpose(0, 1).to(q.dtype)


def _row_by_row(xy: Tensor) -> Tensor:
    """(n,) tiles by y, then by x."""
    by_x = xy[:, 0].argsort(stable=True)
    return by_x[xy[by_x, 1].argsort(stable=True)]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, places: Tensor, xy: Tensor, theta: Tensor, decay: Decay, counts: Sequence[int]
) -> Tensor:
    """(heads, c, d) of queries (heads, c, d) at some places and all keys (heads, n, d) of their slide, row by row."""
    d2 = (places[:, None] - xy).square().sum(-1)  # (c, n)
    outputs = []
    with torch.autocast(q.device.type, enabled=False):
        for h, count in enumerate(counts):
            # ||q||^2 is the same for all j
            log_likelihood = (q[h] @ k[h].T - k[h].square().sum(-1) / 2) / math.sqrt(q.shape[2])
            log_prior = (decay.log_prior(d2.to(q.dtype), theta[h]).exp() + FLOOR).log()
            scores = (log_likelihood + log_prior).masked_fill(~nearest(d2, count), -math.inf)
            outputs.append(scores.softmax(1) @ v[h])
    return torch.stack(outputs)


def nearest(d2: Tensor, count: int) -> Tensor:
    """(c, n) whether a key is among the ``count`` of smallest d2 (c, n); of equal ones, the first are."""
    if count >= d2.shape[1]:
        return torch.ones_like(d2, dtype=torch.bool)
    farthest = d2.kthvalue(count, dim=1, keepdim=True).values
    closer, equal = d2 < farthest, d2 == farthest
    return closer | (equal & (equal.cumsum(1) <= count - closer.sum(1, keepdim=True)))
