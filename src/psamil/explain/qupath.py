"""Tiles and regions as QuPath reads them: GeoJSON with QuPath's own properties.

- :func:`tiles_geojson`: each tile is an object of the type ``tile``, with its scores as measurements.
- :func:`regions_geojson`: chosen tiles, merged where they touch, are annotations.
- :func:`write_geojson`: a file, compressed if it is large. The same input gives the same bytes.

QuPath counts level-0 pixels from the corner of the image that it shows. It crops slides to their scanned area if
OpenSlide knows it (``openslide.bounds-x``, ...: MIRAX and Leica slides, for instance); psamil counts from the corner of
the whole slide, as OpenSlide does. ``offset_px0``, the corner of the scanned area, is therefore subtracted; see
``docs/qupath.md``.
"""

from __future__ import annotations

import gzip
import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psamil.errors import DataError, MissingExtraError, ShapeError
from psamil.files import atomic_write
from psamil.readers import TilePlaces

ID_SPACE = uuid.UUID("5b6f1c0e-6d3c-5d0b-9f1e-2f6c3a0f7a11")  # of all ids that psamil gives to objects of QuPath
LARGE_BYTES = 20_000_000  # text beyond this is compressed
SIGNIFICANT_DIGITS = 7  # of measurements: what float32 holds
TOUCHING_SHARE = 0.02  # of a tile: a gap that rounding of sizes leaves between neighbours
FINEST_PX0 = 1 / 1024  # to which corners of regions are rounded where those of tiles are no whole pixels
REGION_COLOUR = (213, 94, 0)  # vermilion, told apart from haematoxylin and eosin by everyone


def tiles_geojson(
    places: TilePlaces,
    measurements: Mapping[str, NDArray[Any]],
    *,
    offset_px0: tuple[float, float] = (0, 0),
    slide: str = "",
) -> dict[str, Any]:
    """A FeatureCollection with one feature for each tile, in their order.

    Args:
        places: of the tiles, in level-0 pixels.
        measurements: by name, (n,) numbers each. NaN and infinite ones are left out for their tile.
        offset_px0: upper left corner, on the slide, of the image that QuPath shows: ``bounds_px0[:2]`` of a slide.
        slide: its name. The ids of features are made of it and of the number of the tile.
    """
    corners, size = _corners_px0(places, offset_px0), places.size
    columns = {name: _column(name, values, len(corners)) for name, values in measurements.items()}
    far = corners + size
    features = [
        _feature(
            f"{slide}/tile/{tile}",
            {"type": "Polygon", "coordinates": [_ring([(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)])]},
            {
                "objectType": "tile",
                "measurements": {name: values[tile] for name, values in columns.items() if values[tile] is not None},
            },
        )
        for tile, ((x0, y0), (x1, y1)) in enumerate(zip(corners.tolist(), far.tolist(), strict=True))
    ]
    return {"type": "FeatureCollection", "features": features}


def regions_geojson(
    places: TilePlaces,
    high: NDArray[np.bool_],
    *,
    name: str,
    measurements: Mapping[str, NDArray[Any]] | None = None,
    offset_px0: tuple[float, float] = (0, 0),
    slide: str = "",
) -> dict[str, Any]:
    """A FeatureCollection of annotations: chosen tiles, merged where their sides touch. Holes stay holes.

    Each region has the number of its tiles as a measurement, its area in mm² if the resolution of the slide is known,
    and the mean and the largest value of each measurement of its tiles. Annotations are locked against being moved.

    Args:
        places: of the tiles, in level-0 pixels.
        high: (n,) which tiles are chosen.
        name: of the class of the annotations.
        measurements: by name, (n,) numbers each.
        offset_px0: as for :func:`tiles_geojson`.
        slide: its name. The ids of features are made of it, of the name, and of the first tile of the region.
    """
    corners = _corners_px0(places, offset_px0)
    columns = {key: np.asarray(values, dtype=np.float64) for key, values in (measurements or {}).items()}
    for key, values in {"high": np.asarray(high), **columns}.items():
        if values.shape != (len(corners),):
            raise ShapeError(f"{key} is {values.shape}, expected ({len(corners)},), one value for each tile")
    features: list[dict[str, Any]] = []
    for region, tiles in _merged(corners, places.size, np.flatnonzero(high)):
        found: dict[str, float] = {"Tiles": len(tiles)}
        if places.mpp is not None:
            found["Area mm^2"] = _shortened(region.area * (places.mpp / 1000) ** 2)
        for key, values in columns.items():
            known = values[tiles][np.isfinite(values[tiles])]
            if len(known):
                found |= {f"{key} mean": _shortened(known.mean()), f"{key} max": _shortened(known.max())}
        rings = [region.exterior, *region.interiors]
        properties = {
            "objectType": "annotation",
            "name": f"{name} {len(features) + 1}",
            "classification": {"name": name, "color": list(REGION_COLOUR)},
            "isLocked": True,
            "measurements": found,
        }
        geometry = {"type": "Polygon", "coordinates": [_ring(list(ring.coords)) for ring in rings]}
        features.append(_feature(f"{slide}/{name}/{tiles[0]}", geometry, properties))
    return {"type": "FeatureCollection", "features": features}


