r"""Posterior attention: exact, O(n) memory, differentiable in q, k, v and theta.

    o_i = sum_j p_ij v_j,
    p_i. = softmax over { j : d_ij <= K_h } of  -||q_i - k_j||^2 / (2 sqrt d) + log f(d_ij | theta_h),

with K_h = f^{-1}(tau | theta_h). The paper's assumptions are relaxed as in its equation for the refined posterior (with
the sign and the factor of its Gaussian: minus, one half). `psamil.spatial.reference` states the same in n x n arrays.

The work is done by one of four paths per bag: "compiled", if it can be taken (float32 on a CPU, where there is a C
compiler); else, of "lattice" (positions are whole steps apart), "scattered" (any positions) and "dense" (small bags, or
no pruning), the one that computes fewest pairs, weighted by the cost of a pair.
``layout.choose(radii)`` shows the choice and ``Layout.of(xy, path=...)`` forces it.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from ctypes import CDLL
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import flop_registry, register_flop_formula

from psamil.errors import OptionError, ShapeError
from psamil.spatial import compiled, kernels
from psamil.spatial.blocks import Blocks
from psamil.spatial.compiled import SortedTiles
from psamil.spatial.decays import Decay, get_decay
from psamil.spatial.layout import BagLayout, Layout
from psamil.spatial.reference import RADIUS_TOLERANCE, squared_radius


def posterior_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    xy: Tensor,
    theta: Tensor,
    *,
    decay: str | Decay,
    tau: float = 1e-3,
    bags: Tensor | None = None,
    layout: Layout | None = None,
) -> Tensor:
    """Attention of every tile to the tiles within its heads' radii.

    Args:
        q, k, v: (n, heads, d). bfloat16 and float16 are computed in float32.
        xy: (n, 2) positions in tile steps, on a lattice or not.
        theta: (heads,) positive parameters of the prior.
        decay: "exponential", "gaussian", "cauchy" or a decay object.
        tau: prior below which a tile is pruned; 0 prunes nothing.
        bags: (b + 1,) offsets of packed bags; attention never crosses bags. Default: one bag.
        layout: of these positions and bags, if it was built before; ``xy`` and ``bags`` are then not looked at.

    Returns:
        (n, heads, d) in the dtype of q.
    """
    decay = get_decay(decay)
    _check(q, k, v, xy, theta, tau)
    if len(q) == 0:
        return q + k + v  # nothing to attend to, nothing to differentiate
    layout = Layout.of(xy, bags) if layout is None else layout
    if layout.n != len(q):
        raise ShapeError(f"the layout holds {layout.n} tiles, q holds {len(q)}")

    compute = q.dtype if q.dtype == torch.float64 else torch.float32
    q32, k32, v32, theta32 = (t.to(compute) for t in (q, k, v, theta))
    keep_d2 = squared_radius(decay, theta, tau)
    scale = decay.embedding_scale(theta32) if hasattr(decay, "embedding_scale") else None
    embeds = [scale is not None and _embeds(bag, scale, keep_d2) for bag in layout.bags]

    def attend(geometry: _Geometry, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = geometry.bags[0]
        if geometry.path == "dense" and embeds[first]:
            assert scale is not None
            return _embedded_attention(q, k, v, layout.bags[first], scale, keep_d2)
        return _PosteriorAttention.apply(q, k, v, theta32, geometry)

    return _by_path(attend, (q32, k32, v32), decay, keep_d2, layout, embeds).to(q.dtype)


def spatial_lag(
    v: Tensor,
    xy: Tensor,
    theta: Tensor,
    *,
    decay: str | Decay,
    tau: float = 1e-3,
    bags: Tensor | None = None,
    layout: Layout | None = None,
) -> Tensor:
    r"""What surrounds every tile, by the prior alone and without the tile itself:

        l_i = sum_{j != i} f(d_ij | theta_h) v_j / sum_j f(d_ij | theta_h),    j with d_ij <= K_h.

    It is 0 where there are no other tiles. Arguments are those of :func:`posterior_attention`.

    With q = k = 0 attention has the same weights p_ij, of which p_ii = 1 / sum_j f(d_ij) is known by the softmax's
    denominator: l_i = o_i - p_ii v_i.
    """
    decay = get_decay(decay)
    _check(v, v, v, xy, theta, tau)
    if len(v) == 0:
        return v * 1.0
    layout = Layout.of(xy, bags) if layout is None else layout
    if layout.n != len(v):
        raise ShapeError(f"the layout holds {layout.n} tiles, v holds {len(v)}")
    compute = v.dtype if v.dtype == torch.float64 else torch.float32
    theta32 = theta.to(compute)

    def attend(geometry: _Geometry, v: Tensor) -> Tensor:
        return _SpatialLag.apply(v, theta32, geometry)

    padded = torch.nn.functional.pad(v.to(compute), (0, 1))  # room for the gradient of the denominator
    lag = _by_path(attend, (padded,), decay, squared_radius(decay, theta, tau), layout)
    return lag[..., :-1].to(v.dtype)


def _by_path(
    attend: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    decay: Decay,
    keep_d2: Tensor,
    layout: Layout,
    embeds: Sequence[bool] | None = None,
) -> Tensor:
    """attend(geometry, *tensors) (n, heads, .) for bags that take the same path, in the order of the tiles.

    Args:
        tensors: (n, heads, .) each.
        embeds: bags of which attend does the dense path as plain attention.
    """
    kernel = compiled.kernel_for(tensors[0], decay)
    radii = (keep_d2 / (1 + RADIUS_TOLERANCE)).sqrt().tolist()
    paths = layout.choose(radii, embeds, compiled=kernel is not None)

    def call(group: Sequence[int], *of_group: Tensor) -> Tensor:
        with torch.autocast(of_group[0].device.type, enabled=False):
            return attend(_Geometry(layout, group, paths[group[0]], decay, keep_d2, kernel), *of_group)

    # bags on the same path share a call, except dense ones, which are taken one by one
    shared = {path: [b for b, p in enumerate(paths) if p == path] for path in paths if path != "dense"}
    groups = [*shared.values(), *([b] for b, path in enumerate(paths) if path == "dense")]
    if len(groups) == 1:
        return call(groups[0], *tensors)
    offsets, device = layout.offsets, tensors[0].device
    tiles = [torch.cat([torch.arange(offsets[b], offsets[b + 1]) for b in group]).to(device) for group in groups]
    parts = [call(group, *(tensor[t] for tensor in tensors)) for group, t in zip(groups, tiles, strict=True)]
    return torch.cat(parts).index_select(0, torch.cat(tiles).argsort())


EMBEDDING_LIMIT = 6.0  # largest embedded position: beyond it, rounding of products of positions would show
EMBEDDING_MASK_LIMIT = 2**24  # largest mask of heads x n x n


def _embeds(bag: BagLayout, scale: Tensor, keep_d2: Tensor) -> bool:
    """Whether the dense path can be plain attention on extended queries and keys: precise, and in little memory."""
    precise = bag.half_diagonal * scale.detach().amax().item() <= EMBEDDING_LIMIT
    return precise and (_keeps_all(bag, keep_d2) or len(scale) * bag.n**2 <= EMBEDDING_MASK_LIMIT)


def _keeps_all(bag: BagLayout, keep_d2: Tensor) -> bool:
    return (2 * bag.half_diagonal) ** 2 <= keep_d2.amin().item()


def _embedded_attention(q: Tensor, k: Tensor, v: Tensor, bag: BagLayout, scale: Tensor, keep_d2: Tensor) -> Tensor:
    r"""One bag whose prior is Gaussian, as plain attention. With x' = s x,

    -||q_i - k_j||^2 / (2 sqrt d) - ||x'_i - x'_j||^2 / 2 = [q_i / sqrt d, x'_i, 1] . [k_j, x'_j, b_j] + (no j),
    b_j = -||k_j||^2 / (2 sqrt d) - ||x'_j||^2 / 2,

    and theta gets its gradient through x'.
    """
    d = q.shape[2]
    mean = k.mean(0).detach()  # cancels; improves rounding
    q, k, v = ((t - shift).transpose(0, 1) for t, shift in ((q, mean), (k, mean), (v, 0)))  # (heads, n, d)
    centred = (bag.xy - bag.xy.amax(0) / 2).to(q.dtype)
    place = centred * scale[:, None, None]  # (heads, n, 2)
    bias = -k.square().sum(-1, keepdim=True) / (2 * math.sqrt(d)) - place.square().sum(-1, keepdim=True) / 2
    query = torch.cat((q / math.sqrt(d), place, torch.ones_like(bias)), -1)
    key = torch.cat((k, place, bias), -1)
    value = torch.nn.functional.pad(v, (0, 3))
    mask = None if _keeps_all(bag, keep_d2) else kernels.pruning_mask(centred, keep_d2)
    out = torch.nn.functional.scaled_dot_product_attention(query[None], key[None], value[None], mask, scale=1.0)
    return out[0, :, :, :d].transpose(0, 1)


@dataclass(eq=False)
class _Geometry:
    """What the operator needs beside tensors.

    It is an operator of torch, so that torch counts its FLOPs, and operators take tensors and numbers: a geometry is
    passed by its number among those alive.
    """

    layout: Layout
    bags: Sequence[int]
    path: str
    decay: Decay
    keep_d2: Tensor  # (heads,) float64
    kernel: CDLL | None  # of the compiled path
    plans: list[kernels.HeadPlan] = field(default_factory=list)

    @property
    def blocks(self) -> Blocks:
        return self.layout.blocks(self.path, self.bags)

    @property
    def xy(self) -> Tensor:
        return self.layout.bags[self.bags[0]].xy

    @property
    def sorted_tiles(self) -> list[SortedTiles]:
        return [self.layout.bags[b].sorted_tiles for b in self.bags]

    def head_plans(self, theta: Tensor) -> list[kernels.HeadPlan]:
        """Made in the forward pass, used again in the backward pass."""
        if not self.plans:
            lattice = self.path == "lattice"
            self.plans = [
                kernels.HeadPlan(self.blocks, self.decay, theta[h], keep, lattice)
                for h, keep in enumerate(self.keep_d2.tolist())
            ]
        return self.plans

    def count_pairs(self) -> int:
        """Query-key pairs within the radius, over all heads: the useful work."""
        return sum(self.layout.bags[b].count_pairs(keep) for b in self.bags for keep in self.keep_d2.tolist())


_GEOMETRIES: "weakref.WeakValueDictionary[int, _Geometry]" = weakref.WeakValueDictionary()


class _PosteriorAttention(torch.autograd.Function):
    """Differentiates the two operators below."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, theta: Tensor, geometry: _Geometry) -> Tensor:
        _GEOMETRIES[id(geometry)] = geometry
        out, lse = torch.ops.psamil.posterior_attention(q, k, v, theta, id(geometry))
        ctx.save_for_backward(q, k, v, theta, out, lse)
        ctx.geometry = geometry
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad.device.type, enabled=False):
            tensors = (grad.contiguous(), *ctx.saved_tensors)
            return *torch.ops.psamil.posterior_attention_backward(*tensors, id(ctx.geometry)), None


