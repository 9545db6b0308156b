r"""PPEG, the pyramid position encoding of TransMIL: tiles see their surroundings through depthwise convolutions.

    y_i = x_i + sum over k in (7, 5, 3) of (W_k * x)(c_i) + b_k,

with c_i the cell of tile i on a grid, W_k a k x k kernel per channel, and 0 in cells without a tile. Tiles that share a
cell are seen by others as their mean. The three kernels are added up before they are applied.

Grids are sparse: only squares of cells that hold a tile are computed, so that time and memory are O(n) however far
apart the tiles lie. There are two:

- "file": tiles in the order of the file fill a square of side s = ceil(sqrt(n)) row by row, whose rest is filled with
  the first tiles again. This is what TransMIL does. Neighbours on this square are neighbours on the slide at best along
  a row, and results depend on the order of the file.
- "lattice": tiles are where they are, rounded to whole steps.

Shao, Bian, Chen, Wang, Zhang, Ji, Zhang: TransMIL: Transformer based Correlated Multiple Instance Learning for Whole
Slide Image Classification. NeurIPS 2021.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad

from psamil.errors import one_of
from psamil.models.segments import segment_sum
from psamil.spatial import Layout

GRIDS = ("file", "lattice")
KERNELS = (7, 5, 3)
REACH = KERNELS[0] // 2  # cells
SIDE = 16  # cells of a square that is computed at once


class PPEG(nn.Module):
    """x (n, width) at cells (n, 2) -> (n, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, k, groups=width) for k in KERNELS)

    def forward(self, x: Tensor, cells: Tensor) -> Tensor:
        if len(x) == 0:
            return x
        weight, bias = x.new_zeros(()), x.new_zeros(())
        for convolution in self.convolutions:
            assert isinstance(convolution, nn.Conv2d)
            assert convolution.bias is not None
            weight = weight + pad(convolution.weight, [REACH - convolution.kernel_size[0] // 2] * 4)
            bias = bias + convolution.bias
        return x + _sparse_convolution(x, cells, weight, bias)


def _sparse_convolution(x: Tensor, cells: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(n, channels): depthwise convolution with ``weight`` (channels, 1, 7, 7) of tiles at whole ``cells`` (n, 2)."""
    cells = cells - cells.amin(0)
    row = int(cells[:, 0].amax()) + SIDE + 2 * REACH  # cells in a row: no window reaches into the next
    occupied, cell_of_tile, tiles = torch.unique(
        (cells[:, 1] + REACH) * row + cells[:, 0] + REACH, return_inverse=True, return_counts=True
    )
    values = segment_sum(x, cell_of_tile, len(occupied) + 1)[:-1].to(x.dtype) / tiles[:, None]

    square = cells // SIDE
    squares, square_of_tile = torch.unique(square, dim=0, return_inverse=True)
    window = torch.arange(SIDE + 2 * REACH, device=cells.device)
    corner = squares * SIDE  # of the window, since cells are numbered from REACH
    wanted = (corner[:, 1, None] + window)[:, :, None] * row + (corner[:, 0, None] + window)[:, None, :]
    found = torch.searchsorted(occupied, wanted).clamp_max(len(occupied) - 1)
    found = torch.where(occupied[found] == wanted, found, len(occupied))  # (squares, y, x)
    canvas = pad(values, (0, 0, 0, 1))[found].permute(0, 3, 1, 2)
    out = conv2d(canvas, weight, bias, groups=x.shape[1]).permute(0, 2, 3, 1)  # (squares, SIDE, SIDE, channels)
    inside = cells - square * SIDE
    return out[square_of_tile, inside[:, 1], inside[:, 0]]


def lattice_cells(layout: Layout) -> Tensor:
    """(n, 2) cell of each tile; slides lie below one another, too far apart for a kernel to reach across."""
    cells, below = [], 0
    for bag in layout.bags:
        cell = bag.xy.round().long()
        cells.append(cell + cell.new_tensor([0, below]))
        below += int(cell[:, 1].amax()) + 1 + REACH
    return torch.cat(cells) if cells else torch.empty(0, 2, dtype=torch.long)


def file_cells(sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Slides of these sizes as squares: the tile that lies in each cell (m,), the cells (m, 2), and, (n,), where among
    the m the n tiles lie for the first time."""
    tiles, cells, first = [], [], []
    start = below = m = 0
    for n in sizes:
        side = math.ceil(math.sqrt(n))
        index = torch.arange(side * side)
        tiles.append(start + (index % n if n else index))
        cells.append(torch.stack((index % max(side, 1), below + index // max(side, 1)), 1))
        first.append(m + torch.arange(n))
        start, below, m = start + n, below + side + REACH, m + side * side
    return torch.cat(tiles), torch.cat(cells), torch.cat(first)


class PositionEncoding(nn.Module):
    """PPEG of the tiles of a layout on one of the two grids."""

    def __init__(self, width: int, grid: str) -> None:
        super().__init__()
        if grid not in GRIDS:
            raise one_of("grid", grid, GRIDS)
        self.grid, self.ppeg = grid, PPEG(width)
        self.exceptions = {"permutation": "tiles lie on a square in the order of the file"} if grid == "file" else {}

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        if self.grid == "lattice":
            return self.ppeg(x, lattice_cells(layout))
        tiles, cells, first = (t.to(x.device) for t in file_cells([bag.n for bag in layout.bags] or [0]))
        return self.ppeg(x[tiles], cells)[first]
