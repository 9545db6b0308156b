r"""Pairs of tiles close to each other, as a list of edges: for models that take sums over a fixed neighbourhood.

Tiles are sorted into square cells whose side is the radius, numbered row by row. The neighbours of a tile then lie in
its own row of cells, the one above or the one below, in one contiguous run of sorted tiles each. For m pairs found,
this takes O(n + m) time beside two sorts, O(n + m) memory, and nothing of size n x n.
"""

import math

import torch
from torch import Tensor

from psamil.bag import check_offsets
from psamil.errors import OptionError, ShapeError
from psamil.spatial.blocks import position_in_group
from psamil.spatial.reference import RADIUS_TOLERANCE


@torch.no_grad()
def neighbour_pairs(xy: Tensor, slides: Tensor, radius_steps: float = 1.5) -> Tensor:
    """Ordered pairs of different tiles of one slide that lie within a radius of each other.

    On a lattice, the default radius gives the 8 tiles around each tile. Tiles at the same position are neighbours. As
    in the attention, a pair is kept when d^2 <= radius^2 (1 + RADIUS_TOLERANCE), so that rounding does not drop a tile
    at exactly the radius.

    Args:
        xy: (n, 2) positions in tile steps, on a lattice or anywhere.
        slides: (s + 1,) offsets of the slides.
        radius_steps: in tile steps.

    Returns:
        (2, m) whole numbers on the device of ``xy``: tile i above its neighbour j, sorted by i, then by j. With every
        (i, j) there is (j, i).
    """
    if xy.ndim != 2 or xy.shape[1] != 2:
        raise ShapeError(f"xy must be (n, 2), got {tuple(xy.shape)}")
    if not (radius_steps > 0 and math.isfinite(radius_steps)):
        raise OptionError(f"radius_steps must be positive and finite, got {radius_steps}")
    n = len(xy)
    check_offsets(slides, n, "slides")
    if not xy.isfinite().all():
        raise ShapeError(f"xy holds {int((~xy.isfinite()).any(1).sum())} tiles with NaN or infinite positions")
    device = xy.device
    xy = xy.to("cpu" if device.type == "mps" else device).double()  # MPS has no float64
    column, row, n_columns = _cells(xy, slides.to(xy.device), radius_steps * (1 + RADIUS_TOLERANCE))

    cell = row * n_columns + column
    sorted_cell, order = cell.sort(stable=True)
    # (n, 3) runs of sorted tiles: the cell of a tile with those left and right of it, in the rows below, same, above
    middle = cell[:, None] + n_columns * torch.arange(-1, 2, device=xy.device)
    start = torch.searchsorted(sorted_cell, middle - 1).flatten()
    size = torch.searchsorted(sorted_cell, middle + 1, right=True).flatten() - start
    i = torch.repeat_interleave(torch.arange(n, device=xy.device), size.view(n, 3).sum(1))
    j = order[torch.repeat_interleave(start, size) + position_in_group(size)]

    d2 = (xy[i] - xy[j]).square().sum(1)
    keep = (d2 <= radius_steps**2 * (1 + RADIUS_TOLERANCE)) & (i != j)
    pair = (i[keep] * n + j[keep]).sort().values
    return torch.stack((pair // max(n, 1), pair % max(n, 1))).to(device)


def _cells(xy: Tensor, slides: Tensor, side: float) -> tuple[Tensor, Tensor, int]:
    """Column and row of the cell of each tile, and the number of columns.

    Rows are numbered through all slides. Column 0, the last column and a row between two slides stay empty, so that no
    neighbouring cell lies in another row or in another slide.
    """
    sizes = slides.diff()
    slide = torch.repeat_interleave(sizes)
    corner = xy.new_full((len(sizes), 2), math.inf).scatter_reduce(0, slide[:, None].expand(-1, 2), xy, "amin")
    cell = ((xy - corner[slide]) / side).floor()
    columns = float(cell[:, 0].amax()) + 3 if len(xy) else 1.0
    highest = xy.new_full((len(sizes),), -2).scatter_reduce(0, slide, cell[:, 1], "amax")  # an empty slide needs no row
    rows_before = (highest + 2).cumsum(0) - (highest + 2)
    rows = float((highest + 2).sum())
    if columns * (rows + 2) > 2.0**62:
        raise ShapeError(f"positions are spread over {columns:.3g} x {rows:.3g} cells of {side} steps: too far apart")
    column, row = (cell + torch.stack((torch.ones_like(slide), rows_before[slide] + 1), 1)).long().unbind(1)
    return column, row, int(columns)
