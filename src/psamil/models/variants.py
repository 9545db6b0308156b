r"""Other spatial parts in the trunk of PSA-MIL: what the paper compares with, in every other respect the same model.

With l_ij = q_i . k_j / sqrt d, every tile i attends by a softmax over j of

- ``msa``: l_ij, j any tile of the slide. No positions. O(n^2) time.
- ``local``: l_ij, j within the disc d_ij <= K: an equal prior inside, none outside. O(n K^2) time.
- ``ppeg``: l_ij as in ``msa``, after convolutions have added the surroundings of a tile to it
  (:mod:`psamil.models.ppeg`). O(n^2) time.
- ``rpe``: l_ij + t_h(class of d_ij), j any tile of the slide, with a learned table t per head that begins at 0. O(n^2)
  time, four times that of ``msa``. Classes are those of SETMIL (``buckets="irpe-euc"``): 0, 1, 2 to 3, and 4 or more
  whole steps, rounded; or one for every step up to 20 (``buckets="table20"``), as in the first version of the authors'
  code.
- ``rope``: R(c_i) q_i . R(c_j) k_j / sqrt d, j any tile of the slide. R turns the pairs of numbers in the first half of
  a head by the angles x theta_k, those in the second by y theta_k, theta_k = 10000^(-2k / (d / 2)), for a tile at
  (x, y) in tile steps. Only differences of positions matter. O(n^2) time.

Memory is O(n) for all. Where this differs from the first version of the authors' code, the only one with such models:
products are scaled by 1 / sqrt d, a disc is one (theirs set scores outside to 0, which leaves most of the attention
there), tables begin at 0 instead of at random.

Peled, Maruvka, Freiman: PSA-MIL. WACV 2026. Zhao et al.: SETMIL. MICCAI 2022. Su et al.: RoFormer. Neurocomputing 2024.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from psamil.errors import OptionError, one_of
from psamil.models.ppeg import PositionEncoding
from psamil.models.registry import register_model
from psamil.models.trunk import MultiHeadAttention, Trunk, with_preset
from psamil.spatial import Layout
from psamil.spatial.dot_product import Disc, dense_attention, local_attention, tabled_attention

BUCKETS: dict[str, tuple[float, ...]] = {
    "irpe-euc": (0.5, 1.5, 3.5),
    "table20": tuple(float(step) for step in range(1, 21)),
}
"""Smallest distance, in tile steps, of every class but the first."""


class DenseAttention(MultiHeadAttention):
    """Of all tiles of a slide to each other."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, xy: Tensor, layout: Layout) -> Tensor:
        return dense_attention(q, k, v, layout)


class DiscAttention(MultiHeadAttention):
    """Of the tiles within a radius of each other."""

    def __init__(self, width: int, heads: int, *, radius_steps: float) -> None:
        super().__init__(width, heads)
        if not (radius_steps > 0 and math.isfinite(radius_steps)):
            raise OptionError(f"radius_steps must be positive and finite, got {radius_steps}")
        self.radius_steps = radius_steps

    def attend(self, q: Tensor, k: Tensor, v: Tensor, xy: Tensor, layout: Layout) -> Tensor:
        radii = torch.full((self.heads,), self.radius_steps, device=q.device)
        return local_attention(q, k, v, xy, radii, Disc(), layout)


class RelativeAttention(MultiHeadAttention):
    """Dense, with a learned bias for every class of distances."""

    def __init__(self, width: int, heads: int, *, buckets: str) -> None:
        super().__init__(width, heads)
        if buckets not in BUCKETS:
            raise one_of("buckets", buckets, BUCKETS)
        self.bounds_steps = BUCKETS[buckets]
        self.table = nn.Parameter(torch.zeros(heads, len(self.bounds_steps) + 1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, xy: Tensor, layout: Layout) -> Tensor:
        return tabled_attention(q, k, v, self.table, self.bounds_steps, layout)


class RotaryAttention(MultiHeadAttention):
    """Dense, of queries and keys that are turned by their positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        if self.head_dim % 4:
            raise OptionError(f"head_dim must be a multiple of 4 for rotations in x and y, got {self.head_dim}")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, xy: Tensor, layout: Layout) -> Tensor:
        turn = self._turn(layout, q)
        return dense_attention(_rotated(q, *turn), _rotated(k, *turn), v, layout)

    def _turn(self, layout: Layout, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (n, 1, d / 2) of all angles."""
        xy = torch.cat([bag.xy for bag in layout.bags]) if layout.bags else like.new_zeros(0, 2)
        quarter = self.head_dim // 4
        theta = 10000 ** (-torch.arange(quarter, dtype=xy.dtype, device=xy.device) / quarter)
        angle = (xy[:, :, None] * theta).flatten(1)[:, None]  # those of x, then those of y
        return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def _rotated(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of numbers in (n, heads, d), the first d / 2 of which turn with x, the others with y."""
    a, b = vectors.unflatten(-1, (-1, 2)).unbind(-1)  # (n, heads, d / 2)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


@register_model
def msa(in_dim: int, n_out: int, *, preset: str | None = None, **options: Any) -> Trunk:
    """Self-attention without positions; options of :class:`psamil.models.trunk.Trunk`."""
    return Trunk(in_dim, n_out, DenseAttention, **with_preset(preset, options))


@register_model
def local(in_dim: int, n_out: int, *, radius_steps: float = 7.0, preset: str | None = None, **options: Any) -> Trunk:
    """Self-attention within a disc of ``radius_steps``; other options of :class:`psamil.models.trunk.Trunk`."""
    attention = partial(DiscAttention, radius_steps=radius_steps)
    return Trunk(in_dim, n_out, attention, **with_preset(preset, options))


@register_model
def ppeg(in_dim: int, n_out: int, *, grid: str = "lattice", preset: str | None = None, **options: Any) -> Trunk:
    """Self-attention after PPEG on the ``grid`` "lattice" or "file"; other options of
    :class:`psamil.models.trunk.Trunk`."""
    position = partial(PositionEncoding, grid=grid)
    return Trunk(in_dim, n_out, DenseAttention, position, **with_preset(preset, options))


@register_model
def rpe(in_dim: int, n_out: int, *, buckets: str = "irpe-euc", preset: str | None = None, **options: Any) -> Trunk:
    """Self-attention with a learned bias per class of distances, ``buckets`` "irpe-euc" or "table20"; other options of
    :class:`psamil.models.trunk.Trunk`."""
    attention = partial(RelativeAttention, buckets=buckets)
    return Trunk(in_dim, n_out, attention, **with_preset(preset, options))


@register_model
def rope(in_dim: int, n_out: int, *, preset: str | None = None, **options: Any) -> Trunk:
    """Self-attention with rotary positions in two dimensions; options of :class:`psamil.models.trunk.Trunk`."""
    return Trunk(in_dim, n_out, RotaryAttention, **with_preset(preset, options))
