"""Opening, describing and finding bags, whatever their format."""

import logging
import os

import numpy as np
import pytest

from psamil.errors import DataError, OptionError
from psamil.readers import READERS, BagRef, describe_bag, find_bags, open_bag, slide_id
from tests.readers import layouts_other
from tests.readers.layouts import (
    DIM,
    FEATURES,
    N,
    corners,
    trident_attributes,
    write_clam,
    write_clam_patches,
    write_h5,
    write_stamp,
    write_trident,
)
from tests.readers.same_bag import assert_same_bag


@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("slide.h5", "slide"),
        ("features/uni/slide.svs.h5", "slide"),
        ("TCGA-A7-A0CD-01Z-00-DX1.F045B9C8-049C-41BF-8432-EF89F236D34D.svs", None),
        ("a.b.ome.tif.h5", "a.b"),
        ("x.OME.TIFF", "x"),
        ("slides.ndpi.pt", "slides"),  # ends in "s"
        ("0012", "0012"),
        ("0012.5.parquet", "0012.5"),
        ("täglich 3.mrxs.zarr", "täglich 3"),
        ("v1.2", "v1.2"),
        (".h5", ".h5"),
    ],
)
def test_slide_id(name, id):
    assert slide_id(name) == (id or name.removesuffix(".svs"))


def test_describe_says_what_open_gives_without_loading_features(tmp_path, monkeypatch):
    path = write_trident(tmp_path, mpp=0.25)
    bag, summary = open_bag(path), describe_bag(path)
    assert (summary.n, summary.dim, summary.dtype, summary.non_finite) == (N, DIM, "float32", None)
    assert (summary.step, summary.mpp, summary.encoder) == (bag.step, 0.25, "uni_v1")
    assert (summary.duplicates, summary.phases, summary.warnings) == (0, 1, ())
    np.testing.assert_array_equal(summary.xy, bag.xy.numpy())
    hollow = READERS["trident"].read(path, with_features=False).features
    assert (hollow.shape, hollow.strides, hollow.flags.writeable) == ((N, DIM), (0, 0), False)


@pytest.fixture
def with_gaps(tmp_path):
    """NaN in one tile, infinity in another."""
    features = FEATURES.copy()
    features[3, 5], features[10, :2] = np.nan, np.inf
    return write_trident(tmp_path, features=features)


def test_features_that_are_not_finite_are_an_error(with_gaps):
    with pytest.raises(DataError, match=rf"slide\.h5.*2 of {N} tiles have NaN or infinite features.*drop"):
        open_bag(with_gaps)
    assert describe_bag(with_gaps, count_non_finite=True).non_finite == 2


def test_features_that_are_not_finite_are_dropped_with_their_tiles(with_gaps):
    bag, all_tiles = open_bag(with_gaps, non_finite="drop"), describe_bag(with_gaps)
    keep = np.setdiff1d(np.arange(N), [3, 10])
    np.testing.assert_array_equal(bag.features.numpy(), FEATURES[keep])
    np.testing.assert_array_equal(bag.xy.numpy(), all_tiles.xy[keep])
    line = open_bag(with_gaps, non_finite="drop", positions="row order").xy[:, 0]
    np.testing.assert_array_equal(line.numpy(), keep)


def test_features_that_are_not_finite_become_zero(with_gaps):
    expected = FEATURES.copy()
    expected[3, 5] = expected[10, :2] = 0
    np.testing.assert_array_equal(open_bag(with_gaps, non_finite="zero").features.numpy(), expected)


@pytest.mark.parametrize("options", [{"non_finite": "x"}, {"positions": "x"}, {"format": "x"}])
def test_unknown_options_are_answered_with_the_known(tmp_path, options):
    with pytest.raises(OptionError, match="known"):
        open_bag(write_trident(tmp_path), **options)


def test_step_can_be_given_and_positions_can_be_physical(tmp_path):
    path = write_trident(tmp_path, mpp=0.25)
    assert open_bag(path, step=1024).xy.max() * 2 == open_bag(path).xy.max()
    physical = open_bag(path, um_per_step=100)
    assert physical.step_um == 100
    assert physical.xy.max() == open_bag(path).xy.max() * 1.28


def test_what_a_user_should_know_is_logged(tmp_path, caplog):
    path = write_trident(tmp_path, coords=corners(256))
    with caplog.at_level(logging.WARNING):
        open_bag(path)
    assert "slide.h5" in caplog.text
    assert "256" in caplog.text


def test_format_can_be_named(tmp_path):
    assert_same_bag(open_bag(write_trident(tmp_path), format="clam"))
    with pytest.raises(DataError, match="has no dataset 'feats'"):
        open_bag(write_trident(tmp_path), format="stamp")


