"""Tissue that a user marks: masks and GeoJSON."""

import json

import numpy as np
import pytest
import tifffile
from PIL import Image

from psamil.errors import DataError
from psamil.slides.annotations import filled, find_mask, read_mask, read_polygons
from psamil.slides.slide import open_slide
from psamil.slides.tiling import TileGrid, lay_tiles
from tests.slides.drawn import glass, write_slide

SQUARE = [[400, 200], [1200, 200], [1200, 1000], [400, 1000], [400, 200]]
HOLE = [[600, 400], [1000, 400], [1000, 800], [600, 800], [600, 400]]
FAR = [[1600, 1000], [1760, 1000], [1760, 1160], [1600, 1160], [1600, 1000]]


@pytest.fixture(scope="module")
def slide(tmp_path_factory):
    path = write_slide(tmp_path_factory.mktemp("slide") / "a.tif", glass(1600, 2000), levels=1)
    with open_slide(path) as slide:
        yield slide


def feature(kind, coordinates):
    return {
        "type": "Feature",
        "geometry": {"type": kind, "coordinates": coordinates},
        "properties": {"objectType": "annotation", "classification": {"name": "Tissue"}},
    }


def expected_mask():
    """Of pixels that are 16 px of the slide wide."""
    y, x = np.mgrid[:100, :125] * 16 + 8
    square = (x >= 400) & (x < 1200) & (y >= 200) & (y < 1000)
    hole = (x >= 600) & (x < 1000) & (y >= 400) & (y < 800)
    return (square & ~hole) | ((x >= 1600) & (x < 1760) & (y >= 1000) & (y < 1160))


@pytest.mark.parametrize(
    "content",
    [
        {"type": "FeatureCollection", "features": [feature("Polygon", [SQUARE, HOLE]), feature("Polygon", [FAR])]},
        [feature("MultiPolygon", [[SQUARE, HOLE], [FAR]])],
        feature("MultiPolygon", [[FAR], [SQUARE, HOLE]]),
        {"type": "MultiPolygon", "coordinates": [[SQUARE, HOLE], [FAR]]},
        {
            "type": "GeometryCollection",
            "geometries": [feature("MultiPolygon", [[SQUARE, HOLE], [FAR]])["geometry"], {"type": "Point"}],
        },
    ],
    ids=["collection", "list", "feature", "geometry", "geometries"],
)
def test_geojson(tmp_path, slide, content):
    (tmp_path / "a.geojson").write_text(json.dumps(content))
    tissue = read_mask(tmp_path / "a.geojson", slide)
    np.testing.assert_array_equal(tissue.mask, expected_mask())
    assert tissue.mpp == pytest.approx(8)
    assert not tissue.pen.any()
    assert not tissue.blurred.any()
    shares = lay_tiles(slide, tissue, TileGrid(size_px=200, least_tissue=0)).tissue_share.reshape(8, 10)
    assert shares[1, 2] == pytest.approx(1, abs=0.01)
    assert shares[2, 3] == pytest.approx(0, abs=0.01)  # the hole


def test_areas_that_overlap_add_up(tmp_path, slide):
    content = [feature("Polygon", [SQUARE]), feature("Polygon", [HOLE])]
    (tmp_path / "a.geojson").write_text(json.dumps(content))
    assert read_mask(tmp_path / "a.geojson", slide).mask[12:62, 25:75].all()


def test_filling_is_even_odd_by_centres_of_pixels():
    rng = np.random.default_rng(0)
    angle = np.sort(rng.random(40)) * 2 * np.pi
    star = np.stack([25 + 30 * rng.random(40) * np.cos(angle), 20 + 22 * rng.random(40) * np.sin(angle)], axis=1)
    got = filled([star], (40, 50))
    matplotlib_path = pytest.importorskip("matplotlib.path")
    y, x = np.mgrid[:40, :50] + 0.5
    expected = matplotlib_path.Path(star).contains_points(np.stack([x.ravel(), y.ravel()], axis=1)).reshape(40, 50)
    np.testing.assert_array_equal(got, expected)
    assert 0.05 < got.mean() < 0.95


