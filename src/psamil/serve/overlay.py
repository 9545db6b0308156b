r"""What a model says about the tiles of a slide, in one compact file for the browser. All numbers are little-endian.

b"PSAO1\0"   6 bytes
version      uint16, 1
length       uint32, of the header with its padding: a multiple of 4
header       JSON {"n", "layers": [{"key", "low", "high"}], "corners": {...}}, padded with spaces
corners      {"kind": "lattice", "origin": [x, y], "step": s}: uint16 (n, 2), x_i = origin + s * column_i, exactly
             {"kind": "free"}: float32 (n, 2)
layers       uint16 (n,) each, padded to 4 bytes: 0 is low, 65535 is high, linear in between
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"PSAO1\0"
VERSION = 1
LARGEST = 65535


def pack_overlay(corners: NDArray[np.float64], layers: Mapping[str, NDArray[np.float64]]) -> bytes:
    """The file.

    Args:
        corners: (n, 2) of the tiles.
        layers: (n,) finite numbers each, by key.
    """
    kind, packed = _pack_corners(corners)
    ranges = {key: value_range(values) for key, values in layers.items()}
    about = {
        "n": len(corners),
        "layers": [{"key": key, "low": low, "high": high} for key, (low, high) in ranges.items()],
        "corners": kind,
    }
    header = json.dumps(about, allow_nan=False).encode()
    header += b" " * (-len(header) % 4)
    parts = [MAGIC, struct.pack("<HI", VERSION, len(header)), header, packed]
    for key, values in layers.items():
        parts.append(quantised(values, *ranges[key]).tobytes())
        parts.append(bytes(-len(parts[-1]) % 4))
    return b"".join(parts)


def value_range(values: NDArray[np.float64]) -> tuple[float, float]:
    return (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)


def quantised(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.uint16]:
    """(n,) 0 for low to 65535 for high; all 0 where they are equal."""
    if not high > low:
        return np.zeros(len(values), "<u2")
    return np.rint((values - low) * (LARGEST / (high - low))).astype("<u2")


def _pack_corners(corners: NDArray[np.float64]) -> tuple[dict[str, Any], bytes]:
    """As columns and rows where the corners are whole numbers with a common step, else as they are."""
    whole = np.rint(corners)
    if len(corners) and np.array_equal(whole, corners) and np.abs(whole).max() < 2**53:
        origin = whole.min(0)
        steps = (whole - origin).astype(np.int64)
        step = max(1, int(np.gcd.reduce(steps, axis=None)))
        if steps.max() // step <= LARGEST:
            kind = {"kind": "lattice", "origin": origin.tolist(), "step": step}
            return kind, (steps // step).astype("<u2").tobytes()
    return {"kind": "free"}, corners.astype("<f4").tobytes()
