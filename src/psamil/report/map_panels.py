"""What one panel of a heat map shows: tiles, the slide under them, frames of labelled tiles, bars of colour and scale.

Axes are in the unit of the tiles' places, y pointing down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psamil.readers import TilePlaces
from psamil.report.overviews import Overview

Window = tuple[float, float, float, float]  # left, top, right, bottom

FRAME = "#e4002b"
ON_LATTICE = 0.01  # of a step that a tile may lie off
MOST_CELLS = 100_000_000  # of a lattice that is drawn as an image
MOST_VECTORS = 2_000  # squares that an SVG keeps as such
SCALE_BAR_SHARE = 0.3  # of the width of a window, at most
LUMINANCE = (0.299, 0.587, 0.114)
PALER = 0.35  # how much of the way to white a slide under tiles is taken


@dataclass(frozen=True, eq=False)
class Cells:
    """Tiles on an exact lattice."""

    columns: NDArray[np.int64]  # (n,)
    rows: NDArray[np.int64]  # (n,)
    corner: tuple[float, float]  # of the first cell
    step: float  # side of a cell


def cells_of(places: TilePlaces) -> Cells | None:
    """The lattice that the tiles lie on without gaps between neighbours; None where there is no such.

    Cells of overlapping tiles have the size of their step and lie in the middle of the tiles.
    """
    corners, size = places.corners, places.size
    if not len(corners):
        return None
    first = corners.min(0)
    for step in (size, _common_step(corners)):
        if not 0 < step <= size * (1 + ON_LATTICE):
            continue
        exact = (corners - first) / step
        whole = np.rint(exact)
        if np.abs(exact - whole).max() <= ON_LATTICE and (whole.max(0) + 1).prod() <= MOST_CELLS:
            x, y = (first + (size - step) / 2).tolist()
            return Cells(whole[:, 0].astype(np.int64), whole[:, 1].astype(np.int64), (x, y), step)
    return None


def _common_step(corners: NDArray[np.float64]) -> float:
    """The most common distance of neighbours in a row; 0 where no two tiles share a row."""
    ordered = corners[np.lexsort(corners.T)]
    along, across = np.diff(ordered, axis=0).T
    steps, counts = np.unique(along[(across == 0) & (along > 0)], return_counts=True)
    return float(steps[counts.argmax()]) if len(steps) else 0.0


def draw_tiles(axis: Any, places: TilePlaces, colours: NDArray[np.float64]) -> None:
    """Every tile as a square; ``colours`` are (n, 4)."""
    from matplotlib.collections import PolyCollection

    cells = cells_of(places)
    if cells is not None:
        height, width = int(cells.rows.max()) + 1, int(cells.columns.max()) + 1
        image = np.zeros((height, width, 4), np.uint8)
        image[cells.rows, cells.columns] = np.rint(255 * colours)
        (x, y), step = cells.corner, cells.step
        axis.imshow(image, extent=(x, x + width * step, y + height * step, y), interpolation="none", aspect="equal")
        return
    squares: Any = _squares(places.corners, places.size)  # as one array, which is quick
    drawn: Any = PolyCollection(squares, facecolors=colours, edgecolors="none", antialiaseds=False)
    drawn.set_rasterized(len(squares) > MOST_VECTORS)
    axis.add_collection(drawn, autolim=False)


def draw_frames(axis: Any, places: TilePlaces, labelled: NDArray[np.bool_]) -> None:
    """Outlines of the areas of labelled tiles: their edges that no two of them share."""
    from matplotlib.collections import LineCollection

    cells = cells_of(places)
    if cells is None:
        squares = _squares(places.corners[labelled], places.size)
        lines = np.stack([squares, np.roll(squares, -1, axis=1)], axis=2).reshape(-1, 2, 2)
    else:
        is_labelled = np.zeros((cells.rows.max() + 3, cells.columns.max() + 3), dtype=bool)
        is_labelled[cells.rows[labelled] + 1, cells.columns[labelled] + 1] = True  # with a margin on all sides
        upright = np.argwhere(np.diff(is_labelled, axis=1)).astype(np.float64)  # (row, column left of the edge)
        level = np.argwhere(np.diff(is_labelled, axis=0)).astype(np.float64)
        down = upright[:, None, ::-1] + np.array([[0, -1], [0, 0]])  # (edges, ends, xy)
        across = level[:, None, ::-1] + np.array([[-1, 0], [0, 0]])
        lines = np.array(cells.corner) + cells.step * np.concatenate([down, across])
    axis.add_collection(LineCollection(list(lines), colors=FRAME, linewidths=1.1, capstyle="projecting"), autolim=False)


def _squares(corners: NDArray[np.float64], size: float) -> NDArray[np.float64]:
    """(n, 4, 2)"""
    return np.asarray(corners[:, None] + size * np.array([[0, 0], [1, 0], [1, 1], [0, 1]]))


def draw_overview(axis: Any, overview: Overview, unit: str, *, under_tiles: bool) -> None:
    """The slide. Under tiles it is pale and grey, so that all colour is that of scores."""
    left, top, right, bottom = overview.extent_in(unit)
    pixels = overview.pixels
    if under_tiles:
        grey = pixels @ np.array(LUMINANCE)
        pixels = np.repeat((grey + PALER * (255 - grey)).astype(np.uint8)[..., None], 3, axis=2)
    axis.imshow(pixels, extent=(left, right, bottom, top), interpolation="antialiased", aspect="equal")


def draw_colour_bar(axis: Any, colours: Any, label: str) -> None:
    """With numbers at both ends and between them."""
    low, high = colours.get_clim()
    axis.imshow(colours.to_rgba(np.linspace(low, high, 256))[None], extent=(0, 1, 0, 1), aspect="auto")
    axis.set_xticks([0, 0.5, 1], [f"{value:.3g}".replace("-", "−") for value in (low, (low + high) / 2, high)])
    for text, side in zip(axis.get_xticklabels(), ("left", "center", "right"), strict=True):
        text.set_horizontalalignment(side)
    axis.set_yticks([])
    axis.tick_params(length=2, pad=1.5, labelsize=7.5)
    axis.spines[:].set_visible(False)
    axis.text(1, 1.25, label, transform=axis.transAxes, ha="right", va="bottom", fontsize=6.5, color="#5b616b")


def draw_scale_bar(axis: Any, window: Window, um_per_unit: float) -> None:
    """A length that people can tell, in the lower left corner of the window."""
    left, top, right, bottom = window
    length_um = scale_bar_um((right - left) * um_per_unit)
    text = f"{length_um / 1000:g} mm" if length_um >= 1000 else f"{length_um:g} µm"
    x, y = left + 0.03 * (right - left), bottom - 0.03 * (bottom - top)
    halo = {"boxstyle": "square,pad=0.15", "facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.75}
    axis.text(x, y - 0.02 * (bottom - top), text, fontsize=7.5, va="bottom", color="#20242b", bbox=halo)
    axis.plot([x, x + length_um / um_per_unit], [y, y], color="#20242b", linewidth=2.2, solid_capstyle="butt")


def scale_bar_um(width_um: float) -> float:
    """1, 2 or 5 times a power of ten, at most ``SCALE_BAR_SHARE`` of the width."""
    largest = SCALE_BAR_SHARE * width_um
    power = 10.0 ** math.floor(math.log10(largest))
    return power * max(times for times in (1, 2, 5) if times * power <= largest * (1 + 1e-9))