def test_paths_that_are_no_bag(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        open_bag(tmp_path / "missing.h5")
    with pytest.raises(DataError, match="find_bags"):
        open_bag(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match=r"no known format.*trident"):
        open_bag(tmp_path / "notes.txt")
    os.mkfifo(tmp_path / "pipe.h5")  # opening it would wait for ever
    with pytest.raises(DataError, match="is not a file"):
        open_bag(tmp_path / "pipe.h5")
    with pytest.raises(DataError, match="does not exist"):
        find_bags(tmp_path / "missing")


def test_found_bags_open(tmp_path):
    write_stamp(tmp_path / "deep" / "er", "a.svs")
    write_trident(tmp_path / "job", "b")
    write_clam(tmp_path / "clam", "c")
    found = find_bags(tmp_path)
    assert [(ref.id, ref.format) for ref in found.bags] == [("a", "stamp"), ("b", "trident"), ("c", "clam")]
    for ref in found.bags:
        assert open_bag(ref).id == describe_bag(ref).ref.id == ref.id
        assert open_bag(ref).n == N


def test_single_file(tmp_path):
    path = write_stamp(tmp_path)
    assert find_bags(path).bags == (BagRef("slide", path, "stamp"),)


def test_what_is_beside_bags_is_counted_and_what_is_broken_is_named(tmp_path):
    write_stamp(tmp_path, "good")
    (tmp_path / "broken.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    (tmp_path / "broken.pt").write_bytes(b"no tensor")
    write_h5(tmp_path / "unknown.h5", {"something": np.zeros(3)})
    write_clam_patches(tmp_path, "good")
    write_h5(tmp_path / "heatmaps" / "good.h5", {"attention_scores": np.zeros((N, 1)), "coords": corners(512)})
    for name in ("good.jpg", "process.json", "_logs.txt", "._good.h5", "good.h5.tmp"):
        (tmp_path / name).write_bytes(b"0")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "slide.h5").write_bytes(b"0")
    found = find_bags(tmp_path)
    assert [ref.id for ref in found.bags] == ["good"]
    assert {aside.path.name: aside.reason.split(" (")[0].split(";")[0] for aside in found.set_aside} == {
        "broken.h5": "is damaged, incomplete or not HDF5",
        "broken.pt": "is damaged, or holds more than tensors",
        "unknown.h5": "is of no known format",
    }
    assert found.ignored == 7


def test_features_of_two_encoders_have_to_be_chosen(tmp_path):
    for model in ("uni", "conch"):
        write_trident(tmp_path, "a", model=model)
        write_trident(tmp_path, "b", model=model)
    with pytest.raises(
        DataError, match=r"2 slides occur more than once.*name one of these.*features_conch.*features_uni"
    ):
        find_bags(tmp_path)
    assert len(find_bags(tmp_path / "20x_256px_0px_overlap" / "features_uni").bags) == 2


def test_two_files_of_one_name_in_a_folder(tmp_path):
    write_stamp(tmp_path, "a.svs")
    write_stamp(tmp_path, "a.ndpi")
    with pytest.raises(DataError, match=r"'a' is in .*rename"):
        find_bags(tmp_path)
    write_stamp(tmp_path / "case", "A")
    write_stamp(tmp_path / "case", "a")
    assert len(find_bags(tmp_path / "case").bags) == 2


def test_h5_is_preferred_to_the_pt_beside_it(tmp_path):
    write_trident(tmp_path)
    write_trident(tmp_path, kind="pt")
    assert [ref.path.suffix for ref in find_bags(tmp_path).bags] == [".h5"]


def test_folders_that_link_in_circles(tmp_path):
    write_stamp(tmp_path / "real")
    (tmp_path / "real" / "again").symlink_to(tmp_path, target_is_directory=True)
    assert len(find_bags(tmp_path).bags) == 1


def test_folders_behind_links_are_found(tmp_path):
    write_stamp(tmp_path / "store")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "features").symlink_to(tmp_path / "store", target_is_directory=True)
    assert len(find_bags(tmp_path / "project").bags) == 1


def test_one_format_only(tmp_path):
    write_stamp(tmp_path, "a")
    write_trident(tmp_path, "b")
    assert [ref.id for ref in find_bags(tmp_path, format="stamp").bags] == ["a"]
    with pytest.raises(OptionError, match="known"):
        find_bags(tmp_path, format="unknown")


