"""Tissue as a user marks it: a mask or GeoJSON for each slide, instead of a search.

- A mask is white where there is tissue, and covers the whole slide at any resolution: PNG, JPEG, TIFF (also large and
  pyramidal) or a NumPy array. 0 and 1 stand for black and white, too.
- GeoJSON holds Polygons and MultiPolygons, with holes, in level-0 pixels as OpenSlide counts them: a FeatureCollection,
  as QuPath exports it, a list of features, a feature or a geometry. Other geometries mark no area and are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psamil.errors import DataError
from psamil.files import read_json
from psamil.readers.ids import slide_id
from psamil.slides.slide import Slide
from psamil.slides.sources import open_source
from psamil.slides.tissue import Tissue, overview_mpp

GEOJSON_SUFFIXES = (".geojson", ".json")
MASK_SUFFIXES = (*GEOJSON_SUFFIXES, ".npy", ".png", ".tif", ".tiff", ".jpg", ".jpeg")
LARGEST_DISTORTION = 0.02  # of a mask's width to height, beyond the rounding of both to whole pixels


def find_mask(folder: str | Path, name: str) -> Path:
    """The mask or GeoJSON of a slide in a folder: ``<name>.geojson``, ``<name>.png``, or ``<name>_mask.png``."""
    folder = Path(folder)
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix.lower() in MASK_SUFFIXES)
    except OSError as error:
        raise DataError(folder, f"cannot be read: {error.strerror}", "check the path and its permissions") from error
    found = [file for file in files if _slide_of_mask(file) in (name, f"{name}_mask")]
    if len(found) != 1:
        cause = (
            f"has several masks of {name}: {', '.join(file.name for file in found)}" if found else "has no mask of it"
        )
        raise DataError(folder, cause, f"leave one file there, for instance {name}.geojson or {name}.png")
    return found[0]


def _slide_of_mask(file: Path) -> str:
    return slide_id(file.stem) if file.suffix.lower() in GEOJSON_SUFFIXES else slide_id(file)


def read_mask(path: str | Path, slide: Slide) -> Tissue:
    """Tissue from a mask or GeoJSON, at the resolution at which tissue is looked for.

    Raises:
        DataError: for a file that cannot be read, is no mask, has another shape than the slide, or marks nothing on it.
    """
    path, mpp = Path(path), overview_mpp(slide)
    width, height = (max(1, round(side * slide.mpp_px0 / mpp)) for side in slide.size_px0)
    if path.suffix.lower() in GEOJSON_SUFFIXES:
        mask = np.zeros((height, width), bool)
        scale = np.array([width / slide.size_px0[0], height / slide.size_px0[1]])
        for rings in read_polygons(path):
            mask |= filled([ring * scale for ring in rings], (height, width))
        remedy = "give coordinates in level-0 pixels of this slide"
    else:
        mask = _array_mask(path, slide) if path.suffix.lower() == ".npy" else _image_mask(path, slide, mpp)
        remedy = "draw tissue in white"
    if not mask.any():
        raise DataError(path, f"marks no tissue on {slide.name}", remedy)
    nothing = np.zeros_like(mask)
    return Tissue(mask, mpp * width / mask.shape[1], nothing, nothing)


def read_polygons(path: str | Path) -> list[list[NDArray[np.float64]]]:
    """Each polygon as its rings (n, 2), the outline first and then its holes."""
    polygons = []
    for geometry in _geometries(read_json(path)):
        kind, coordinates = geometry.get("type"), geometry.get("coordinates")
        if kind not in ("Polygon", "MultiPolygon"):
            continue
        try:
            parts: Any = [coordinates] if kind == "Polygon" else coordinates
            polygons += [[np.array(ring, np.float64)[:, :2].reshape(-1, 2) for ring in part] for part in parts]
        except (TypeError, ValueError, IndexError) as error:
            raise DataError(path, f"has a {kind} with other coordinates than x and y", "export it again") from error
    if not all(np.isfinite(ring).all() for rings in polygons for ring in rings):
        raise DataError(path, "has coordinates that are no numbers", "export it again")
    if not polygons:
        raise DataError(path, "has no Polygon or MultiPolygon", "mark tissue as areas and export it as GeoJSON")
    return polygons


def _geometries(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, list):
        for item in node:
            yield from _geometries(item)
    elif isinstance(node, dict):
        inner = [node[key] for key in ("features", "geometry", "geometries") if key in node]
        if inner:
            yield from _geometries(inner)
        else:
            yield node


def filled(rings: list[NDArray[np.float64]], shape: tuple[int, int]) -> NDArray[np.bool_]:
    """(h, w) pixels whose centre is within an odd number of rings, so that holes stay empty.

    A ray to the right of each row's centre line changes sides where it crosses an edge: crossings are counted into the
    first pixel whose centre lies behind them, and summed along the row.
    """
    height, width = shape
    crossings = np.zeros((height, width + 1), np.int64)
    for ring in rings:
        (x0, y0), (x1, y1) = ring.T, np.roll(ring, -1, axis=0).T
        rows = [np.clip(np.ceil(y - 0.5), 0, height).astype(np.int64) for y in (np.minimum(y0, y1), np.maximum(y0, y1))]
        counts = rows[1] - rows[0]  # rows whose centre line crosses the edge
        edge = np.repeat(np.arange(len(ring)), counts)
        row = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts) + rows[0][edge]
        x = x0[edge] + (row + 0.5 - y0[edge]) * (x1[edge] - x0[edge]) / (y1[edge] - y0[edge])
        column = np.clip(np.ceil(x - 0.5), 0, width).astype(np.int64)
        np.add.at(crossings, (row, column), 1)
    return crossings[:, :width].cumsum(1) % 2 == 1


def _array_mask(path: Path, slide: Slide) -> NDArray[np.bool_]:
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(path, f"is no NumPy array that can be read: {error}", "save it again with np.save") from error
    if values.ndim != 2 or 0 in values.shape or values.dtype.kind not in "bui":
        cause = f"has the shape {values.shape} and the type {values.dtype}"
        raise DataError(path, cause, "save a mask (h, w) of bool or whole numbers")
    _check_shape(path, values.shape[1], values.shape[0], slide)
    return _is_white(path, values)


def _image_mask(path: Path, slide: Slide, mpp: float) -> NDArray[np.bool_]:
    source = open_source(path)
    width, height = source.level_sizes[0]
    with Slide(path, source, slide.mpp_px0 * slide.size_px0[0] / width) as image:
        _check_shape(path, width, height, slide)
        return _is_white(path, image.overview(max(mpp, image.mpp_px0)).min(2))


def _check_shape(path: Path, width: int, height: int, slide: Slide) -> None:
    across, down = width / slide.size_px0[0], height / slide.size_px0[1]
    allowed = LARGEST_DISTORTION + 1 / min(width, height)
    if abs(across / down - 1) > allowed:
        own = " x ".join(map(str, slide.size_px0))
        cause = f"has {width} x {height} pixels, another shape than {slide.name} with {own}"
        raise DataError(path, cause, "give a mask of the whole slide")


def _is_white(path: Path, values: NDArray[Any]) -> NDArray[np.bool_]:
    largest = int(values.max())
    if 1 < largest < 128:
        raise DataError(
            path, f"has values up to {largest}, neither 0 and 1 nor black and white", "draw tissue in white"
        )
    return np.asarray(values > (127 if largest > 1 else 0))
