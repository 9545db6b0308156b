"""NumPy archives, one bag per file: plain ``.npz``, and the tile embeddings of slide2vec.

    <slide>.npz
      features | feats | embeddings | X        (n, dim)
      coords | xy | coordinates, or x and y    (n, 2), or (n,) each; left out where there are none
      unit                                     "px0", "um", "steps", or "px", which is also the default
      step, tile_size                          distance and side of the tiles, in unit
      mpp                                      micrometres per level-0 pixel
      continuous                               true for cells or spots, which lie on no lattice
      encoder                                  name
      feature_names                            (dim,) texts

    <output>/tile_embeddings/<slide>.npz, .pt  features (n, dim); an .npz may add tile_index (n,)
    <output>/tile_embeddings/<slide>.meta.json artifact_type, num_tiles, encoder_name, tile_size_lv0
    <output>/tiles/<slide>.coordinates.npz     tile_index, x and y in level-0 pixels
             <slide>.coordinates.meta.json     slide {base_spacing_um}, tiling {step_px_lv0, tile_size_lv0}

Arrays of Python objects are never loaded: unpickling them could run code.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psamil.errors import DataError
from psamil.readers.arrays import hollow, is_bomb, one_corner_per_tile, one_row_per_tile
from psamil.readers.pickled import load_pickled
from psamil.readers.tiles import Tiles
from psamil.readers.tilings import positive

NAME = "npz"

FEATURES_KEYS = ("features", "feats", "embeddings", "X", "feature", "feat", "embedding", "tile_embeddings")
COORDS_KEYS = ("coords", "xy", "coordinates", "coord", "positions")
UNITS = ("px0", "um", "px", "steps")
COMPANIONS = (".index.npz", ".coordinates.npz")  # positions of a bag that is another file
MAX_JSON_BYTES = 16 << 20

MADE_AGAIN = "make the file again, or leave it out"

Headers = dict[str, tuple[tuple[int, ...], "np.dtype[Any]"]]  # shape and dtype of every array


def recognise(path: Path) -> bool:
    if path.suffix == ".pt":
        return _is_slide2vec(path)
    if path.suffix != ".npz" or path.name.endswith(COMPANIONS):
        return False
    return _first(FEATURES_KEYS, headers(path)) is not None


def members(path: Path) -> list[str | None]:
    return [None]


def read(path: Path, member: str | None = None, *, with_features: bool = True) -> Tiles:
    return (_read_slide2vec if _is_slide2vec(path) else _read_plain)(path, with_features)


def headers(path: Path) -> Headers:
    """Shape and dtype of every array of the archive, checked against the bytes that it holds."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.endswith(".npy")]
            return {entry.filename.removesuffix(".npy"): _header(path, archive, entry) for entry in entries}
    except DataError:
        raise
    except Exception as error:  # the content decides what goes wrong
        raise _damaged(path, error) from error


def load_array(path: Path, key: str, arrays: Headers | None = None) -> NDArray[Any]:
    """One array of the archive, whose headers may be known. DataError if it is not there, damaged, or of objects."""
    arrays = headers(path) if arrays is None else arrays
    if key not in arrays:
        raise DataError(path, f"has no array {key!r}, only {', '.join(arrays) or 'none'}", MADE_AGAIN)
    if arrays[key][1].hasobject:
        cause = f"is refused: array {key!r} is made of pickled objects, which could run code"
        raise DataError(path, cause, "write it as plain numbers")
    try:
        with np.load(path, allow_pickle=False) as archive:
            return np.asarray(archive[key])
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, OSError, NotImplementedError) as error:
        raise _damaged(path, error) from error


def load_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; an empty one if there is no such file."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"larger than {MAX_JSON_BYTES >> 20} MiB")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(path, f"is damaged or no JSON ({error})", MADE_AGAIN) from error
    if not isinstance(content, dict):
        raise DataError(path, "does not hold a JSON object", MADE_AGAIN)
    return content


def _header(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype[Any]]:
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
        announced, held = prod(shape) * dtype.itemsize, entry.file_size - file.tell()
    if announced != held and not dtype.hasobject:
        cause = f"is damaged: {entry.filename!r} {shape} needs {announced} bytes, the file has {held} of it"
        raise DataError(path, cause, MADE_AGAIN)
    if is_bomb(announced, min(entry.compress_size, path.stat().st_size)):
        cause = f"is refused: {entry.filename!r} unpacks to {announced} bytes from {entry.compress_size}"
        raise DataError(path, cause, "write it without compression if that is right")
    return shape, dtype


def _read_plain(path: Path, with_features: bool) -> Tiles:
    arrays = headers(path)
    if "ptr" in arrays:
        raise DataError(path, "holds several bags, whose rows the array 'ptr' tells apart", "write one file per bag")
    stated = {key: _scalar(path, arrays, key) for key in ("unit", "step", "tile_size", "mpp", "continuous", "encoder")}
    unit = str(stated["unit"] or "px")
    if unit not in UNITS:
        raise DataError(path, f"has positions in the unknown unit {unit!r}", f"use one of {', '.join(UNITS)}")
    features = _features(path, arrays, with_features)
    return Tiles(
        features=features,
        coords=_coords(path, arrays, features),
        unit=unit,
        nominal_step=positive(stated["step"]),
        tile_size=positive(stated["tile_size"]),
        mpp=positive(stated["mpp"]),
        continuous=bool(stated["continuous"]),
        encoder=None if stated["encoder"] is None else str(stated["encoder"]),
        feature_names=_feature_names(path, arrays, features.shape[1]),
    )


