"""Labels of tiles from annotations: shares, lesions, all formats of both, and slides without annotations."""

import h5py
import numpy as np
import pytest
from PIL import Image

from psamil.cohort.simulation import STEP_PX0 as STEP
from psamil.cohort.simulation import write_trident_bag
from psamil.cohort.tile_labels import TileLabels
from psamil.errors import DataError, OptionError
from psamil.readers import TilePlaces, find_bags
from psamil.slides.lesions import lesions_of
from psamil.slides.tile_labels import label_slide, label_tiles
from tests.slides.outlines import square, write_asap, write_geojson

shapely = pytest.importorskip("shapely")

CORNERS = np.stack([side.ravel() * STEP for side in np.mgrid[0:8, 0:8][::-1]], 1)


def lattice(size=100.0, side=6, mpp=1.0):
    corners = np.stack([axis.ravel() for axis in np.mgrid[0:side, 0:side][::-1]], 1) * size
    return TilePlaces(corners, size, "px0", mpp)


def test_shares_by_hand():
    """A square over one tile, half of the next and a quarter of the one beside it."""
    lesions = lesions_of(shapely.union_all([shapely.box(0, 0, 150, 100), shapely.box(200, 0, 225, 100)]), mpp=None)
    labels = {share: label_slide(lattice(), lesions, share) for share in (0.2, 0.25, 0.5, 0.51, 1.0)}
    assert {share: np.flatnonzero(found.positive).tolist() for share, found in labels.items()} == {
        0.2: [0, 1, 2],
        0.25: [0, 1, 2],
        0.5: [0, 1],
        0.51: [0],
        1.0: [0],
    }
    assert labels[0.25].lesions[:4].tolist() == [1, 1, 2, 0]
    assert np.isnan([labels[0.25].lesion_lengths_um[k] for k in (1, 2)]).all()


def test_shares_are_those_of_pixels():
    """Random outlines, counted on single pixels; tiles are given out of order."""
    rng = np.random.default_rng(0)
    mask = np.kron(rng.random((30, 30)) < 0.4, np.ones((20, 20))).astype(bool)
    area = shapely.union_all(
        [shapely.box(20 * x, 20 * y, 20 * x + 20, 20 * y + 20) for y, x in np.argwhere(mask[::20, ::20])]
    )
    places = lattice()
    order = rng.permutation(36)
    places = TilePlaces(places.corners[order], 100.0, "px0", 1.0)
    share = mask.reshape(6, 100, 6, 100).mean((1, 3)).ravel()[order]
    for least in (0.3, 0.4, 0.45):
        assert (label_slide(places, lesions_of(area, 1.0), least).positive == (share >= least - 1e-9)).all()


def test_a_tile_belongs_to_the_lesion_of_its_centre():
    """A lesion between tiles, with its margin of 37.5 um over their centres, has tiles, but no positive ones."""
    thin = shapely.box(98, 0, 102, 600)
    labels = label_slide(lattice(), lesions_of(thin, mpp=1.0))
    assert not labels.positive.any()
    assert not labels.lesions.any()  # centres are 48 um away
    labels = label_slide(lattice(), lesions_of(shapely.box(80, 0, 120, 600), mpp=1.0))
    assert not labels.positive.any()
    assert (labels.lesions.reshape(6, 6)[:, :3] == [1, 1, 0]).all()
    assert labels.lesion_lengths_um.keys() == {1}


def test_a_positive_tile_belongs_to_the_lesion_that_covers_most_of_it():
    """Three stripes in a tile of 1000 um: its centre is in none of them."""
    places = TilePlaces(np.array([[0.0, 0.0], [1000.0, 0.0]]), 1000.0, "px0", 1.0)
    stripes = shapely.union_all([shapely.box(0, 0, 240, 1000), shapely.box(700, 0, 1000, 1000)])
    labels = label_slide(places, lesions_of(stripes, mpp=1.0))
    assert labels.positive.tolist() == [True, False]
    larger = [k for k, region in enumerate(lesions_of(stripes, mpp=1.0).regions, 1) if region.bounds[0] > 500]
    assert labels.lesions.tolist() == [*larger, 0]


