"""Where tiles are on a slide, whatever was read of them."""

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from psamil.readers import open_bag, tile_places


@pytest.fixture
def trident_file(tmp_path: Path) -> Path:
    folder = tmp_path / "20x_256px_0px_overlap" / "features_uni"
    folder.mkdir(parents=True)
    corners = np.array([[x, y] for y in range(3) for x in range(4)]) * 512 + [1000, 3000]
    features = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    features[5] = np.nan
    with h5py.File(folder / "slide.h5", "w") as file:
        file["features"] = features
        coords = file.create_dataset("coords", data=corners)
        coords.attrs.update(patch_size=256, patch_size_level0=512, overlap=0, level0_magnification=40)
    return folder / "slide.h5"


def test_corners_are_those_of_the_file(trident_file: Path) -> None:
    places = tile_places(trident_file, open_bag(trident_file, non_finite="zero"))
    assert places.unit == "px0"
    assert places.size == 512
    assert places.corners[0].tolist() == [1000, 3000]
    assert places.corners[-1].tolist() == [1000 + 3 * 512, 3000 + 2 * 512]


def test_tiles_that_were_dropped_have_no_place(trident_file: Path) -> None:
    bag = open_bag(trident_file, non_finite="drop")
    places = tile_places(trident_file, bag)
    assert len(places.corners) == bag.n == 11
    np.testing.assert_allclose((places.corners - places.corners.min(0)) / 512, bag.xy.numpy())


def test_shuffled_positions_do_not_move_tiles(trident_file: Path) -> None:
    shuffled = tile_places(trident_file, open_bag(trident_file, non_finite="zero", positions="shuffled"))
    assert shuffled.corners[0].tolist() == [1000, 3000]


def test_physical_steps_do_not_change_the_size_of_tiles(trident_file: Path) -> None:
    places = tile_places(trident_file, open_bag(trident_file, non_finite="zero", mpp=0.25, um_per_step=64.0))
    assert (places.unit, places.size, places.um_per_unit) == ("px0", 512, 0.25)


def test_without_coordinates_tiles_lie_in_a_row(tmp_path: Path) -> None:
    torch.save(torch.ones(3, 4), tmp_path / "slide.pt")
    places = tile_places(tmp_path / "slide.pt", open_bag(tmp_path / "slide.pt", positions="row order"))
    assert places.unit == "steps"
    assert places.um_per_unit is None
    assert places.corners.tolist() == [[0, 0], [1, 0], [2, 0]]
