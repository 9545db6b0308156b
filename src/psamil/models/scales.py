"""A coarser scale made from one: squares of tiles and their means.

Models of several magnifications want features that an encoder has seen at each of them. A bag has one scale. What
stands here for a coarser tile is the mean of the tiles inside it, which knows what the tiles know and nothing of what a
wider field of view would show.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from psamil.models.segments import segment_mean

TOLERANCE_STEPS = 1e-3
"""So far may a position lie before the edge of a square and still count as in it: rounding must not move a tile."""


@dataclass(frozen=True)
class Squares:
    """The squares that hold tiles, m of them: slide by slide, then row by row."""

    of_tile: Tensor  # (n,) index of the square of each tile
    cell: Tensor  # (m, 2) column and row of each square in its slide, from 0; neighbours are 1 apart
    slides: Tensor  # (s + 1,) offsets of the slides among the squares

    def __len__(self) -> int:
        return len(self.cell)

    def mean(self, per_tile: Tensor) -> Tensor:
        """(m, ...) mean over the tiles of each square."""
        return segment_mean(per_tile, self.of_tile, len(self))

    def of_any_tile(self, per_tile: Tensor) -> Tensor:
        """(m, ...) what all tiles of a square have in common, such as their bag."""
        return per_tile.new_zeros(len(self), *per_tile.shape[1:]).index_copy(0, self.of_tile, per_tile)


@torch.no_grad()
def squares_of(xy: Tensor, slides: Tensor, side_steps: int) -> Squares:
    """Cuts each slide into squares of ``side_steps`` x ``side_steps`` tile steps, from the corner of its tiles.

    Args:
        xy: (n, 2) positions in tile steps, on a lattice or anywhere.
        slides: (s + 1,) offsets of the slides.
        side_steps: side of a square in tile steps.
    """
    device = xy.device
    xy = xy.to("cpu" if device.type == "mps" else device).double()  # MPS has no float64
    sizes = slides.diff()
    slide = torch.repeat_interleave(sizes).to(xy.device)
    corner = xy.new_full((len(sizes), 2), torch.inf).scatter_reduce(0, slide[:, None].expand(-1, 2), xy, "amin")
    column, row = ((xy - corner[slide] + TOLERANCE_STEPS) / side_steps).floor().long().unbind(1)
    columns, rows = (int(place.amax()) + 1 if len(xy) else 1 for place in (column, row))
    square, of_tile = ((slide * rows + row) * columns + column).unique(return_inverse=True)
    cell = torch.stack((square % columns, square // columns % rows), 1)
    squares_per_slide = torch.bincount(square // (columns * rows), minlength=len(sizes)).cpu()
    offsets = torch.cat((slides.new_zeros(1, device="cpu"), squares_per_slide.cumsum(0)))
    return Squares(of_tile.to(device), cell.to(device), offsets)


def tree_pairs(parent: Tensor, first_child: int) -> Tensor:
    """(2, 2 n) pairs of n nodes, counted from ``first_child``, with their parents (n,), in both directions."""
    child = torch.arange(first_child, first_child + len(parent), device=parent.device)
    return torch.stack((torch.cat((child, parent)), torch.cat((parent, child))))
