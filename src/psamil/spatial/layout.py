r"""Where the tiles of a slide lie, prepared once so that attention finds the neighbours within *any* radius quickly.

A layout is built once per slide in O(n log n) and then serves every step, epoch, head and radius:

- Tiles are sorted into horizontal rows (one lattice step high, or about one mean tile distance where positions are
  continuous) and by x inside a row. The tiles within a disc of a place are then one contiguous run per row, found by
  two binary searches: nothing of size n x n, no list of neighbours, and a new radius costs almost nothing.
- Queries are grouped into blocks of ``BLOCK_SIDE``^2 slots that share their keys. On a lattice a block is a square of
  cells and a slot is a cell, so that the prior between any key and the 64 slots is one row of a table. Elsewhere a
  block is any 64 tiles close together (sort-tile-recursive packing).

Layouts of several slides are joined by :meth:`Layout.pack`; a layout can be moved to a device and pickled.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from psamil.errors import OptionError, ShapeError, one_of

BLOCK_SIDE = 8
SLOTS = BLOCK_SIDE * BLOCK_SIDE  # queries per block
PATHS = ("lattice", "scattered", "dense")

LATTICE_TOLERANCE = 1e-6  # steps; how far from a whole number a position may be and still count as on the lattice
LATTICE_MAX_RADIUS = 64  # steps; a table for a larger radius no longer fits in cache
X_BITS = 32  # of a sort key, below the row number
X_RESOLUTION = 16  # sub-divisions of a pitch in a sort key

# Relative time of one query-key pair, forward and backward, as measured by benchmarks/attention.py
PAIR_COST = {"lattice": 1.0, "scattered": 1.5, "dense": 1.5, "dense, embedded": 0.7}


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
    tiles: Tensor  # (bags, 2) first sorted tile of the bag and its number of tiles
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
        row = low[block] + _position_in_group(rows_of_block)
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


class Chunk(NamedTuple):
    """Consecutive blocks of a plan that are worked on together, padded to the same number of keys."""

    first: int
    last: int  # exclusive
    length: int  # keys per block, L
    keys: Tensor  # ((last - first) * L,) sorted tile, n where padded
    cells: Tensor  # lattice: row of the prior table for each key, ``window**2`` where padded; elsewhere empty


class Plan:
    """The order in which the blocks are worked on for one radius, and the keys of each.

    Blocks are taken in order of their number of keys, so that padding to the longest of a chunk wastes little. On a
    lattice ``window`` = BLOCK_SIDE + 2 floor(reach) is the side of the square of cells around a block; 0 elsewhere.
    """

    def __init__(self, blocks: Blocks, reach: float, window: int) -> None:
        self.blocks, self.window = blocks, window
        self._kept: list[Chunk] | None = None
        runs = blocks.runs(reach)
        keys = blocks.keys_per_block(runs)
        self.order = keys.argsort(descending=True, stable=True)  # (blocks,)
        self.queries = blocks.queries.index_select(0, self.order)  # (blocks, SLOTS)
        rank = torch.empty_like(self.order)
        rank[self.order] = torch.arange(len(rank), device=rank.device)
        self.place = rank.index_select(0, blocks.place // SLOTS) * SLOTS + blocks.place % SLOTS
        self._keys = keys[self.order]
        runs_of_block = runs.of_block[self.order]
        first_run = (runs.of_block.cumsum(0) - runs.of_block)[self.order]
        by_rank = torch.repeat_interleave(first_run, runs_of_block) + _position_in_group(runs_of_block)
        self._runs_end = runs_of_block.cumsum(0).tolist()
        self._run_start, self._run_count = runs.start[by_rank], runs.size[by_rank]
        if window:
            margin = (window - BLOCK_SIDE) // 2
            x, y = blocks.origin.long()[runs.block].unbind(1)
            self._tile_x = blocks.xy[:, 0].long()
            self._run_cell = ((runs.row - y + margin) * window - x + margin)[by_rank]  # + x of a tile: row of the table

    def chunks(self, pairs: int) -> Iterable[Chunk]:
        """All blocks, in chunks of about ``pairs`` query-key pairs. What was expanded is kept while it is small."""
        if self._kept is None and self._keys.sum() <= EXPANDED_KEYS:
            self._kept = list(self._expanded_chunks(pairs))
        return self._expanded_chunks(pairs) if self._kept is None else self._kept

    def _expanded_chunks(self, pairs: int) -> Iterator[Chunk]:
        keys = self._keys.tolist()
        first, run_first = 0, 0
        while first < len(keys):
            # group blocks into chunks, and expand the runs of many chunks at once, but of a bounded number of keys
            bounds, padded, expanded = [first], [], 0
            while bounds[-1] < len(keys) and expanded < EXPANDED_KEYS:
                length = keys[bounds[-1]]
                size = min(len(keys) - bounds[-1], max(1, pairs // (SLOTS * length)))
                bounds.append(bounds[-1] + size)
                padded += [length] * size
                expanded += length * size
            run_last = self._runs_end[bounds[-1] - 1]
            tile, cell = self._expand(slice(first, bounds[-1]), slice(run_first, run_last), padded)
            start = 0
            for i, j in pairwise(bounds):
                stop = start + keys[i] * (j - i)
                yield Chunk(i, j, keys[i], tile[start:stop], cell[start:stop])
                start = stop
            first, run_first = bounds[-1], run_last

    def _expand(self, blocks: slice, runs: slice, padded: list[int]) -> tuple[Tensor, Tensor]:
        """Sorted tile and, on a lattice, row of the prior table for the keys of these blocks, each padded."""
        count, keys = self._run_count[runs], self._keys[blocks]
        shift = torch.repeat_interleave(self._run_start[runs] - (count.cumsum(0) - count), count)
        tile = shift.add_(torch.arange(len(shift), device=shift.device))
        length = torch.tensor(padded, device=keys.device)
        excess = length - keys
        begin = keys.cumsum(0) - keys - (length.cumsum(0) - length)
        index = torch.repeat_interleave(begin, length)
        index.add_(torch.arange(len(index), device=index.device))
        padding = torch.repeat_interleave(length.cumsum(0) - excess, excess) + _position_in_group(excess)
        index[padding] = len(tile)
        n = len(self.blocks.order)
        keys_of_blocks = torch.cat((tile, tile.new_tensor([n]))).index_select(0, index)
        if not self.window:
            return keys_of_blocks, keys_of_blocks[:0]
        cell = torch.repeat_interleave(self._run_cell[runs], count).add_(self._tile_x.index_select(0, tile))
        return keys_of_blocks, torch.cat((cell, cell.new_tensor([self.window**2]))).index_select(0, index)


EXPANDED_KEYS = 1 << 19  # keys of a plan that are held in memory at a time: 16 bytes each


@dataclass(frozen=True)
class BagLayout:
    """The geometry of one bag: its tiles on blocks of a lattice (if they lie on one) and on packed blocks."""

    n: int
    xy: Tensor  # (n, 2) float64, relative to the smallest x and y
    lattice: Blocks | None
    scattered: Blocks

    @staticmethod
    def build(xy: Tensor) -> BagLayout:
        xy = xy.detach().to("cpu", torch.float64)
        if not xy.isfinite().all():
            raise ShapeError(f"xy holds {int((~xy.isfinite()).any(1).sum())} tiles with NaN or infinite positions")
        xy = xy - xy.amin(0)
        scattered = _scattered_blocks(xy)
        return BagLayout(len(xy), xy, _lattice_blocks(xy), scattered)

    def to(self, device: torch.device | str) -> BagLayout:
        lattice = None if self.lattice is None else _move(self.lattice, device)
        return BagLayout(self.n, _move_tensor(self.xy, device), lattice, _move(self.scattered, device))

    @functools.cached_property
    def half_diagonal(self) -> float:
        """Upper bound of the distance of a tile from the middle of the bag."""
        return float(self.xy.amax(0).norm()) / 2

    def count_pairs(self, squared_radius: float) -> int:
        """Query-key pairs within the radius, each tile with itself included."""
        if self.lattice is not None:  # every tile as a block of its own: its runs are then exactly its neighbours
            total = 0
            for xy in self.lattice.xy.split(1 << 14):
                single = self.lattice._replace(box=torch.cat((xy, xy), 1), bag=torch.zeros_like(xy[:, 0]).long())
                total += int(single.runs(math.sqrt(squared_radius)).size.sum())
            return total
        total = 0
        x, y = self.xy.T.contiguous()
        for qx, qy in zip(x.split(256), y.split(256), strict=True):
            d2 = (x - qx[:, None]).square_().add_((y - qy[:, None]).square_())
            total += int((d2 <= squared_radius).sum())
        return total

    def work(self, radii: Sequence[float], embedded: bool = False) -> dict[str, float]:
        """Counted work of each path: query-key pairs it computes over all heads, times the cost of one such pair."""
        work = {"dense": PAIR_COST["dense, embedded" if embedded else "dense"] * len(radii) * self.n**2}
        for path, blocks in (("lattice", self.lattice), ("scattered", self.scattered)):
            if blocks is not None and (path == "scattered" or max(radii) <= LATTICE_MAX_RADIUS):
                pairs = SLOTS * sum(int(blocks.keys_per_block(blocks.runs(radius)).sum()) for radius in radii)
                work[path] = PAIR_COST[path] * pairs
        return work


class Layout:
    """The layout of one bag, or of several bags packed one after the other.

    >>> layout = Layout.of(xy)  # one slide; xy (n, 2) in tile steps
    >>> layout.work([7.0, 15.0])  # counted work of every path for heads of these radii, per bag

    ``path`` forces one of "lattice", "scattered", "dense" where counted work would choose another.
    """

    def __init__(self, bags: Sequence[BagLayout], path: str | None = None) -> None:
        if path is not None and path not in PATHS:
            raise one_of("path", path, PATHS)
        if path == "lattice" and any(bag.lattice is None for bag in bags):
            raise OptionError('path "lattice" was asked for, but the positions of a bag do not lie on a lattice')
        self.bags = tuple(bags)
        self.path = path
        self._joined: dict[tuple[str, tuple[int, ...]], Blocks] = {}
        self._chosen: dict[tuple[tuple[float, ...], tuple[bool, ...]], tuple[str, ...]] = {}

    @staticmethod
    def of(xy: Tensor, bags: Tensor | None = None, path: str | None = None) -> Layout:
        """The layout of tiles at ``xy`` (n, 2) in tile steps; ``bags`` (b + 1,) are the offsets of packed bags."""
        if xy.ndim != 2 or xy.shape[1] != 2:
            raise ShapeError(f"xy must be (n, 2), got {tuple(xy.shape)}")
        offsets = [0, len(xy)] if bags is None else bags.tolist()
        if offsets[0] != 0 or offsets[-1] != len(xy) or any(b < a for a, b in pairwise(offsets)):
            raise ShapeError(f"bags must be offsets that rise from 0 to n = {len(xy)}, got {offsets[:8]}")
        built = [BagLayout.build(xy[a:b]) for a, b in pairwise(offsets) if b > a]  # an empty bag has no geometry
        return Layout(built, path).to(xy.device)

    @staticmethod
    def pack(layouts: Sequence[Layout]) -> Layout:
        """One layout for bags that are packed in this order."""
        paths = {layout.path for layout in layouts}
        return Layout([bag for layout in layouts for bag in layout.bags], paths.pop() if len(paths) == 1 else None)

    @property
    def n(self) -> int:
        return sum(bag.n for bag in self.bags)

    @property
    def offsets(self) -> list[int]:
        offsets = [0]
        for bag in self.bags:
            offsets.append(offsets[-1] + bag.n)
        return offsets

    def to(self, device: torch.device | str) -> Layout:
        return Layout([bag.to(device) for bag in self.bags], self.path)

    def __reduce__(self) -> tuple[object, ...]:
        return Layout, (self.bags, self.path)

    def __repr__(self) -> str:
        on_lattice = sum(bag.lattice is not None for bag in self.bags)
        return f"Layout({len(self.bags)} bags, {on_lattice} on a lattice, {self.n} tiles, path={self.path or 'auto'})"

    def work(self, radii: Sequence[float], embedded: Sequence[bool] | None = None) -> list[dict[str, float]]:
        """Counted work per bag: for each path the pairs it would compute for heads of these radii, weighted by cost.

        ``embedded`` says for which bags the dense path can be ordinary attention on extended queries and keys.
        """
        embedded = embedded or [False] * len(self.bags)
        return [bag.work(radii, cheap) for bag, cheap in zip(self.bags, embedded, strict=True)]

    def choose(self, radii: Sequence[float], embedded: Sequence[bool] | None = None) -> tuple[str, ...]:
        """The path of each bag for heads of these radii: the forced one, or the one of least counted work."""
        if self.path == "lattice" and max(radii) > LATTICE_MAX_RADIUS:
            raise OptionError(f"path 'lattice' serves radii up to {LATTICE_MAX_RADIUS} steps, got {max(radii):.1f}")
        if self.path is not None:
            return (self.path,) * len(self.bags)
        # radii move a little in every training step, counted work changes slowly: one count serves a whole step of K
        rounded = tuple(float(math.ceil(r)) if math.isfinite(r) else math.inf for r in radii)
        case = (rounded, tuple(embedded or ()))
        if case not in self._chosen:
            if len(self._chosen) >= 64:
                self._chosen.clear()
            self._chosen[case] = tuple(min(work, key=work.__getitem__) for work in self.work(rounded, embedded))
        return self._chosen[case]

    def blocks(self, path: str, bags: Sequence[int]) -> Blocks:
        """The blocks of these bags joined, tiles numbered from the first tile of the first of them."""
        key = (path, tuple(bags))
        if key not in self._joined:
            parts = [self.bags[b].lattice if path == "lattice" else self.bags[b].scattered for b in bags]
            self._joined[key] = _join([part for part in parts if part is not None])
        return self._joined[key]


def _lattice_blocks(xy: Tensor) -> Blocks | None:
    """Squares of BLOCK_SIDE x BLOCK_SIDE cells, or None where positions are not whole steps apart."""
    cell = xy.round()
    if (xy - cell).abs().amax() > LATTICE_TOLERANCE or xy.amax() >= 2 ** (X_BITS - 5):
        return None
    x, y = cell.long().unbind(1)
    order, key = _sort_by_row_and_x(cell, 1.0)
    # Tiles that share a cell go to different layers of blocks, so that no slot holds two
    repeat = torch.empty_like(order)
    repeat[order] = _position_in_group(torch.unique_consecutive(key, return_counts=True)[1])
    wide = int(x.amax()) // BLOCK_SIDE + 1
    high = int(y.amax()) // BLOCK_SIDE + 1
    square = (repeat * high + y // BLOCK_SIDE) * wide + x // BLOCK_SIDE
    squares, block = torch.unique(square, return_inverse=True)
    corner = torch.stack((squares % wide, squares // wide % high), 1).double() * BLOCK_SIDE
    place = block * SLOTS + (y % BLOCK_SIDE) * BLOCK_SIDE + x % BLOCK_SIDE
    return _blocks(cell, order, key, place, len(squares), corner, pitch=1.0, thickness=0.0)


def _scattered_blocks(xy: Tensor) -> Blocks:
    """Groups of SLOTS tiles close together: sort by x, cut into strips, sort each strip by y, cut into groups."""
    n = len(xy)
    extent = xy.amax(0)
    # rows about one mean tile distance high; a power of two, so that dividing by it is exact
    mean_distance = max(math.sqrt(float(extent.prod()) / n), float(extent.amax()) / n)
    pitch = 2.0 ** round(math.log2(mean_distance)) if mean_distance > 0 else 1.0
    order, key = _sort_by_row_and_x(xy, pitch)
    n_blocks = math.ceil(n / SLOTS)
    strips = max(1, round(math.sqrt(n_blocks * float(extent[0] + pitch) / float(extent[1] + pitch))))
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
        tiles=torch.tensor([[0, n]]),
        rows=torch.tensor([[0, int(key[-1] >> X_BITS) + 1]]),
        pitch=torch.tensor([pitch], dtype=torch.float64),
        thickness=torch.tensor([thickness], dtype=torch.float64),
    )


def _join(parts: Sequence[Blocks]) -> Blocks:
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
                tiles=part.tiles + part.tiles.new_tensor([[tile, 0]]),
                rows=part.rows + part.rows.new_tensor([[row, 0]]),
            )
        )
        tile, row, block = tile + n, row + int(part.rows[0, 1]), block + len(part.bag)
    return Blocks(*(torch.cat(tensors) for tensors in zip(*shifted, strict=True)))


def _position_in_group(counts: Tensor) -> Tensor:
    """0 .. count - 1 for each group: (2, 0, 3) -> 0 1 0 1 2."""
    start = counts.cumsum(0) - counts
    return torch.arange(int(counts.sum()), device=counts.device) - torch.repeat_interleave(start, counts)


def _move(blocks: Blocks, device: torch.device | str) -> Blocks:
    return Blocks(*(_move_tensor(tensor, device) for tensor in blocks))


def _move_tensor(tensor: Tensor, device: torch.device | str) -> Tensor:
    """To the device; float64 becomes float32 where the device has no float64."""
    if torch.device(device).type == "mps" and tensor.dtype == torch.float64:
        tensor = tensor.float()
    return tensor.to(device)
