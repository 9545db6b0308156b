"""Opens one feature file as a bag: features as they are, positions in tile steps."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from psamil.bag import Bag, TileStep
from psamil.errors import DataError, one_of
from psamil.lattice import Positions, place_tiles
from psamil.readers.formats import READERS, locate_bag
from psamil.readers.tiles import BagRef, Tiles

NON_FINITE = ("error", "drop", "zero")
POSITIONS = ("file", "row order", "shuffled")
BLOCK_BYTES = 8 << 20  # of features that are looked through at a time

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class BagSummary:
    """What is in a bag, found without loading its features."""

    ref: BagRef
    n: int
    dim: int
    dtype: str
    encoder: str | None
    step: TileStep | None  # None: the file has no positions
    xy: NDArray[np.float64] | None  # (n, 2) in tile steps
    duplicates: int
    phases: int | None
    warnings: tuple[str, ...]
    feature_names: tuple[str, ...] | None = None  # of each column of features, where the file names them
    non_finite: int | None = None  # tiles with NaN or infinite features; None: not counted

    @property
    def mpp(self) -> float | None:
        return None if self.step is None else self.step.mpp


def open_bag(
    path: BagRef | Path | str,
    *,
    format: str | None = None,
    member: str | None = None,
    step: float | None = None,
    mpp: float | None = None,
    um_per_step: float | None = None,
    continuous: bool | None = None,
    non_finite: str = "error",
    positions: str = "file",
) -> Bag:
    """The tiles of one slide, from a file of any known format. What a user should know about them is logged.

    Args:
        path: of the file (or zarr folder), or a bag that :func:`find_bags` found.
        format: name of its format, one of ``READERS``; by default the file tells.
        member: which bag, for files that hold several.
        step: distance of neighbouring tiles in the unit of the file, if you know better than the file.
        mpp: micrometres per pixel of the coordinates, if you know better than the file.
        um_per_step: gives physical positions: one step is this many micrometres.
        continuous: True for cells or spots anywhere, False for tiles of a lattice, if you know better than the file.
        non_finite: what to do with tiles that have NaN or infinite features: "error", "drop" the tiles or "zero" these
            numbers.
        positions: "file"; "row order" puts the tiles in a line, one step apart, as they are in the file: for files
            without coordinates; "shuffled" exchanges the positions of the tiles at random, always in the same way for
            a slide of the same name: a model that then predicts as well as before does not use positions.

    Raises:
        DataError: files that are damaged, incomplete, not to be trusted, or without positions.
    """
    if non_finite not in NON_FINITE:
        raise one_of("non_finite", non_finite, NON_FINITE)
    ref = locate_bag(path, format, member)
    tiles = READERS[ref.format].read(ref.path, ref.member)
    features, keep = _finite_features(ref, tiles.features, non_finite)
    placed = _place(ref, tiles, positions, step, mpp, um_per_step, continuous, keep)
    if placed is None:
        raise DataError(
            ref.path,
            "has no coordinates, and none were found beside it",
            'put the file that has them beside it (patches/, h5_files/), or open it with positions="row order"',
        )
    for warning in (*tiles.notes, *placed.warnings):
        log.warning("%s: %s", ref.path, warning)
    return Bag(
        features=torch.from_numpy(features),
        xy=torch.from_numpy(placed.xy),
        id=ref.id,
        step=placed.step,
        slide_ids=(ref.id,),
    )


def describe_bag(
    path: BagRef | Path | str,
    *,
    format: str | None = None,
    member: str | None = None,
    step: float | None = None,
    mpp: float | None = None,
    um_per_step: float | None = None,
    continuous: bool | None = None,
    count_non_finite: bool = False,
) -> BagSummary:
    """What is in a bag. Features are loaded only if those that are not finite are to be counted."""
    ref = locate_bag(path, format, member)
    tiles = READERS[ref.format].read(ref.path, ref.member, with_features=count_non_finite)
    placed = _place(ref, tiles, "file", step, mpp, um_per_step, continuous)
    n, dim = tiles.features.shape
    return BagSummary(
        ref=ref,
        n=n,
        dim=dim,
        dtype=str(tiles.features.dtype),
        encoder=tiles.encoder,
        step=placed.step if placed else None,
        xy=placed.xy if placed else None,
        duplicates=placed.duplicates if placed else 0,
        phases=placed.phases if placed else None,
        warnings=tiles.notes + (placed.warnings if placed else ("The file has no coordinates.",)),
        feature_names=tiles.feature_names,
        non_finite=sum(int(bad.sum()) for _, bad in _non_finite_rows(tiles.features)) if count_non_finite else None,
    )


def _place(
    ref: BagRef,
    tiles: Tiles,
    positions: str,
    step: float | None,
    mpp: float | None,
    um_per_step: float | None,
    continuous: bool | None,
    keep: NDArray[np.bool_] | None = None,
) -> Positions | None:
    """Positions of all tiles, or of those that are kept; None if the file has none."""
    if positions not in POSITIONS:
        raise one_of("positions", positions, POSITIONS)
    n = len(tiles.features)
    coords = tiles.coords
    if positions == "row order":
        line = np.stack([np.arange(n, dtype=np.float64), np.zeros(n)], 1)
        return Positions(line if keep is None else line[keep], TileStep(1.0, "steps", "given"))
    if coords is None and n == 0:
        coords = np.empty((0, 2))
    if coords is None:
        return None
    placed = place_tiles(
        coords if keep is None else coords[keep],
        name=ref.path,
        # Who knows how long a pixel is need not know its level: lengths are then in these pixels, as if in level 0.
        unit="px0" if tiles.unit == "px" and mpp is not None else tiles.unit,
        nominal_step=tiles.nominal_step,
        tile_size=tiles.tile_size,
        mpp=tiles.mpp if mpp is None else mpp,
        continuous=tiles.continuous if continuous is None else continuous,
        given_step=step,
        um_per_step=um_per_step,
    )
    if positions == "shuffled":
        order = np.random.default_rng(zlib.crc32(ref.id.encode())).permutation(len(placed.xy))
        return replace(placed, xy=placed.xy[order])
    return placed


def _finite_features(ref: BagRef, features: NDArray[Any], policy: str) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """Features without NaN and infinite numbers, and which tiles were kept if not all were."""
    bad = np.zeros(len(features), bool)
    for rows, bad_rows in _non_finite_rows(features):
        bad[rows] = bad_rows
    if not bad.any():
        return features, None
    if policy == "drop":
        return features[~bad], ~bad
    if policy == "zero":
        features[bad] = np.where(np.isfinite(features[bad]), features[bad], 0)
        return features, None
    raise DataError(
        ref.path,
        f"{int(bad.sum())} of {len(features)} tiles have NaN or infinite features",
        'extract the features again, or open it with non_finite="drop" or "zero"',
    )


def finite_tiles(path: BagRef | Path | str) -> NDArray[np.bool_]:
    """(n,) of all tiles of the file, which have finite features alone: those that ``non_finite="drop"`` keeps."""
    ref = locate_bag(path, None, None)
    features = READERS[ref.format].read(ref.path, ref.member).features
    finite = np.ones(len(features), bool)
    for rows, bad_rows in _non_finite_rows(features):
        finite[rows] = ~bad_rows
    return finite


def _non_finite_rows(features: NDArray[Any]) -> Iterator[tuple[slice, NDArray[np.bool_]]]:
    """Which rows have NaN or infinite features, in blocks of rows: all at once would take half the features' memory."""
    rows = max(1, BLOCK_BYTES // max(1, features.shape[1] * features.itemsize))
    for first in range(0, len(features), rows):
        block = slice(first, first + rows)
        yield block, ~np.isfinite(features[block]).all(1)
