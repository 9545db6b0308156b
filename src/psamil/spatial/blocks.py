r"""Tiles sorted so that those within any radius are contiguous, and queries grouped so that they share their keys.

- Tiles are sorted into horizontal rows (one lattice step high, or about one mean tile distance where positions are
  continuous) and by x inside a row. The tiles within a disc of a place are then one contiguous run per row, found by
  two binary searches: nothing of size n x n, no list of neighbours, and a new radius costs almost nothing.
- Queries are grouped into blocks of ``BLOCK_SIDE``^2 slots that share their keys. On a lattice a block is a square of
  cells and a slot is a cell, so that the prior between any key and the 64 slots is one row of a table. Elsewhere a
  block is any 64 tiles close together (sort-tile-recursive packing).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_SIDE = 8
SLOTS = BLOCK_SIDE * BLOCK_SIDE  # queries per block

LATTICE_TOLERANCE = 1e-6  # steps; how far from a whole number a position may be and still count as on the lattice
LATTICE_MAX_EXTENT = 2**20  # steps; tiles farther apart than that are served as scattered ones
X_BITS = 32  # of a sort key, below the row number
X_RESOLUTION = 16  # sub-divisions of a pitch in a sort key


class Blocks(NamedTuple):
    """Query blocks of one or more bags and the sorted tiles they look up: plain tensors, to be passed to an operator.

    ``n`` below is the number of tiles; an index of ``n`` means "no tile here". Positions are in tile steps, relative
    to the bag's smallest x and y.
    """

    order: Tensor  # (n,) sorted tile -> tile
    inverse: Tensor  # (n,) tile -> sorted tile
    place: Tensor  # (n,) tile -> block * SLOTS + slot
    xy: Tensor  # (n, 2) position of the sorted tile
    key: Tensor  # (n,) ascending sort key of the sorted tile: row and fixed-point x
    queries: Tensor  # (blocks, SLOTS) tile in each slot
    query_xy: Tensor  # (blocks, SLOTS, 2) its position
    origin: Tensor  # (blocks, 2) lattice: position of slot 0; else: centre of the block
    box: Tensor  # (blocks, 4) x0, y0, x1, y1 around the tiles of the block
    bag: Tensor  # (blocks,) bag of the block
    rows: Tensor  # (bags, 2) first row number of the bag and its number of rows
    pitch: Tensor  # (bags,) row height
    thickness: Tensor  # (bags,) how far tiles of a row can lie above its lower edge: 0 on a lattice

    def runs(self, reach: float) -> Runs:
        """Contiguous runs of sorted tiles that hold every tile within ``reach`` of a block's box, in order of blocks.

        Runs may hold tiles slightly beyond reach; the attention masks pair by pair.
        """
        n_blocks = len(self.bag)
        pitch, thickness = self.pitch[self.bag], self.thickness[self.bag]
        first_row, n_rows = self.rows[self.bag].unbind(1)
        x0, y0, x1, y1 = self.box.unbind(1)
        span = self.xy.amax().item() + 1  # an infinite reach is a reach across the widest bag
        reach = min(reach, math.sqrt(2) * span)
        low = ((y0 - reach - thickness) / pitch).ceil().clamp_min(0).long()
        high = torch.minimum(((y1 + reach) / pitch).floor().long(), n_rows - 1)
        rows_of_block = (high - low + 1).clamp_min(0)
        block = torch.repeat_interleave(torch.arange(n_blocks, device=low.device), rows_of_block)
        row = low[block] + position_in_group(rows_of_block)
        y = row * pitch[block]
        dy = torch.maximum(y0[block] - y - thickness[block], y - y1[block]).clamp_min(0)
        half = (reach * reach - dy.square()).clamp_min(0).sqrt()
        base = (first_row[block] + row) << X_BITS
        scale = X_RESOLUTION / pitch[block]
        left = (x0[block] - half) * scale
        # On a lattice rounding up is exact; rounding down could let in a tile beyond the window of the prior table
        left = torch.where(thickness[block] > 0, left.floor(), left.ceil()).clamp(0, 2**X_BITS - 1).long()
        right = ((x1[block] + half) * scale).floor().clamp(0, 2**X_BITS - 1).long()
        start = torch.searchsorted(self.key, base + left)
        stop = torch.searchsorted(self.key, base + right, right=True)
        return Runs(rows_of_block, block, start, (stop - start).clamp_min_(0), row)

    def keys_per_block(self, runs: Runs) -> Tensor:
        """(blocks,) number of keys every block has to look at."""
        return torch.zeros_like(self.bag).index_add_(0, runs.block, runs.size)


class Runs(NamedTuple):
    of_block: Tensor  # (blocks,) number of runs of each block
    block: Tensor  # (runs,)
    start: Tensor  # (runs,) first sorted tile
    size: Tensor  # (runs,) number of tiles
    row: Tensor  # (runs,) row of the bag it lies in


def lattice_blocks(xy: Tensor) -> Blocks | None:
    """Squares of BLOCK_SIDE x BLOCK_SIDE cells, or None where positions are not whole steps apart."""
    cell = xy.round()
    if (xy - cell).abs().amax() > LATTICE_TOLERANCE or xy.amax() > LATTICE_MAX_EXTENT:
        return None
    x, y = cell.long().unbind(1)
    order, key = _sort_by_row_and_x(cell, 1.0)
    # Tiles that share a cell go to different layers of blocks, so that no slot holds two
    repeat = torch.empty_like(order)
    repeat[order] = position_in_group(torch.unique_consecutive(key, return_counts=True)[1])
    wide = int(x.amax()) // BLOCK_SIDE + 1
    high = int(y.amax()) // BLOCK_SIDE + 1
    square = (repeat * high + y // BLOCK_SIDE) * wide + x // BLOCK_SIDE
    squares, block = torch.unique(square, return_inverse=True)
    corner = torch.stack((squares % wide, squares // wide % high), 1).double() * BLOCK_SIDE
    place = block * SLOTS + (y % BLOCK_SIDE) * BLOCK_SIDE + x % BLOCK_SIDE
    return _blocks(cell, order, key, place, len(squares), corner, pitch=1.0, thickness=0.0)


def scattered_blocks(xy: Tensor) -> Blocks:
    """Groups of SLOTS tiles close together: sort by x, cut into strips, sort each strip by y, cut into groups."""
    n = len(xy)
    extent = xy.amax(0)
    # Rows about one mean tile distance high, but never many more than sqrt(n) of them, and x resolved among n tiles.
    # A power of two, so that dividing by it is exact.
    width, height = extent.tolist()
    pitch = max(math.sqrt(width * height / n), height / (4 * math.sqrt(n)), width / n)
    pitch = 2.0 ** round(math.log2(pitch)) if pitch > 0 else 1.0
    order, key = _sort_by_row_and_x(xy, pitch)
    n_blocks = math.ceil(n / SLOTS)
    strips = max(1, round(math.sqrt(n_blocks * (width + pitch) / (height + pitch))))
    per_strip = math.ceil(n_blocks / strips) * SLOTS
    strip = torch.empty(n, dtype=torch.long)
    strip[xy[:, 0].argsort(stable=True)] = torch.arange(n) // per_strip
    by_y = xy[:, 1].argsort(stable=True)
    packed = by_y[strip[by_y].argsort(stable=True)]
    place = torch.empty(n, dtype=torch.long)
    place[packed] = torch.arange(n)
    return _blocks(xy, order, key, place, n_blocks, None, pitch=pitch, thickness=pitch)


def _sort_by_row_and_x(xy: Tensor, pitch: float) -> tuple[Tensor, Tensor]:
    row = (xy[:, 1] / pitch).floor().long()
    key = (row << X_BITS) + (xy[:, 0] * (X_RESOLUTION / pitch)).floor().long()
    key, order = key.sort(stable=True)
    return order, key


def _blocks(
    xy: Tensor,
    order: Tensor,
    key: Tensor,
    place: Tensor,
    n_blocks: int,
    origin: Tensor | None,
    *,
    pitch: float,
    thickness: float,
) -> Blocks:
    n = len(xy)
    queries = torch.full((n_blocks * SLOTS,), n)
    queries[place] = torch.arange(n)
    taken = (queries < n).view(n_blocks, SLOTS, 1)
    query_xy = torch.zeros(n_blocks * SLOTS, 2, dtype=torch.float64)
    query_xy[place] = xy
    query_xy = query_xy.view(n_blocks, SLOTS, 2)
    low = query_xy.masked_fill(~taken, math.inf).amin(1)
    high = query_xy.masked_fill(~taken, -math.inf).amax(1)
    return Blocks(
        order=order,
        inverse=order.argsort(),
        place=place,
        xy=xy[order],
        key=key,
        queries=queries.view(n_blocks, SLOTS),
        query_xy=query_xy,
        origin=(low + high) / 2 if origin is None else origin,
        box=torch.cat((low, high), 1),
        bag=torch.zeros(n_blocks, dtype=torch.long),
        rows=torch.tensor([[0, int(key[-1] >> X_BITS) + 1]]),
        pitch=torch.tensor([pitch], dtype=torch.float64),
        thickness=torch.tensor([thickness], dtype=torch.float64),
    )


def join(parts: Sequence[Blocks]) -> Blocks:
    """Blocks of several bags with tiles, rows and bags numbered through."""
    if len(parts) == 1:
        return parts[0]
    n_total = sum(len(part.order) for part in parts)
    shifted = []
    tile, row, block = 0, 0, 0
    for i, part in enumerate(parts):
        n = len(part.order)
        shifted.append(
            part._replace(
                order=part.order + tile,
                inverse=part.inverse + tile,
                place=part.place + block * SLOTS,
                key=part.key + (row << X_BITS),
                queries=torch.where(part.queries < n, part.queries + tile, n_total),
                bag=part.bag + i,
                rows=part.rows + part.rows.new_tensor([[row, 0]]),
            )
        )
        tile, row, block = tile + n, row + int(part.rows[0, 1]), block + len(part.bag)
    return Blocks(*(torch.cat(tensors) for tensors in zip(*shifted, strict=True)))


def position_in_group(counts: Tensor) -> Tensor:
    """0 .. count - 1 for each group: (2, 0, 3) -> 0 1 0 1 2."""
    start = counts.cumsum(0) - counts
    return torch.arange(int(counts.sum()), device=counts.device) - torch.repeat_interleave(start, counts)
