"""STAMP: ``<extractor>-<hash>/<slide>.h5`` with ``feats`` (n, dim) float16 and ``coords`` (n, 2) in micrometres.

- Since 2.1 ``tile_size_um`` is the side of a tile, in 2.0 ``tile_size`` together with ``unit`` "um".
- Before, coordinates were pixels of tiles resized to 224 px for 256 um; there is no unit, the distance tells.
- A file that has any attribute of these versions but no unit is damaged: it is refused rather than taken for pixels.
- The micrometres per pixel that can be computed from the attributes are those of the resized tile, not of the slide.
- Files of slides and patients have the same dataset with one vector.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psamil.errors import DataError
from psamil.readers.arrays import one_corner_per_tile, one_row_per_tile, refuse_slide_vector, slide_vector
from psamil.readers.hdf5 import CheckedH5
from psamil.readers.tiles import Tiles
from psamil.readers.tilings import positive

NAME = "stamp"

H5 = (".h5", ".hdf5")
FEATURES_NAMES = ("feats", "patch_embeddings")  # the second: multiplex images, without coordinates
HISTORIC_TILE_PX, HISTORIC_TILE_UM = 224, 256.0
ATTRIBUTES_WITH_UNIT = ("stamp_version", "tile_size_um", "tile_size_px", "code_hash", "feat_type")


def recognise(path: Path) -> bool:
    """The name of the dataset is STAMP's own."""
    if path.suffix.lower() not in H5:
        return False
    with CheckedH5(path) as file:
        name = next((name for name in FEATURES_NAMES if name in file.names), None)
        if name is not None:
            _refuse_slides_and_patients(path, file.shape(name), file.names, file.attributes())
        return name is not None


def members(path: Path) -> list[str | None]:
    return [None]


def read(path: Path, member: str | None = None, *, with_features: bool = True) -> Tiles:
    with CheckedH5(path) as file:
        name = next((name for name in FEATURES_NAMES if name in file.names), FEATURES_NAMES[0])
        raw_features = file.read(name, with_values=with_features)
        raw_coords = file.read("coords") if "coords" in file.names else None
        about = file.attributes()
        _refuse_slides_and_patients(path, raw_features.shape, file.names, about)
    features = one_row_per_tile(path, raw_features)
    encoder = about.get("extractor")
    if raw_coords is None:
        return Tiles(features, None, unit="px", encoder=encoder)
    coords = one_corner_per_tile(path, raw_coords, features)
    tile_size = positive(about.get("tile_size_um")) or positive(about.get("tile_size"))
    if about.get("unit") == "um":
        return Tiles(features, coords, "um", nominal_step=tile_size, tile_size=tile_size, encoder=encoder)
    _refuse_lost_unit(path, about, tile_size)
    if round(tile_size or _smallest_distance(coords) or 0) == HISTORIC_TILE_PX:
        coords *= HISTORIC_TILE_UM / HISTORIC_TILE_PX
        note = f"Coordinates have no unit; taken as pixels of {HISTORIC_TILE_UM:g} um tiles of {HISTORIC_TILE_PX} px."
        return Tiles(features, coords, "um", HISTORIC_TILE_UM, HISTORIC_TILE_UM, encoder=encoder, notes=(note,))
    note = "Coordinates have no unit; distances in micrometres are not known either."
    return Tiles(features, coords, "px", nominal_step=tile_size, tile_size=tile_size, encoder=encoder, notes=(note,))


def _refuse_slides_and_patients(
    path: Path, shape: tuple[int, ...], names: frozenset[str], about: dict[str, Any]
) -> None:
    refuse_slide_vector(path, shape)
    if about.get("feat_type", "tile") != "tile" or ("coords" not in names and "encoder" in about):
        raise slide_vector(path, shape)


def _refuse_lost_unit(path: Path, about: dict[str, Any], tile_size: float | None) -> None:
    is_recent = any(name in about for name in ATTRIBUTES_WITH_UNIT)
    if "unit" in about or is_recent or (tile_size is not None and round(tile_size) != HISTORIC_TILE_PX):
        stated = f"the unit {str(about['unit'])[:20]!r}" if "unit" in about else "no unit"
        cause = f"is damaged or altered: its coordinates have {stated}, where this version of STAMP writes 'um'"
        raise DataError(path, cause, "make the file again; or write the attribute `unit`, if you know it")


def _smallest_distance(coords: NDArray[np.float64]) -> float | None:
    """Along x or y, between tiles anywhere."""
    gaps = np.concatenate([np.diff(np.unique(coords[:, axis])) for axis in (0, 1)])
    return float(gaps.min()) if len(gaps) else None
