"""The coordinate files that tiling leaves beside the features: ``patches/`` of TRIDENT and CLAM.

They say where every tile of a slide lies and how large it is, so features can be joined with them, and an extraction
that was killed half-way can be noticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psamil.errors import DataError
from psamil.readers.arrays import one_corner_per_tile
from psamil.readers.hdf5 import CheckedH5


@dataclass(frozen=True, eq=False)
class Tiling:
    """All tiles of one slide, as they were cut."""

    path: Path
    coords: NDArray[np.float64]  # (n, 2) corners in level-0 pixels
    attributes: dict[str, Any]  # of the coordinates, and of the old pipeline's stored images
    image_px: int | None  # side of the stored images, in pixels of the level they were read at

    @staticmethod
    def read(path: Path) -> Tiling:
        with CheckedH5(path) as file:
            coords = file.read("coords")
            has_images = "imgs" in file.names
            attributes = (file.attributes("imgs") if has_images else {}) | file.attributes("coords")
            image_px = file.shape("imgs")[1] if has_images and len(file.shape("imgs")) == 4 else None
        return Tiling(path, one_corner_per_tile(path, coords, coords.reshape(-1, 2)), attributes, image_px)

    def begins_with(self, coords: NDArray[np.float64]) -> bool:
        """Whether these are the first tiles of the tiling, or all."""
        return len(coords) <= len(self.coords) and bool((self.coords[: len(coords)] == coords).all())

    def check(self, path: Path, coords: NDArray[np.float64]) -> None:
        """Features that belong to this tiling have all of its tiles, and the same.

        They are extracted in the order of the tiling: its first tiles alone are what a killed run leaves. A tiling with
        other tiles altogether is of another run, and says nothing.
        """
        if len(coords) == len(self.coords):
            other = int((coords != self.coords).any(1).sum())
            if 0 < other < len(coords) / 2:
                cause = f"is damaged: {other} of its {len(coords)} tiles lie elsewhere than {self.path} says"
                raise DataError(path, cause, "extract the features of this slide again")
        if len(coords) < len(self.coords) and self.begins_with(coords):
            cause = f"is incomplete: it has the first {len(coords)} of the {len(self.coords)} tiles of {self.path}"
            remedy = "extract the features of this slide again (or move that file, if tiles were left out on purpose)"
            raise DataError(path, cause, remedy)


def positive(value: Any) -> float | None:
    """A positive number from an attribute that may be missing, a text, or nonsense."""
    try:
        number = float(np.ravel(value)[0])
    except (TypeError, ValueError, IndexError):
        return None
    return number if 0 < number < float("inf") else None
