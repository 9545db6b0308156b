"""Stores of wsidata and LazySlide: one zarr folder per slide, written by zarr 2 or 3.

    <slide>.zarr/  or  <slide>.scene-<k>.zarr/
      zarr.json or .zattrs             slide_properties {mpp, ...}, tile_spec {<tile key>: {width, stride_width, ...}}
      shapes/<tile key>/shapes.parquet tile_id, [x, y,] geometry: a box per tile, in level-0 pixels
      tables/<model>_<tile key>/       X (n, dim), obs {tile_id, ...}: the features, as AnnData lays them out

A store can hold several tables: of several encoders, or of several tilings. Features and tiles are joined by tile_id;
their order differs. Chunks that are missing from a zarr array read as zeros, so they are counted before reading. Arrays
are refused whose codecs are not known to do nothing but unpack numbers and texts, or that are much larger than what is
stored of them.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from psamil.errors import DataError, MissingExtraError
from psamil.readers.arrays import MAX_COMPRESSION, MAX_SPARSITY, hollow, is_bomb, plain_float
from psamil.readers.tiles import Tiles
from psamil.readers.tilings import positive

NAME = "wsidata"

CODECS = {"blosc", "zlib", "gzip", "zstd", "lz4", "bz2", "lzma", "shuffle", "delta", "crc32", "crc32c", "adler32"}
CODECS |= {"fletcher32", "fixedscaleoffset", "bitround", "quantize", "packbits", "astype", "vlen-utf8", "vlen-bytes"}
CODECS |= {"bytes", "transpose", "sharding_indexed"}  # of zarr 3 alone
MAX_METADATA_BYTES = 16 << 20
EXTRACT_AGAIN = "extract the features of this slide again"


def recognise(path: Path) -> bool:
    if not (path.is_dir() and ((path / "zarr.json").is_file() or (path / ".zgroup").is_file())):
        return False
    attributes = _attributes(path)
    return "tile_spec" in attributes or "slide_properties" in attributes


def members(path: Path) -> list[str | None]:
    tables = _feature_tables(path)
    if not tables:
        raise DataError(path, "has no table of tile features", "extract features with LazySlide first")
    return [None] if len(tables) == 1 else [*sorted(tables)]


def read(path: Path, member: str | None = None, *, with_features: bool = True) -> Tiles:
    tables = _feature_tables(path)
    if member is None and len(tables) == 1:
        member = next(iter(tables))
    if member not in tables:
        names = ", ".join(sorted(tables)) or "none"
        cause = f"has no feature table {member!r}" if member else f"has {len(tables)} feature tables"
        raise DataError(path, cause, f"name one of: {names}")
    assert member is not None
    tile_key = tables[member]
    table = path / "tables" / member
    tile_ids = _tile_ids(table)
    features = _features(table / "X", len(tile_ids), with_features)
    coords, tiles_in_store = _corners_px0(path / "shapes" / tile_key / "shapes.parquet", tile_ids)
    step_px0, size_px0 = _step_and_size_px0(_attributes(path).get("tile_spec", {}).get(tile_key, {}))
    note = f"The table {member} has features of {len(tile_ids)} of the {tiles_in_store} tiles {tile_key!r}."
    return Tiles(
        features=features,
        coords=coords,
        unit="px0",
        nominal_step=step_px0,
        tile_size=size_px0,
        mpp=positive((_attributes(path).get("slide_properties") or {}).get("mpp")),
        encoder=member.removesuffix(f"_{tile_key}"),
        notes=(note,) if len(tile_ids) < tiles_in_store else (),
    )


def _attributes(group: Path) -> dict[str, Any]:
    """The user attributes of a group, of zarr 3 or 2."""
    file = group / "zarr.json"
    if not file.is_file():
        file = group / ".zattrs"
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
        attributes = content.get("attributes", {}) if file.name == "zarr.json" else content
        return dict(attributes)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(file, f"is damaged: no zarr attributes ({error})", EXTRACT_AGAIN) from error


def _feature_tables(path: Path) -> dict[str, str]:
    """Name of each table of tile features, and the key of the tiles that it describes."""
    tile_keys = {shapes.parent.name for shapes in path.glob("shapes/*/shapes.parquet")} - {"tissues"}
    tables = {}
    for table in sorted(path.glob("tables/*")):
        if (table / "X").is_dir():
            region = _region(table)
            if region is None:  # <model>_<tile key>
                region = next((key for key in sorted(tile_keys, key=len) if table.name.endswith(f"_{key}")), None)
            if region in tile_keys:
                tables[table.name] = region
    return tables


def _region(table: Path) -> str | None:
    """The shapes that a table describes, which spatialdata notes in its attributes and AnnData in its uns."""
    region = _attributes(table).get("region")
    if region is None and (table / "uns" / "spatialdata_attrs" / "region").is_dir():
        region = _values(table / "uns" / "spatialdata_attrs" / "region").tolist()
    if isinstance(region, list):
        region = region[0] if len(region) == 1 else None
    return None if region is None else str(region)


def _tile_ids(table: Path) -> NDArray[Any]:
    """tile_id of each row of features."""
    column = table / "obs" / str(_attributes(table).get("instance_key") or "tile_id")
    if not column.is_dir():
        raise DataError(table, f"has no column obs/{column.name}, so its rows cannot be joined to tiles", EXTRACT_AGAIN)
    if (column / "codes").is_dir():
        tile_ids = _values(column / "categories")[_values(column / "codes")]
    elif (column / "values").is_dir():  # integers of which some could be missing
        tile_ids = _values(column / "values")
    else:
        tile_ids = _values(column)
    if len(np.unique(tile_ids)) < len(tile_ids):
        cause = f"has {len(tile_ids)} rows for {len(np.unique(tile_ids))} tile ids"
        raise DataError(table, cause, EXTRACT_AGAIN)
    return tile_ids


def _features(x: Path, rows: int, with_features: bool) -> NDArray[np.floating]:
    attributes = _attributes(x)
    sparse = str(attributes.get("encoding-type", "")).removesuffix("_matrix")
    if sparse in ("csr", "csc"):
        shape, stored = tuple(attributes["shape"]), _open_array(x / "data").dtype
    else:
        array = _open_array(x)
        shape, stored = array.shape, array.dtype
    if len(shape) != 2 or shape[0] != rows:
        raise DataError(x, f"has features of shape {tuple(shape)} for {rows} tile ids", EXTRACT_AGAIN)
    if stored.kind not in "fiub":
        raise DataError(x, f"has features of type {stored}", EXTRACT_AGAIN)
    dtype = plain_float(stored)
    _refuse_bomb(x, prod(shape) * dtype.itemsize, MAX_SPARSITY if sparse in ("csr", "csc") else MAX_COMPRESSION)
    if not with_features:
        return hollow(shape, dtype)
    if sparse in ("csr", "csc"):
        return _dense(x, sparse, shape).astype(dtype, copy=False)
    return _values(x, every_chunk=True).astype(dtype, copy=False)


def _dense(x: Path, kind: str, shape: tuple[int, int]) -> NDArray[Any]:
    from scipy import sparse

    parts = (_values(x / "data"), _values(x / "indices"), _values(x / "indptr"))
    try:
        matrix = (sparse.csr_matrix if kind == "csr" else sparse.csc_matrix)(parts, shape=shape)
        matrix.check_format(full_check=True)
    except ValueError as error:
        raise DataError(x, f"is damaged: no sparse matrix ({error})", EXTRACT_AGAIN) from error
    return np.asarray(matrix.toarray())


def _corners_px0(file: Path, tile_ids: NDArray[Any]) -> tuple[NDArray[np.float64], int]:
    """(n, 2) corner of the tile of each id, and how many tiles the file holds."""
    parquet = _import("pyarrow.parquet")
    try:
        names = parquet.read_schema(file).names
        id_column = next((name for name in ("tile_id", "__index_level_0__") if name in names), None)
        columns = ["x", "y"] if {"x", "y"} <= set(names) else ["geometry"]
        if id_column is None or not set(columns) <= set(names):
            raise DataError(file, f"has columns {', '.join(names)}, not tile_id and geometry", "tile the slide again")
        table = parquet.read_table(file, columns=[id_column, *columns])
        shape_ids = table[id_column].to_numpy()
        if columns == ["geometry"]:
            shapely = _import("shapely")
            corners = shapely.bounds(shapely.from_wkb(table["geometry"].to_numpy()))[:, :2]
        else:
            corners = np.stack([table["x"].to_numpy(), table["y"].to_numpy()], 1).astype(np.float64)
    except (DataError, MissingExtraError):
        raise
    except Exception as error:  # pyarrow and shapely raise errors of many kinds on damaged files
        raise DataError(file, f"is damaged ({error})", "tile the slide again") from error
    index = pd.Index(shape_ids.astype(str) if tile_ids.dtype.kind not in "iu" else shape_ids)
    if not index.is_unique:
        raise DataError(file, "has several tiles of the same tile_id", "tile the slide again")
    rows = index.get_indexer(pd.Index(tile_ids.astype(str) if tile_ids.dtype.kind not in "iu" else tile_ids))
    if (rows < 0).any():
        cause = f"lacks {int((rows < 0).sum())} of the {len(rows)} tiles that have features"
        raise DataError(file, cause, EXTRACT_AGAIN)
    return corners[rows], len(shape_ids)


def _step_and_size_px0(spec: dict[str, Any]) -> tuple[float | None, float | None]:
    """Distance and side of tiles in level-0 pixels, rounded down as the tools do."""
    downsample = positive(spec.get("base_downsample"))
    stride, width = positive(spec.get("stride_width")), positive(spec.get("width"))
    if downsample is None:
        return None, None
    return (
        None if stride is None else float(int(stride * downsample)),
        None if width is None else float(int(width * downsample)),
    )


def _values(folder: Path, every_chunk: bool = False) -> NDArray[Any]:
    array = _open_array(folder)
    missing = array.nchunks - array.nchunks_initialized
    if every_chunk and missing:
        raise DataError(folder, f"is incomplete: {missing} of {array.nchunks} chunks are missing", EXTRACT_AGAIN)
    _refuse_bomb(folder, array.nbytes, MAX_COMPRESSION)
    try:
        values = np.asarray(array[...])
    except Exception as error:  # every codec has its own errors
        raise DataError(folder, f"is damaged ({error})", EXTRACT_AGAIN) from error
    return values


def _open_array(folder: Path) -> Any:
    zarr = _import("zarr")
    try:
        metadata = [file for file in (folder / "zarr.json", folder / ".zarray") if file.is_file()]
        unknown = {codec for file in metadata for codec in _codecs(_json(file))} - CODECS
        if unknown:
            cause = f"is refused: it is packed by {', '.join(sorted(map(repr, unknown)))}, which could run code"
            raise DataError(folder, cause, "write plain numbers")
        return zarr.open_array(str(folder), mode="r")
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            folder, f"is damaged: no zarr array ({error or type(error).__name__})", EXTRACT_AGAIN
        ) from error


def _json(file: Path) -> Any:
    if file.stat().st_size > MAX_METADATA_BYTES:
        raise ValueError(f"{file.name} is larger than {MAX_METADATA_BYTES >> 20} MiB")
    return json.loads(file.read_text())


def _codecs(metadata: dict[str, Any]) -> Iterator[str]:
    """Names of all steps that turn stored bytes into numbers, of zarr 2 and 3, also those inside of other steps."""
    steps = [metadata.get("compressor"), *(metadata.get("filters") or ())]
    steps += [*(metadata.get("codecs") or ()), *(metadata.get("index_codecs") or ())]
    for step in steps:
        if isinstance(step, str):
            yield step
        elif step is not None:
            yield str(step.get("id", step.get("name"))).removeprefix("numcodecs.")
            yield from _codecs(step.get("configuration") or {})


def _refuse_bomb(folder: Path, array_bytes: int, most: int) -> None:
    stored = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if is_bomb(array_bytes, stored, most):
        raise DataError(folder, f"is refused: it unpacks to {array_bytes} bytes from {stored}", EXTRACT_AGAIN)


def _import(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(module.partition(".")[0], "zarr", "reading wsidata and LazySlide stores") from error
