"""Where the tiles of a file are on the slide, in the pixels of the slide: what overlays and annotations need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from psamil.bag import Bag, TileStep
from psamil.errors import ShapeError
from psamil.readers.formats import READERS, locate_bag
from psamil.readers.opening import finite_tiles
from psamil.readers.tiles import BagRef


@dataclass(frozen=True, eq=False)
class TilePlaces:
    """Squares on a slide, one for each tile of a bag and in its order."""

    corners: NDArray[np.float64]  # (n, 2) upper left corners, in unit
    size: float  # side of a square, in unit
    unit: str  # "px0" (level-0 pixels, as OpenSlide counts them), "um", "px" (of an unknown level) or "steps"
    mpp: float | None = None  # micrometres per level-0 pixel

    @property
    def um_per_unit(self) -> float | None:
        """Micrometres per unit, where it is known."""
        return {"um": 1.0, "px0": self.mpp}.get(self.unit)


def tile_places(ref: BagRef | Path | str, bag: Bag) -> TilePlaces:
    """The places of the tiles of one slide as its file has them, in tile steps where it has none.

    Args:
        ref: of the file.
        bag: what was read from it, in whatever way; perhaps without the tiles that have NaN or infinite features.

    Cells have no extent: theirs are squares of one tile step around them. Tiles whose size the file does not tell are
    taken to be as large as a step.
    """
    ref = locate_bag(ref, None, None)
    tiles = READERS[ref.format].read(ref.path, ref.member, with_features=False)
    if tiles.coords is None:
        return TilePlaces(bag.xy.double().numpy(), 1.0, "steps")
    corners = np.asarray(tiles.coords, dtype=np.float64)
    if len(corners) != bag.n:
        corners = corners[finite_tiles(ref)]
    if len(corners) != bag.n:
        raise ShapeError(f"{ref.path} has {len(tiles.coords)} tiles, the bag of it {bag.n}")
    mpp = tiles.mpp if bag.step is None or bag.step.mpp is None else bag.step.mpp
    unit = "px0" if tiles.unit == "px" and bag.step is not None and bag.step.unit == "px0" else tiles.unit
    step = _step_in(unit, bag.step)
    if tiles.continuous:
        return TilePlaces(corners - step / 2, step, unit, mpp)
    return TilePlaces(corners, tiles.tile_size or step, unit, mpp)


def _step_in(unit: str, step: TileStep | None) -> float:
    """Its length in the unit of a file; 1 where nothing is known."""
    if step is None:
        return 1.0
    if step.unit == unit:
        return step.length
    return step.length / step.mpp if (step.unit, unit) == ("um", "px0") and step.mpp else 1.0
