"""A slide with the colours of its tiles on it, as a pyramidal TIFF that QuPath and other viewers open.

One pixel covers a whole power of two of level-0 pixels, so that the edges of tiles stay where they are on every level
whose step divides them; colours are those of tiles, with sharp edges, and nothing is lost by compression. Under the
colours the slide is grey.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psamil.errors import MissingExtraError, OptionError
from psamil.files import atomic_write
from psamil.readers import TilePlaces
from psamil.report.map_panels import LUMINANCE, cells_of
from psamil.slides.slide import Slide

LONGEST_PX = 8192  # of the first level
SMALLEST_LEVEL_PX = 512
TILE_PX = 256
OPACITY = 0.5
COLOURS = "viridis"


def write_overlay(path: Path, slide: Slide, places: TilePlaces, percentiles: NDArray[np.floating]) -> None:
    """Writes the whole slide, as OpenSlide counts it, with tiles coloured by percentile (n,), 0 to 100."""
    try:
        import tifffile
        from matplotlib import colormaps
    except ImportError as error:
        raise MissingExtraError("tifffile and matplotlib", "slides", "an overlay") from error
    if places.unit != "px0":
        raise OptionError(f"an overlay needs tiles in level-0 pixels; those of {slide.name!r} are in {places.unit}")
    downsample = 2 ** max(0, math.ceil(math.log2(max(slide.size_px0) / LONGEST_PX)))
    image = slide.overview(slide.mpp_px0 * downsample).copy()
    colours = colormaps[COLOURS](np.asarray(percentiles) / 100, bytes=True)[:, :3]
    _paint(image, places, colours, slide.size_px0)
    with atomic_write(path) as temporary, tifffile.TiffWriter(temporary, bigtiff=False) as file:
        mpp = slide.mpp_px0 * slide.size_px0[0] / image.shape[1]
        for i, level in enumerate(_levels(image)):
            per_cm = 1e4 / mpp / 2**i
            file.write(
                level,
                tile=(TILE_PX, TILE_PX),
                photometric="rgb",
                compression="adobe_deflate",
                predictor=True,
                subfiletype=int(i > 0),  # a smaller version of the first
                resolution=(per_cm, per_cm),
                resolutionunit="CENTIMETER",
                metadata=None,
            )


def _paint(image: NDArray[np.uint8], places: TilePlaces, colours: NDArray[np.uint8], size_px0: tuple[int, int]) -> None:
    """Colours over the grey of the slide, in place; edges go to the nearest pixel.

    Tiles that overlap are painted in the middle of their own square, as in heat maps.
    """
    cells = cells_of(places)
    corners, size = places.corners, places.size
    if cells is not None:
        size = cells.step
        corners = np.array(cells.corner) + size * np.stack([cells.columns, cells.rows], axis=1)
    scale = np.array([image.shape[1], image.shape[0]]) / size_px0
    first = np.rint(corners * scale).astype(np.int64).clip(0)
    last = np.rint((corners + size) * scale).astype(np.int64)
    slide = image.copy()
    for (left, top), (right, bottom), colour in zip(first.tolist(), last.tolist(), colours, strict=True):
        grey = slide[top:bottom, left:right] @ np.array(LUMINANCE)
        image[top:bottom, left:right] = (1 - OPACITY) * grey[..., None] + OPACITY * colour


def _levels(image: NDArray[np.uint8]) -> list[Any]:
    from PIL import Image

    levels = [Image.fromarray(image)]
    while max(levels[-1].size) > SMALLEST_LEVEL_PX:
        levels.append(levels[-1].reduce(2))
    return [np.asarray(level) for level in levels]