def test_polygon_beyond_the_slide():
    square = np.array([[-100, -100], [30, -100], [30, 30], [-100, 30]], float)
    mask = filled([square], (50, 60))
    assert mask[:30, :30].all()
    assert mask.sum() == 900


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("{", "not valid JSON"),
        ('{"type": "FeatureCollection", "features": []}', "no Polygon"),
        ('{"type": "LineString", "coordinates": [[0, 0], [1, 1]]}', "no Polygon"),
        ('{"type": "Polygon", "coordinates": [[0, 1], [2, 3]]}', "other coordinates than x and y"),
        ('{"type": "Polygon", "coordinates": null}', "other coordinates than x and y"),
        ('{"type": "Polygon", "coordinates": [[[0, 0], [NaN, 1], [1, 1]]]}', "no numbers"),
        ('{"type": "Polygon", "coordinates": [[[9000, 0], [9500, 0], [9500, 10]]]}', "marks no tissue on a"),
    ],
    ids=["broken", "empty", "line", "flat", "null", "nan", "outside"],
)
def test_geojson_that_cannot_be_used(tmp_path, slide, content, cause):
    (tmp_path / "a.geojson").write_text(content)
    with pytest.raises(DataError, match=cause):
        read_mask(tmp_path / "a.geojson", slide)


def drawn_mask(width, height):
    mask = np.zeros((height, width), np.uint8)
    mask[height // 4 : height // 2, width // 5 : 3 * width // 5] = 255
    return mask


@pytest.mark.parametrize("size", [(2000, 1600), (500, 400), (125, 100)], ids=str)
@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.jpg", "a.npy"])
def test_mask_of_any_size(tmp_path, slide, size, name):
    mask, path = drawn_mask(*size), tmp_path / name
    if name.endswith("npy"):
        np.save(path, mask)
    elif name.endswith("tif"):
        tifffile.imwrite(path, mask, tile=(64, 64), compression="zlib")
    else:
        Image.fromarray(mask).save(path)
    tissue = read_mask(path, slide)
    assert tissue.mask.shape[0] / tissue.mask.shape[1] == pytest.approx(0.8, rel=0.02)
    assert tissue.area_mm2 == pytest.approx(0.25 * 0.4 * 0.8, rel=0.1)
    tiles = lay_tiles(slide, tissue, TileGrid(size_px=100, least_tissue=0.9))
    assert ((tiles.coords_px0 >= (400, 400)) & (tiles.coords_px0 <= (1100, 700))).all()
    assert len(tiles) == 32


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64])
def test_mask_of_zeros_and_ones(tmp_path, slide, dtype):
    np.save(tmp_path / "a.npy", (drawn_mask(500, 400) > 0).astype(dtype))
    assert read_mask(tmp_path / "a.npy", slide).share == pytest.approx(0.1)
    Image.fromarray((drawn_mask(500, 400) > 0).astype(np.uint8)).save(tmp_path / "b.png")
    assert read_mask(tmp_path / "b.png", slide).share == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(
    ("mask", "cause"),
    [
        (np.zeros((400, 500), np.uint8), "marks no tissue"),
        (np.full((500, 500), 255, np.uint8), "another shape than a with 2000 x 1600"),
        (np.full((400, 500), 3, np.uint8), "values up to 3"),
        (np.ones((400, 500, 3), np.uint8), "has the shape"),
        (np.ones((400, 500)), "float64"),
    ],
    ids=["black", "shape", "labels", "colours", "float"],
)
def test_mask_that_cannot_be_used(tmp_path, slide, mask, cause):
    np.save(tmp_path / "a.npy", mask)
    with pytest.raises(DataError, match=cause):
        read_mask(tmp_path / "a.npy", slide)


@pytest.mark.parametrize("name", ["a.npy", "a.png"])
def test_text_with_the_name_of_a_mask(tmp_path, slide, name):
    (tmp_path / name).write_text("text")
    with pytest.raises(DataError, match=name):
        read_mask(tmp_path / name, slide)


def test_pickled_mask_is_refused(tmp_path, slide):
    np.save(tmp_path / "a.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="no NumPy array"):
        read_mask(tmp_path / "a.npy", slide)


def test_find_mask(tmp_path):
    for name in ("a.geojson", "b.svs.png", "c_mask.tif", "d.npy", "d.png", "e.txt", "a.1.png"):
        (tmp_path / name).touch()
    assert [find_mask(tmp_path, name).name for name in ("a", "b", "c", "a.1")] == [
        "a.geojson",
        "b.svs.png",
        "c_mask.tif",
        "a.1.png",
    ]
    with pytest.raises(DataError, match=r"several masks of d: d\.npy, d\.png"):
        find_mask(tmp_path, "d")
    with pytest.raises(DataError, match="no mask"):
        find_mask(tmp_path, "e")
    with pytest.raises(DataError, match="No such file"):
        find_mask(tmp_path / "nowhere", "a")


def test_polygons_keep_their_holes(tmp_path):
    (tmp_path / "a.geojson").write_text(json.dumps([feature("Polygon", [SQUARE, HOLE])]))
    (polygon,) = read_polygons(tmp_path / "a.geojson")
    np.testing.assert_array_equal(polygon[0], SQUARE)
    np.testing.assert_array_equal(polygon[1], HOLE)
