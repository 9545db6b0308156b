"""Areas as a user marks them: a mask or GeoJSON for each slide. Tissue, instead of a search; lesions, see
:mod:`psamil.slides.lesions`.

- A mask is white where the areas are, and covers the whole slide at any resolution: PNG, JPEG, TIFF (also large and
  pyramidal) or a NumPy array. 0 and 1 stand for black and white, too.
- GeoJSON holds Polygons and MultiPolygons, with holes, in level-0 pixels as OpenSlide counts them: a FeatureCollection,
  as QuPath exports it, a list of features, a feature or a geometry. Other geometries mark no area and are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    found = find_file(folder, name, MASK_SUFFIXES)
    if found is None:
        cause = "has no mask of it"
        raise DataError(folder, cause, f"leave one file there, for instance {name}.geojson or {name}.png")
    return found


def find_file(folder: str | Path, name: str, suffixes: Sequence[str]) -> Path | None:
    """The file of a slide in a folder, by its name, perhaps with ``_mask`` at its end; None if there is none."""
    folder = Path(folder)
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix.lower() in suffixes)
    except OSError as error:
        raise DataError(folder, f"cannot be read: {error.strerror}", "check the path and its permissions") from error
    found = [file for file in files if slide_id(_without_text_suffix(file)) in (name, f"{name}_mask")]
    if len(found) > 1:
        cause = f"has several masks of {name}: {', '.join(file.name for file in found)}"
        raise DataError(folder, cause, "leave one file there")
    return found[0] if found else None


def _without_text_suffix(file: Path) -> str:
    """Those that :func:`psamil.readers.ids.slide_id` does not know."""
    return file.stem if file.suffix.lower() in (*GEOJSON_SUFFIXES, ".xml") else file.name


def read_mask(path: str | Path, slide: Slide) -> Tissue:
    """Tissue from a mask or GeoJSON, at the resolution at which tissue is looked for.

    Raises:
        DataError: for a file that cannot be read, is no mask, has another shape than the slide, or marks nothing on it.
    """
    path, mpp = Path(path), overview_mpp(slide)
    width, height = (max(1, round(side * slide.mpp_px0 / mpp)) for side in slide.size_px0)
    if is_geojson(path):
        mask = np.zeros((height, width), bool)
        scale = np.array([width / slide.size_px0[0], height / slide.size_px0[1]])
        for rings in read_polygons(path):
            mask |= filled([ring * scale for ring in rings], (height, width))
        remedy = "give coordinates in level-0 pixels of this slide"
    else:
        mask = read_raster(path, slide.name, slide.size_px0, mpp / slide.mpp_px0)
        remedy = "draw tissue in white"
    if not mask.any():
        raise DataError(path, f"marks no tissue on {slide.name}", remedy)
    nothing = np.zeros_like(mask)
    return Tissue(mask, mpp * width / mask.shape[1], nothing, nothing)


@dataclass(frozen=True, eq=False)
class Area:
    """A polygon and the class it was given, "" for none."""

    rings: list[NDArray[np.float64]]  # (n, 2) each, in level-0 pixels; the outline first and then its holes
    kind: str = ""


def is_geojson(path: Path) -> bool:
    return path.suffix.lower() in GEOJSON_SUFFIXES


def read_polygons(path: str | Path) -> list[list[NDArray[np.float64]]]:
    """Each polygon as its rings (n, 2), the outline first and then its holes."""
    areas = read_geojson(path)
    if not areas:
        raise DataError(path, "has no Polygon or MultiPolygon", "mark tissue as areas and export it as GeoJSON")
    return [area.rings for area in areas]


def read_geojson(path: str | Path) -> list[Area]:
    """Its polygons, with the names of their classes as QuPath gives them; perhaps none."""
    areas = []
    for geometry, kind in _geometries(read_json(path), ""):
        shape, coordinates = geometry.get("type"), geometry.get("coordinates")
        if shape not in ("Polygon", "MultiPolygon"):
            continue
        try:
            parts: Any = [coordinates] if shape == "Polygon" else coordinates
            polygons = [[np.array(ring, np.float64)[:, :2].reshape(-1, 2) for ring in part] for part in parts]
        except (TypeError, ValueError, IndexError) as error:
            raise DataError(path, f"has a {shape} with other coordinates than x and y", "export it again") from error
        areas += [Area(rings, kind) for rings in polygons if rings]
    if not all(np.isfinite(ring).all() for area in areas for ring in area.rings):
        raise DataError(path, "has coordinates that are no numbers", "export it again")
    return areas


def _geometries(node: Any, kind: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Geometries, each with the class of its feature."""
    if isinstance(node, list):
        for item in node:
            yield from _geometries(item, kind)
    elif isinstance(node, dict):
        inner = [node[key] for key in ("features", "geometry", "geometries") if key in node]
        if inner:
            yield from _geometries(inner, _class_name(node) or kind)
        else:
            yield node, kind


def _class_name(feature: dict[str, Any]) -> str:
    """As QuPath writes it: ``properties.classification.name``, or ``names`` of a class that is derived of others."""
    properties = feature.get("properties")
    found = properties.get("classification") if isinstance(properties, dict) else None
    if isinstance(found, dict):
        names = found.get("names")
        found = found.get("name") or (": ".join(map(str, names)) if isinstance(names, list) else "")
    return found if isinstance(found, str) else ""


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


def read_raster(path: Path, name: str, size_px0: tuple[int, int], downsample: float) -> NDArray[np.bool_]:
    """(h, w) where a mask of a whole slide is white; images at this downsample of level 0, or at their own.

    Args:
        path: of an image or a NumPy array.
        name: of the slide.
        size_px0: of the slide.
        downsample: level-0 pixels per pixel of the result. Arrays stay as they are.
    """
    if path.suffix.lower() == ".npy":
        return _array_mask(path, name, size_px0)
    source = open_source(path)
    width, height = source.level_sizes[0]
    with Slide(path, source, size_px0[0] / width) as image:  # a unit of length is a level-0 pixel of the slide
        _check_shape(path, width, height, name, size_px0)
        return _is_white(path, image.overview(max(downsample, image.mpp_px0)).min(2))


def _array_mask(path: Path, name: str, size_px0: tuple[int, int]) -> NDArray[np.bool_]:
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(path, f"is no NumPy array that can be read: {error}", "save it again with np.save") from error
    if values.ndim != 2 or 0 in values.shape or values.dtype.kind not in "bui":
        cause = f"has the shape {values.shape} and the type {values.dtype}"
        raise DataError(path, cause, "save a mask (h, w) of bool or whole numbers")
    _check_shape(path, values.shape[1], values.shape[0], name, size_px0)
    return _is_white(path, values)


def _check_shape(path: Path, width: int, height: int, name: str, size_px0: tuple[int, int]) -> None:
    across, down = width / size_px0[0], height / size_px0[1]
    allowed = LARGEST_DISTORTION + 1 / min(width, height)
    if abs(across / down - 1) > allowed:
        own = " x ".join(map(str, size_px0))
        cause = f"has {width} x {height} pixels, another shape than {name} with {own}"
        raise DataError(path, cause, "give a mask of the whole slide")


def _is_white(path: Path, values: NDArray[Any]) -> NDArray[np.bool_]:
    largest = int(values.max())
    if 1 < largest < 128:
        raise DataError(path, f"has values up to {largest}, neither 0 and 1 nor black and white", "draw areas in white")
    return np.asarray(values > (127 if largest > 1 else 0))
