"""Lesions as the CAMELYON16 challenge counts them, against the challenge's procedure on pixels."""

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from psamil.errors import DataError
from psamil.slides.lesions import find_annotation, lesions_of, read_lesion_mask, read_outlines
from tests.slides.outlines import square, write_asap, write_geojson

shapely = pytest.importorskip("shapely")


def box(*corners):
    return shapely.box(*corners)


def test_classes_and_groups(tmp_path):
    """A square of 100 with a hole, of which 20 are excluded, and one more of CAMELYON's second group."""
    rings = square(0, 0, 10), square(2, 2, 3)
    one = read_outlines(write_geojson(tmp_path / "a.geojson", ("Tumor", *rings), ("Exclusion", square(6, 0, 2, 10))))
    assert one.area == 100 - 9 - 20
    plain = read_outlines(write_geojson(tmp_path / "b.geojson", (None, *rings), ("tumour", square(20, 0, 1))))
    assert plain.area == 100 - 9 + 1
    asap = write_asap(tmp_path / "c.xml", ("_0", rings[0]), ("_1", square(20, 0, 1)), ("_2", rings[1]))
    assert read_outlines(asap).area == 100 + 1 - 9
    later = write_asap(tmp_path / "d.xml", ("metastases", rings[0]), ("normal", rings[1]))
    assert read_outlines(later).area == 100 - 9
    for empty in (write_geojson(tmp_path / "e.geojson"), write_asap(tmp_path / "f.xml")):
        assert read_outlines(empty).is_empty


def test_classes_that_may_mean_anything_are_refused(tmp_path):
    path = write_geojson(tmp_path / "a.geojson", ("Tumor", square(0, 0, 10)), ("Stroma", square(20, 0, 10)))
    with pytest.raises(DataError, match=r"classes 'Stroma', .*--lesion-classes"):
        read_outlines(path)
    assert read_outlines(path, ["tumor"]).area == 100
    assert read_outlines(path, ["Stroma", "Tumor"]).area == 200


def test_an_outline_that_crosses_itself(tmp_path):
    bow_tie = [[0, 0], [10, 10], [10, 0], [0, 10]]
    assert read_outlines(write_geojson(tmp_path / "a.geojson", ("Tumor", bow_tie))).area == pytest.approx(50)


def test_close_outlines_are_one_lesion():
    """At 0.5 um, 75 um are 150 pixels: 140 apart is one lesion, 160 apart are two; holes are filled."""
    ring = box(0, 0, 1000, 1000).difference(box(300, 300, 700, 700))
    near, far = box(1140, 0, 1200, 60), box(0, 1160, 40, 1200)
    lesions = lesions_of(shapely.union_all([ring, near, far]), mpp=0.5)
    assert len(lesions.regions) == 2
    large, small = sorted(lesions.regions, key=lambda region: -region.area)
    assert large.contains(box(300, 300, 700, 700))
    assert large.contains(near)
    assert small.contains(far)
    assert sorted(length < 275 for length in lesions.lengths_um) == [False, True]


def test_without_a_resolution_nothing_grows():
    lesions = lesions_of(shapely.union_all([box(0, 0, 10, 10), box(11, 0, 20, 10)]), mpp=None)
    assert [region.area for region in lesions.regions] == [100, 90]
    assert np.isnan(lesions.lengths_um).all()
    assert len(lesions_of(shapely.Polygon(), mpp=0.5).regions) == 0


def test_isolated_tumour_cells_are_those_below_200_um():
    """A disc of 200 um has a major axis of 275 um with its margin."""
    (length,) = lesions_of(shapely.Point(150_000, 90_000).buffer(100 / 0.25, quad_segs=64), mpp=0.25).lengths_um
    assert length == pytest.approx(275, rel=1e-3)


@pytest.mark.parametrize("angle", [0, 30, 117])
def test_length_of_a_long_lesion(angle):
    """A strip of 1000 x 25 um, with its margin 1075 x 100: a rectangle of this length, but for its round ends."""
    strip = shapely.affinity.rotate(box(150_000, 90_000, 150_000 + 4000, 90_000 + 100), angle)
    (length,) = lesions_of(strip, mpp=0.25).lengths_um
    assert length == pytest.approx(4 * 1075 / np.sqrt(12), rel=0.02)


