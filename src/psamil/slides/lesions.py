r"""Lesions of a slide as an annotation outlines them, and as the CAMELYON16 challenge counts them.

What is annotated is the union of all areas of lesions without those that are excluded. The challenge's evaluation
counts with this area grown by 37.5 um, which is half of the size of 5 tumour cells: outlines less than 75 um apart are
one lesion, and a detection this close to it is a hit. Holes are filled. The length of a lesion is the major axis of the
ellipse with the same second moments as its grown area, :math:`4 \sqrt{\lambda_{max}}`; where it is below 275 um, which
is 200 um and twice the margin, the lesion is one of isolated tumour cells.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psamil.errors import DataError, MissingExtraError
from psamil.slides.annotations import MASK_SUFFIXES, Area, find_file, is_geojson, read_geojson, read_raster
from psamil.slides.asap_xml import read_asap_xml

MARGIN_UM = 37.5
LESION_CLASSES = ("", "_0", "_1", "lesion", "metastases", "tumor", "tumour")  # in lower case
EXCLUDED_CLASSES = ("_2", "exclusion", "ignore*", "normal")
MASK_PX_PER_TILE = 16  # resolution at which masks are read: about that of the challenge's evaluation


@dataclass(frozen=True, eq=False)
class Lesions:
    """Of one slide, in level-0 pixels."""

    annotated: Any  # shapely geometry: what is outlined
    regions: NDArray[Any]  # (k,) shapely polygons: the lesions as the challenge counts them
    lengths_um: tuple[float, ...]  # major axis of each; NaN where the resolution of the slide is not known


def find_annotation(folder: str | Path, name: str) -> Path | None:
    """The file of a slide: ``<name>.geojson``, ``.xml``, a mask ``<name>.png`` or ``<name>_mask.tif``; None without."""
    return find_file(folder, name, (*MASK_SUFFIXES, ".xml"))


def is_mask(path: Path) -> bool:
    """Whether an annotation is a picture, which tells where areas are only if the size of the slide is known."""
    return not is_geojson(path) and path.suffix.lower() != ".xml"


def read_outlines(path: Path, classes: Collection[str] | None = None) -> Any:
    """What GeoJSON or XML of ASAP outlines as lesions, as a shapely geometry; perhaps empty.

    Args:
        path: of the file.
        classes: of lesions. By default ``LESION_CLASSES``, "" being no class; then other classes than these and
            ``EXCLUDED_CLASSES`` are refused, since nobody knows what they mean.
    """
    shapely = _shapely()
    wanted = set(LESION_CLASSES if classes is None else (name.lower() for name in classes))
    left_out = set(EXCLUDED_CLASSES) - wanted
    areas = read_geojson(path) if is_geojson(path) else read_asap_xml(path)
    lesions = [area for area in areas if area.kind.lower() in wanted]
    excluded = [area for area in areas if area.kind.lower() in left_out]
    unknown = sorted({area.kind for area in areas if area.kind.lower() not in wanted | left_out})
    if unknown and classes is None:
        cause = f"has areas of the classes {', '.join(map(repr, unknown))}, which may be lesions or not"
        raise DataError(path, cause, "name the classes of lesions (--lesion-classes)")
    return shapely.difference(_union(lesions), _union(excluded))


def read_lesion_mask(path: Path, name: str, size_px0: tuple[int, int], tile_px0: float) -> Any:
    """What a mask marks as lesions, as a shapely geometry; perhaps empty.

    Args:
        path: of the mask, of the whole slide at any resolution.
        name: of the slide.
        size_px0: of the slide.
        tile_px0: side of a tile, which decides at which resolution the mask is read.
    """
    shapely = _shapely()
    mask = read_raster(path, name, size_px0, max(1.0, tile_px0 / MASK_PX_PER_TILE))
    steps = np.diff(np.pad(mask, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    (rows, starts), (_, ends) = np.nonzero(steps == 1), np.nonzero(steps == -1)  # runs of white pixels
    across, down = size_px0[0] / mask.shape[1], size_px0[1] / mask.shape[0]
    return shapely.union_all(shapely.box(starts * across, rows * down, ends * across, (rows + 1) * down))


def lesions_of(annotated: Any, mpp: float | None) -> Lesions:
    """The lesions of what is annotated.

    Args:
        annotated: shapely geometry in level-0 pixels.
        mpp: micrometres per level-0 pixel. Where it is not known, areas do not grow and lengths are NaN.
    """
    shapely = _shapely()
    grown = annotated if mpp is None else shapely.buffer(annotated, MARGIN_UM / mpp)
    filled = [shapely.Polygon(part.exterior) for part in shapely.get_parts(grown) if part.geom_type == "Polygon"]
    regions = shapely.get_parts(shapely.union_all(filled)) if filled else np.array([], dtype=object)
    lengths = tuple(math.nan if mpp is None else _major_axis(region) * mpp for region in regions)
    return Lesions(annotated, regions, lengths)


def overlaps(squares: NDArray[Any], polygons: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Squares and polygons that have area in common, as numbers of both, and this area."""
    shapely = _shapely()
    square, polygon = shapely.STRtree(polygons).query(squares, predicate="intersects")
    shapely.prepare(polygons)
    common = shapely.area(squares[square])
    edge = ~shapely.contains_properly(polygons[polygon], squares[square])  # cutting is slow: only where it must be
    common[edge] = shapely.area(shapely.intersection(polygons[polygon[edge]], squares[square[edge]]))
    return square, polygon, common


def _union(areas: list[Area]) -> Any:
    """Rings of fewer than three points, and outlines that are but a line, mark nothing."""
    shapely = _shapely()
    rings = [[ring for ring in area.rings if len(ring) > 2] for area in areas if len(area.rings[0]) > 2]
    polygons = shapely.make_valid([shapely.Polygon(outline, holes) for outline, *holes in rings])
    return shapely.union_all(polygons[shapely.area(polygons) > 0])


def _major_axis(region: Any) -> float:
    """Of the ellipse with the same second moments, which are sums over the edges of the outline."""
    points = np.asarray(region.exterior.coords)
    x, y = (points - points.mean(0)).T  # rounding stays small where the origin is near
    x0, x1, y0, y1 = x[:-1], x[1:], y[:-1], y[1:]
    cross = x0 * y1 - x1 * y0
    area = cross.sum() / 2
    mean = np.array([((x0 + x1) * cross).sum(), ((y0 + y1) * cross).sum()]) / (6 * area)
    xx, yy = ((a * a + a * b + b * b) @ cross / (12 * area) for a, b in ((x0, x1), (y0, y1)))
    xy = (x0 * y1 + 2 * x0 * y0 + 2 * x1 * y1 + x1 * y0) @ cross / (24 * area)
    covariance = np.array([[xx, xy], [xy, yy]]) - np.outer(mean, mean)
    return float(4 * np.sqrt(np.linalg.eigvalsh(covariance)[-1]))


def _shapely() -> Any:
    try:
        import shapely
    except ImportError as error:
        raise MissingExtraError("shapely", "slides", "reading annotations of lesions") from error
    return shapely