def test_tiny_slides(tmp_path):
    for n in range(3):
        about = trident_attributes()
        path = write_trident(tmp_path, f"tiles{n}", features=FEATURES[:n], coords=corners(512)[:n], about=about)
        bag = open_bag(path)
        assert (bag.n, bag.step.length if n else None) == (n, 512 if n else None)


def test_coordinates_that_no_slide_has(tmp_path):
    coords = corners(512)
    coords[7, 1] = 1 << 40
    with pytest.raises(DataError, match="1 tiles with coordinates that no slide has"):
        open_bag(write_trident(tmp_path, coords=coords, patches=False))


def test_stores_of_several_encoders(tmp_path):
    """Stores are not walked into; which features to take is asked for once."""
    layouts_other.write_wsidata(tmp_path / "a.zarr", tables=("uni_tiles", "conch_tiles"))
    layouts_other.write_wsidata(tmp_path / "b.zarr", tables=("uni_tiles",))
    found = find_bags(tmp_path)
    assert ([ref.id for ref in found.bags], found.ignored) == (["b"], 0)
    assert "several kinds; name one with `member=`: conch_tiles, uni_tiles" in found.set_aside[0].reason
    found = find_bags(tmp_path, member="uni_tiles")
    assert [(ref.id, ref.member) for ref in found.bags] == [("a", "uni_tiles"), ("b", "uni_tiles")]
    assert all(open_bag(ref).n == layouts_other.N for ref in found.bags)
    with pytest.raises(DataError, match="name one with"):
        open_bag(tmp_path / "a.zarr")
    assert open_bag(tmp_path / "a.zarr", member="conch_tiles").id == "a"


def test_tables_of_several_slides(tmp_path):
    layouts_other.cell_table(bag="slide_id").to_csv(tmp_path / "cells.csv", index=False)
    found = find_bags(tmp_path)
    assert len(found.bags) > 1
    assert [ref.id for ref in found.bags] == [ref.member for ref in found.bags]
    assert open_bag(found.bags[0]).id == found.bags[0].id
    assert describe_bag(found.bags[0]).feature_names[-2:] == ("CD3", "CD8")
    with pytest.raises(DataError, match=r"holds \d+ bags; name one"):
        open_bag(tmp_path / "cells.csv")


@pytest.mark.parametrize("format", ["slideflow", "psa_authors", "npz"])
def test_formats_with_pt_files_are_told_apart(tmp_path, format):
    folder = tmp_path / "S1"
    folder.mkdir()
    if format == "slideflow":
        layouts_other.write_slideflow(folder)
    elif format == "psa_authors":
        layouts_other.write_psa_authors(folder / "S1.pt")
    else:
        layouts_other.write_slide2vec(folder, "pt")
    found = find_bags(folder)
    assert [ref.format for ref in found.bags] == [format]
    assert found.set_aside == ()
    assert open_bag(found.bags[0]).n == layouts_other.N


def test_the_user_may_know_the_size_of_a_pixel_of_unknown_level(tmp_path):
    path = write_h5(tmp_path / "slide.h5", {"features": FEATURES, "coords": corners(512)})
    assert (open_bag(path).step.unit, open_bag(path).step_um) == ("px", None)
    assert open_bag(path, mpp=0.25).step_um == describe_bag(path, mpp=0.25).step.um == 128
    assert open_bag(path, mpp=0.25, um_per_step=128).xy.tolist() == open_bag(path).xy.tolist()
    with pytest.raises(DataError, match="give micrometres per pixel with `mpp=`"):
        open_bag(path, um_per_step=128)


def test_the_user_may_know_that_these_are_cells(tmp_path):
    cells = np.random.default_rng(0).uniform(0, 10_000, (N, 2))
    path = write_h5(tmp_path / "slide.h5", {"features": FEATURES, "coords": cells})
    with pytest.raises(DataError, match="continuous=True"):
        open_bag(path)
    assert open_bag(path, continuous=True).step.source == "spacing"
    assert describe_bag(path, continuous=True).phases is None
    np.savez(tmp_path / "tiles.npz", features=FEATURES, coords=corners(512), continuous=True)
    assert describe_bag(tmp_path / "tiles.npz", continuous=False).phases == 1


def test_the_user_may_know_the_size_of_a_pixel(tmp_path):
    path = tmp_path / "slide.npz"
    np.savez(path, features=np.zeros((4, 2), np.float32), coords=[[0, 0], [512, 0], [0, 512], [512, 512]], unit="px0")
    assert open_bag(path).step_um is None
    assert open_bag(path, mpp=0.25).step_um == 128
    assert open_bag(path, mpp=0.25, um_per_step=64).xy.max() == 2
    assert describe_bag(path, mpp=0.25).mpp == 0.25
