"""Shapes in which files hold features and coordinates, brought to (n, dim) and (n, 2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from psamil.errors import DataError

LARGEST_COORDINATE = 1e7  # metres away, in micrometres as in pixels


def hollow(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """A read-only array of the right shape and dtype that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def one_row_per_tile(path: Path, features: NDArray[Any]) -> NDArray[np.floating]:
    """Features as (n, dim): without a leading batch axis, and (0,) of slides without tissue as (0, 0)."""
    shape = features.shape
    refuse_slide_vector(path, shape)
    if features.dtype.kind != "f":
        raise DataError(path, f"has features of type {features.dtype}", "features must be floating point numbers")
    if len(shape) == 3 and shape[0] == 1:
        return features[0]
    if shape == (0,):
        return features.reshape(0, 0)
    if len(shape) != 2 or (shape[0] and not shape[1]):
        raise DataError(path, f"has features of shape {shape}", "features must be (tiles, dim)")
    return features


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
