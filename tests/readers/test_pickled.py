"""Features in .pt files, harmless and hostile."""

import pickle
import zipfile

import numpy as np
import pytest
import torch

from psamil.errors import DataError
from psamil.readers import describe_bag, find_bags, open_bag
from psamil.readers.pickled import load_pickled
from tests.readers.layouts import FEATURES, corners

COORDS = corners(512)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "slide.pt"


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("kind", ["tensor", "array", "dictionary of tensors", "dictionary of arrays", "parameter"])
def test_kinds(path, kind, dtype, zipped):
    features = FEATURES.astype(dtype)
    content = {
        "tensor": torch.from_numpy(features),
        "array": features,
        "dictionary of tensors": {"feats": torch.from_numpy(features), "coords": torch.from_numpy(COORDS)},
        "dictionary of arrays": {"features": features, "coords": COORDS},
        "parameter": torch.nn.Parameter(torch.from_numpy(features)),
    }[kind]
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    loaded = load_pickled(path)
    assert loaded.features.dtype == dtype
    np.testing.assert_array_equal(loaded.features, features)
    torch.from_numpy(loaded.features).add_(1)  # writable
    if isinstance(content, dict):
        np.testing.assert_array_equal(loaded.coords, COORDS)
    else:
        assert loaded.coords is None
    hollow = load_pickled(path, with_features=False).features
    assert (hollow.shape, hollow.dtype, hollow.strides) == (features.shape, features.dtype, (0, 0))


def test_fortran_order(path):
    torch.save(np.asfortranarray(FEATURES), path)
    np.testing.assert_array_equal(load_pickled(path).features, FEATURES)


def test_bfloat16_is_widened_and_said(path):
    torch.save({"features": torch.from_numpy(FEATURES).bfloat16(), "coords": torch.from_numpy(COORDS)}, path)
    summary = describe_bag(path)
    assert summary.dtype == "float32"
    assert "bfloat16" in summary.warnings[0]
    assert open_bag(path).features.dtype == torch.float32


@pytest.mark.parametrize("content", [{"a": 1}, [1, 2], "text", None, torch.zeros(3, 3).to_sparse(), {"features": [1]}])
def test_other_content_is_named(path, content):
    torch.save(content, path)
    with pytest.raises(DataError, match=r"slide\.pt.*save it again|name them"):
        open_bag(path)


@pytest.mark.parametrize("content", [np.array(["a", None], object), np.array(["text"]), FEATURES.astype(">f4")])
def test_arrays_of_other_things_than_plain_numbers(path, content):
    torch.save(content, path)
    with pytest.raises(DataError, match="holds more than tensors"):
        open_bag(path)


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.mark.parametrize("form", ["torch", "torch of old", "pickle", "inside a dictionary", "inside an array"])
def test_bombs_do_not_go_off(tmp_path, path, form):
    mark = tmp_path / "exploded"
    bomb = Bomb(mark)
    if form == "pickle":
        path.write_bytes(pickle.dumps(bomb))
    elif form == "inside a dictionary":
        torch.save({"features": torch.from_numpy(FEATURES), "coords": bomb}, path)
    elif form == "inside an array":
        torch.save(np.array([bomb], object), path)
    else:
        torch.save(bomb, path, _use_new_zipfile_serialization=form == "torch")
    with pytest.raises(DataError, match="holds more than tensors"):
        open_bag(path)
    assert "holds more than tensors" in find_bags(tmp_path).set_aside[0].reason
    assert not mark.exists()
    pickle.loads(pickle.dumps(bomb)).close()
    assert mark.exists()  # the bomb is one


def test_view_larger_than_its_file(path):
    """A tensor that repeats one number a million million times."""
    torch.save(torch.zeros(1).expand(1 << 20, 1 << 20), path)
    with pytest.raises(DataError, match="more than the file holds"):
        open_bag(path)


def test_compressed_archive_is_refused(path):
    torch.save(torch.zeros(1000, 1000), path)
    with (
        zipfile.ZipFile(path) as stored,
        zipfile.ZipFile(path.with_name("packed.pt"), "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in stored.namelist():
            packed.writestr(entry, stored.read(entry))
    with pytest.raises(DataError, match="compressed"):
        open_bag(path.with_name("packed.pt"))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_damage(path, zipped, as_tensor):
    """Truncated anywhere it is named; with a flipped byte it is named or has its shape."""
    content = torch.from_numpy(FEATURES) if as_tensor else FEATURES
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    data = path.read_bytes()
    for size in range(0, len(data), 97):
        path.write_bytes(data[:size])
        with pytest.raises(DataError):
            load_pickled(path)
    rng = np.random.default_rng(0)
    for place in rng.integers(len(data), size=200):
        damaged = bytearray(data)
        damaged[place] ^= rng.integers(1, 256)
        path.write_bytes(damaged)
        try:
            features = load_pickled(path).features
        except DataError:
            continue
        assert features.size == FEATURES.size
