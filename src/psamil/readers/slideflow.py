"""Slideflow: feature bags of PyTorch tensors, positions beside them.

    bags/
      <slide>.pt            tensor (n, dim)
      <slide>.index.npz     arr_0 (n, 2): the *centre* of each tile, in level-0 pixels (older: <slide>.index.npy)
      bags_config.json      extractor {class}, tile_px, tile_um

The side of a tile in level-0 pixels is not stored (tile_um would need the micrometres per pixel of the slide), so
centres cannot become corners. Distances between tiles are the same; an overlay on the slide is off by half a tile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psamil.errors import DataError
from psamil.readers.arrays import one_corner_per_tile, one_row_per_tile
from psamil.readers.npz import MADE_AGAIN, load_array, load_json
from psamil.readers.pickled import load_pickled
from psamil.readers.tiles import Tiles

NAME = "slideflow"


def recognise(path: Path) -> bool:
    return path.suffix == ".pt" and (_index(path) is not None or path.with_name("bags_config.json").is_file())


def members(path: Path) -> list[str | None]:
    return [None]


def read(path: Path, member: str | None = None, *, with_features: bool = True) -> Tiles:
    pickled = load_pickled(path, with_features=with_features)
    features = one_row_per_tile(path, pickled.features)
    config = load_json(path.with_name("bags_config.json"))
    extractor = config.get("extractor")
    encoder = (
        str(extractor["class"]).rpartition(".")[2] if isinstance(extractor, dict) and "class" in extractor else None
    )
    index = _index(path)
    if index is None:
        notes = (*pickled.notes, f"There are no positions: {path.stem}.index.npz is missing.")
        return Tiles(features, None, encoder=encoder, notes=notes)
    centres_px0 = one_corner_per_tile(index, _load_centres(index), features)
    notes = (*pickled.notes, "Positions are the centres of the tiles, whose size in level-0 pixels is not stored.")
    return Tiles(features, centres_px0, unit="px0", encoder=encoder, notes=notes)


def _index(path: Path) -> Path | None:
    candidates = (path.with_name(f"{path.stem}.index.{extension}") for extension in ("npz", "npy"))
    return next((file for file in candidates if file.is_file()), None)


def _load_centres(index: Path) -> NDArray[Any]:
    if index.suffix == ".npz":
        return load_array(index, "arr_0")
    try:
        return np.asarray(np.load(index, allow_pickle=False))
    except (ValueError, EOFError, OSError) as error:
        raise DataError(index, f"is damaged or holds more than numbers ({error})", MADE_AGAIN) from error
