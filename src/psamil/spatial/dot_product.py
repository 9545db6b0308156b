r"""Attention whose scores are products q . k, as in most transformers, by the operators there are.

- :func:`local_attention`: softmax over the tiles j with prior f(d_ij) of  q_i . k_j / sqrt d + log f(d_ij | theta_h),
  by :func:`psamil.spatial.posterior_attention`, exactly. Its scores are -||q - k||^2 / (2 sqrt d), which are products
  up to a constant as soon as all keys have the same norm. One more column lifts them onto a sphere of radius M,

      k' = [k, sqrt(M^2 - ||k||^2)],    q' = [sqrt((d + 1) / d) q, 0],
      -||q' - k'||^2 / (2 sqrt(d + 1)) = q . k / sqrt d + (no j).

- :func:`dense_attention`: softmax over all tiles j of the slide of  q_i . k_j / sqrt d. O(n^2 d) time, O(n) memory.
- :func:`tabled_attention`: the same with a learnable bias per head and class of distances, added to the scores.

Three priors for :func:`local_attention` that are not learned: :class:`Disc`, :class:`LocalAlibi`, :class:`GlobalAlibi`.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from psamil.spatial.attention import posterior_attention
from psamil.spatial.decays import Decay, Exponential
from psamil.spatial.layout import Layout
from psamil.spatial.reference import RADIUS_TOLERANCE

PAIRS_PER_CHUNK = 2**21  # pairs of queries and keys, over all heads, that tabled_attention holds at a time


class Disc:
    r"""f(d | K) = 1 for d <= K, 0 beyond: theta is the radius."""

    name = "disc"
    c_log_prior = "0.0f * d2"
    c_slope = "0.0f * d2"

    def log_prior(self, d2: Tensor, theta: Tensor) -> Tensor:
        return torch.zeros_like(d2) * theta

    def slope(self, d2: Tensor, theta: Tensor) -> Tensor:
        return torch.zeros_like(d2)

    def radius(self, theta: Tensor, tau: float) -> Tensor:
        return theta

    def theta_of_radius(self, radius: Tensor, tau: float) -> Tensor:
        return radius


class LocalAlibi(Exponential):
    r"""f(d | m) = exp(-m d) for d <= R, 0 beyond: a bias of -m d, whatever the slope m within the same radius."""

    name = "local alibi"

    def __init__(self, radius_steps: float) -> None:
        self.radius_steps = radius_steps

    def radius(self, theta: Tensor, tau: float) -> Tensor:
        return torch.full_like(theta, self.radius_steps)


class GlobalAlibi(Exponential):
    r"""f(d | m) = exp(-m d) for d <= R, exp(-m F) beyond: far tiles are all as far as F; none is pruned."""

    name = "global alibi"

    def __init__(self, radius_steps: float, far_steps: float) -> None:
        self.near_d2, self.far_steps = radius_steps**2 * (1 + RADIUS_TOLERANCE), far_steps
        distance = f"where(d2 <= {self.near_d2!r}f, root(d2), all({far_steps!r}f))"
        self.c_log_prior, self.c_slope = f"-theta * {distance}", f"-{distance}"

    def log_prior(self, d2: Tensor, theta: Tensor) -> Tensor:
        return theta * self.slope(d2, theta)

    def slope(self, d2: Tensor, theta: Tensor) -> Tensor:
        return -torch.where(d2 <= self.near_d2, d2.sqrt(), self.far_steps)

    def radius(self, theta: Tensor, tau: float) -> Tensor:
        return torch.full_like(theta, math.inf)


def local_attention(q: Tensor, k: Tensor, v: Tensor, xy: Tensor, theta: Tensor, decay: Decay, layout: Layout) -> Tensor:
    """(n, heads, d); arguments as in :func:`psamil.spatial.posterior_attention`. The prior gives the radius."""
    n, _, d = q.shape
    if n == 0:
        return v
    compute = torch.promote_types(q.dtype, torch.float32)
    wide_q, wide_k, wide_v = (t.to(compute) for t in (q, k, v))
    norm2 = wide_k.square().sum(-1, keepdim=True)
    # M^2 is twice the largest norm, so that the root stays away from 0, where it has no gradient
    sphere = 2 * norm2.detach().amax(0, keepdim=True).clamp_min(torch.finfo(compute).tiny)
    lifted_q = torch.nn.functional.pad(wide_q * math.sqrt((d + 1) / d), (0, 1))
    lifted_k = torch.cat((wide_k, (sphere - norm2).sqrt()), -1)
    lifted_v = torch.nn.functional.pad(wide_v, (0, 1))
    out = posterior_attention(lifted_q, lifted_k, lifted_v, xy, theta, decay=decay, tau=0.0, layout=layout)
    return out[..., :d].to(q.dtype)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """(n, heads, d): every tile attends to all tiles of its slide, by the fused attention of torch."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # (1, heads, n, d)
    slides = [
        scaled_dot_product_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b]) for a, b in pairwise(layout.offsets)
    ]
    return (torch.cat(slides, 2) if slides else v)[0].transpose(0, 1)


def tabled_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, bounds_steps: Sequence[float], layout: Layout
) -> Tensor:
    """(n, heads, d): dense attention with the bias ``table[h, c]`` for pairs of tiles whose distance is of class c.

    Fused attention has no gradient for a bias. Queries are therefore taken in chunks, which the backward pass computes
    again: O(n) memory, and about four times the time of :func:`dense_attention`.

    Args:
        table: (heads, classes).
        bounds_steps: the smallest distance of each class but the first, rising: one less than there are classes.
    """
    bounds_d2 = torch.tensor(bounds_steps, dtype=torch.float64, device=q.device).square()
    outputs = []
    for bag, (a, b) in zip(layout.bags, pairwise(layout.offsets), strict=True):
        queries, keys, values = (t[a:b].transpose(0, 1) for t in (q, k, v))  # (heads, n, d)
        size = max(16, PAIRS_PER_CHUNK // (len(table) * bag.n))
        for start in range(0, bag.n, size):
            part = slice(start, min(start + size, bag.n))
            arguments = queries[:, part], keys, values, table, bag.xy, part, bounds_d2
            outputs.append(checkpoint(_attend_by_table, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outputs, 1).transpose(0, 1) if outputs else v


def _attend_by_table(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, xy: Tensor, part: slice, bounds_d2: Tensor
) -> Tensor:
    """(heads, queries, d) of some queries and all keys of one slide."""
    x, y = xy.T.contiguous()  # float64: whole squared distances fall on the right side of a bound
    dy = y[part, None] - y
    d2 = (x[part, None] - x).square_().addcmul_(dy, dy)
    bias = _Lookup.apply(table, torch.bucketize(d2, bounds_d2.to(d2), right=True))
    return (q / math.sqrt(q.shape[2]) @ k.mT + bias).softmax(-1) @ v


class _Lookup(torch.autograd.Function):
    """bias[h, i, j] = table[h, classes[i, j]]. Its gradient counts per class, which autograd would do pair by pair."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, classes: Tensor) -> Tensor:
        ctx.save_for_backward(classes)
        ctx.n_classes = table.shape[1]
        return torch.stack([head.take(classes) for head in table])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (classes,) = ctx.saved_tensors
        flat = classes.view(-1)
        return torch.stack([torch.bincount(flat, g.reshape(-1), ctx.n_classes) for g in grad]).to(grad.dtype), None