def _features(path: Path, arrays: Headers, with_features: bool) -> NDArray[np.floating]:
    key = _first(FEATURES_KEYS, arrays)
    if key is None:
        found = ", ".join(arrays) or "nothing"
        raise DataError(path, f"has no features, only {found}", f"name them {FEATURES_KEYS[0]!r}")
    shape, dtype = arrays[key]
    features = load_array(path, key, arrays) if with_features or dtype.hasobject else hollow(shape, dtype)
    if dtype.kind in "iub":  # one-hot types, counts
        features = features.astype(np.float32) if with_features else hollow(shape, np.float32)
    return one_row_per_tile(path, features)


def _feature_names(path: Path, arrays: Headers, dim: int) -> tuple[str, ...] | None:
    if "feature_names" not in arrays:
        return None
    names = load_array(path, "feature_names", arrays).ravel()
    if len(names) != dim:
        raise DataError(path, f"has {len(names)} names for {dim} columns of features", MADE_AGAIN)
    return tuple(name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in names)


def _coords(path: Path, arrays: Headers, features: NDArray[Any]) -> NDArray[np.float64] | None:
    key = _first(COORDS_KEYS, arrays)
    if key is None and not {"x", "y"} <= arrays.keys():
        return None
    if key is not None:
        coords = load_array(path, key, arrays)
    elif arrays["x"][0] == arrays["y"][0]:
        coords = np.stack([load_array(path, axis, arrays) for axis in "xy"], -1)
    else:
        raise DataError(path, f"has x of shape {arrays['x'][0]} and y of shape {arrays['y'][0]}", MADE_AGAIN)
    if coords.dtype.kind not in "fiu":
        raise DataError(path, f"has positions of type {coords.dtype}", "write them as plain numbers")
    return one_corner_per_tile(path, coords, features)


def _scalar(path: Path, arrays: Headers, key: str) -> Any:
    if key not in arrays:
        return None
    value = load_array(path, key, arrays)
    if value.size != 1:
        raise DataError(path, f"has {key!r} of shape {value.shape}, not one value", MADE_AGAIN)
    return value.item()


def _is_slide2vec(path: Path) -> bool:
    return load_json(path.with_name(f"{path.stem}.meta.json")).get("artifact_type") == "tile_embeddings"


def _read_slide2vec(path: Path, with_features: bool) -> Tiles:
    about = load_json(path.with_name(f"{path.stem}.meta.json"))
    notes: tuple[str, ...] = ()
    if path.suffix == ".pt":
        pickled = load_pickled(path, with_features=with_features)
        features, tile_index, notes = one_row_per_tile(path, pickled.features), None, pickled.notes
    else:
        arrays = headers(path)
        features = _features(path, arrays, with_features)
        tile_index = load_array(path, "tile_index", arrays) if "tile_index" in arrays else None
    if about.get("num_tiles", len(features)) != len(features):
        cause = f"is incomplete: it has {len(features)} of the {about['num_tiles']} tiles that its .meta.json announces"
        raise DataError(path, cause, "extract the features of this slide again")
    tiles_folder = path.parent.parent / "tiles"
    corners = tiles_folder / f"{path.stem}.coordinates.npz"
    tiling = load_json(tiles_folder / f"{path.stem}.coordinates.meta.json")
    about_tiles = {**about, **tiling, **tiling.get("tiling", {})}  # older versions do not nest
    if len(features) and not corners.is_file():
        notes += (f"There are no positions: {corners} is missing.",)
    return Tiles(
        features=features,
        coords=_corners_px0(corners, tile_index, features),
        nominal_step=positive(about_tiles.get("step_px_lv0")),
        tile_size=positive(about_tiles.get("tile_size_lv0")),
        mpp=positive(tiling.get("slide", {}).get("base_spacing_um")),
        encoder=about.get("encoder_name"),
        notes=notes,
    )


def _corners_px0(path: Path, tile_index: NDArray[Any] | None, features: NDArray[Any]) -> NDArray[np.float64] | None:
    """Corners in the order of the features, which tile_index says where it is stored."""
    if not path.is_file():
        return None if len(features) else np.empty((0, 2))
    arrays = headers(path)
    if tile_index is None:
        return _coords(path, arrays, features)
    known = load_array(path, "tile_index", arrays)
    corners = _coords(path, arrays, known)
    row_of_tile = dict(zip(known.ravel().tolist(), range(known.size), strict=True))
    rows = [row_of_tile[tile] for tile in tile_index.ravel().tolist() if tile in row_of_tile]
    if corners is None or len(rows) != len(features):
        cause = f"has the positions of {len(rows)} of the {len(features)} tiles that have features"
        raise DataError(path, cause, "extract the features of this slide again")
    return corners[rows]


def _first(names: tuple[str, ...], found: Headers) -> str | None:
    return next((name for name in names if name in found), None)


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(path, f"is damaged, incomplete or no NumPy archive ({error or type(error).__name__})", MADE_AGAIN)
