"""TRIDENT: ``<job>/20x_256px_0px_overlap/features_<encoder>/<slide>.h5``, or ``.pt`` beside ``patches/``.

- ``features`` (n, dim) float32 or float16, ``coords`` (n, 2) in level-0 pixels, and what is known of the tiles as
  attributes of the coordinates. Slides without tissue have ``features`` (0,) or (0, dim).
- The stored ``patch_size_level0`` is the side of a tile, and rounded differently from the distance that tiles really
  have: that distance is computed as TRIDENT walks.
- Micrometres per pixel are in ``<job>/wsi_states`` alone.
- ``.pt`` files are NumPy arrays without coordinates; these come from ``patches/<slide>_patches.h5``.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from psamil.errors import DataError
from psamil.readers.arrays import one_corner_per_tile, one_row_per_tile, refuse_slide_vector
from psamil.readers.hdf5 import CheckedH5
from psamil.readers.pickled import load_pickled
from psamil.readers.tiles import Tiles
from psamil.readers.tilings import Tiling, positive

NAME = "trident"

H5 = (".h5", ".hdf5")
PT = (".pt", ".pth")
COORDS_ATTRIBUTES = {"patch_size_level0", "level0_magnification", "target_magnification"}
FEATURES_ATTRIBUTES = {"encoder", "savetodir"}
MAX_STATE_BYTES = 16 << 20


def recognise(path: Path) -> bool:
    """Attributes that TRIDENT alone writes, or a place in its folders."""
    if path.suffix.lower() in PT:
        return _is_in_encoder_folder(path) and _tiling_path(path).is_file()
    if path.suffix.lower() not in H5:
        return False
    with CheckedH5(path) as file:
        if not {"features", "coords"} <= file.names:
            return False
        is_marked = COORDS_ATTRIBUTES & file.attributes("coords").keys()
        is_marked |= FEATURES_ATTRIBUTES & file.attributes("features").keys()
        if not is_marked and not _is_in_encoder_folder(path):
            return False
        refuse_slide_vector(path, file.shape("features"))
        return True


def members(path: Path) -> list[str | None]:
    return [None]


def read(path: Path, member: str | None = None, *, with_features: bool = True) -> Tiles:
    tiling = Tiling.read(_tiling_path(path)) if _tiling_path(path).is_file() else None
    if path.suffix.lower() in PT:
        if tiling is None:
            raise DataError(path, f"has no coordinates: {_tiling_path(path)} is missing", "copy that file beside it")
        pickled = load_pickled(path, with_features=with_features)
        features, raw_coords, about_coords, about_features = pickled.features, tiling.coords, tiling.attributes, {}
    else:
        with CheckedH5(path) as file:
            features = file.read("features", with_values=with_features)
            raw_coords = file.read("coords")
            about_coords, about_features = file.attributes("coords"), file.attributes("features")
    features = one_row_per_tile(path, features)
    coords = one_corner_per_tile(path, raw_coords, features)
    if tiling is not None:
        tiling.check(path, coords)
        if not COORDS_ATTRIBUTES & about_coords.keys() and tiling.begins_with(coords):
            about_coords = tiling.attributes
    step_px0, tile_px0 = _step_and_tile_px0(about_coords)
    mpp, notes = _mpp(path)
    return Tiles(
        features=features,
        coords=coords,
        nominal_step=step_px0,
        tile_size=tile_px0,
        mpp=mpp,
        encoder=about_features.get("encoder") or _encoder_of_folder(path.parent),
        notes=notes,
    )


def _step_and_tile_px0(about: dict[str, Any]) -> tuple[float | None, float | None]:
    """Distance of neighbouring tiles and side of a tile, rounded one after the other as TRIDENT does."""
    tile = positive(about.get("patch_size_level0"))
    patch, overlap = positive(about.get("patch_size")), positive(about.get("overlap")) or 0.0
    source, target = positive(about.get("level0_magnification")), positive(about.get("target_magnification"))
    # Files whose tiles were sized by micrometres have a side that nominal magnifications do not give.
    if patch and source and target and tile in (None, patch * source // target):
        zoom = source / target
        tile = float(round(patch * zoom))
        step = tile - round(overlap * zoom)
    elif tile:
        step = tile - (round(overlap * tile / patch) if patch else 0)
    else:
        return None, None
    return (step if step > 0 else None), tile


def _mpp(path: Path) -> tuple[float | None, tuple[str, ...]]:
    """Micrometres per level-0 pixel from the states of the job, and a note if two slides of this name disagree."""
    for folder in list(path.parents)[:4]:
        states = folder / "wsi_states"
        if states.is_dir():
            found = {_mpp_of_state(state) for state in _states(states, states.stat().st_mtime_ns).get(path.stem, ())}
            known = found - {None}
            if len(known) > 1:
                return None, (f"{states} has several values of micrometres per pixel for {path.stem}: none is used.",)
            return (known.pop() if known else None), ()
    return None, ()


@lru_cache(maxsize=8)
def _states(folder: Path, changed_ns: int) -> dict[str, list[Path]]:
    """State files of each slide: ``<slide>__<hash>.json``. Listed once, for folders of thousands of slides."""
    states: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*__*.json")):
        states.setdefault(path.stem.rpartition("__")[0], []).append(path)
    return states


def _mpp_of_state(path: Path) -> float | None:
    try:
        if path.stat().st_size > MAX_STATE_BYTES:
            return None
        state = json.loads(path.read_text("utf-8"))
        return positive(state["meta"]["mpp"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # only a convenience is lost


def _is_in_encoder_folder(path: Path) -> bool:
    """``20x_256px_0px_overlap/features_<encoder>``, or any ``features_<encoder>`` beside TRIDENT's ``patches``."""
    is_of_job = path.parent.parent.name.endswith("_overlap") or _tiling_path(path).is_file()
    return is_of_job and path.parent.name.startswith(("features_", "slide_features_"))


def _encoder_of_folder(folder: Path) -> str | None:
    return folder.name.removeprefix("features_") if folder.name.startswith("features_") else None


def _tiling_path(path: Path) -> Path:
    return path.parent.parent / "patches" / f"{path.stem}_patches.h5"