def challenge_on_pixels(mask, um_per_px):
    """Numbers of regions, and their major axes in um: distances, filled holes, eight neighbours, second moments."""
    grown = ndimage.distance_transform_edt(~mask) < 37.5 / um_per_px
    numbers, count = ndimage.label(ndimage.binary_fill_holes(grown), structure=np.ones((3, 3)))
    lengths = []
    for k in range(1, count + 1):
        covariance = np.cov(np.argwhere(numbers == k).T, bias=True) + np.eye(2) / 12
        lengths.append(4 * np.sqrt(np.linalg.eigvalsh(covariance)[-1]) * um_per_px)
    return numbers, np.array(lengths)


@pytest.mark.parametrize("seed", range(8))
def test_lesions_of_masks_are_those_of_the_challenge(tmp_path, seed):
    """Random blobs at 4 um per pixel of the mask, which has a quarter of the slide's pixels to each side."""
    rng = np.random.default_rng(seed)
    mask = ndimage.gaussian_filter(rng.random((220, 260)), 5) > 0.53
    mask &= np.pad(np.ones((200, 240), bool), 10)  # pixels end at the border of the slide, grown outlines do not
    Image.fromarray((mask * 255).astype(np.uint8)).save(tmp_path / "a.png")
    annotated = read_lesion_mask(tmp_path / "a.png", "a", (4 * 260, 4 * 220), tile_px0=16 * 4)
    assert annotated.area == mask.sum() * 16
    lesions = lesions_of(annotated, mpp=1.0)
    numbers, lengths = challenge_on_pixels(mask, 4.0)
    y, x = np.nonzero(mask)
    ours = np.array(
        [
            np.flatnonzero(shapely.contains_xy(lesions.regions, *place))[0]
            for place in zip(4 * x + 2, 4 * y + 2, strict=True)
        ]
    )
    pairs = set(zip(ours.tolist(), numbers[y, x].tolist(), strict=True))
    assert len(lesions.regions) == len(lengths) == len(pairs)  # the same pixels are together
    for region, number in pairs:
        assert lesions.lengths_um[region] == pytest.approx(lengths[number - 1], abs=6.0)  # distances of pixels' centres


def test_masks_and_their_resolution(tmp_path):
    mask = np.zeros((100, 200), np.uint8)
    mask[10:20, 30:70] = 1
    np.save(tmp_path / "a_mask.npy", mask)
    area = read_lesion_mask(tmp_path / "a_mask.npy", "a", (2000, 1000), tile_px0=100)
    assert area.equals(box(300, 100, 700, 200))
    np.save(tmp_path / "b.npy", np.zeros((100, 200), bool))
    assert read_lesion_mask(tmp_path / "b.npy", "b", (2000, 1000), tile_px0=100).is_empty
    with pytest.raises(DataError, match="another shape than a with 2000 x 2000"):
        read_lesion_mask(tmp_path / "a_mask.npy", "a", (2000, 2000), tile_px0=100)


def test_find_annotation(tmp_path):
    for name in ("a.xml", "b.geojson", "c_mask.tif", "d.svs.xml", "e.xml", "e.geojson"):
        (tmp_path / name).touch()
    found = [find_annotation(tmp_path, name) for name in ("a", "b", "c", "d", "f")]
    assert [path and path.name for path in found] == ["a.xml", "b.geojson", "c_mask.tif", "d.svs.xml", None]
    with pytest.raises(DataError, match=r"several masks of e: e\.geojson, e\.xml"):
        find_annotation(tmp_path, "e")


def test_rings_without_an_area_mark_nothing(tmp_path):
    line, point = [[0, 0], [100, 0], [200, 0]], [[300, 300]]
    path = write_geojson(tmp_path / "a.geojson", ("Tumor", square(0, 0, 1000), point), ("Tumor", line))
    assert read_outlines(path).area == 1000**2
    only_line = read_outlines(write_asap(tmp_path / "b.xml", ("_0", line)))
    assert only_line.is_empty
    assert len(lesions_of(only_line, 0.25).regions) == 0
