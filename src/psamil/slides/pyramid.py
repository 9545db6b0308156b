"""Pyramidal TIFF files that slide readers open: tiles of JPEG, every level half as large as the one before.

This is the part of TIFF 6.0 that such a file needs. Tiles are compressed by Pillow, which cannot write tiled files.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from psamil.errors import MissingExtraError
from psamil.files import atomic_write

TILE_PX = 256
SMALLEST_LEVEL_PX = 512  # no level is made of one whose longer side is not above this
JPEG_QUALITY = 80
SHORT, LONG, RATIONAL = 3, 4, 5  # types of TIFF fields
FORMATS = {SHORT: "H", LONG: "I", RATIONAL: "II"}


def write_pyramid(path: str | Path, image: NDArray[np.uint8], mpp: float) -> None:
    """Writes an image (height, width, 3) atomically, with its resolution.

    Args:
        path: of the file, less than 4 GB.
        image: RGB.
        mpp: micrometres per pixel.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("Pillow", "slides", "a slide file") from error
    levels = [Image.fromarray(image)]
    while max(levels[-1].size) > SMALLEST_LEVEL_PX:
        levels.append(levels[-1].reduce(2))
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        file.write(struct.pack("<2sHI", b"II", 42, 0))
        link = 4  # where the position of the next directory is written
        for i, level in enumerate(levels):
            tiles = [(file.tell(), file.write(tile)) for tile in _jpeg_tiles(level)]
            file.write(b"\0" * (file.tell() % 2))
            position = file.tell()
            file.seek(link)
            file.write(struct.pack("<I", position))
            file.seek(position)
            link = _write_directory(file, _fields(level.size, tiles, mpp * image.shape[1] / level.width, i))


def _jpeg_tiles(level: Any) -> Iterator[bytes]:
    """Row by row. The last pixels are repeated beyond the image: a sharp edge would ring into it."""
    from PIL import Image

    beyond = [(0, -side % TILE_PX) for side in (level.height, level.width)]
    padded = np.pad(np.asarray(level), (*beyond, (0, 0)), mode="edge")
    for y in range(0, level.height, TILE_PX):
        for x in range(0, level.width, TILE_PX):
            written = io.BytesIO()
            tile = Image.fromarray(padded[y : y + TILE_PX, x : x + TILE_PX])
            tile.save(written, "JPEG", quality=JPEG_QUALITY, subsampling="4:2:0")
            yield written.getvalue()


def _fields(
    size: tuple[int, int], tiles: list[tuple[int, int]], mpp: float, level: int
) -> list[tuple[int, int, list[int]]]:
    """Tag, type and values of what a reader must know of a level."""
    pixels_per_cm = [round(1e4 / mpp * 1000), 1000]
    return [
        (254, LONG, [int(level > 0)]),  # a smaller version of another image
        (256, LONG, [size[0]]),
        (257, LONG, [size[1]]),
        (258, SHORT, [8, 8, 8]),  # bits
        (259, SHORT, [7]),  # JPEG
        (262, SHORT, [6]),  # luminance and chrominance
        (277, SHORT, [3]),  # samples per pixel
        (282, RATIONAL, pixels_per_cm),
        (283, RATIONAL, pixels_per_cm),
        (284, SHORT, [1]),  # samples side by side
        (296, SHORT, [3]),  # resolution is per centimetre
        (322, LONG, [TILE_PX]),
        (323, LONG, [TILE_PX]),
        (324, LONG, [start for start, _ in tiles]),
        (325, LONG, [length for _, length in tiles]),
        (530, SHORT, [2, 2]),  # chrominance at half the resolution
    ]


def _write_directory(file: BinaryIO, fields: list[tuple[int, int, list[int]]]) -> int:
    """Writes the directory of a level. Returns the position of its link to the next one."""
    start = file.tell()
    link = start + 2 + 12 * len(fields)
    entries, behind = [], b""  # values of more than four bytes stand behind the directory
    for tag, kind, values in fields:
        count = len(values) // len(FORMATS[kind])
        packed = struct.pack("<" + FORMATS[kind] * count, *values)
        if len(packed) > 4:
            place = link + 4 + len(behind)
            behind += packed + b"\0" * (len(packed) % 2)
            packed = struct.pack("<I", place)
        entries.append(struct.pack("<HHI4s", tag, kind, count, packed))
    file.write(struct.pack("<H", len(fields)) + b"".join(entries) + struct.pack("<I", 0) + behind)
    return link
