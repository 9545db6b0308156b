"""A whole-slide image, read at any resolution.

- Places are level-0 pixels, as OpenSlide's ``read_region`` takes them; sizes of results are pixels of the result.
- The resolution is exact: a region is read from the coarsest level that is fine enough and resampled by the ratio of
  the two, whatever it is. Nothing is rounded to a magnification.
- Neighbouring regions fit together: each is resampled with a margin around it, on one grid for the whole slide.
- What was not scanned, is transparent, or lies outside the slide is white.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psamil.errors import DataError
from psamil.readers.ids import slide_id
from psamil.slides.dicom_series import slide_series
from psamil.slides.resolution import checked_mpp, mpp_of
from psamil.slides.sources import Source, open_source

SLIDE_SUFFIXES = (
    *(".svs", ".ndpi", ".mrxs", ".tif", ".tiff", ".btf", ".qptiff", ".scn", ".bif", ".czi", ".vms", ".vmu", ".svslide"),
)
DICOM_SUFFIXES = (".dcm", ".dicom")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")

LEVEL_TOLERANCE = 1.01  # a level this much coarser than asked is used: sizes of levels are rounded
PIECE_PX = (1024, 128)  # width and height of the pieces of overviews, so that memory does not grow with the slide
BLOCK_PX = 1600  # larger regions are read in blocks of this side, so that memory does not grow with them
LANCZOS_SUPPORT = 3  # pixels of the result, to each side


class Slide:
    """An open slide; :func:`open_slide` makes it. Another process opens its own from ``path`` and ``mpp_px0``.

    Attributes:
        name: of the file, without its extensions.
        size_px0: width and height.
        mpp_px0: micrometres per pixel of level 0.
        bounds_px0: x, y, width and height of the scanned area; the whole slide where the file does not tell.
        level_count: how many resolutions the file holds.
    """

    def __init__(self, path: Path, source: Source, mpp_px0: float) -> None:
        self.path, self.name, self.mpp_px0 = path, slide_id(path), mpp_px0
        self.size_px0, self.bounds_px0 = source.level_sizes[0], source.bounds_px0
        self.level_count = len(source.level_sizes)
        self._source = source
        self._overview: NDArray[np.uint8] | None = None  # the last one: some files are slow to read as a whole

    def read(self, x_px0: float, y_px0: float, size_px: int, mpp: float) -> NDArray[np.uint8]:
        """(size_px, size_px, 3): the square whose upper left corner is (x_px0, y_px0), at mpp micrometres per pixel."""
        return self._read(x_px0, y_px0, size_px, size_px, mpp / self.mpp_px0, mpp / self.mpp_px0)

    def overview(self, mpp: float) -> NDArray[np.uint8]:
        """(h, w, 3): the whole slide at mpp micrometres per pixel, but for the rounding of h and w."""
        from PIL import Image

        width, height = (max(1, round(side * self.mpp_px0 / mpp)) for side in self.size_px0)
        kept = self._overview
        if kept is None or kept.shape[0] < height or kept.shape[1] < width:
            across, down = self.size_px0[0] / width, self.size_px0[1] / height
            kept = np.empty((height, width, 3), np.uint8)
            for y in range(0, height, PIECE_PX[1]):
                for x in range(0, width, PIECE_PX[0]):
                    piece = kept[y : y + PIECE_PX[1], x : x + PIECE_PX[0]]
                    piece[:] = self._read(x * across, y * down, piece.shape[1], piece.shape[0], across, down)
        elif kept.shape[:2] != (height, width):
            kept = np.asarray(Image.fromarray(kept).resize((width, height), Image.Resampling.LANCZOS))
        self._overview = kept
        return kept

    def close(self) -> None:
        self._source.close()

    def __enter__(self) -> Slide:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, x: float, y: float, width: int, height: int, across: float, down: float) -> NDArray[np.uint8]:
        """width x height pixels from (x, y) on, each of which covers across x down pixels of level 0."""
        from PIL import Image

        finest = min(across, down)
        levels = [i for i, d in enumerate(self._source.downsamples) if d <= finest * LEVEL_TOLERANCE]
        level = max(levels, key=lambda i: self._source.downsamples[i], default=0)
        downsample = self._source.downsamples[level]
        left, right = x / downsample, (x + width * across) / downsample  # pixels of the level from here on
        top, bottom = y / downsample, (y + height * down) / downsample
        ratio = max(across, down) / downsample
        origins = self._source.origin(level, round(left)), self._source.origin(level, round(top))
        aligned = all(abs(a - b) < 1e-6 for a, b in zip(origins, (left, top), strict=True))
        if aligned and round(right) - round(left) == width and round(bottom) - round(top) == height:
            return np.asarray(self._assemble(level, round(left), round(top), width, height, 1))
        # Averaging k x k pixels first is quick and leaves at least two pixels for each of the result to be resampled.
        k = max(1, int(ratio / 2))
        margin = k * math.ceil((LANCZOS_SUPPORT * ratio + 1) / k)
        (x0, x1), (y0, y1) = (
            _with_margin(first, last, margin, k, side)
            for first, last, side in zip((left, top), (right, bottom), self._source.level_sizes[level], strict=True)
        )
        image = self._assemble(level, x0, y0, x1 - x0, y1 - y0, k)
        x0_exact, y0_exact = self._source.origin(level, x0), self._source.origin(level, y0)
        corners = ((left - x0_exact) / k, (top - y0_exact) / k, (right - x0_exact) / k, (bottom - y0_exact) / k)
        limits = (image.width, image.height, image.width, image.height)
        box = tuple(min(max(corner, 0.0), float(limit)) for corner, limit in zip(corners, limits, strict=True))
        return np.asarray(image.resize((width, height), Image.Resampling.LANCZOS, box=box))

    def _assemble(self, level: int, x: int, y: int, width: int, height: int, k: int) -> Any:
        """A region of a level, averaged over k x k pixels."""
        from PIL import Image

        if width * height <= BLOCK_PX**2:
            region = self._source.read(level, x, y, width, height)
            return region if k == 1 else region.reduce(k)
        result = Image.new("RGB", (-(-width // k), -(-height // k)))
        side = max(1, BLOCK_PX // k) * k
        for top in range(0, height, side):
            for left in range(0, width, side):
                size = min(side, width - left), min(side, height - top)
                region = self._source.read(level, x + left, y + top, *size)
                result.paste(region if k == 1 else region.reduce(k), (left // k, top // k))
        return result


def _with_margin(first: float, last: float, margin: int, k: int, side: int) -> tuple[int, int]:
    """Whole pixels from first to last and a margin, in multiples of k; within the slide, if first and last are."""
    begin, end = math.floor(first / k) * k - margin, math.ceil(last / k) * k + margin
    if first >= 0:
        begin = max(0, begin)
    if last < side + 1:  # sizes of levels are rounded
        end = min(side, end)
    return begin, end


def open_slide(path: str | Path, mpp: float | None = None) -> Slide:
    """Opens a slide, a large image, or a folder with one DICOM series.

    Args:
        path: of the file or folder.
        mpp: micrometres per pixel of level 0, for slides that do not tell; it wins over what the file says.

    Raises:
        DataError: for a file that cannot be read, or whose resolution is neither known nor given.
    """
    path = Path(path)
    if mpp is not None:
        mpp = checked_mpp(mpp)
    source = open_source(_series_file(path) if path.is_dir() else path)
    try:
        return Slide(path, source, mpp_of(source.facts, path) if mpp is None else mpp)
    except BaseException:
        source.close()
        raise


def _series_file(folder: Path) -> Path:
    """Any file of a DICOM series stands for the whole of it; of several series, none could stand for the folder."""
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix.lower() in DICOM_SUFFIXES)
    except OSError as error:
        raise DataError(folder, f"cannot be read: {error.strerror}", "check its permissions") from error
    if not files:
        raise DataError(folder, "is a folder without a DICOM series", "name a slide, or a folder of slides")
    series = {uid for file in files if (uid := slide_series(file)) is not None}
    if len(series) > 1:
        some = ", ".join(sorted(series)[:3]) + (" and more" if len(series) > 3 else "")
        remedy = "give each a folder of its own, whose name is then that of the slide"
        raise DataError(folder, f"holds {len(series)} DICOM series of slides ({some})", remedy)
    return files[0]


def find_slides(path: str | Path) -> list[Path]:
    """The slides below a folder, sorted; for the path of a slide, this one.

    Links to folders are followed, and each folder is looked at once. A folder with DICOM files is one slide: a series
    each. PNG and JPEG files count where there is nothing else, as beside slides they are previews and masks. A folder
    that cannot be listed is among the results, so that opening it says why, like any other slide that cannot be read.

    Raises:
        DataError: for a path without slides, and for two slides of the same name, whose results would collide.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.exists():
        raise DataError(path, "does not exist", "check the path")
    slides: list[Path] = []
    images: list[Path] = []

    def unlistable(error: OSError) -> None:
        slides.append(Path(error.filename))

    seen: set[tuple[int, int]] = set()
    for folder, folders, files in os.walk(path, onerror=unlistable, followlinks=True):
        about = os.stat(folder)
        if (about.st_dev, about.st_ino) in seen:  # by a link, which can lead back to a folder above it
            folders.clear()
            continue
        seen.add((about.st_dev, about.st_ino))
        here = [Path(folder) / file for file in files if not file.startswith(".")]
        if any(file.suffix.lower() in DICOM_SUFFIXES for file in here):
            slides.append(Path(folder))
        slides += [file for file in here if file.suffix.lower() in SLIDE_SUFFIXES]
        images += [file for file in here if file.suffix.lower() in IMAGE_SUFFIXES]
        parts = {file.stem for file in here if file.suffix.lower() == ".mrxs"}  # its data lie in a folder of its name
        kept = [name for name in folders if name not in parts and not name.startswith(".")]
        folders[:] = sorted(kept, key=lambda name: (os.path.islink(os.path.join(folder, name)), name))
    found = sorted(slides or images)
    if not found:
        raise DataError(path, "has no slides", f"known are {', '.join((*SLIDE_SUFFIXES, *DICOM_SUFFIXES))}")
    names = Counter(slide_id(slide) for slide in found)
    twice = [slide for slide in found if names[slide_id(slide)] > 1]
    if twice:
        raise DataError(twice[0], f"has the same name as {twice[1]}", "rename one of them, or extract them separately")
    return found
