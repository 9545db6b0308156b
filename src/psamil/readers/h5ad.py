"""AnnData files of spatial omics: ``.h5ad``.

    X                  (n, dim) features, dense or sparse
    obsm/spatial       (n, 2) positions of cells or spots; further columns are left out
    obs                columns; x and y are taken where there is no obsm/spatial
    obs/sample         (or slide, image, library_id, ...) the bag of each row, if the file holds several

Nothing in the file says what positions are measured in: they count as pixels of an unknown level, unless columns of obs
are named otherwise (x_um).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from psamil.errors import DataError, MissingExtraError
from psamil.readers.arrays import MAX_SPARSITY, hollow, is_bomb, one_corner_per_tile, plain_float
from psamil.readers.instance_columns import bag_column, position_columns
from psamil.readers.tiles import Tiles

NAME = "h5ad"

SPATIAL_KEYS = ("spatial", "X_spatial")
MADE_AGAIN = "write the file again with a present version of anndata, or leave it out"


def recognise(path: Path) -> bool:
    return path.suffix == ".h5ad"


def members(path: Path) -> list[str | None]:
    with _opened(path) as (file, read_elem):
        bags = _bags(path, _obs(path, file, read_elem))
    return [None] if bags is None else [*dict.fromkeys(bags)]


def read(path: Path, member: str | None = None, *, with_features: bool = True) -> Tiles:
    with _opened(path) as (file, read_elem):
        obs = _obs(path, file, read_elem)
        rows = _rows_of(path, _bags(path, obs), member)
        coords, unit = _coords(path, file, read_elem, obs)
        names = _feature_names(file, read_elem)
        features = _features(path, file, read_elem, len(obs), rows, with_features)
    if coords is not None:
        coords = one_corner_per_tile(path, coords if rows is None else coords[rows], features)
        without = int((~np.isfinite(coords)).any(1).sum())
        if without:
            raise DataError(path, f"has {without} of {len(coords)} rows without a position", "remove these rows")
    if names is not None and len(names) != features.shape[1]:
        raise DataError(path, f"has {len(names)} rows in 'var' for {features.shape[1]} columns of features", MADE_AGAIN)
    return Tiles(features, coords, unit=unit, continuous=coords is not None, feature_names=names)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[h5py.File, Callable[[Any], Any]]]:
    """The file, and anndata's function that decodes its parts."""
    try:
        import anndata
    except ImportError as error:
        raise MissingExtraError("anndata", "h5ad", "reading .h5ad") from error
    try:
        from anndata.io import read_elem
    except ModuleNotFoundError:  # its place before version 0.11
        read_elem = anndata.experimental.read_elem
    try:
        with h5py.File(path, "r") as file:
            _refuse_foreign(path, file)
            yield file, read_elem
    except (DataError, MissingExtraError):
        raise
    except Exception as error:  # h5py and anndata raise errors of many kinds for damaged files
        raise DataError(path, f"is damaged, incomplete or not HDF5 ({error})", MADE_AGAIN) from error


def _refuse_foreign(path: Path, group: h5py.Group) -> None:
    """Links and external storage can pull in other files of the machine; missing chunks would read as zeros."""
    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise DataError(path, f"is refused: {group.name}/{name} is a link to another place", MADE_AGAIN)
        part = group[name]
        if isinstance(part, h5py.Group):
            _refuse_foreign(path, part)
            continue
        if part.is_virtual or part.id.get_create_plist().get_external_count():
            raise DataError(path, f"is refused: {part.name} is stored outside of this file", MADE_AGAIN)
        if part.shape is not None:  # AnnData writes None without a shape
            _refuse_announced(path, part)


