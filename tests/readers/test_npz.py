import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from psamil.errors import DataError
from psamil.readers import find_bags, npz, open_bag
from tests.readers import layouts_other as layouts
from tests.real_data import DATA

REPOSITORY = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("features", ["features", "feats", "embeddings", "X"])
@pytest.mark.parametrize("coords", ["coords", "xy", "coordinates"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_plain(tmp_path, features, coords, save):
    path = tmp_path / "S1.npz"
    save(path, **{features: layouts.FEATURES, coords: layouts.CORNERS_PX0.astype(np.int32)})
    assert npz.recognise(path)
    assert npz.members(path) == [None]
    tiles = npz.read(path)
    layouts.assert_is_the_bag(tiles)
    assert (tiles.unit, tiles.continuous) == ("px", False)
    assert (tiles.nominal_step, tiles.tile_size, tiles.mpp, tiles.encoder) == (None, None, None, None)
    layouts.assert_is_hollow(npz.read(path, with_features=False))


@pytest.mark.parametrize(("stored", "opened"), [(">f4", "float32"), (">f2", "float16"), ("g", "float64")])
def test_foreign_types_of_numbers(tmp_path, stored, opened):
    coords = layouts.CORNERS_PX0.astype(">i4")
    np.savez(tmp_path / "S1.npz", features=layouts.FEATURES.astype(stored), coords=coords)
    bag = open_bag(tmp_path / "S1.npz", step=layouts.STEP_PX0)
    assert str(bag.features.dtype) == f"torch.{opened}"
    np.testing.assert_allclose(bag.features.float(), layouts.FEATURES, rtol=1e-3)
    layouts.assert_is_hollow(npz.read(tmp_path / "S1.npz", with_features=False), np.dtype(opened))


@pytest.mark.parametrize("kind", ["c8", "U8", "M8[s]"])
def test_coordinates_that_are_no_numbers(tmp_path, kind):
    np.savez(tmp_path / "S1.npz", features=layouts.FEATURES, coords=np.zeros((layouts.N, 2), kind))
    with pytest.raises(DataError, match="positions of type"):
        open_bag(tmp_path / "S1.npz")


def test_compression_bomb(tmp_path):
    features = np.broadcast_to(np.float16(0), (200_000, 1024))
    np.savez_compressed(tmp_path / "S1.npz", features=features, coords=np.zeros((200_000, 2), "i4"))
    with pytest.raises(DataError, match=r"refused: 'features.npy' unpacks to 409600000 bytes"):
        npz.read(tmp_path / "S1.npz")


def test_names_of_features(tmp_path):
    names = [f"marker{i}" for i in range(layouts.DIM)]
    np.savez(tmp_path / "S1.npz", features=layouts.FEATURES, feature_names=names)
    assert npz.read(tmp_path / "S1.npz").feature_names == tuple(names)
    np.savez(tmp_path / "S2.npz", features=layouts.FEATURES, feature_names=names[1:])
    with pytest.raises(DataError, match="19 names for 20 columns of features"):
        npz.read(tmp_path / "S2.npz")


def test_stated_facts(tmp_path):
    path = tmp_path / "S1.npz"
    facts = dict(unit="px0", step=448, tile_size=512.0, mpp=0.25, encoder="uni", continuous=True)
    np.savez(path, features=layouts.FEATURES, coords=layouts.CORNERS_PX0, **facts)
    tiles = npz.read(path)
    layouts.assert_is_the_bag(tiles)
    found = (tiles.unit, tiles.nominal_step, tiles.tile_size, tiles.mpp, tiles.encoder, tiles.continuous)
    assert found == ("px0", 448, 512, 0.25, "uni", True)


@pytest.mark.parametrize(
    ("arrays", "coords"),
    [
        ({"features": layouts.FEATURES}, None),
        ({"features": layouts.FEATURES[None], "coords": layouts.CORNERS_PX0[None]}, layouts.CORNERS_PX0),
        (
            {"features": layouts.FEATURES, "x": layouts.CORNERS_PX0[:, 0], "y": layouts.CORNERS_PX0[:, 1]},
            layouts.CORNERS_PX0,
        ),
    ],
    ids=["no positions", "batch axis", "x and y"],
)
def test_variants(tmp_path, arrays, coords):
    np.savez(tmp_path / "S1.npz", **arrays)
    layouts.assert_is_the_bag(npz.read(tmp_path / "S1.npz"), coords)


@pytest.mark.parametrize(
    ("stored", "opened"), [("float16", "float16"), ("float64", "float64"), ("uint8", "float32"), ("bool", "float32")]
)
def test_precision(tmp_path, stored, opened):
    values = (layouts.FEATURES > 0).astype(stored)
    np.savez(tmp_path / "S1.npz", features=values)
    tiles = npz.read(tmp_path / "S1.npz")
    np.testing.assert_array_equal(tiles.features, values.astype(float))
    assert tiles.features.dtype == opened
    layouts.assert_is_hollow(npz.read(tmp_path / "S1.npz", with_features=False), opened)


def test_slide_without_tiles(tmp_path):
    np.savez(tmp_path / "S1.npz", features=np.empty((0, 8), np.float32), coords=np.empty((0, 2)))
    tiles = npz.read(tmp_path / "S1.npz")
    assert tiles.features.shape == (0, 8)
    assert tiles.coords.shape == (0, 2)


def test_other_files_are_not_recognised(tmp_path):
    np.savez(tmp_path / "S1.index.npz", layouts.CORNERS_PX0)
    np.savez(tmp_path / "splits.npz", train=np.arange(3))
    torch.save(torch.ones(2, 3), tmp_path / "S1.pt")
    assert not any(npz.recognise(path) for path in tmp_path.iterdir())


@pytest.mark.parametrize("format", ["npz", "pt"])
@pytest.mark.parametrize("nested", [True, False])
def test_slide2vec(tmp_path, format, nested):
    path = layouts.write_slide2vec(tmp_path / "out", format, nested=nested)
    assert npz.recognise(path)
    tiles = npz.read(path)
    layouts.assert_is_the_bag(tiles)
    assert (tiles.unit, tiles.nominal_step, tiles.tile_size) == ("px0", layouts.STEP_PX0, layouts.TILE_PX0)
    assert (tiles.mpp, tiles.encoder) == (layouts.MPP if nested else None, "uni")
    layouts.assert_is_hollow(npz.read(path, with_features=False))


def test_slide2vec_is_joined_by_tile_index(tmp_path):
    layouts.assert_is_the_bag(npz.read(layouts.write_slide2vec(tmp_path / "out", shuffled=True)))


def test_slide2vec_without_coordinates(tmp_path):
    path = layouts.write_slide2vec(tmp_path / "out")
    (tmp_path / "out/tiles/S1.coordinates.npz").unlink()
    tiles = npz.read(path)
    layouts.assert_is_the_bag(tiles, None)
    assert "S1.coordinates.npz is missing" in tiles.notes[0]


def test_incomplete_slide2vec(tmp_path):
    path = layouts.write_slide2vec(tmp_path / "out")
    metadata = path.with_name("S1.meta.json")
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"num_tiles": 99}))
    with pytest.raises(DataError, match=r"24 of the 99 tiles that its \.meta\.json announces"):
        npz.read(path)
    metadata.write_text("{")
    with pytest.raises(DataError, match=r"meta\.json: is damaged"):
        npz.read(path)


