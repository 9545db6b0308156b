"""Shapes in which files hold features and coordinates, brought to (n, dim) and (n, 2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from psamil.errors import DataError

FREELY_COMPRESSED_BYTES = 256 << 20  # arrays up to here may be compressed to any degree
MAX_COMPRESSION = 100  # larger ones to this degree; features hardly compress at all
MAX_SPARSITY = 1000  # the same of sparse arrays, against the bytes of their entries
LARGEST_COORDINATE = 1e7  # metres away, in micrometres as in pixels


def hollow(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """A read-only array of the right shape and dtype that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def plain_float(dtype: DTypeLike) -> np.dtype[np.floating]:
    """The type of 2, 4 or 8 bytes in the machine's own order that torch takes for numbers of this type."""
    found = np.dtype(dtype)
    return np.dtype(f"f{min(found.itemsize, 8)}" if found.kind == "f" else "f4")


def one_row_per_tile(path: Path, features: NDArray[Any]) -> NDArray[np.floating]:
    """Features as (n, dim): without a leading batch axis, and (0,) of slides without tissue as (0, 0)."""
    shape = features.shape
    refuse_slide_vector(path, shape)
    if features.dtype.kind != "f":
        raise DataError(path, f"has features of type {features.dtype}", "features must be floating point numbers")
    dtype = plain_float(features.dtype)
    if features.dtype != dtype:
        features = features.astype(dtype) if any(features.strides) else hollow(shape, dtype)
    if len(shape) == 3 and shape[0] == 1:
        return features[0]
    if shape == (0,):
        return features.reshape(0, 0)
    if len(shape) != 2 or (shape[0] and not shape[1]):
        raise DataError(path, f"has features of shape {shape}", "features must be (tiles, dim)")
    return features


def is_bomb(array_bytes: int, stored_bytes: int, most: int = MAX_COMPRESSION) -> bool:
    """Whether so few bytes cannot honestly hold an array of that size, so that it must not be unpacked."""
    return array_bytes > max(FREELY_COMPRESSED_BYTES, most * stored_bytes)


def one_corner_per_tile(path: Path, coords: NDArray[Any], features: NDArray[Any]) -> NDArray[np.float64]:
    """Coordinates as (n, 2) float64, one for each row of the features."""
    if len(coords.shape) == 3 and coords.shape[0] == 1:
        coords = coords[0]
    if coords.size == 0:
        coords = coords.reshape(0, 2)
    if coords.ndim != 2 or coords.shape[1] != 2:
        raise DataError(path, f"has coordinates of shape {coords.shape}", "coordinates must be (tiles, 2): x, y")
    if len(coords) != len(features):
        if len(features) == 1:
            raise slide_vector(path, features.shape)
        cause = f"has features of {len(features)} tiles and coordinates of {len(coords)}: incomplete or mixed up"
        raise DataError(path, cause, "extract the features of this slide again")
    if coords.dtype.kind not in "fiu":
        raise DataError(path, f"has coordinates of type {coords.dtype}", "write them as plain numbers")
    coords = coords.astype(np.float64)
    far = int((np.abs(coords) > LARGEST_COORDINATE).any(1).sum())
    if far:
        raise DataError(path, f"has {far} tiles with coordinates that no slide has: damaged", "make the file again")
    return coords


def refuse_slide_vector(path: Path, shape: tuple[int, ...]) -> None:
    """(dim,) is one vector; (0,) is what a slide without tissue has."""
    if len(shape) == 1 and shape[0]:
        raise slide_vector(path, shape)


def slide_vector(path: Path, shape: tuple[int, ...]) -> DataError:
    """The error for files that hold one vector for a whole slide or patient."""
    cause = f"holds one vector of {shape[-1]} numbers for the whole slide or patient, not one per tile"
    return DataError(path, cause, "give the folder of tile features (in TRIDENT features_*, not slide_features_*)")
