"""What a feature file says, before anything is concluded from it, and what every reader must be able to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Tiles:
    """The content of one bag file, in the units of the file."""

    features: NDArray[np.floating]  # (n, dim), of the precision of the file
    coords: NDArray[np.float64] | None  # (n, 2) x, y of the tile's corner (or of the cell); None: the file has none
    unit: str = "px0"  # of coords: "px0" (level-0 pixels), "um", "px" (pixels of an unknown level) or "steps"
    nominal_step: float | None = None  # distance of neighbouring tiles that the metadata imply, in unit
    tile_size: float | None = None  # side of a tile, in unit
    mpp: float | None = None  # micrometres per level-0 pixel
    continuous: bool = False  # cells or spots anywhere, not tiles of a lattice
    encoder: str | None = None
    feature_names: tuple[str, ...] | None = None  # of each column of features, where the file names them
    notes: tuple[str, ...] = ()  # what a user should know about this file, in whole sentences


@dataclass(frozen=True, order=True)
class BagRef:
    """Where a bag is: a file (or zarr folder), its format, and which bag inside it if the file holds several."""

    id: str  # name of the slide: stem of the file without known extensions, or the member's name
    path: Path
    format: str  # name of the reader
    member: str | None = None


class Reader(Protocol):
    """One format. Readers are the modules of this package that are listed in ``psamil.readers.READERS``."""

    NAME: str

    def recognise(self, path: Path) -> bool:
        """Whether the file is a bag of this format, from its name, its neighbours and its structure; cheap.

        False for files of other formats. A file that is of this format but damaged raises DataError.
        """

    def members(self, path: Path) -> list[str | None]:
        """Names of the bags inside the file; [None] for a file that is one bag."""

    def read(self, path: Path, member: str | None = None, *, with_features: bool = True) -> Tiles:
        """The bag. DataError if the file is damaged, incomplete or not to be trusted.

        Without features, they are a read-only array of the right shape and dtype that takes no memory.
        """