@pytest.mark.parametrize(
    ("arrays", "cause"),
    [
        ({"features": layouts.FEATURES, "coords": layouts.CORNERS_PX0[:7]}, "24 tiles and coordinates of 7"),
        ({"features": layouts.FEATURES, "x": np.ones(4), "y": np.ones(5)}, r"x of shape \(4,\) and y of shape \(5,\)"),
        ({"features": layouts.FEATURES[0]}, "one vector of 20 numbers"),
        ({"features": np.full((24, 2), "a")}, "type <U1"),
        ({"features": layouts.FEATURES, "coords": np.full((24, 2), "a")}, "type <U1"),
        ({"features": layouts.FEATURES, "ptr": np.array([0, 3, 24])}, "several bags"),
        ({"features": layouts.FEATURES, "unit": "miles"}, "unknown unit 'miles'"),
        ({"features": layouts.FEATURES, "mpp": np.ones(3)}, r"'mpp' of shape \(3,\)"),
        ({"features": np.array([[object()]])}, "pickled objects"),
        ({"features": layouts.FEATURES, "coords": np.array([[object()]])}, "pickled objects"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, arrays, cause):
    path = tmp_path / "S1.npz"
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=cause):
        npz.read(path)


def test_every_truncation_is_named(tmp_path):
    path, whole = tmp_path / "S1.npz", tmp_path / "whole.npz"
    np.savez(whole, features=layouts.FEATURES, coords=layouts.CORNERS_PX0)
    content = whole.read_bytes()
    for length in range(0, len(content), 97):
        path.write_bytes(content[:length])
        with pytest.raises(DataError, match=r"S1\.npz: is damaged"):
            npz.recognise(path)
        with pytest.raises(DataError, match=r"S1\.npz: is damaged"):
            npz.read(path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_flipped_bytes_read_right_or_are_named(tmp_path, save):
    path, whole = tmp_path / "S1.npz", tmp_path / "whole.npz"
    save(whole, features=layouts.FEATURES, coords=layouts.CORNERS_PX0)
    content = whole.read_bytes()
    rng = np.random.default_rng(0)
    named = 0
    for at, flip in zip(rng.integers(0, len(content), 200), rng.integers(1, 256, 200), strict=True):
        changed = bytearray(content)
        changed[at] ^= flip
        path.write_bytes(changed)
        try:
            tiles = npz.read(path)
        except DataError:
            named += 1
        else:
            layouts.assert_is_the_bag(tiles, tiles.coords if tiles.coords is None else layouts.CORNERS_PX0)
    assert named > 100


def converter(name):
    return runpy.run_path(str(REPOSITORY / "examples" / name))["convert"]


def real(name):
    if not (DATA / name).is_dir():
        pytest.skip(f"the data set {name} is not here; PSAMIL_DATA names the data folder")
    return DATA / name


def test_converted_cells(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    bits = np.packbits([[1, 0, 1], [0, 1, 0], [1, 1, 1]], axis=1)
    xy = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    cells = {"ptr": np.array([0, 1, 3]), "xy": xy, "cell_type": np.array([1, 0, 1], np.uint8), "markers_bits": bits}
    np.savez(data / "cells.npz", **cells)
    (data / "cell_types.txt").write_text("B\nT")
    (data / "markers.txt").write_text("CD3\nCD8\nKi67")
    (data / "bags.csv").write_text("Person,n_cells,label\n1,1,0\n12,2,1\n")
    labels = converter("convert_cells.py")(data, tmp_path / "out")
    assert labels["slide_id"].tolist() == ["TNBC-01", "TNBC-12"]
    assert labels["label"].tolist() == ["mixed", "compartmentalised"]
    tiles = npz.read(tmp_path / "out/features/TNBC-12.npz")
    assert tiles.features.tolist() == [[1, 0, 0, 1, 0], [0, 1, 1, 1, 1]]
    assert tiles.coords.tolist() == [[3, 4], [5, 6]]
    assert (tiles.unit, tiles.continuous) == ("px", True)


@pytest.mark.parametrize(
    ("name", "images", "dim"), [("crc_codex_schurch2020", 140, 11), ("tnbc_mibi_keren2018", 33, 64)]
)
def test_real_cells(tmp_path, name, images, dim):
    labels = converter("convert_cells.py")(real(name), tmp_path)
    found = find_bags(tmp_path)
    assert (len(found.bags), found.set_aside) == (images, ())
    assert {ref.id for ref in found.bags} == set(labels["slide_id"])
    bag = open_bag(found.bags[0])
    assert bag.features.shape[1] == dim
    assert bag.n == int(labels.set_index("slide_id")["n_cells"][bag.id])


def test_real_regions(tmp_path):
    labels = converter("convert_tcga_hipt4k.py")(real("tcga_hipt4k"), tmp_path, ["BRCA"])
    assert {"case_id", "slide_id", "oncotree", "survival_months", "censorship", "fold0"} <= set(labels.columns)
    found = find_bags(tmp_path)
    assert (len(found.bags), found.set_aside) == (len(labels), ())
    bag = open_bag(found.bags[0], positions="row order")
    assert bag.n == int(labels.set_index("slide_id")["n_regions"][bag.id])


def test_shuffled_positions_belong_to_other_tiles_of_the_same_slide(tmp_path):
    features, coords = np.arange(60, dtype=np.float32).reshape(30, 2), np.stack(np.divmod(np.arange(30), 6), 1) * 256
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", features=features, coords=coords)
    a, b = (open_bag(tmp_path / f"{name}.npz", positions="shuffled") for name in ("a", "b"))
    plain = open_bag(tmp_path / "a.npz")
    assert torch.equal(a.features, plain.features)
    assert sorted(map(tuple, a.xy.tolist())) == sorted(map(tuple, plain.xy.tolist()))
    assert (a.xy != plain.xy).any(1).sum() > 20
    assert not torch.equal(a.xy, b.xy)
    assert torch.equal(a.xy, open_bag(tmp_path / "a.npz", positions="shuffled").xy)
