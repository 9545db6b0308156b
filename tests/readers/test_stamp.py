"""STAMP files of all versions open to the same bag."""

import numpy as np
import pytest

from psamil.errors import DataError
from psamil.readers import describe_bag, find_bags, open_bag
from tests.readers.layouts import FEATURES, STAMP_ATTRIBUTES, N, corners, write_stamp
from tests.readers.same_bag import assert_same_bag


def test_current(tmp_path):
    bag = open_bag(write_stamp(tmp_path))
    assert_same_bag(bag, "float16")
    assert (bag.step_um, bag.step.unit, bag.step.source) == (256, "um", "metadata")
    assert bag.step.mpp is None  # what the file could say is that of the resized tile
    assert find_bags(tmp_path).bags[0].format == "stamp"
    assert describe_bag(tmp_path / "slide.h5").encoder == "uni-0a1b2c3d"


def test_version_2_0(tmp_path):
    bag = open_bag(write_stamp(tmp_path, about={"extractor": "uni", "unit": "um", "tile_size": 256.0}))
    assert_same_bag(bag, "float16")
    assert (bag.step_um, bag.step.source) == (256, "metadata")


@pytest.mark.parametrize("about", [{}, {"extractor": "ctranspath"}, {"tile_size": 224}])
def test_historic_pixels_become_micrometres(tmp_path, about):
    bag = open_bag(write_stamp(tmp_path, coords=corners(224, "i8", origin=(0, 0)), about=about))
    assert_same_bag(bag, "float16")
    assert bag.step_um == 256


def test_pixels_of_unknown_size(tmp_path):
    bag = open_bag(write_stamp(tmp_path, coords=corners(300), about={}))
    assert_same_bag(bag, "float16")
    assert (bag.step.unit, bag.step_um) == ("px", None)


@pytest.mark.parametrize("lost", [{}, {"unit": "ul"}, {"uniu": "um"}], ids=str)
@pytest.mark.parametrize("about", [STAMP_ATTRIBUTES, {"extractor": "uni", "unit": "um", "tile_size": 256.0}])
def test_lost_unit_is_not_taken_for_pixels(tmp_path, lost, about):
    path = write_stamp(tmp_path, about={name: about[name] for name in about if name != "unit"} | lost)
    with pytest.raises(DataError, match=r"its coordinates have (no unit|the unit 'ul'), where .* writes 'um'"):
        open_bag(path)


def test_drift_between_supertiles_is_kept(tmp_path):
    """Steps are a little longer than a tile where two large regions meet."""
    coords = corners(256, "f4", origin=(0, 0)) + (corners(1, origin=(0, 0)) // 4 * 0.8)
    bag = open_bag(write_stamp(tmp_path, coords=coords.astype("f4")))
    assert bag.n == N
    assert np.abs(bag.xy.numpy() - (coords - coords.min(0)) / 256).max() < 0.05


@pytest.mark.parametrize("kind", ["slide", "patient", None])
@pytest.mark.parametrize("features", [FEATURES[0], FEATURES[:1]], ids=["(dim,)", "(1, dim)"])
def test_slide_and_patient_vectors_are_refused_by_name(tmp_path, kind, features):
    about = {"version": "2.3.0", "encoder": "titan", "precision": "float32"} | ({"feat_type": kind} if kind else {})
    path = write_stamp(tmp_path, arrays={"feats": features}, about=about)
    with pytest.raises(DataError, match="one vector of 16 numbers for the whole slide or patient"):
        open_bag(path)
    with pytest.raises(DataError, match="one vector"):
        open_bag(path, format="stamp")
    assert "one vector" in find_bags(tmp_path).set_aside[0].reason


def test_multiplex_embeddings_have_no_coordinates(tmp_path):
    path = write_stamp(tmp_path, arrays={"patch_embeddings": FEATURES}, about={"extractor": "kronos"})
    with pytest.raises(DataError, match="no coordinates"):
        open_bag(path)
    assert open_bag(path, positions="row order").n == N


def test_rows_of_features_and_coordinates_must_agree(tmp_path):
    path = write_stamp(tmp_path, arrays={"feats": FEATURES, "coords": corners(256, "f4")[:-2]}, about=STAMP_ATTRIBUTES)
    with pytest.raises(DataError, match="incomplete or mixed up"):
        open_bag(path)
