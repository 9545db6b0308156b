import sys

import h5py
import numpy as np
import pytest

from psamil.errors import DataError, MissingExtraError
from psamil.readers import h5ad
from tests.readers import layouts_other as layouts

FEATURES = np.concatenate([layouts.ONE_HOT, layouts.MARKERS], 1)
EVEN, ODD = slice(0, None, 2), slice(1, None, 2)


def write(path, x=FEATURES, spatial=layouts.CELLS_XY, **obs):
    import anndata
    import pandas as pd

    table = pd.DataFrame(obs, index=[f"cell{i}" for i in range(layouts.N)])
    data = anndata.AnnData(x, obs=table)
    if spatial is not None:
        data.obsm["spatial"] = spatial
    data.write_h5ad(path)
    return path


def sparse(kind):
    import scipy.sparse

    return getattr(scipy.sparse, f"{kind}_matrix")(FEATURES)


@pytest.mark.parametrize("kind", ["dense", "csr", "csc"])
def test_one_sample(tmp_path, kind):
    path = write(tmp_path / "S1.h5ad", FEATURES if kind == "dense" else sparse(kind))
    assert h5ad.recognise(path)
    assert h5ad.members(path) == [None]
    tiles = h5ad.read(path)
    layouts.assert_are_the_cells(tiles)
    assert (tiles.unit, tiles.features.dtype) == ("px", np.float32)
    layouts.assert_is_hollow(h5ad.read(path, with_features=False), shape=FEATURES.shape)


@pytest.mark.parametrize("kind", ["dense", "csr", "csc"])
@pytest.mark.parametrize("column", ["sample", "slide_id", "library_id"])
def test_several_samples(tmp_path, kind, column):
    samples = np.where(np.arange(layouts.N) % 2, "008", "007")
    path = write(tmp_path / "cells.h5ad", FEATURES if kind == "dense" else sparse(kind), **{column: samples})
    assert h5ad.members(path) == ["007", "008"]
    layouts.assert_are_the_cells(h5ad.read(path, "007"), EVEN)
    layouts.assert_are_the_cells(h5ad.read(path, "008"), ODD)
    layouts.assert_is_hollow(h5ad.read(path, "008", with_features=False), shape=(layouts.N // 2, 5))
    with pytest.raises(DataError, match="holds 2 bags; name one of: 007, 008"):
        h5ad.read(path)
    with pytest.raises(DataError, match="no bag '7'"):
        h5ad.read(path, "7")


def test_positions_in_obs_or_nowhere(tmp_path):
    x, y = layouts.CELLS_XY.T
    tiles = h5ad.read(write(tmp_path / "S1.h5ad", spatial=None, x_um=x, y_um=y))
    layouts.assert_are_the_cells(tiles)
    assert tiles.unit == "um"
    assert h5ad.read(write(tmp_path / "S2.h5ad", spatial=None)).coords is None


def test_third_axis_is_left_out(tmp_path):
    spatial = np.concatenate([layouts.CELLS_XY, np.ones((layouts.N, 1))], 1)
    layouts.assert_are_the_cells(h5ad.read(write(tmp_path / "S1.h5ad", spatial=spatial)))


def test_counts_become_float32(tmp_path):
    tiles = h5ad.read(write(tmp_path / "S1.h5ad", np.arange(layouts.N * 2).reshape(-1, 2)))
    assert tiles.features.dtype == np.float32
    assert tiles.features[3].tolist() == [6, 7]


def test_other_files_are_not_recognised(tmp_path):
    assert not h5ad.recognise(tmp_path / "S1.h5")


def test_truncated(tmp_path):
    path = write(tmp_path / "S1.h5ad")
    content = path.read_bytes()
    for length in range(0, len(content), 4096):
        path.write_bytes(content[:length])
        with pytest.raises(DataError, match=r"S1\.h5ad: is damaged"):
            h5ad.read(path)


@pytest.mark.parametrize("part", ["X", "obs", "obsm/spatial"])
def test_wrong_or_missing_parts(tmp_path, part):
    path = write(tmp_path / "S1.h5ad")
    with h5py.File(path, "a") as file:
        del file[part]
        file[part] = np.ones((7, 2), np.float32)
    with pytest.raises(DataError, match=r"S1\.h5ad: "):
        h5ad.read(path)


def test_links_and_missing_chunks_are_refused(tmp_path):
    path = write(tmp_path / "S1.h5ad")
    with h5py.File(path, "a") as file:
        del file["X"]
        file["X"] = h5py.ExternalLink("/etc/passwd", "/X")
    with pytest.raises(DataError, match="X is a link to another place"):
        h5ad.read(path)
    with h5py.File(path, "a") as file:
        del file["X"]
        file.create_dataset("X", (layouts.N, 5), "f4", chunks=(6, 5))[:6] = 1
    with pytest.raises(DataError, match="X has 1 of 4 pieces"):
        h5ad.read(path)


def test_names_of_features(tmp_path):
    path = write(tmp_path / "S1.h5ad")
    assert h5ad.read(path).feature_names == ("0", "1", "2", "3", "4")
    with h5py.File(path, "a") as file:
        file["var/_index"][:] = ["CD3", "CD8", "CD20", "CD68", "DNA"]
    assert h5ad.read(path).feature_names == ("CD3", "CD8", "CD20", "CD68", "DNA")


def test_facts_that_have_no_value(tmp_path):
    path = write(tmp_path / "S1.h5ad")
    with h5py.File(path, "a") as file:
        file["uns/nothing"] = h5py.Empty("f4")
    layouts.assert_are_the_cells(h5ad.read(path))


def test_objects_and_announced_sizes_are_refused(tmp_path):
    path = write(tmp_path / "S1.h5ad")
    with h5py.File(path, "a") as file:
        file.create_dataset("uns/lists", (3,), h5py.vlen_dtype(np.float32))
    with pytest.raises(DataError, match="/uns/lists is made of objects"):
        h5ad.read(path)
    path = write(tmp_path / "S2.h5ad")
    with h5py.File(path, "a") as file:
        file.create_dataset("uns/zeros", (1 << 28,), "f8")
    with pytest.raises(DataError, match="/uns/zeros needs 2147483648 bytes, and has 0"):
        h5ad.read(path)
    path = write(tmp_path / "S3.h5ad", sparse("csr"))
    with h5py.File(path, "a") as file:
        file["X"].attrs["shape"] = [layouts.N, 1 << 40]
    with pytest.raises(DataError, match="is much larger than"):
        h5ad.read(path)


def test_compression_bomb(tmp_path):
    path = write(tmp_path / "S1.h5ad")
    with h5py.File(path, "a") as file:
        zeros = np.zeros((1 << 13, 1 << 13), "f8")
        file.create_dataset("uns/zeros", data=zeros, chunks=(1 << 10, 1 << 13), compression=9)
    with pytest.raises(DataError, match="/uns/zeros unpacks to 536870912 bytes"):
        h5ad.read(path)


def test_cells_without_position(tmp_path):
    spatial = layouts.CELLS_XY.copy()
    spatial[2] = np.nan
    with pytest.raises(DataError, match="1 of 24 rows without a position"):
        h5ad.read(write(tmp_path / "S1.h5ad", spatial=spatial))


def test_missing_extra(tmp_path, monkeypatch):
    path = write(tmp_path / "S1.h5ad")
    monkeypatch.setitem(sys.modules, "anndata", None)
    with pytest.raises(MissingExtraError, match=r"anndata; install it with: pip install 'psamil\[h5ad\]'"):
        h5ad.read(path)
