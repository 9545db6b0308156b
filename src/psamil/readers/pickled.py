"""Features in ``.pt`` files, loaded without running what a stranger may have pickled into them.

``torch.load(weights_only=True)`` builds tensors and plain containers alone. NumPy arrays, which TRIDENT pickles, are
allowed through stand-ins: the pickle fills in shape, dtype and bytes, and NumPy's own unpickling, which trusts its
input, is never called.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from psamil.errors import DataError
from psamil.readers.arrays import hollow

FEATURES_KEYS = ("features", "feats", "embeddings", "feature")
COORDS_KEYS = ("coords", "coordinates")
NUMBER_TYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
RE_SAVE = "save it again as one tensor (tiles, dim), or as a dictionary of the tensors 'features' and 'coords'"


@dataclass(frozen=True, eq=False)
class Pickled:
    features: NDArray[Any]  # of any shape
    coords: NDArray[Any] | None
    notes: tuple[str, ...] = ()


def load_pickled(path: Path, *, with_features: bool = True) -> Pickled:
    """A tensor or array of features, or a dictionary of features and coordinates."""
    content = _load(path, in_place=not with_features)
    parts = content if isinstance(content, dict) else {FEATURES_KEYS[0]: content}
    features = next((parts[key] for key in FEATURES_KEYS if key in parts), None)
    coords = next((parts[key] for key in COORDS_KEYS if key in parts), None)
    if features is None:
        keys = ", ".join(sorted(map(str, parts)))[:200] or "nothing"
        raise DataError(path, f"is a dictionary of {keys}, without features", f"name them {FEATURES_KEYS[0]!r}")
    features, notes = _array(path, "features", features, with_values=with_features)
    return Pickled(features, None if coords is None else _array(path, "coords", coords)[0], notes)


class _Bytes:
    """Stand-in for ``_codecs.encode``: old pickles write bytes as text."""

    def __new__(cls, text: str, encoding: str = "latin1") -> bytes:  # type: ignore[misc]
        if encoding != "latin1":
            raise ValueError(f"bytes pickled as {encoding!r}")
        return text.encode("latin1")


class _Dtype:
    """Stand-in for ``numpy.dtype``."""

    def __init__(self, name: str, *_: object) -> None:
        if name not in NUMBER_TYPES:
            raise ValueError(f"an array of type {name!r}")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] not in ("<", "|"):
            raise ValueError("an array that is not little-endian")


class _NdarrayName:
    """Stand-in for ``numpy.ndarray``, which pickles only name."""


class _Array:
    """Stand-in for the function that NumPy's pickles call to make an array."""

    def __init__(self, *_: object) -> None:
        self.values: NDArray[Any] = np.empty(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, is_fortran, raw = state
        if not isinstance(kind, _Dtype) or not isinstance(raw, bytes):
            raise ValueError("an array of objects")
        self.values = np.frombuffer(raw, kind.dtype).reshape(shape, order="F" if is_fortran else "C")


STAND_INS = [
    (_Bytes, "_codecs.encode"),
    (_Dtype, "numpy.dtype"),
    (_NdarrayName, "numpy.ndarray"),
    (_Array, "numpy.core.multiarray._reconstruct"),
    (_Array, "numpy._core.multiarray._reconstruct"),
]


def _load(path: Path, in_place: bool) -> Any:
    """What the file holds. ``in_place``: tensors stay in the file until their values are asked for."""
    try:
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            _check_zip(path)
        with torch.serialization.safe_globals(STAND_INS):  # type: ignore[arg-type]
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip and in_place)
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(path, "does not exist", "check the path") from error
    except Exception as error:  # the content decides what goes wrong in an unpickler
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(path, f"is damaged, or holds more than tensors ({_reason(cause)})", RE_SAVE) from error


def _reason(lines: list[str]) -> str:
    """torch explains at length how to switch the protection off; the cause is the line that names what is refused."""
    named = next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0])
    return named.strip()[:200]


def _check_zip(path: Path) -> None:
    """torch does not compress: a file that says it unpacks to more than its own size is damaged or a trap."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    is_packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
    if is_packed or sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise DataError(path, "is damaged, or compressed, which torch.save does not do", RE_SAVE)


def _array(path: Path, what: str, value: Any, *, with_values: bool = True) -> tuple[NDArray[Any], tuple[str, ...]]:
    """A NumPy array of the tensor's precision, and what happened to it."""
    if isinstance(value, _Array):
        return (value.values.copy() if with_values else hollow(value.values.shape, value.values.dtype)), ()
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized or value.is_complex():
        raise DataError(path, f"has {what} of type {type(value).__name__}, not a plain tensor or array", RE_SAVE)
    if prod(value.shape) * value.element_size() > path.stat().st_size:
        raise DataError(path, f"has {what} of shape {tuple(value.shape)}, more than the file holds", RE_SAVE)
    notes: tuple[str, ...] = ()
    dtype = value.dtype
    if dtype == torch.bfloat16:
        dtype, notes = torch.float32, (f"The {what} are bfloat16 and were widened to float32.",)
    if not with_values:
        return hollow(tuple(value.shape), torch.empty(0, dtype=dtype).numpy().dtype), notes
    return value.detach().to(dtype).contiguous().numpy(), notes
