"""Drawn slides whose label is the arrangement of a tumour, and nothing else.

Every slide has nests of a tumour in a tissue of stroma, glands and lymphocytes. In positive slides the nests lie
side by side and make one lesion; in negative slides each of them lies alone. All else is the same by construction:

- Tissue is drawn on a lattice of cells of 224 px, one piece per cell, and a piece never crosses the edge of its cell.
  Tiles of 224 px at 0.5 um per pixel, from the corner of the slide, are these cells: single tiles look the same in both
  classes.
- The outline, the number of nests, places for a lesion, places for single nests and the stain are drawn before the
  label decides which of the places are used. Nests lie where there is tissue all around.
- Hospitals stain in their own way, slides of one hospital differ a little, and neither depends on the label.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from psamil.errors import DataError, MissingExtraError, OptionError
from psamil.files import atomic_write, write_json
from psamil.slides.procedural_sprites import CELL_PX, Floats
from psamil.slides.procedural_tissue import (
    FIELD_PER_CELL,
    GLANDS,
    LYMPHOCYTES,
    STROMA,
    TUMOUR,
    Palette,
    Stain,
    paint,
    smooth_field,
)
from psamil.slides.pyramid import write_pyramid

MPP = 0.5
CELL_UM = CELL_PX * MPP
NESTS = (5, 8)  # per slide, from and to
APART_STEPS = 2.0  # distance that single nests exceed
MIN_TILES = 90  # with fewer there is no room for them
GLAND_SHARE, LYMPHOCYTE_SHARE = 0.45, 0.1  # of the cells deep in the tissue that hold no nest
SITE_SPREAD, SLIDE_SPREAD = 0.2, 0.07  # of the strength of the stain, relative
ATTEMPTS = 50

Places = NDArray[np.int64]  # (n, 2) row and column of cells


def draw_slides(
    out: Path, *, slides: int = 60, tiles: int = 110, tile_spread: float = 0.15, sites: int = 4, seed: int = 0
) -> Path:
    """Draws a cohort of slides, much like H&E, whose label depends only on how nests of a tumour are arranged.

    Example: psamil draw-slides cohort --slides 60

    ``OUT/slides/<slide>.tiff`` are pyramids of 0.5 um per pixel. ``OUT/lesions/<slide>.geojson`` outlines the lesion of
    a positive slide as QuPath does. ``OUT/labels.csv`` has a row per slide and is written last. The same arguments give
    the same pictures.

    Args:
        out: new folder of the cohort.
        slides: number of slides; half of them are positive.
        tiles: median number of tiles of 112 um (224 px) on the tissue of a slide, at least 90.
        tile_spread: standard deviation of the logarithm of the number of tiles.
        sites: number of hospitals, each with its own stain.
        seed: of all randomness.

    Returns:
        The label table.
    """
    try:
        import PIL  # noqa: F401
        import shapely  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(str(error.name), "slides", "drawing slides") from error
    for name, value, least in (("slides", slides, 2), ("tiles", tiles, MIN_TILES), ("sites", sites, 1)):
        if value < least:
            raise OptionError(f"{name} must be at least {least}, got {value}")
    if not 0 <= tile_spread <= 1:
        raise OptionError(f"tile_spread must be between 0 and 1, got {tile_spread:g}")
    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise DataError(out, "is not empty", "choose a new folder, or delete this one")
    random = np.random.default_rng([seed, 1])
    positive = random.permutation(slides) < slides // 2
    site_of = random.integers(sites, size=slides)
    stains = [Stain.draw(random, SITE_SPREAD) for _ in range(sites)]
    palette = Palette.draw(seed)
    console = Console(stderr=True)
    rows = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for i in progress.track(range(slides), description="slides"):
            random = np.random.default_rng([seed, 2, i])
            slide, site = f"slide_{i:03d}", int(site_of[i])
            n = max(MIN_TILES, round(tiles * math.exp(tile_spread * random.standard_normal())))
            cells, outline, lesion = draw_cells(n, bool(positive[i]), random)
            stain = Stain.draw(random, SLIDE_SPREAD, stains[site])
            write_pyramid(out / "slides" / f"{slide}.tiff", paint(cells, outline, palette, stain, random), MPP)
            if len(lesion):
                _write_lesion(out / "lesions" / f"{slide}.geojson", lesion)
            label = "positive" if positive[i] else "negative"
            rows.append({"case_id": f"case_{i:03d}", "slide_id": slide, "label": label, "site": f"site_{site}"})
    with atomic_write(out / "labels.csv") as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return out / "labels.csv"


def draw_cells(n: int, positive: bool, random: np.random.Generator) -> tuple[NDArray[np.int64], Floats, Places]:
    """What each cell of a slide of about n cells shows (-1: glass), the outline of its tissue, the cells of its lesion.

    See :func:`psamil.slides.procedural_tissue.paint` for the first two. A negative slide has no lesion.
    """
    count = int(random.integers(NESTS[0], NESTS[1] + 1))
    for _ in range(ATTEMPTS):
        outline = _outline(n, random)
        of_cells = outline.reshape(len(outline) // FIELD_PER_CELL, FIELD_PER_CELL, -1, FIELD_PER_CELL)
        tissue, deep = np.asarray((of_cells > 0).any((1, 3))), np.asarray((of_cells > 0.02).all((1, 3)))
        places = random.permutation(np.argwhere(deep))
        lesion, single = _side_by_side(places, count, random), _alone(places, count)
        if lesion is not None and single is not None:
            break
    else:
        raise OptionError(f"{count} nests that lie alone do not fit on {n} tiles; draw larger slides")
    cells = np.where(tissue, STROMA, -1)
    nests = lesion if positive else single
    cells[tuple(nests.T)] = TUMOUR
    rest = np.argwhere(deep & (cells != TUMOUR))
    ranked = rest[np.argsort(smooth_field(cells.shape, 3, random)[tuple(rest.T)])]  # pieces of a kind gather
    glands, lymphocytes = (round(share * len(rest)) for share in (GLAND_SHARE, LYMPHOCYTE_SHARE))
    cells[tuple(ranked[:glands].T)] = GLANDS
    cells[tuple(ranked[len(ranked) - lymphocytes :].T)] = LYMPHOCYTES
    return cells, outline, lesion if positive else lesion[:0]


def _outline(n: int, random: np.random.Generator) -> Floats:
    """A rounded piece of tissue of about n cells, with glass around it: above 0 inside, 0 at the edge."""
    radius = math.sqrt(n / math.pi)
    stretch = random.uniform(1, 1.35)
    waves, phase = np.arange(2, 7), random.uniform(0, 2 * math.pi, 5)
    sizes = random.uniform(0, 0.25, 5) / waves
    reach = radius * math.sqrt(stretch) * (1 + sizes.sum())
    half = math.ceil(reach) + 1
    y, x = np.mgrid[-half : half : 1 / FIELD_PER_CELL, -half : half : 1 / FIELD_PER_CELL] + 0.5 / FIELD_PER_CELL
    turn = random.uniform(0, math.pi)
    along = (x * math.cos(turn) + y * math.sin(turn)) / math.sqrt(stretch)
    across = (y * math.cos(turn) - x * math.sin(turn)) * math.sqrt(stretch)
    edge = 1 + (sizes * np.cos(waves * np.arctan2(across, along)[..., None] + phase)).sum(-1)
    inside = (edge - np.hypot(along, across) / radius).astype(np.float32)
    rows, columns = (np.flatnonzero((inside > 0).any(axis)) for axis in (1, 0))
    (top, bottom), (left, right) = (
        (side[0] // FIELD_PER_CELL - 1, side[-1] // FIELD_PER_CELL + 2) for side in (rows, columns)
    )  # one row of glass cells on every side
    padded = np.pad(inside, FIELD_PER_CELL, constant_values=-1)
    return padded[
        (top + 1) * FIELD_PER_CELL : (bottom + 1) * FIELD_PER_CELL,
        (left + 1) * FIELD_PER_CELL : (right + 1) * FIELD_PER_CELL,
    ]


def _side_by_side(places: Places, count: int, random: np.random.Generator) -> Places | None:
    """Connected cells around the first one, the nearer ones rather; None if there is no room."""
    if len(places) < count:
        return None
    near = np.hypot(*(places - places[0]).T) + random.uniform(0, 1.2, len(places))
    chosen = {tuple(places[0].tolist())}
    for place in places[np.argsort(near)].tolist() * 2:  # twice: what did not touch yet may do so later
        row, column = place
        if (
            len(chosen) < count
            and {(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)} & chosen
        ):
            chosen.add((row, column))
    return np.array(sorted(chosen)) if len(chosen) == count else None


def _alone(places: Places, count: int) -> Places | None:
    """The first cells that are more than APART_STEPS from each other; None if there is no room."""
    chosen: list[Places] = []
    for place in places:
        if len(chosen) < count and all(math.hypot(*(place - other)) > APART_STEPS for other in chosen):
            chosen.append(place)
    return np.stack(chosen) if len(chosen) == count else None


def _write_lesion(path: Path, lesion: Places) -> None:
    """As QuPath exports an annotation, in level-0 pixels."""
    import shapely

    corners = lesion[:, ::-1] * CELL_PX
    outline = shapely.union_all(shapely.box(*corners.T, *(corners + CELL_PX).T))
    feature = {
        "type": "Feature",
        "geometry": shapely.geometry.mapping(outline),
        "properties": {"objectType": "annotation", "classification": {"name": "Tumor", "color": [200, 0, 0]}},
    }
    write_json(path, {"type": "FeatureCollection", "features": [feature]})
