"""CLAM's files and those of its relatives open to the same bag."""

import numpy as np
import pytest
import torch

from psamil.errors import DataError
from psamil.readers import describe_bag, find_bags, open_bag
from tests.readers.layouts import (
    FEATURES,
    N,
    corners,
    write_clam,
    write_clam_image_patches,
    write_clam_patches,
    write_h5,
)
from tests.readers.same_bag import assert_same_bag


@pytest.fixture
def tmp_path(tmp_path):
    """Tilings are looked for beside the folder of the features, too: where other tests have theirs."""
    return tmp_path / "project"


def test_h5_without_tiling_is_measured(tmp_path):
    bag = open_bag(write_clam(tmp_path))
    assert_same_bag(bag)
    assert (bag.step.length, bag.step.source, bag.step.unit) == (512, "measured", "px0")


@pytest.mark.parametrize("results", [".", "..", "../RESULTS"])
def test_h5_takes_the_tile_size_from_its_tiling(tmp_path, results):
    path = write_clam(tmp_path / "FEATURES")
    write_clam_patches(tmp_path / "FEATURES" / results)
    bag = open_bag(path)
    assert_same_bag(bag)
    assert (bag.step.length, bag.step.source, bag.step.overlap) == (512, "metadata", 0)


def test_image_patches_of_the_old_pipeline(tmp_path):
    path = write_clam(tmp_path)
    write_clam_image_patches(tmp_path)
    bag = open_bag(path)
    assert_same_bag(bag)
    assert bag.step.source == "metadata"
    assert find_bags(tmp_path).ignored == 2  # the tiling, and the .pt of the same bag


def test_step_size_is_not_stored_so_it_is_measured(tmp_path):
    path = write_clam(tmp_path, coords=corners(256))
    write_clam_patches(tmp_path, coords=corners(256))
    summary = describe_bag(path)
    assert (summary.step.length, summary.step.source, summary.step.overlap) == (256, "measured", 0.5)
    assert "512" in summary.warnings[0]


def test_pt_takes_coordinates_of_the_h5_or_of_the_tiling(tmp_path):
    write_clam(tmp_path / "both")
    assert_same_bag(open_bag(tmp_path / "both/pt_files/slide.pt"))
    path = write_clam(tmp_path / "one", kinds=("pt",))
    write_clam_patches(tmp_path / "one")
    assert_same_bag(open_bag(path))


def test_pt_alone_has_no_positions(tmp_path):
    path = write_clam(tmp_path, kinds=("pt",))
    with pytest.raises(DataError, match=r"no coordinates.*row order"):
        open_bag(path)
    assert describe_bag(path).step is None
    bag = open_bag(path, positions="row order")
    assert bag.xy.tolist() == [[i, 0] for i in range(N)]


def test_pt_with_other_rows_than_its_neighbours(tmp_path):
    write_clam(tmp_path, rows=N - 3)
    with pytest.raises(DataError, match=f"features of {N} tiles, but there are coordinates of {N - 3}"):
        open_bag(tmp_path / "pt_files/slide.pt")


def test_h5_of_a_killed_run_is_incomplete(tmp_path):
    path = write_clam(tmp_path, rows=32, kinds=("h5",))
    assert open_bag(path).n == 32  # nothing tells
    write_clam_patches(tmp_path)
    with pytest.raises(DataError, match=f"incomplete: it has the first 32 of the {N} tiles"):
        open_bag(path)


def test_pt_marks_a_complete_h5(tmp_path):
    path = write_clam(tmp_path, rows=32)
    with pytest.raises(DataError, match=f"incomplete or mixed up: it has 32 tiles, and .*slide.pt has {N}"):
        open_bag(path)
    (tmp_path / "pt_files/slide.pt").write_bytes(b"cut off")
    with pytest.raises(DataError, match=r"h5: may be incomplete: .*slide.pt beside it is damaged"):
        open_bag(path)
    (tmp_path / "pt_files/slide.pt").unlink()
    assert "check that all tiles are there" in describe_bag(path).warnings[0]


def test_pt_of_a_single_tile(tmp_path):
    write_clam(tmp_path, features=FEATURES[:1], coords=corners(512, "i4")[:1])
    bag = open_bag(tmp_path / "pt_files/slide.pt")
    assert bag.features.tolist() == FEATURES[:1].tolist()


def test_tiling_of_another_run_is_not_used(tmp_path):
    path = write_clam(tmp_path)
    write_clam_patches(tmp_path, coords=np.concatenate([corners(256), corners(256) + 64]))
    assert open_bag(path).step.source == "measured"


def test_tile_features_with_a_batch_axis(tmp_path):
    arrays = {"features": FEATURES[None], "coords": corners(512)[None]}
    bag = open_bag(write_h5(tmp_path / "slide.h5", arrays))
    assert_same_bag(bag)
    assert bag.step.unit == "px"  # nothing says that it is level 0
    (tmp_path / "pt_files").mkdir()
    torch.save(torch.from_numpy(FEATURES[None]), tmp_path / "pt_files/slide.pt")
    write_clam_patches(tmp_path)
    assert_same_bag(open_bag(tmp_path / "pt_files/slide.pt"))


@pytest.mark.parametrize("name", ["feats", "features"])
def test_pt_dictionary(tmp_path, name):
    content = {name: torch.from_numpy(FEATURES), "coords": torch.from_numpy(corners(512)), "label": 1}
    tmp_path.mkdir()
    torch.save(content, tmp_path / "slide.pt")
    assert_same_bag(open_bag(tmp_path / "slide.pt"))


def test_pt_in_the_file_format_of_old_torch(tmp_path):
    write_clam(tmp_path)
    path = tmp_path / "pt_files/slide.pt"
    torch.save(torch.from_numpy(FEATURES), path, _use_new_zipfile_serialization=False)
    assert_same_bag(open_bag(path))


def test_slide_vectors_are_refused_by_name(tmp_path):
    tmp_path.mkdir()
    torch.save(torch.from_numpy(FEATURES[0]), tmp_path / "slide.pt")
    with pytest.raises(DataError, match="one vector of 16 numbers"):
        open_bag(tmp_path / "slide.pt")
    path = write_h5(tmp_path / "slide.h5", {"features": FEATURES[:1], "coords": corners(512)})
    with pytest.raises(DataError, match="one vector of 16 numbers"):
        open_bag(path)
    assert find_bags(tmp_path / "slide.pt").bags == ()


def test_h5_and_pt_of_a_slide_are_one_bag(tmp_path):
    write_clam(tmp_path, "TCGA-A1.0001.abc")
    write_clam(tmp_path, "b")
    write_clam_patches(tmp_path, "b")
    found = find_bags(tmp_path)
    assert [(ref.id, ref.path.suffix, ref.format) for ref in found.bags] == [
        ("TCGA-A1.0001.abc", ".h5", "clam"),
        ("b", ".h5", "clam"),
    ]
    assert found.ignored == 3
