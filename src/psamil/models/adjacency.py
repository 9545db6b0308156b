r"""Products with the adjacency matrix of tiles, kept as a list of edges.

With A the matrix of the pairs (i, j), w_ij = 1 unless weights are given,

    (A x)_i = sum_j w_ij x_j,        d_i = sum_j 1,        A_hat = D^(-1/2) A D^(-1/2).

Time O(m width) for m pairs, memory O(n width + m): neither n x n nor one row of features per pair. Gradients flow into
x and, where they are asked for, into the weights, so that learned attention over neighbours can use it too.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from psamil.bag import PackedBags
from psamil.errors import ShapeError
from psamil.spatial.neighbours import neighbour_pairs

CHUNK_NUMBERS = 1 << 20
"""Numbers per chunk where features are gathered per pair, as in the gradient of the weights."""


class Adjacency:
    """Which tiles are neighbours; the matrix need not be symmetric.

    Args:
        pairs: (2, m) whole numbers, i above j, sorted by i: as :func:`psamil.spatial.neighbours.neighbour_pairs` gives.
        n: number of tiles.
    """

    def __init__(self, pairs: Tensor, n: int) -> None:
        if pairs.ndim != 2 or len(pairs) != 2 or (pairs[0].diff() < 0).any():
            raise ShapeError(f"pairs must be (2, m), sorted by their first row, got {tuple(pairs.shape)}")
        self.rows, self.columns, self.n = pairs[0], pairs[1], n
        self.starts = torch.searchsorted(self.rows, torch.arange(n, device=pairs.device))  # first pair of each tile
        self._normalised: dict[torch.dtype, Tensor] = {}

    @staticmethod
    def of(batch: PackedBags, radius_steps: float = 1.5) -> Adjacency:
        """Tiles of the same slide within the radius; by default the 8 tiles around each tile of a lattice."""
        return Adjacency(neighbour_pairs(batch.xy, batch.slides, radius_steps), batch.n)

    @cached_property
    def degree(self) -> Tensor:
        """(n,) number of neighbours d_i."""
        return torch.bincount(self.rows, minlength=self.n)

    def normalised_weights(self, dtype: torch.dtype) -> Tensor:
        """(m,) entries 1 / sqrt(d_i d_j) of A_hat, for a symmetric matrix."""
        if dtype not in self._normalised:
            scale = self.degree.clamp(min=1).to(dtype).rsqrt()
            self._normalised[dtype] = scale[self.rows] * scale[self.columns]
        return self._normalised[dtype]

    @cached_property
    def by_column(self) -> tuple[Tensor, Adjacency]:
        """The order of the pairs that sorts them by j, and the transposed matrix in that order."""
        order = self.columns.argsort(stable=True)
        return order, Adjacency(torch.stack((self.columns[order], self.rows[order])), self.n)

    def sum(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """A x for x = ``values`` (n, ...), in float32 at least; ``weights`` (m,) are in the order of the pairs."""
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        if weights is not None:
            weights = weights.to(wide.dtype)
        product: Tensor = _NeighbourSum.apply(wide.reshape(self.n, math.prod(wide.shape[1:])), weights, self)
        return product.view(wide.shape)


def _sum(adjacency: Adjacency, values: Tensor, weights: Tensor | None) -> Tensor:
    if values.numel() == 0 or len(adjacency.rows) == 0:
        return torch.zeros_like(values)
    sums: Tensor = F.embedding_bag(
        adjacency.columns, values.contiguous(), adjacency.starts, mode="sum", per_sample_weights=weights
    )
    return sums


class _NeighbourSum(torch.autograd.Function):
    """Both directions are sums over neighbours: that is far faster than adding gathered rows, and lean in memory."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weights: Tensor | None, adjacency: Adjacency) -> Tensor:
        ctx.adjacency = adjacency
        ctx.save_for_backward(values if ctx.needs_input_grad[1] else None, weights)
        return _sum(adjacency, values, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        values, weights = ctx.saved_tensors
        adjacency, of_values, of_weights = ctx.adjacency, None, None
        if ctx.needs_input_grad[0]:
            order, transposed = adjacency.by_column
            of_values = _sum(transposed, gradient, None if weights is None else weights[order])
        if ctx.needs_input_grad[1]:
            chunk = max(1, CHUNK_NUMBERS // max(1, gradient.shape[1]))
            pairs = zip(adjacency.rows.split(chunk), adjacency.columns.split(chunk), strict=True)
            of_weights = torch.cat([(gradient[i] * values[j]).sum(1) for i, j in pairs])
        return of_values, of_weights, None