def _refuse_announced(path: Path, part: h5py.Dataset) -> None:
    """Values that the file announces but does not hold, or that are no numbers or texts."""
    stored = part.id.get_storage_size()
    if part.dtype.kind == "O" and h5py.check_string_dtype(part.dtype) is None:
        raise DataError(path, f"is refused: {part.name} is made of objects, not of numbers or texts", MADE_AGAIN)
    if part.chunks is not None:
        expected = prod(-(-size // side) for size, side in zip(part.shape, part.chunks, strict=True))
        if part.id.get_num_chunks() != expected:
            cause = f"is incomplete: {part.name} has {part.id.get_num_chunks()} of {expected} pieces"
            raise DataError(path, cause, MADE_AGAIN)
    elif part.nbytes > stored:
        raise DataError(path, f"is incomplete: {part.name} needs {part.nbytes} bytes, and has {stored}", MADE_AGAIN)
    if is_bomb(part.nbytes, stored):
        raise DataError(path, f"is refused: {part.name} unpacks to {part.nbytes} bytes from {stored}", MADE_AGAIN)


def _obs(path: Path, file: h5py.File, read_elem: Callable[[Any], Any]) -> pd.DataFrame:
    obs = read_elem(file["obs"]) if "obs" in file else None
    if not isinstance(obs, pd.DataFrame):
        raise DataError(path, "has no table 'obs' of its rows", MADE_AGAIN)
    return obs


def _feature_names(file: h5py.File, read_elem: Callable[[Any], Any]) -> tuple[str, ...] | None:
    var = read_elem(file["var"]) if "var" in file else None
    return tuple(map(str, var.index)) if isinstance(var, pd.DataFrame) else None


def _bags(path: Path, obs: pd.DataFrame) -> list[str] | None:
    """Name of the bag of each row."""
    column = bag_column([str(name) for name in obs.columns])
    if column is None and "library_id" in obs:
        column = "library_id"
    if column is None:
        return None
    if obs[column].isna().any():
        raise DataError(path, f"has {int(obs[column].isna().sum())} rows without obs {column!r}", "complete the column")
    return [str(bag) for bag in obs[column]]


def _rows_of(path: Path, bags: list[str] | None, member: str | None) -> NDArray[np.intp] | None:
    """Rows of the bag; None for all."""
    if bags is None or (member is None and len(set(bags)) == 1):
        return None
    rows = np.flatnonzero(np.array(bags) == member)
    if not len(rows):
        names = list(dict.fromkeys(bags))
        cause = f"holds {len(names)} bags" if member is None else f"has no bag {member!r}"
        raise DataError(path, cause, f"name one of: {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}")
    return rows


def _coords(
    path: Path, file: h5py.File, read_elem: Callable[[Any], Any], obs: pd.DataFrame
) -> tuple[NDArray[Any] | None, str]:
    """(all rows, 2) positions and their unit."""
    key = next((key for key in SPATIAL_KEYS if key in file.get("obsm", {})), None)
    if key is not None:
        spatial = np.asarray(read_elem(file["obsm"][key]))
        if spatial.ndim != 2 or spatial.shape[1] < 2 or len(spatial) != len(obs) or spatial.dtype.kind not in "fiu":
            cause = f"has obsm/{key} of shape {spatial.shape} {spatial.dtype} for {len(obs)} rows"
            raise DataError(path, cause, MADE_AGAIN)
        return spatial[:, :2], "px"
    x, y, unit = position_columns([str(name) for name in obs.select_dtypes("number").columns])
    return (None, unit) if x is None else (obs[[x, y]].to_numpy(np.float64), unit)


def _features(
    path: Path,
    file: h5py.File,
    read_elem: Callable[[Any], Any],
    n: int,
    rows: NDArray[np.intp] | None,
    with_features: bool,
) -> NDArray[np.floating]:
    """(rows, dim), dense."""
    x = file.get("X")
    if x is None or (isinstance(x, h5py.Dataset) and x.ndim != 2):
        raise DataError(path, "has no matrix X of features", "store the features in X")
    is_sparse = isinstance(x, h5py.Group)
    shape = tuple(int(size) for size in (x.attrs["shape"] if is_sparse else x.shape))
    stored = (x["data"] if is_sparse else x).dtype
    if shape[0] != n or stored.kind not in "fiub":
        raise DataError(path, f"has X of shape {shape} {stored} for {n} rows", MADE_AGAIN)
    dtype = plain_float(stored)
    if is_sparse and is_bomb(prod(shape) * dtype.itemsize, x["data"].nbytes, MAX_SPARSITY):
        raise DataError(path, f"is refused: X {shape} is much larger than its {x['data'].nbytes} bytes", MADE_AGAIN)
    if not with_features:
        return hollow((n if rows is None else len(rows), shape[1]), dtype)
    values = read_elem(x)
    values = values if rows is None else values[rows]
    return np.asarray(values.toarray() if is_sparse else values).astype(dtype, copy=False)
