"""CLAM and its relatives: ``h5_files/<slide>.h5`` and ``pt_files/<slide>.pt``, tiles in ``patches/<slide>.h5``.

- Feature files say nothing about their tiles: the side of a tile comes from ``patches/``, if these are the same tiles.
- Features are appended batch by batch: a killed run leaves a valid file with too few rows, seen only beside
  ``patches/``, or beside the ``.pt``, which is written when all rows are there.
- ``.pt`` files have no coordinates of their own; their rows are those of the ``.h5`` of the same slide, or of
  ``patches/``.
- Other files of features and coordinates without any attributes are read in the same way, with a leading batch axis or
  without, ``.h5`` or a ``.pt`` dictionary. Nothing says that their pixels are those of level 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from psamil.errors import DataError
from psamil.readers.arrays import one_corner_per_tile, one_row_per_tile, refuse_slide_vector
from psamil.readers.hdf5 import CheckedH5
from psamil.readers.pickled import load_pickled
from psamil.readers.tiles import Tiles
from psamil.readers.tilings import Tiling, positive

NAME = "clam"

H5 = (".h5", ".hdf5")
PT = (".pt", ".pth")
FEATURES_NAMES = ("features", "feats", "embeddings")


def recognise(path: Path) -> bool:
    """Any ``.h5`` with features, any ``.pt`` of features: ask the readers of other formats first."""
    if path.suffix.lower() in PT:
        refuse_slide_vector(path, load_pickled(path, with_features=False).features.shape)
        return True
    if path.suffix.lower() not in H5:
        return False
    with CheckedH5(path) as file:
        name = _features_name(file)
        if name is not None:
            refuse_slide_vector(path, file.shape(name))
        return name is not None


def members(path: Path) -> list[str | None]:
    return [None]


def read(path: Path, member: str | None = None, *, with_features: bool = True) -> Tiles:
    own = _read_pt if path.suffix.lower() in PT else _read_h5
    raw_features, raw_coords, notes = own(path, with_features)
    features = one_row_per_tile(path, raw_features)
    tilings = [Tiling.read(file) for file in _tiling_paths(path, has_coords=raw_coords is not None)]
    if raw_coords is None:
        raw_coords = _coords_of_neighbours(path, tilings, len(features))
    if raw_coords is None:
        return Tiles(features, None, unit="px", notes=notes)
    coords = one_corner_per_tile(path, raw_coords, features)
    notes += _check_completion(path, len(features))
    for tiling in tilings:
        tiling.check(path, coords)
    own_tiling = next((tiling for tiling in tilings if tiling.begins_with(coords)), None)
    tile_px0 = None if own_tiling is None else _tile_px0(own_tiling)
    is_level0 = own_tiling is not None or path.parent.name in ("h5_files", "pt_files")
    return Tiles(
        features=features,
        coords=coords,
        unit="px0" if is_level0 else "px",
        nominal_step=tile_px0,  # the step is not stored; it is the side of a tile unless the user chose another
        tile_size=tile_px0,
        notes=notes,
    )


def _read_h5(path: Path, with_features: bool) -> tuple[NDArray[Any], NDArray[Any] | None, tuple[str, ...]]:
    with CheckedH5(path) as file:
        name = _features_name(file)
        if name is None:
            raise DataError(path, "has no dataset of features", f"it has {', '.join(sorted(file.names)) or 'none'}")
        coords = file.read("coords") if "coords" in file.names else None
        return file.read(name, with_values=with_features), coords, ()


def _read_pt(path: Path, with_features: bool) -> tuple[NDArray[Any], NDArray[Any] | None, tuple[str, ...]]:
    pickled = load_pickled(path, with_features=with_features)
    return pickled.features, pickled.coords, pickled.notes


def _features_name(file: CheckedH5) -> str | None:
    return next((name for name in FEATURES_NAMES if name in file.names), None)


def _tiling_paths(path: Path, has_coords: bool) -> Iterator[Path]:
    """``patches/<slide>.h5`` in the folder of the features or beside it.

    CLAM's users often keep it in a folder beside that of the features. There could be several such folders, so they are
    searched only if the features have coordinates to compare.
    """
    home = path.parent.parent if path.parent.name in ("h5_files", "pt_files") else path.parent
    folders = [home / "patches", home.parent / "patches"]
    if has_coords and home != path.parent:
        folders += sorted(home.parent.glob("*/patches"))
    for folder in dict.fromkeys(folders):
        file = folder / f"{path.stem}.h5"
        if folder != path.parent and file.is_file():
            yield file


def _check_completion(path: Path, tiles: int) -> tuple[str, ...]:
    """CLAM writes ``pt_files/<slide>.pt`` after the last row of ``h5_files/<slide>.h5``. A note if it is missing."""
    folder = path.parent.parent / "pt_files"
    if path.parent.name != "h5_files" or not folder.is_dir():
        return ()
    marker = folder / f"{path.stem}.pt"
    if not marker.is_file():
        return (f"There is no {marker}, which CLAM writes when a slide is complete: check that all tiles are there.",)
    try:
        complete = one_row_per_tile(marker, load_pickled(marker, with_features=False).features).shape[0]
    except DataError as error:
        raise DataError(path, f"may be incomplete: {marker} beside it {error.cause}", error.remedy) from error
    if complete != tiles:
        cause = f"is incomplete or mixed up: it has {tiles} tiles, and {marker} has {complete}"
        raise DataError(path, cause, "extract the features of this slide again")
    return ()


def _coords_of_neighbours(path: Path, tilings: list[Tiling], tiles: int) -> NDArray[Any] | None:
    """Coordinates for rows that have none: of the same slide's ``.h5``, or of its tiling, if it has as many rows."""
    beside: list[tuple[Path, NDArray[Any]]] = []
    h5 = path.parent.parent / "h5_files" / f"{path.stem}.h5"
    if path.parent.name == "pt_files" and h5.is_file():
        with CheckedH5(h5) as file:
            coords = file.read("coords")
            beside.append((h5, coords[0] if coords.ndim == 3 and len(coords) == 1 else coords))
    beside += [(tiling.path, tiling.coords) for tiling in tilings]
    fitting = next((coords for _, coords in beside if len(coords) == tiles), None)
    if fitting is None and beside:
        rows = ", ".join(f"{len(coords)} in {file}" for file, coords in beside)
        cause = f"has features of {tiles} tiles, but there are coordinates of {rows}: incomplete or mixed up"
        raise DataError(path, cause, "extract the features of this slide again")
    return fitting


def _tile_px0(tiling: Tiling) -> float | None:
    """Side of a tile in level-0 pixels, as CLAM computes it. The old pipeline knows it by the images it stored."""
    side_px = positive(tiling.attributes.get("patch_size", tiling.image_px))
    downsample = positive(tiling.attributes.get("downsample"))
    return side_px * int(downsample) if side_px and downsample else None
