"""A slide as one small picture, with its place in level-0 pixels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from psamil.errors import DataError
from psamil.slides.slide import open_slide

OVERVIEW_PX = 1200  # the longer side
ANY_MPP = 1.0  # for slides that do not tell; nothing that is kept depends on it


@dataclass(frozen=True, eq=False)
class Overview:
    """The scanned area of a slide."""

    pixels: NDArray[np.uint8]  # (h, w, 3)
    extent_px0: tuple[float, float, float, float]  # left, top, right, bottom of what the pixels show
    mpp: float | None  # micrometres per level-0 pixel, where it is known

    @staticmethod
    def of(path: Path, mpp: float | None = None) -> Overview:
        """Of a slide, which may not tell how large its pixels are. Glass that was not scanned is cut off.

        Args:
            path: of the slide.
            mpp: micrometres per level-0 pixel; it wins over what the file says.
        """
        try:
            slide, known = open_slide(path, mpp), True
        except DataError:
            if mpp is not None:
                raise
            slide, known = open_slide(path, ANY_MPP), False  # an error again, if it was about something else
        with slide:
            width, height = slide.size_px0
            x, y, scanned_width, scanned_height = slide.bounds_px0
            pixels = slide.overview(max(scanned_width, scanned_height) * slide.mpp_px0 / OVERVIEW_PX)
            across, down = width / pixels.shape[1], height / pixels.shape[0]  # level-0 pixels per pixel
            left, right = int(x / across), -(-(x + scanned_width) // across)
            top, bottom = int(y / down), -(-(y + scanned_height) // down)
            cut = pixels[top : int(bottom), left : int(right)]
            right, bottom = left + cut.shape[1], top + cut.shape[0]
            return Overview(
                cut, (left * across, top * down, right * across, bottom * down), slide.mpp_px0 if known else None
            )

    def has_place_in(self, unit: str) -> bool:
        """Whether it is known where tiles lie on the slide whose places are in this unit."""
        return unit == "px0" or (unit == "um" and self.mpp is not None)

    def extent_in(self, unit: str) -> tuple[float, float, float, float]:
        """The same in a unit in which it has a place."""
        factor = self.mpp or 1.0 if unit == "um" else 1.0
        left, top, right, bottom = (factor * place for place in self.extent_px0)
        return left, top, right, bottom