class _SpatialLag(torch.autograd.Function):
    r"""l_i = o_i - p_ii v_i with q = k = 0, whose last channel of v is 0.

    With g = dL/dl and p_ii = exp(-lse_i): dL/do = g, dL/dlse_i = p_ii g_i . v_i, and directly dL/dv_i = -p_ii g_i. The
    gradient of the denominator adds to that of every score, dS_ij = p_ij (v_j . g_i - o_i . g_i + dL/dlse_i): as one
    more channel of o, -dL/dlse_i, whose g is 1 and whose v is 0.
    """

    @staticmethod
    def forward(ctx: Any, v: Tensor, theta: Tensor, geometry: _Geometry) -> Tensor:
        _GEOMETRIES[id(geometry)] = geometry
        nothing = torch.zeros_like(v)
        out, lse = torch.ops.psamil.posterior_attention(nothing, nothing, v, theta, id(geometry))
        ctx.save_for_backward(v, theta, out, lse)
        ctx.geometry = geometry
        return out - lse.neg().exp2()[..., None] * v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        v, theta, out, lse = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            own = lse.neg().exp2()[..., None]  # p_ii
            of_total = own * (grad * v).sum(-1, keepdim=True)
            extended = torch.cat((grad[..., :-1], torch.ones_like(own)), -1)
            out = torch.cat((out[..., :-1], -of_total), -1)
            nothing = torch.zeros_like(v)
            tensors = (extended, nothing, nothing, v, theta, out, lse)
            _, _, dv, dtheta = torch.ops.psamil.posterior_attention_backward(*tensors, id(ctx.geometry))
        return dv - own * grad, dtheta, None


