"""The layout of the PSA-MIL authors' code: tile embeddings of a slide beside the table of its tiles.

    tile_embeddings/<slide>/tile_embeddings.tensor    tensor (n, dim); the folder names the slide
                            df_slide.csv              column path: the image of each tile, in the order of the tensor
    <folder>/<slide>.pt                               the same with the slide's name on the file
             df_slide.csv

An image is named ``<row>_<col>...``: its place on the lattice, in tile steps. Nothing says how long a step is.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from psamil.errors import DataError
from psamil.readers.arrays import one_corner_per_tile, one_row_per_tile
from psamil.readers.pickled import load_pickled
from psamil.readers.tiles import Tiles

NAME = "psa_authors"

ROW_AND_COLUMN = re.compile(r"(\d+)_(\d+)(?!\d)")
TABLE = "df_slide.csv"


def recognise(path: Path) -> bool:
    return path.suffix in (".pt", ".tensor") and path.with_name(TABLE).is_file()


def members(path: Path) -> list[str | None]:
    return [path.parent.name] if path.stem == "tile_embeddings" else [None]


def read(path: Path, member: str | None = None, *, with_features: bool = True) -> Tiles:
    pickled = load_pickled(path, with_features=with_features)
    features = one_row_per_tile(path, pickled.features)
    table = path.with_name(TABLE)
    coords = one_corner_per_tile(table, _columns_and_rows(table), features)
    return Tiles(features, coords, unit="steps", nominal_step=1.0, tile_size=1.0, notes=pickled.notes)


def _columns_and_rows(table: Path) -> NDArray[np.float64]:
    """(n, 2) x = column and y = row of every tile."""
    try:
        images = pd.read_csv(table, usecols=["path"], dtype=str, keep_default_na=False)["path"]
    except (OSError, ValueError) as error:  # parser errors of pandas are ValueErrors
        raise DataError(table, f"is damaged, or has no column 'path' ({error})", "write it again") from error
    places = [ROW_AND_COLUMN.match(re.split(r"[/\\]", image)[-1]) for image in images]
    nameless = [image for image, place in zip(images, places, strict=True) if place is None]
    if nameless:
        cause = f"names {len(nameless)} tiles without row and column, such as {nameless[0]!r}"
        raise DataError(table, cause, "tile images must be named <row>_<col>...")
    return np.array([(place[2], place[1]) for place in places if place], dtype=np.float64).reshape(-1, 2)