def geojson_bytes(collection: Mapping[str, Any]) -> bytes:
    """The text of a collection, without needless blanks."""
    return json.dumps(collection, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()


def write_geojson(path: str | Path, collection: Mapping[str, Any]) -> Path:
    """Writes a collection, and returns where: with ``.gz`` added to the name if it is large. QuPath reads both."""
    path, content = Path(path), geojson_bytes(collection)
    if len(content) > LARGE_BYTES:
        path, content = path.with_name(f"{path.name}.gz"), gzip.compress(content, compresslevel=6, mtime=0)
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)
    return path


def _corners_px0(places: TilePlaces, offset_px0: tuple[float, float]) -> NDArray[np.float64]:
    if places.unit != "px0":
        known = {"um": "micrometres", "px": "pixels of an unknown level", "steps": "tile steps"}.get(places.unit)
        raise DataError(
            "places of tiles",
            f"are in {known or places.unit}, but QuPath needs level-0 pixels",
            "take features whose coordinates are level-0 pixels, as those of psamil extract and TRIDENT",
        )
    return places.corners - np.asarray(offset_px0, dtype=np.float64)


def _feature(name: str, geometry: dict[str, Any], properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Feature", "id": str(uuid.uuid5(ID_SPACE, name)), "geometry": geometry, "properties": properties}


def _ring(points: list[tuple[float, float]]) -> list[list[float]]:
    """Whole numbers as such: QuPath takes both, and files are smaller."""
    return [[int(value) if value.is_integer() else value for value in map(float, point)] for point in points]


def _column(name: str, values: NDArray[Any], n: int) -> list[float | None]:
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.shape != (n,):
        raise ShapeError(f"the measurement {name!r} is {numbers.shape}, expected ({n},), one value for each tile")
    finite = np.isfinite(numbers).tolist()
    return [_shortened(value) if known else None for value, known in zip(numbers.tolist(), finite, strict=True)]


def _shortened(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def _merged(
    corners: NDArray[np.float64], size: float, chosen: NDArray[np.int64]
) -> list[tuple[Any, NDArray[np.int64]]]:
    """Polygons and the tiles of each, in the order of their first tiles.

    Squares grow by half the gap that counts as touching, are united, and shrink by it again.
    """
    try:
        import shapely
    except ImportError as error:
        raise MissingExtraError("shapely", "slides", "merging tiles into regions") from error
    if not len(chosen):
        return []
    grown = TOUCHING_SHARE / 2 * size
    squares = shapely.box(*(corners[chosen] - grown).T, *(corners[chosen] + size + grown).T)
    united = shapely.buffer(shapely.union_all(squares), -grown, join_style="mitre")
    is_whole = float(size).is_integer() and (corners == corners.round()).all()
    exact = shapely.set_precision(united, 1.0 if is_whole else FINEST_PX0)
    regions = shapely.get_parts(exact)
    tile, region = shapely.STRtree(regions).query(shapely.points(corners[chosen] + size / 2), predicate="within")
    order = np.lexsort((tile, region))
    members = np.split(chosen[tile[order]], np.searchsorted(region[order], np.arange(1, len(regions))))
    return sorted(zip(regions, members, strict=True), key=lambda found: int(found[1][0]))