@pytest.fixture
def features(tmp_path):
    for name in ("a", "b", "c", "d"):
        write_trident_bag(tmp_path / "features", "drawn", name, np.zeros((64, 4), np.float32), CORNERS)
    return tmp_path / "features"


def expected_tiles():
    """Those of a lesion over two by two tiles, one of which is excluded."""
    positive = np.zeros((8, 8), bool)
    positive[1:3, 1:3] = True
    positive[2, 2] = False
    return positive.ravel()


def annotate(folder):
    """The same lesion as GeoJSON, XML and a mask; d has no file."""
    folder.mkdir()
    whole, part = square(STEP, STEP, 2 * STEP), square(2 * STEP, 2 * STEP, STEP)
    write_geojson(folder / "a.geojson", ("Tumor", whole), ("Exclusion", part))
    write_asap(folder / "b.xml", ("_0", whole), ("_2", part))
    mask = np.kron(expected_tiles().reshape(8, 8), np.ones((10, 10))).astype(np.uint8)
    np.save(folder / "c_mask.npy", mask)
    return folder


def write_slides(folder):
    folder.mkdir()
    Image.new("RGB", (8 * STEP, 8 * STEP), "white").save(folder / "c.png")
    return folder


def test_all_formats_of_annotations(features, tmp_path):
    done = label_tiles(features, annotate(tmp_path / "annotations"), tmp_path / "labels")
    labels = TileLabels.open(tmp_path / "labels")
    assert sorted(labels.files) == ["a", "b", "c"]
    for ref in find_bags(features).bags[:3]:
        found = labels.with_lesions(ref, 64)
        assert (found.positive == expected_tiles()).all()
        assert set(found.lesions[found.positive].tolist()) == {1}
    assert (done.annotated, done.unannotated, done.positive_tiles, done.lesions) == (3, ("d",), 9, 3)
    assert "Annotations of 3 slides; 1 without a file are left out: 'd'." in str(done)
    assert done.about()["unannotated"] == 1


def test_slides_without_a_file_as_normal(features, tmp_path):
    done = label_tiles(features, annotate(tmp_path / "annotations"), tmp_path / "labels", unannotated="normal")
    assert "1 without a file count as normal: 'd'." in str(done)
    (normal,) = [ref for ref in find_bags(features).bags if ref.id == "d"]
    found = TileLabels.open(tmp_path / "labels").with_lesions(normal, 64)
    assert not found.positive.any()
    assert not found.lesion_lengths_um


def test_empty_annotations_are_of_normal_slides(features, tmp_path):
    (tmp_path / "annotations").mkdir()
    write_geojson(tmp_path / "annotations" / "a.geojson")
    write_asap(tmp_path / "annotations" / "b.xml")
    done = label_tiles(features, tmp_path / "annotations", tmp_path / "labels")
    assert (done.annotated, done.lesions, done.positive_tiles) == (2, 0, 0)
    assert not np.load(tmp_path / "labels" / "b.npz")["positive"].any()


def test_masks_need_the_size_of_the_slide(features, tmp_path):
    annotations = annotate(tmp_path / "annotations")
    for path in features.rglob("c*.h5"):
        with h5py.File(path, "a") as file:
            del file["coords"].attrs["level0_width"]
    with pytest.raises(DataError, match=r"c_mask\.npy: is a mask, and c\.h5 does not tell how large .*--slides"):
        label_tiles(features, annotations, tmp_path / "labels")
    label_tiles(features, annotations, tmp_path / "labels", slides=write_slides(tmp_path / "slides"))
    assert (np.load(tmp_path / "labels" / "c.npz")["positive"] == expected_tiles()).all()


def test_what_is_refused(features, tmp_path):
    annotations = annotate(tmp_path / "annotations")
    with pytest.raises(OptionError, match="unknown policy for slides without annotations 'ignore'"):
        label_tiles(features, annotations, tmp_path / "labels", unannotated="ignore")
    with pytest.raises(OptionError, match="least_share"):
        label_tiles(features, annotations, tmp_path / "labels", least_share=0)
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match=r"no annotations of any of the 4 slides; name the files as slides: a\.geojson"):
        label_tiles(features, tmp_path / "other", tmp_path / "labels", unannotated="normal")
