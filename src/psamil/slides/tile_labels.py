"""Labels of tiles from outlines on slides, as :mod:`psamil.cohort.tile_labels` reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from psamil.errors import DataError, MissingExtraError
from psamil.files import atomic_write
from psamil.readers import find_bags, trident
from psamil.slides.annotations import read_polygons

LEAST_SHARE = 0.5  # of a tile that a lesion covers


def label_tiles(features: Path, outlines: Path, out: Path) -> None:
    """Writes ``OUT/<slide>.npy`` for each slide: 1 for tiles that outlined areas cover at least half, else 0.

    Args:
        features: folder of features in TRIDENT's layout.
        outlines: folder of ``<slide>.geojson`` in level-0 pixels. A slide without a file has nothing to outline.
        out: folder of the labels.
    """
    for ref in find_bags(features, format="trident").bags:
        tiles = trident.read(ref.path, with_features=False)
        if tiles.coords is None or tiles.tile_size is None:
            raise DataError(ref.path, "does not say where its tiles are, and how large", "extract the features again")
        outline = outlines / f"{ref.id}.geojson"
        covered = (
            covered_shares(outline, tiles.coords, tiles.tile_size) if outline.exists() else np.zeros(len(tiles.coords))
        )
        with atomic_write(out / f"{ref.id}.npy") as temporary, open(temporary, "wb") as file:
            np.save(file, covered >= LEAST_SHARE)


def covered_shares(outline: Path, coords_px0: NDArray[np.float64], size_px0: float) -> NDArray[np.float64]:
    """(n,) how much of each tile lies in the areas of a GeoJSON file."""
    try:
        import shapely
    except ImportError as error:
        raise MissingExtraError("shapely", "slides", "labels of tiles from outlines") from error
    areas = [shapely.make_valid(shapely.Polygon(rings[0], rings[1:])) for rings in read_polygons(outline)]
    tiles = shapely.box(*coords_px0.T, *(coords_px0 + size_px0).T)
    shares = shapely.area(shapely.intersection(tiles, shapely.union_all(areas))) / size_px0**2
    return np.asarray(shares, dtype=np.float64)