# Operators of their own, so that torch sees one call with a known cost instead of thousands of small products
_LIBRARY = torch.library.Library("psamil", "DEF")
_LIBRARY.define("posterior_attention(Tensor q, Tensor k, Tensor v, Tensor theta, int geometry) -> (Tensor, Tensor)")
_LIBRARY.define(
    "posterior_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor theta, Tensor out, Tensor lse, "
    "int geometry) -> (Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.impl(_LIBRARY, "posterior_attention", "CompositeExplicitAutograd")
def _forward(q: Tensor, k: Tensor, v: Tensor, theta: Tensor, geometry: int) -> tuple[Tensor, Tensor]:
    g = _GEOMETRIES[geometry]
    if g.path == "compiled" and g.kernel is not None:
        return compiled.forward(q, k, v, theta, g.sorted_tiles, g.keep_d2.tolist(), g.kernel)
    if g.path == "dense":
        return kernels.dense_forward(q, k, v, g.xy, theta, g.keep_d2.to(q), g.decay)
    with kernels.Scratch.of(q) as scratch:
        return kernels.block_forward(q, k, v, g.head_plans(theta), g.blocks, scratch)


@torch.library.impl(_LIBRARY, "posterior_attention_backward", "CompositeExplicitAutograd")
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, theta: Tensor, out: Tensor, lse: Tensor, geometry: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = _GEOMETRIES[geometry]
    if g.path == "compiled" and g.kernel is not None:
        return compiled.backward(grad, q, k, v, theta, out, lse, g.sorted_tiles, g.keep_d2.tolist(), g.kernel)
    if g.path == "dense":
        return kernels.dense_backward(grad, q, k, v, out, lse, g.xy, theta, g.keep_d2.to(q), g.decay)
    with kernels.Scratch.of(q) as scratch:
        return kernels.block_backward(grad, q, k, v, out, lse, g.head_plans(theta), g.blocks, scratch)


@register_flop_formula(torch.ops.psamil.posterior_attention, get_raw=True)
def _forward_flops(q: Tensor, k: Tensor, v: Tensor, theta: Tensor, geometry: int, *_: Any, **__: Any) -> int:
    """Two products per kept pair (scores, output), 2 d each: the convention of torch for attention."""
    return 4 * q.shape[2] * _GEOMETRIES[geometry].count_pairs()


@register_flop_formula(torch.ops.psamil.posterior_attention_backward, get_raw=True)
def _backward_flops(grad: Tensor, *args: Any, **__: Any) -> int:
    """Five products per kept pair: scores again, dP, dQ, dK, dV."""
    return 10 * grad.shape[2] * _GEOMETRIES[args[6]].count_pairs()


# torch counts the products of its attention kernels, but leaves out those for CPUs, which the dense path can use
_ATEN = torch.ops.aten
for _cpu, _other in (
    (_ATEN._scaled_dot_product_flash_attention_for_cpu, _ATEN._scaled_dot_product_flash_attention),
    (_ATEN._scaled_dot_product_flash_attention_for_cpu_backward, _ATEN._scaled_dot_product_flash_attention_backward),
):
    flop_registry.setdefault(_cpu, flop_registry[_other])


def _check(q: Tensor, k: Tensor, v: Tensor, xy: Tensor, theta: Tensor, tau: float) -> None:
    if q.ndim != 3 or q.shape != k.shape or q.shape != v.shape:
        raise ShapeError(f"q, k, v must be (n, heads, d), got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if xy.shape != (len(q), 2):
        raise ShapeError(f"xy must be ({len(q)}, 2) for {len(q)} tiles, got {tuple(xy.shape)}")
    if not q.is_floating_point():
        raise ShapeError(f"q, k, v must be floating point, got {q.dtype}")
    if theta.shape != q.shape[1:2]:
        raise ShapeError(f"theta must be ({q.shape[1]},), one per head, got {tuple(theta.shape)}")
    if not ((theta > 0) & theta.isfinite()).all():
        raise OptionError(f"theta must be positive and finite, got {theta.tolist()}")
    if not 0 <= tau < 1:
        raise OptionError(f"tau must be in [0, 1), got {tau}")
