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
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

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
    compute = torch.promote_types(q.dtype, torch.float32)
    tiles = [t.to(compute).transpose(0, 1).contiguous() for t in (q, k, v)]  # (heads, n, d)
    with torch.autocast(q.device.type, enabled=False):
        outputs = [
            _Tabled.apply(*(t[:, a:b] for t in tiles), table.to(compute), bag.xy, bounds_d2)
            for bag, (a, b) in zip(layout.bags, pairwise(layout.offsets), strict=True)
        ]
    return torch.cat(outputs, 1).transpose(0, 1).to(q.dtype) if outputs else v


class _Tabled(torch.autograd.Function):
    r"""All tiles of one slide, in chunks of queries; of (heads, n, d) tensors and a (heads, classes) table.

        s_ij = q_i . k_j / sqrt d + t[c_ij],   p = softmax_j s,   o_i = sum_j p_ij v_j;
        ds_ij = p_ij (g_i . v_j - g_i . o_i),   dt[c] = sum of ds_ij with c_ij = c,   for a gradient g of o.

    What lives longer than a chunk is made before the first one. (Results that are made in between, however small, keep
    the memory of the chunks from being returned: the process grows with n^2 while its tensors do not.)
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor, xy: Tensor, bounds_d2: Tensor) -> Tensor:
        out = torch.empty_like(v)
        for part in _chunks_of_queries(q):
            p, _ = _posterior_of_table(q[:, part], k, table, xy, part, bounds_d2)
            out[:, part] = p @ v
        ctx.save_for_backward(q, k, v, table, xy, bounds_d2, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, table, xy, bounds_d2, out = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dtable = torch.zeros_like(table, dtype=torch.float64)
        scale = q.shape[2] ** -0.5
        for part in _chunks_of_queries(q):
            p, classes = _posterior_of_table(q[:, part], k, table, xy, part, bounds_d2)
            g = grad[:, part]
            dv += p.mT @ g
            ds = (g @ v.mT).sub_((g * out[:, part]).sum(-1, keepdim=True)).mul_(p)
            for of_head, pairs in zip(dtable, ds, strict=True):
                of_head += torch.bincount(classes.view(-1), pairs.view(-1), len(of_head))
            ds *= scale
            dq[:, part] = ds @ k
            dk += ds.mT @ q[:, part]
        return dq, dk, dv, dtable.to(table.dtype), None, None


def _chunks_of_queries(q: Tensor) -> Iterator[slice]:
    heads, n, _ = q.shape
    size = max(16, PAIRS_PER_CHUNK // max(1, heads * n))
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def _posterior_of_table(
    q: Tensor, k: Tensor, table: Tensor, xy: Tensor, part: slice, bounds_d2: Tensor
) -> tuple[Tensor, Tensor]:
    """p (heads, queries, n) of some queries and all keys of one slide, and the classes (queries, n) of the pairs."""
    x, y = xy.T.contiguous()  # float64: whole squared distances fall on the right side of a bound
    dy = y[part, None] - y
    d2 = (x[part, None] - x).square_().addcmul_(dy, dy)
    classes = torch.bucketize(d2, bounds_d2.to(d2), right=True)
    scores = q * q.shape[2] ** -0.5 @ k.mT
    for of_head, biases in zip(scores, table, strict=True):
        of_head += biases.take(classes)
    return scores.softmax(-1), classes
