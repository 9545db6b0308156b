"""The order in which query blocks are worked on for one radius, and the keys of each, in chunks that fit in cache."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from psamil.spatial.blocks import BLOCK_SIDE, SLOTS, Blocks, position_in_group

WIDE_STEPS = 64  # block whose distances are computed in float64
EXPANDED_KEYS = 1 << 19  # keys of a plan that are held in memory at a time: 16 bytes each


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
        # A block can span a gap between pieces of tissue: positions relative to its centre are then not small
        self.wide = (blocks.box[:, 2:] - blocks.box[:, :2]).amax().item() > WIDE_STEPS
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
        by_rank = torch.repeat_interleave(first_run, runs_of_block) + position_in_group(runs_of_block)
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
        padding = torch.repeat_interleave(length.cumsum(0) - excess, excess) + position_in_group(excess)
        index[padding] = len(tile)
        n = len(self.blocks.order)
        keys_of_blocks = torch.cat((tile, tile.new_tensor([n]))).index_select(0, index)
        if not self.window:
            return keys_of_blocks, keys_of_blocks[:0]
        cell = torch.repeat_interleave(self._run_cell[runs], count).add_(self._tile_x.index_select(0, tile))
        return keys_of_blocks, torch.cat((cell, cell.new_tensor([self.window**2]))).index_select(0, index)
