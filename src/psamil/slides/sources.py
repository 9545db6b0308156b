"""Where the pixels of a slide come from: OpenSlide, the segments of a TIFF file, or an image held in memory.

OpenSlide is asked first, and reads the formats of scanners. TIFF files that it does not know, such as those in strips,
and OME-TIFF, whose smaller levels it does not see, are decoded segment by segment, as far as tifffile can. What remains
are images small enough to be held.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from psamil.errors import DataError, MissingExtraError, PsamilError
from psamil.slides.resolution import tiff_facts

TIFF_SUFFIXES = (".tif", ".tiff", ".btf", ".qptiff")
LARGEST_IMAGE_PX = 80_000_000  # of an image or a segment that has to be decoded as a whole: 240 MB
CACHE_BYTES = 128 << 20  # decoded segments of a TIFF file, whose strips can be as wide as the slide
OPENSLIDE_CACHE_BYTES = 16 << 20  # the same of OpenSlide: what neighbouring tiles share, for all slides of a process
UNSPECIFIED, PREMULTIPLIED = 0, 1  # kinds of further samples of a TIFF file; opacity beside whole colours is 2
CONVERT = "convert it to a tiled pyramidal TIFF, for instance with: vips tiffsave IN OUT --tile --pyramid"
COPY_AGAIN = "copy or download the file again"


class Source(Protocol):
    level_sizes: list[tuple[int, int]]  # width and height, finest first
    downsamples: list[float]
    bounds_px0: tuple[int, int, int, int]
    facts: dict[str, str]  # what the file says about itself: mpp-x, mpp-y, objective-power

    def read(self, level: int, x: int, y: int, width: int, height: int) -> Any:
        """A PIL image in RGB. (x, y) are pixels of the level; white outside."""

    def origin(self, level: int, x: int) -> float:
        """Where a region that is read from x on really begins, in pixels of the level."""

    def close(self) -> None: ...


def open_source(path: Path) -> Source:
    """DataError for a file that none of the three can read."""
    openslide = _import_openslide()
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}", "check the path and its permissions") from error
    tiff = _open_tiff(path) if path.suffix.lower() in TIFF_SUFFIXES else None
    source: Source | None = None
    try:
        with _damage_told(path):
            source = _choose_source(path, tiff, openslide)
            return source
    finally:
        if tiff is not None and not isinstance(source, TiffSource):
            tiff.close()


def _choose_source(path: Path, tiff: Any, openslide: ModuleType) -> Source:
    known = openslide.OpenSlide.detect_format(path)
    if tiff is not None and (tiff.is_ome or known is None) and is_decodable(tiff):
        return TiffSource(path, tiff)
    source = ImageSource(path) if known is None else OpenSlideSource(path)
    if tiff is not None and known in (None, "generic-tiff"):
        source.facts = tiff_facts(tiff)  # OpenSlide takes inches where no unit is given
    return source


def _open_tiff(path: Path) -> Any:
    """None for a file that is not TIFF, whatever its name."""
    try:
        import tifffile
    except ImportError as error:
        raise MissingExtraError("tifffile", "slides", "reading TIFF files") from error
    try:
        return tifffile.TiffFile(path)
    except Exception:  # it stumbles in several ways over what is none
        return None


@contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    """Decoders raise whatever they stumble over in a damaged file; a user gets one line."""
    try:
        yield
    except PsamilError:
        raise
    except Exception as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(path, f"is damaged or incomplete: {cause}", COPY_AGAIN) from error


def _import_openslide() -> ModuleType:
    try:
        import openslide
    except ImportError as error:
        raise MissingExtraError("openslide-python", "slides", "reading slides") from error
    return openslide


@functools.cache
def _openslide_cache() -> Any:
    return _import_openslide().OpenSlideCache(OPENSLIDE_CACHE_BYTES)


def _downsamples(sizes: list[tuple[int, int]]) -> list[float]:
    """How many level-0 pixels a pixel of each level is wide.

    Levels are made by whole factors, and what remains at the border is left out. The ratio of the sizes is then a
    little off, by up to a pixel of the level at the far end of the slide.
    """
    width, height = sizes[0]
    ratios = [(width / w + height / h) / 2 for w, h in sizes]
    whole = [round(ratio) for ratio in ratios]
    fits = [abs(width / k - w) < 1 and abs(height / k - h) < 1 for k, (w, h) in zip(whole, sizes, strict=True)]
    return [float(k) if fit else ratio for k, fit, ratio in zip(whole, fits, ratios, strict=True)]


class OpenSlideSource:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._slide = slide = _import_openslide().OpenSlide(path)
        slide.set_cache(_openslide_cache())
        self.level_sizes = [(int(w), int(h)) for w, h in slide.level_dimensions]
        self.downsamples = _downsamples(self.level_sizes)
        self._own_downsamples = [float(d) for d in slide.level_downsamples]
        properties = slide.properties
        x, y, width, height = (properties.get(f"openslide.bounds-{side}") for side in ("x", "y", "width", "height"))
        if x and y and width and height:
            self.bounds_px0 = int(x), int(y), int(width), int(height)
        else:
            self.bounds_px0 = (0, 0, *self.level_sizes[0])
        self.facts = {
            key: properties[f"openslide.{key}"]
            for key in ("mpp-x", "mpp-y", "objective-power")
            if f"openslide.{key}" in properties
        }

    def read(self, level: int, x: int, y: int, width: int, height: int) -> Any:
        place = round(x * self._own_downsamples[level]), round(y * self._own_downsamples[level])
        with _damage_told(self._path):
            return on_white(self._slide.read_region(place, level, (width, height)))

    def origin(self, level: int, x: int) -> float:
        """OpenSlide takes whole level-0 pixels; between those of the level, it interpolates."""
        return round(x * self._own_downsamples[level]) / self._own_downsamples[level]

    def close(self) -> None:
        self._slide.close()


def is_decodable(file: Any) -> bool:
    """Whether the first series has 8-bit colours in a compression that tifffile can decode without further packages."""
    series = file.series[0]
    if len(series.levels[0].pages) > 1:
        raise DataError(file.filehandle.path, f"is a stack of images ({series.axes}), not one in colour", CONVERT)
    page = series.keyframe
    if page.dtype != np.uint8 or page.imagedepth > 1 or page.photometric not in (1, 2) or not page.dataoffsets:
        return False
    try:
        page.decode(None, 0)
    except (ValueError, NotImplementedError):
        return False
    return True


class TiffSource:
    """Levels of the first series of a TIFF file. A region decodes the strips or tiles that it touches, no others."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path, self._file = path, file
        series = file.series[0]
        self._pages = [level.keyframe for level in series.levels]
        largest = max(math.prod(page.chunks) for page in self._pages)
        if largest > 4 * LARGEST_IMAGE_PX:
            raise DataError(path, f"is stored in pieces of {largest:,} bytes, too large to read", CONVERT)
        self.level_sizes = [(page.imagewidth, page.imagelength) for page in self._pages]
        width, height = self.level_sizes[0]
        self.downsamples = _downsamples(self.level_sizes)
        self.bounds_px0 = (0, 0, width, height)
        self.facts = tiff_facts(file)
        self._cache: OrderedDict[tuple[int, int], NDArray[np.uint8]] = OrderedDict()
        self._cached_bytes = 0

    def read(self, level: int, x: int, y: int, width: int, height: int) -> Any:
        from PIL import Image

        page = self._pages[level]
        full_width, full_height = self.level_sizes[level]
        result = np.full((height, width, 3), 255, np.uint8)
        left, top, right, bottom = max(x, 0), max(y, 0), min(x + width, full_width), min(y + height, full_height)
        if left < right and top < bottom:
            rows, columns = (page.tilelength, page.tilewidth) if page.is_tiled else (page.rowsperstrip, full_width)
            for row in range(top // rows, (bottom - 1) // rows + 1):
                for column in range(left // columns, (right - 1) // columns + 1):
                    x0, y0 = max(left, column * columns), max(top, row * rows)
                    x1, y1 = min(right, (column + 1) * columns), min(bottom, (row + 1) * rows)
                    segment = self._segment(level, row * -(-full_width // columns) + column)
                    part = segment[y0 - row * rows : y1 - row * rows, x0 - column * columns : x1 - column * columns]
                    result[y0 - y : y1 - y, x0 - x : x1 - x] = part
        return Image.fromarray(result)

    def origin(self, level: int, x: int) -> float:
        return x

    def _segment(self, level: int, index: int) -> NDArray[np.uint8]:
        """(rows, columns, 1 or 3) of a strip or tile: colours, on white where it is transparent."""
        key = level, index
        if key not in self._cache:
            with _damage_told(self._path):
                page = self._pages[level]
                per_plane = len(page.dataoffsets) // (page.samplesperpixel if page.planarconfig == 2 else 1)
                planes = [self._decode(page, i) for i in range(index, len(page.dataoffsets), per_plane)]
                self._cache[key] = _opaque(np.concatenate(planes, axis=-1), page)
            self._cached_bytes += self._cache[key].nbytes
            while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
                self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        self._cache.move_to_end(key)
        return self._cache[key]

    def _decode(self, page: Any, index: int) -> NDArray[np.uint8]:
        offset, count = page.dataoffsets[index], page.databytecounts[index]
        handle = page.parent.filehandle
        handle.seek(offset)
        data = handle.read(count)
        if len(data) < count:
            raise DataError(self._path, "is incomplete: it ends within its pixels", COPY_AGAIN)
        tables = {} if page.jpegtables is None else {"jpegtables": page.jpegtables}
        decoded, _, shape = page.decode(data or None, index, **tables)
        # A segment without bytes was left out, as nothing is there.
        return np.full(shape[1:], 255, np.uint8) if decoded is None else decoded[0]

    def close(self) -> None:
        self._file.close()


def _opaque(samples: NDArray[np.uint8], page: Any) -> NDArray[np.uint8]:
    """Colours on white. Samples beyond them are their opacity if the file says so, and are left out if it does not."""
    count = samples.shape[-1] - len(page.extrasamples)
    colours = np.ascontiguousarray(samples[..., :count])
    kind = int(page.extrasamples[0]) if page.extrasamples else UNSPECIFIED
    opacity = samples[..., count : count + 1]
    if kind == UNSPECIFIED or (opacity == 255).all():
        return colours
    missing = 255 - opacity.astype(np.uint16)
    if kind == PREMULTIPLIED:
        return np.minimum(colours + missing, 255).astype(np.uint8)
    return ((colours * (255 - missing) + 255 * missing + 127) // 255).astype(np.uint8)


class ImageSource:
    """An image that Pillow decodes as a whole."""

    def __init__(self, path: Path) -> None:
        from PIL import Image, UnidentifiedImageError

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # there is a stricter limit here
                with Image.open(path) as image:
                    self._image = self._decoded(path, image)
        except UnidentifiedImageError as error:
            raise DataError(path, "is no slide or image that can be read", COPY_AGAIN) from error
        except Image.DecompressionBombError as error:
            raise DataError(path, "is too large for an image that is decoded as a whole", CONVERT) from error
        self.level_sizes, self.downsamples = [self._image.size], [1.0]
        self.bounds_px0 = (0, 0, *self._image.size)
        self.facts: dict[str, str] = {}

    @staticmethod
    def _decoded(path: Path, image: Any) -> Any:
        if image.width * image.height > LARGEST_IMAGE_PX:
            size = f"{image.width:,} x {image.height:,} px"
            cause = f"has {size}; images that are decoded as a whole may have {LARGEST_IMAGE_PX:,} px"
            raise DataError(path, cause, CONVERT)
        if image.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"):
            raise DataError(path, f"has pixels of the kind {image.mode}", "convert it to 8 bits per colour")
        return on_white(image)

    def read(self, level: int, x: int, y: int, width: int, height: int) -> Any:
        from PIL import Image

        region = Image.new("RGB", (width, height), "white")
        region.paste(self._image, (-x, -y))
        return region

    def origin(self, level: int, x: int) -> float:
        return x

    def close(self) -> None:
        self._image.close()


def on_white(image: Any) -> Any:
    """An image in RGB, with white where it is transparent."""
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    if image.mode != "RGBA":
        image = image.convert("RGBA")
    opacity = image.getchannel("A")
    if opacity.getextrema() == (255, 255):
        return image.convert("RGB")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=opacity)
    return white
