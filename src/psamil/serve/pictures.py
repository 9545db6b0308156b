"""Pictures of slides: tiles of a pyramid as OpenSeadragon asks for them, and single tiles of a bag.

The pyramid is that of DeepZoom. Of L levels, a pixel of level l covers exactly d = 2^(L - 1 - l) pixels of level 0,
whatever levels the file has, and level l has ceil(side / d) pixels. Its origin is that of level 0 as OpenSlide counts
it, with what was not scanned; places of tiles count from there as well, so that nothing has to be moved. Neighbouring
tiles overlap by a pixel.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from psamil.errors import DataError
from psamil.serve.byte_cache import ByteCache
from psamil.slides import Slide, open_slide

TILE_PX = 510
OVERLAP_PX = 1
JPEG_QUALITY = 85
CACHE_BYTES = 128 << 20  # of encoded tiles
IDLE_HANDLES = 4  # each may hold decoded parts of its file
TILE_VIEW_PX = 384
TILE_MARGIN = 0.25  # of the side of a tile, around it


@dataclass(frozen=True)
class Pyramid:
    """Geometry of the picture of one slide."""

    width: int
    height: int
    bounds: tuple[int, int, int, int]  # x, y, width and height of the scanned part
    mpp: float | None  # micrometres per pixel of level 0, where the file tells

    @property
    def levels(self) -> int:
        """Level 0 is a single pixel."""
        return (max(self.width, self.height) - 1).bit_length() + 1

    def downsample(self, level: int) -> int:
        return 1 << (self.levels - 1 - level)

    def size(self, level: int) -> tuple[int, int]:
        d = self.downsample(level)
        return -(-self.width // d), -(-self.height // d)

    def box(self, level: int, column: int, row: int) -> tuple[int, int, int, int] | None:
        """Left, top, right and bottom of a tile with its overlap, in pixels of the level; None where there is none."""
        if not 0 <= level < self.levels:
            return None
        width, height = self.size(level)
        if not (0 <= column * TILE_PX < width and 0 <= row * TILE_PX < height):
            return None
        left, top = (max(0, i * TILE_PX - OVERLAP_PX) for i in (column, row))
        right, bottom = (min(side, (i + 1) * TILE_PX + OVERLAP_PX) for i, side in ((column, width), (row, height)))
        return left, top, right, bottom

    def to_json(self) -> dict[str, Any]:
        return {
            "width": self.width,
            "height": self.height,
            "tile_px": TILE_PX,
            "overlap": OVERLAP_PX,
            "levels": self.levels,
            "first_level": next(i for i in reversed(range(self.levels)) if i == 0 or max(self.size(i)) <= TILE_PX),
            "bounds": list(self.bounds),
            "mpp": self.mpp,
        }


class Pictures:
    """Reads slides for several threads. An open slide is used by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[Path, Slide]] = []  # used last at the end
        self._pyramids: dict[Path, Pyramid] = {}
        self._encoded: ByteCache[bytes] = ByteCache(CACHE_BYTES, len)

    def pyramid(self, path: Path) -> Pyramid:
        """DataError for a slide that cannot be read."""
        if path not in self._pyramids:
            with self._opened(path):
                pass
        return self._pyramids[path]

    def pyramid_tile(self, path: Path, level: int, column: int, row: int) -> bytes | None:
        """A JPEG; None outside of the slide."""
        pyramid = self.pyramid(path)
        box = pyramid.box(level, column, row)
        if box is None:
            return None
        return self._encoded.get(
            (path, level, column, row), lambda: self._read_tile(path, box, pyramid.downsample(level))
        )

    def tile_view(self, path: Path, x_px0: float, y_px0: float, size_px0: float) -> bytes:
        """A JPEG of a square with TILE_MARGIN around it."""
        margin = TILE_MARGIN * size_px0
        downsample = (size_px0 + 2 * margin) / TILE_VIEW_PX
        with self._opened(path) as slide:
            return _jpeg(slide.read(x_px0 - margin, y_px0 - margin, TILE_VIEW_PX, downsample * slide.mpp_px0))

    def close(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop()[1].close()

    def _read_tile(self, path: Path, box: tuple[int, int, int, int], downsample: int) -> bytes:
        left, top, right, bottom = box
        side = max(right - left, bottom - top)
        with self._opened(path) as slide:
            pixels = slide.read(left * downsample, top * downsample, side, downsample * slide.mpp_px0)
        return _jpeg(pixels[: bottom - top, : right - left])

    @contextmanager
    def _opened(self, path: Path) -> Iterator[Slide]:
        slide = self._take(path) or self._open(path)
        try:
            yield slide
        except BaseException:
            slide.close()
            raise
        with self._lock:
            self._idle.append((path, slide))
            surplus = [self._idle.pop(0)[1] for _ in range(len(self._idle) - IDLE_HANDLES)]
        for old in surplus:
            old.close()

    def _take(self, path: Path) -> Slide | None:
        with self._lock:
            place = next((i for i, (idle, _) in enumerate(self._idle) if idle == path), None)
            return None if place is None else self._idle.pop(place)[1]

    def _open(self, path: Path) -> Slide:
        try:
            slide = open_slide(path)
            mpp: float | None = slide.mpp_px0
        except DataError:  # perhaps for want of a resolution, without which it can be shown
            slide, mpp = open_slide(path, mpp=1.0), None
        self._pyramids[path] = Pyramid(*slide.size_px0, slide.bounds_px0, mpp)
        return slide


def _jpeg(pixels: NDArray[Any]) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()
