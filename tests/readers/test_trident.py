"""TRIDENT files of every age and variant open to the same bag."""

import numpy as np
import pytest

from psamil.errors import DataError
from psamil.readers import describe_bag, find_bags, open_bag
from tests.readers.layouts import DIM, FEATURES, N, corners, resizable, trident_attributes, write_h5, write_trident
from tests.readers.same_bag import assert_same_bag


def test_h5(tmp_path):
    bag = open_bag(write_trident(tmp_path, mpp=0.25))
    assert_same_bag(bag)
    assert bag.id == "slide"
    assert (bag.step.length, bag.step.unit, bag.step.source, bag.step.overlap) == (512, "px0", "metadata", 0)
    assert bag.step_um == 128


def test_float16_is_kept(tmp_path):
    assert_same_bag(open_bag(write_trident(tmp_path, features=FEATURES.astype(np.float16))), "float16")


def test_pt_is_a_numpy_array_and_has_its_coordinates_in_patches(tmp_path):
    path = write_trident(tmp_path, kind="pt")
    assert find_bags(tmp_path).bags[0].format == "trident"
    assert_same_bag(open_bag(path))
    path = write_trident(tmp_path / "half", kind="pt", features=FEATURES.astype(np.float16))
    assert_same_bag(open_bag(path), "float16")


@pytest.mark.parametrize("name", ["encoder is absent", "encoder is 'None'", "encoder is said"])
def test_encoder(tmp_path, name):
    path = write_trident(tmp_path, encoder={"encoder is absent": None, "encoder is 'None'": "None"}.get(name, "UNI"))
    assert describe_bag(path).encoder == ("UNI" if name == "encoder is said" else "uni_v1")


def test_magnifications_as_floats(tmp_path):
    about = trident_attributes(source=40, target=20.0)
    assert isinstance(about["patch_size_level0"], float)
    assert_same_bag(open_bag(write_trident(tmp_path, about=about)))


def test_overlap_is_in_pixels_of_the_target_magnification(tmp_path):
    about = trident_attributes(overlap=64)
    bag = open_bag(write_trident(tmp_path, about=about, coords=corners(384), folder="20x_256px_64px_overlap"))
    assert_same_bag(bag)
    assert (bag.step.length, bag.step.source, bag.step.overlap) == (384, "metadata", 0.25)


def test_step_is_rounded_as_tiles_are_walked(tmp_path):
    """250 px at 15x from 40x are 666.67 px: 667 for the walk, 666 in patch_size_level0."""
    about = trident_attributes(patch=250, overlap=25, source=40, target=15)
    step = round(250 * 40 / 15) - round(25 * 40 / 15)
    assert (step, about["patch_size_level0"]) == (667 - 67, 666)
    bag = open_bag(write_trident(tmp_path, about=about, coords=corners(step)))
    assert (bag.step.length, bag.step.source) == (step, "metadata")


def test_single_tile_has_the_step_of_its_metadata(tmp_path):
    bag = open_bag(write_trident(tmp_path, features=FEATURES[:1], coords=corners(512)[:1]))
    assert bag.n == 1
    assert bag.step.length == 512


@pytest.mark.parametrize("shape", [(0,), (0, DIM)])
def test_slides_without_tissue(tmp_path, shape):
    bag = open_bag(write_trident(tmp_path, features=np.empty(shape, np.float32), coords=np.empty((0, 2), int)))
    assert bag.n == 0
    assert bag.features.shape == (0, shape[1] if len(shape) > 1 else 0)


def test_coordinates_from_clam_have_no_attributes(tmp_path):
    assert_same_bag(open_bag(write_trident(tmp_path, about={}, encoder=None, patches=False)))


def test_demo_files_know_only_the_distance_of_tiles(tmp_path):
    arrays = {"features": FEATURES, "coords": corners(1024)}
    path = write_h5(tmp_path / "TCGA-X.h5", arrays, {"coords": {"patch_size_level0": 1024}}, maxshape=resizable)
    bag = open_bag(path)
    assert_same_bag(bag)
    assert (bag.step.length, bag.step.source) == (1024, "metadata")


def test_mpp_is_not_used_if_slides_of_one_name_disagree(tmp_path):
    path = write_trident(tmp_path, mpp=0.25)
    states = tmp_path / "wsi_states"
    (states / "slide__ffffffffffff.json").write_text('{"meta": {"mpp": 0.5}}')
    (states / "slide__eeeeeeeeeeee.json").write_text("not json")
    summary = describe_bag(path)
    assert summary.mpp is None
    assert "several values" in summary.warnings[0]


def test_slide_vectors_are_refused_by_name(tmp_path):
    arrays = {"features": FEATURES[0], "coords": corners(512)}
    folder = tmp_path / "20x_256px_0px_overlap" / "slide_features_titan"
    path = write_h5(folder / "slide.h5", arrays, {"coords": trident_attributes()})
    with pytest.raises(DataError, match="one vector of 16 numbers for the whole slide"):
        open_bag(path)
    write_trident(tmp_path)
    found = find_bags(tmp_path)
    assert [ref.path.parent.name for ref in found.bags] == ["features_uni_v1"]
    assert "one vector" in found.set_aside[0].reason


def test_rows_of_features_and_coordinates_must_agree(tmp_path):
    path = write_trident(tmp_path, features=FEATURES[:-1])
    with pytest.raises(DataError, match=f"features of {N - 1} tiles and coordinates of {N}"):
        open_bag(path)
    with pytest.raises(DataError, match="extract the features"):
        open_bag(write_trident(tmp_path, "pt", features=FEATURES[:-1], kind="pt"))


def test_lock_means_that_a_file_is_being_written(tmp_path):
    path = write_trident(tmp_path)
    path.with_name("slide.h5.lock").write_text("{}")
    found = find_bags(tmp_path)
    assert found.bags == ()
    assert "being written" in found.set_aside[0].reason


def test_pt_in_a_folder_of_any_name_beside_patches(tmp_path):
    path = write_trident(tmp_path, kind="pt", folder="my_coordinates")
    bag = open_bag(path)
    assert_same_bag(bag)
    assert bag.step.source == "metadata"
    assert find_bags(tmp_path).bags[0].format == "trident"


def test_tilings_and_states_are_not_bags(tmp_path):
    write_trident(tmp_path, "a")
    write_trident(tmp_path, "b", mpp=0.5)
    found = find_bags(tmp_path)
    assert [ref.id for ref in found.bags] == ["a", "b"]
    assert found.set_aside == ()
    assert found.ignored == 3  # two tilings, one state
