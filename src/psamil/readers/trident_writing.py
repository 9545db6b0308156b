"""Writes feature files as TRIDENT does: ``20x_256px_0px_overlap/features_<encoder>/<slide>.h5`` and what is beside it.

Names, types and attributes are TRIDENT's. Unlike there, a file has its final name only once it is whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from psamil.files import atomic_write, write_json

# Micrometres per pixel below which TRIDENT calls a slide scanned at this magnification.
MAGNIFICATIONS = {0.16: 80, 0.2: 60, 0.3: 40, 0.6: 20, 1.2: 10, 2.4: 5}
STATE_SCHEMA = 2


@dataclass(frozen=True)
class TridentSlide:
    """What TRIDENT's files say of a slide and its tiles."""

    name: str
    size_px0: tuple[int, int]
    mpp_px0: float
    patch_px: int  # side of a tile as the encoder gets it
    patch_px0: int
    overlap_px: int  # at the magnification of the encoder
    magnification: int | float  # of the tiles
    slide_magnification: int
    level_count: int = 1

    @property
    def tiling_folder(self) -> str:
        return tiling_folder(self.magnification, self.patch_px, self.overlap_px)

    def about(self, folder: str) -> dict[str, Any]:
        return {"name": self.name, "savetodir": folder}

    def about_coords(self, folder: str) -> dict[str, Any]:
        return self.about(folder) | {
            "patch_size": self.patch_px,
            "patch_size_level0": self.patch_px0,
            "level0_magnification": self.slide_magnification,
            "target_magnification": self.magnification,
            "overlap": self.overlap_px,
            "level0_width": self.size_px0[0],
            "level0_height": self.size_px0[1],
        }


def tiling_folder(magnification: float, patch_px: int, overlap_px: int) -> str:
    return f"{magnification:g}x_{patch_px}px_{overlap_px}px_overlap"


def magnification_of_tiles(mpp: float) -> int | float:
    """10 / mpp, which is 20 for 0.5 um: a whole number where it is one."""
    exact = round(10 / mpp, 6)
    return int(exact) if exact == int(exact) else exact


def magnification_of_slide(mpp_px0: float) -> int:
    """The nominal magnification that TRIDENT would give a slide; it knows none beyond 2.4 um."""
    nominal = next((value for limit, value in MAGNIFICATIONS.items() if mpp_px0 < limit), None)
    return max(1, round(10 / mpp_px0)) if nominal is None else nominal


class FeatureFile:
    """An open file of features that grows by rows. The coordinates of all tiles are written at the start."""

    def __init__(self, file: h5py.File, slide: TridentSlide, encoder: str, folder: str, chunk_rows: int) -> None:
        self._file, self._slide, self._encoder, self._folder = file, slide, encoder, folder
        self._chunk_rows = chunk_rows

    def begin(self, features: NDArray[np.floating], coords_px0: NDArray[np.int64]) -> None:
        """The first rows of the features, which may be all or none, and all coordinates."""
        about = self._slide.about(self._folder) | {"encoder": self._encoder}
        about_coords = self._slide.about_coords(self._folder)
        _fill(self._file, {"features": (features, about), "coords": (coords_px0, about_coords)}, self._chunk_rows)

    def append(self, features: NDArray[np.floating]) -> None:
        stored = self._file["features"]
        n = len(stored)
        stored.resize(n + len(features), axis=0)
        stored[n:] = features


def feature_path(out: Path, tiling: str, encoder: str, slide: str) -> Path:
    return out / tiling / f"features_{encoder}" / f"{slide}.h5"


def tiling_path(out: Path, tiling: str, slide: str) -> Path:
    return out / tiling / "patches" / f"{slide}_patches.h5"


@contextmanager
def new_feature_file(out: Path, slide: TridentSlide, encoder: str, *, chunk_rows: int = 1) -> Iterator[FeatureFile]:
    """A file to fill in a ``with`` block; at its end it takes its name, after an error it is gone.

    TRIDENT stores each row on its own, which is slow to read; ``chunk_rows`` stores several together.
    """
    path = feature_path(out, slide.tiling_folder, encoder, slide.name)
    with atomic_write(path) as temporary, h5py.File(temporary, "w") as file:
        yield FeatureFile(file, slide, encoder, path.parent.relative_to(out).as_posix(), chunk_rows)


def write_tiling(out: Path, slide: TridentSlide, coords_px0: NDArray[np.int64], *, chunk_rows: int = 1) -> Path:
    """``patches/<slide>_patches.h5``: where the tiles lie."""
    path = tiling_path(out, slide.tiling_folder, slide.name)
    folder = path.parent.relative_to(out).as_posix()
    with atomic_write(path) as temporary, h5py.File(temporary, "w") as file:
        _fill(file, {"coords": (coords_px0, slide.about_coords(folder))}, chunk_rows)
    return path


def write_state(out: Path, slide: TridentSlide, source: str) -> None:
    """``wsi_states``, the only place of the resolution; a slide is known by the path of its file."""
    meta = {
        "dimensions": list(slide.size_px0),
        "mpp": slide.mpp_px0,
        "mag": slide.slide_magnification,
        "level_count": slide.level_count,
    }
    write_json(state_path(out, slide.name, source), {"schema_version": STATE_SCHEMA, "meta": meta})


def state_path(out: Path, slide: str, source: str) -> Path:
    digest = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()[:12]
    return out / "wsi_states" / f"{slide}__{digest}.json"


def _fill(file: h5py.File, datasets: dict[str, tuple[NDArray[Any], dict[str, Any]]], chunk_rows: int) -> None:
    """Datasets with their attributes, which can grow by rows."""
    for key, (rows, attributes) in datasets.items():
        chunks, maxshape = (chunk_rows, *rows.shape[1:]), (None, *rows.shape[1:])
        dataset = file.create_dataset(key, data=rows, chunks=chunks, maxshape=maxshape)
        dataset.attrs.update(attributes)
