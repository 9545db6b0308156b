"""The lattice of tiles on a slide.

There is one lattice per slide. It begins at the upper left corner of the scanned area and goes on in whole level-0
pixels: sides and steps in level-0 pixels are rounded, once for the slide, so that errors do not add up from tile to
tile. A tile is then read at the resolution at which it has ``size_px`` pixels exactly, ``Tiles.mpp``. It differs from
the one asked for by at most half a level-0 pixel per tile: for 224 px at the scan's resolution, by 0.2%.

Tiles lie within the scanned area. Where it is smaller than a tile, there is one tile, filled up with white.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from psamil.errors import OptionError
from psamil.slides.slide import Slide
from psamil.slides.tissue import Tissue

ROWS_TOGETHER = 8  # of tiles: sums over the whole mask would take eight times as much memory as the mask


@dataclass(frozen=True)
class TileGrid:
    """How large tiles are, how far apart, and which are kept.

    Attributes:
        mpp: micrometres per pixel at which tiles are read.
        size_px: side of a tile in these pixels.
        size_um: side of a tile in micrometres, instead of ``size_px``, which is then the nearest whole number.
        overlap_px: of neighbouring tiles, in pixels of a tile.
        least_tissue: share of its area that has to be tissue for a tile to be kept. With 0, all tiles are.
    """

    mpp: float = 0.5
    size_px: int = 224
    size_um: float | None = None
    overlap_px: int = 0
    least_tissue: float = 0.25

    def __post_init__(self) -> None:
        for name in ("mpp", "size_um"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise OptionError(f"{name} must be a positive number of micrometres, got {value}")
        if self.size_um is not None:
            object.__setattr__(self, "size_px", round(self.size_um / self.mpp))
        if self.size_px < 1:
            side = f"{self.size_px} px" if self.size_um is None else f"{self.size_um} um at {self.mpp} um per pixel"
            raise OptionError(f"a tile must have at least one pixel; its side is {side}")
        if not 0 <= self.overlap_px < self.size_px:
            raise OptionError(
                f"overlap_px must be at least 0 and below the side of {self.size_px}, got {self.overlap_px}"
            )
        if not 0 <= self.least_tissue <= 1:
            raise OptionError(f"least_tissue is a share between 0 and 1, got {self.least_tissue}")

    def size_px0(self, slide: Slide) -> int:
        """Side of a tile in level-0 pixels."""
        side_um = self.size_px * self.mpp if self.size_um is None else self.size_um
        return max(1, round(side_um / slide.mpp_px0))

    def step_px0(self, slide: Slide) -> int:
        """Distance of neighbouring tiles in level-0 pixels."""
        size_px0 = self.size_px0(slide)
        return max(1, size_px0 - round(self.overlap_px * size_px0 / self.size_px))


@dataclass(frozen=True)
class Tiles:
    """The tiles of one slide, row by row. ``slide.read(x, y, size_px, mpp)`` reads the one at (x, y)."""

    coords_px0: NDArray[np.int64]  # (n, 2) x and y of upper left corners, as OpenSlide's read_region takes them
    size_px: int
    mpp: float
    size_px0: int
    step_px0: int
    tissue_share: NDArray[np.float64]  # (n,)

    def __len__(self) -> int:
        return len(self.coords_px0)


def lay_tiles(slide: Slide, tissue: Tissue, grid: TileGrid) -> Tiles:
    """The tiles of the lattice with enough tissue."""
    size, step = grid.size_px0(slide), grid.step_px0(slide)
    x0, y0, width, height = slide.bounds_px0
    columns, rows = (max(0, (side - size) // step) + 1 for side in (width, height))
    x, y = x0 + step * np.arange(columns), y0 + step * np.arange(rows)
    shares = _tissue_shares(tissue.mask, slide, x, y, size)
    row, column = np.nonzero((shares >= grid.least_tissue) & ((shares > 0) | (grid.least_tissue == 0)))
    coords = np.stack([x[column], y[row]], axis=1).astype(np.int64)
    mpp = size * slide.mpp_px0 / grid.size_px
    return Tiles(coords, grid.size_px, mpp, size, step, shares[row, column])


def _tissue_shares(
    mask: NDArray[np.bool_], slide: Slide, x: NDArray[np.int64], y: NDArray[np.int64], size: int
) -> NDArray[np.float64]:
    """(rows, columns) share of tissue in the tiles at x × y, over that part of a tile which lies within the slide.

    The sums over the mask from its corner to (u, v) are bilinear between whole pixels, so that interpolating them gives
    the exact area of tissue for borders that lie within pixels of the mask.
    """
    height, width = mask.shape
    across, down = width / slide.size_px0[0], height / slide.size_px0[1]  # pixels of the mask per level-0 pixel
    left, right = np.clip(x * across, 0, width), np.clip((x + size) * across, 0, width)
    shares = np.zeros((len(y), len(x)))
    for first in range(0, len(y), ROWS_TOGETHER):
        rows = y[first : first + ROWS_TOGETHER]
        top, bottom = np.clip(rows * down, 0, height), np.clip((rows + size) * down, 0, height)
        above = min(math.floor(top[0]), height - 1)
        part = mask[above : math.ceil(bottom[-1])]
        sums = np.zeros((len(part) + 1, width + 1))
        part.cumsum(0, dtype=np.float64, out=sums[1:, 1:]).cumsum(1, out=sums[1:, 1:])
        by_row = _interpolated(sums, bottom - above) - _interpolated(sums, top - above)  # (rows, width + 1)
        areas = (_interpolated(by_row.T, right) - _interpolated(by_row.T, left)).T
        inside = np.outer(bottom - top, right - left)
        areas = np.maximum(areas, 0)  # which rounding can be below
        np.divide(areas, inside, out=shares[first : first + len(rows)], where=inside > 0)
    return shares


def _interpolated(values: NDArray[np.float64], places: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows of values at places between whole rows."""
    below = np.minimum(np.floor(places).astype(np.int64), len(values) - 2)
    share = (places - below)[:, None]
    return (1 - share) * values[below] + share * values[below + 1]
