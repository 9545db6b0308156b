"""Feature files as TRIDENT, CLAM and STAMP write them, all of the same slide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

DIM = 16
# Two pieces of tissue on one lattice; columns and rows of the tiles, in the order of the files.
CELLS = np.array([(x, y) for y in range(9) for x in range(12) if (x < 6) == (y < 5)])
# Whole numbers of this size are exact in float16.
FEATURES = np.random.default_rng(0).integers(-2000, 2000, (len(CELLS), DIM)).astype(np.float32)
N = len(CELLS)


def corners(step: float, dtype: str = "i8", origin: tuple[int, int] = (1024, 2048)) -> np.ndarray[Any, Any]:
    return (CELLS * step + origin).astype(dtype)


def write_h5(path: Path, arrays: dict[str, Any], attributes: dict[str, dict[str, Any]] | None = None, **storage: Any):
    """Arrays at the root; attributes of each, those of the file under ""."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file.create_dataset(name, data=values, **({key: of(values) for key, of in storage.items()}))
        for name, about in (attributes or {}).items():
            (file[name] if name else file).attrs.update(about)
    return path


def resizable(values: np.ndarray[Any, Any]) -> tuple[int | None, ...]:
    return (None, *values.shape[1:])


def trident_attributes(patch=256, overlap=0, source=40, target=20, slide="slide") -> dict[str, Any]:
    return {
        "patch_size": patch,
        "patch_size_level0": patch * source // target,
        "level0_magnification": source,
        "target_magnification": target,
        "overlap": overlap,
        "name": slide,
        "savetodir": "/data/job",
        "level0_width": 100_000,
        "level0_height": 80_000,
    }


def write_trident(
    job: Path,
    slide: str = "slide",
    *,
    features: np.ndarray[Any, Any] = FEATURES,
    coords: np.ndarray[Any, Any] | None = None,
    about: dict[str, Any] | None = None,
    encoder: str | None = "uni_v1",
    folder: str = "20x_256px_0px_overlap",
    model: str = "uni_v1",
    kind: str = "h5",
    patches: bool = True,
    mpp: float | None = None,
) -> Path:
    coords = corners(512) if coords is None else coords
    about = trident_attributes(slide=slide) if about is None else about
    storage = {"chunks": lambda a: (1, *a.shape[1:]), "maxshape": resizable}
    if patches:
        write_h5(job / folder / "patches" / f"{slide}_patches.h5", {"coords": coords}, {"coords": about})
    if mpp is not None:
        state = job / "wsi_states" / f"{slide}__0123456789ab.json"
        state.parent.mkdir(exist_ok=True)
        state.write_text(json.dumps({"schema_version": 2, "meta": {"mpp": mpp, "mag": 40}}))
    path = job / folder / f"features_{model}" / f"{slide}.{kind}"
    if kind == "pt":
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(features, path)
        return path
    own = {"name": slide, "savetodir": "/data/job"} | ({"encoder": encoder} if encoder else {})
    return write_h5(path, {"features": features, "coords": coords}, {"features": own, "coords": about}, **storage)


def write_clam(
    home: Path,
    slide: str = "slide",
    *,
    features: np.ndarray[Any, Any] = FEATURES,
    coords: np.ndarray[Any, Any] | None = None,
    rows: int | None = None,
    kinds: tuple[str, ...] = ("h5", "pt"),
) -> Path:
    """``rows``: how many were written before the run was killed."""
    coords = corners(512, "i4") if coords is None else coords
    storage = {"chunks": lambda a: (min(32, len(a)), *a.shape[1:]), "maxshape": resizable}
    if "h5" in kinds:
        write_h5(home / f"h5_files/{slide}.h5", {"features": features[:rows], "coords": coords[:rows]}, **storage)
    if "pt" in kinds:
        (home / "pt_files").mkdir(parents=True, exist_ok=True)
        torch.save(torch.from_numpy(features), home / f"pt_files/{slide}.pt")
    return home / f"{kinds[0]}_files/{slide}.{kinds[0]}"


def write_clam_patches(results: Path, slide: str = "slide", coords: np.ndarray[Any, Any] | None = None) -> Path:
    coords = corners(512) if coords is None else coords
    about = {
        "patch_size": 256,
        "patch_level": 1,
        "downsample": (2.0001, 2.0001),
        "downsampled_level_dim": (50_000, 40_000),
        "level_dim": (50_000, 40_000),
        "name": slide,
        "save_path": "/data/results/patches",
    }
    storage = {"chunks": lambda a: (1, *a.shape[1:]), "maxshape": resizable}
    return write_h5(results / "patches" / f"{slide}.h5", {"coords": coords}, {"coords": about}, **storage)


def write_clam_image_patches(results: Path, slide: str = "slide") -> Path:
    """The old pipeline stored the images of the tiles themselves."""
    images = np.zeros((N, 8, 8, 3), np.uint8)
    about = {"patch_level": 1, "wsi_name": slide, "downsample": (64.0, 64.0), "level_dim": (50_000, 40_000)}
    arrays = {"imgs": images, "coords": corners(512, "i4")}
    storage = {"chunks": lambda a: (1, *a.shape[1:]), "maxshape": resizable}
    return write_h5(results / "patches" / f"{slide}.h5", arrays, {"imgs": about}, **storage)


STAMP_ATTRIBUTES = {
    "stamp_version": "2.3.0",
    "extractor": "uni-0a1b2c3d",
    "unit": "um",
    "tile_size_um": 256.0,
    "tile_size_px": 224,
    "code_hash": "0a1b2c3d",
    "feat_type": "tile",
}


def write_stamp(
    folder: Path,
    slide: str = "slide",
    *,
    coords: np.ndarray[Any, Any] | None = None,
    about: dict[str, Any] | None = None,
    arrays: dict[str, Any] | None = None,
) -> Path:
    coords = corners(256, "f4") if coords is None else coords
    arrays = {"feats": FEATURES.astype(np.float16), "coords": coords} if arrays is None else arrays
    return write_h5(folder / f"{slide}.h5", arrays, {"": STAMP_ATTRIBUTES if about is None else about})
