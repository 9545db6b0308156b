import json
import struct

import numpy as np
import pytest

from psamil.serve.overlay import pack_overlay


def unpack(packed):
    """As the browser does."""
    assert packed[:6] == b"PSAO1\0"
    version, length = struct.unpack_from("<HI", packed, 6)
    assert version == 1
    header = json.loads(packed[12 : 12 + length])
    n, at = header["n"], 12 + length
    assert at % 4 == 0
    if header["corners"]["kind"] == "lattice":
        cells = np.frombuffer(packed, "<u2", 2 * n, at).reshape(n, 2).astype(float)
        corners = np.array(header["corners"]["origin"]) + header["corners"]["step"] * cells
        at += 4 * n
    else:
        corners = np.frombuffer(packed, "<f4", 2 * n, at).reshape(n, 2)
        at += 8 * n
    layers = {}
    for layer in header["layers"]:
        assert at % 4 == 0
        raw = np.frombuffer(packed, "<u2", n, at).astype(float)
        layers[layer["key"]] = layer["low"] + raw / 65535 * (layer["high"] - layer["low"])
        at += 2 * n + 2 * n % 4
    assert at == len(packed)
    return header, corners, layers


@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_numbers_survive(n):
    rng = np.random.default_rng(n)
    corners = rng.integers(0, 300, (n, 2)) * 224.0 + [1031, -77]
    layers = {"scores": rng.normal(size=n) * 10, "head-0": rng.exponential(size=n)}
    header, got_corners, got = unpack(pack_overlay(corners, layers))
    assert header["corners"]["kind"] == "lattice"
    np.testing.assert_array_equal(got_corners, corners)
    assert list(got) == ["scores", "head-0"]
    for key, values in layers.items():
        np.testing.assert_allclose(got[key], values, atol=np.ptp(values) / 65535 * 0.51 + 1e-12)


def test_corners_off_a_lattice_are_float32():
    corners = np.random.default_rng(0).random((11, 2)) * 5000
    header, got, _ = unpack(pack_overlay(corners, {}))
    assert header["corners"] == {"kind": "free"}
    np.testing.assert_allclose(got, corners, rtol=1e-7)


def test_a_lattice_with_more_columns_than_fit():
    corners = np.array([[0.0, 0.0], [1.0, 0.0], [70000.0, 0.0]])
    header, got, _ = unpack(pack_overlay(corners, {}))
    assert header["corners"] == {"kind": "free"}
    np.testing.assert_array_equal(got, corners)


def test_equal_scores():
    header, _, layers = unpack(pack_overlay(np.zeros((3, 2)), {"scores": np.full(3, 2.5)}))
    assert header["layers"] == [{"key": "scores", "low": 2.5, "high": 2.5}]
    np.testing.assert_array_equal(layers["scores"], 2.5)


def test_no_tiles():
    header, corners, layers = unpack(pack_overlay(np.empty((0, 2)), {"scores": np.empty(0)}))
    assert header["n"] == len(corners) == len(layers["scores"]) == 0


def test_size_of_a_large_slide():
    n = 200_000
    rng = np.random.default_rng(0)
    corners = np.stack(np.divmod(np.arange(n), 500), axis=1) * 256.0
    layers = {"scores": rng.normal(size=n), **{f"head-{i}": rng.exponential(size=n) for i in range(8)}}
    packed = pack_overlay(corners, layers)
    assert len(packed) < 4.5e6
    np.testing.assert_array_equal(unpack(packed)[1], corners)
