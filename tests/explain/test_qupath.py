"""GeoJSON for QuPath: its conventions, exact places, holes, and the same bytes again."""

import gzip
import json
import math
import uuid

import numpy as np
import pytest

from psamil.errors import DataError, ShapeError
from psamil.explain import qupath
from psamil.explain.qupath import geojson_bytes, regions_geojson, tiles_geojson, write_geojson
from psamil.readers import TilePlaces

shapely = pytest.importorskip("shapely")


def places_of(picture, step=512.0, size=None, origin=(0.0, 0.0), mpp=0.25):
    """Tiles where a picture is not 0, in the order of rows; and their values."""
    y, x = np.nonzero(picture)
    corners = np.stack([x, y], 1) * step + origin
    return TilePlaces(corners, step if size is None else size, "px0", mpp), np.asarray(picture)[y, x]


def check_conventions(collection):
    """What QuPath reads, strictly: nothing else is in the file, and every polygon is valid."""
    collection = json.loads(geojson_bytes(collection), parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert collection.keys() == {"type", "features"}
    assert collection["type"] == "FeatureCollection"
    ids = [feature["id"] for feature in collection["features"]]
    assert len(set(ids)) == len(ids)
    for feature in collection["features"]:
        assert feature.keys() == {"type", "id", "geometry", "properties"}
        assert feature["type"] == "Feature"
        assert str(uuid.UUID(feature["id"])) == feature["id"]
        geometry, properties = feature["geometry"], feature["properties"]
        assert geometry.keys() == {"type", "coordinates"}
        assert geometry["type"] == "Polygon"
        for ring in geometry["coordinates"]:
            assert len(ring) >= 5
            assert ring[0] == ring[-1]
            assert all(len(point) == 2 and all(type(v) in (int, float) for v in point) for point in ring)
        assert shapely.is_valid(shapely.geometry.shape(geometry))
        assert properties.keys() <= {"objectType", "name", "classification", "isLocked", "measurements"}
        assert properties["objectType"] in ("tile", "annotation")
        for name, value in properties["measurements"].items():
            assert isinstance(name, str)
            assert type(value) in (int, float)
            assert math.isfinite(value)
        if properties["objectType"] == "annotation":
            assert properties["isLocked"] is True
            assert properties["classification"].keys() == {"name", "color"}
            assert len(properties["classification"]["color"]) == 3
            assert all(type(part) is int and 0 <= part <= 255 for part in properties["classification"]["color"])
    return collection["features"]


@pytest.mark.parametrize("offset", [(0, 0), (10778, 35096)], ids=["whole", "cropped"])
def test_tiles_read_back_are_the_tiles_of_the_lattice(offset):
    rng = np.random.default_rng(0)
    places, _ = places_of(rng.random((9, 7)) < 0.6, origin=(10778 + 3, 35096 + 5))
    scores = rng.normal(size=len(places.corners)).astype(np.float32)
    features = check_conventions(tiles_geojson(places, {"Score": scores, "Head 1": -scores}, offset_px0=offset))
    assert len(features) == len(places.corners)
    first = np.array([feature["geometry"]["coordinates"][0][0] for feature in features])
    assert first.dtype.kind == "i"  # whole pixels stay whole
    assert (first + offset == places.corners).all()
    cells = np.array([np.mean(f["geometry"]["coordinates"][0][:4], axis=0) for f in features])
    steps = (cells + offset - places.corners.min(0)) // 512
    assert (steps == (places.corners - places.corners.min(0)) / 512).all()
    boxes = [shapely.geometry.shape(f["geometry"]).bounds for f in features]
    assert (np.ptp(np.array(boxes).reshape(-1, 2, 2), axis=1) == 512).all()
    for name, values in (("Score", scores), ("Head 1", -scores)):
        written = [feature["properties"]["measurements"][name] for feature in features]
        np.testing.assert_allclose(written, values, rtol=1e-6)


def test_places_between_pixels_stay_exact():
    places, _ = places_of(np.ones((2, 3)), step=100.7, size=99.3, origin=(0.25, 0.5))
    features = check_conventions(tiles_geojson(places, {}))
    for feature, (x, y) in zip(features, places.corners.tolist(), strict=True):
        ring = feature["geometry"]["coordinates"][0]
        assert ring[0] == [x, y]
        assert ring[2] == [x + 99.3, y + 99.3]


def test_numbers_that_json_lacks_are_left_out():
    places, _ = places_of(np.ones((1, 3)))
    features = check_conventions(tiles_geojson(places, {"a": np.array([np.nan, 1, np.inf]), "b": np.arange(3)}))
    assert [f["properties"]["measurements"] for f in features] == [{"b": 0}, {"a": 1, "b": 1}, {"b": 2}]


PICTURE = np.array(
    [
        [2, 2, 2, 1, 1],
        [2, 1, 2, 1, 2],
        [2, 2, 2, 1, 2],
        [1, 1, 1, 2, 1],
    ]
)


@pytest.mark.parametrize(("size", "step"), [(512, 512), (511, 512), (514, 512), (33.4, 33.4)], ids=str)
def test_regions_with_a_hole_and_touching_corners(size, step):
    """A ring of 8 tiles around a hole, two tiles by a side, and one that touches those by its corner alone."""
    places, values = places_of(PICTURE, step=step, size=size)
    scores = np.arange(len(values), dtype=float)
    found = regions_geojson(places, values == 2, name="High", measurements={"Score": scores})
    features = check_conventions(found)
    polygons = [shapely.geometry.shape(feature["geometry"]) for feature in features]
    if size > step:  # overlapping tiles overlap at their corners, too
        assert [feature["properties"]["measurements"]["Tiles"] for feature in features] == [11]
        return
    assert [len(polygon.interiors) for polygon in polygons] == [1, 0, 0]
    measured = [feature["properties"]["measurements"] for feature in features]
    assert [m["Tiles"] for m in measured] == [8, 2, 1]
    ring = scores[:15].reshape(3, 5)[:, :3].ravel()[[0, 1, 2, 3, 5, 6, 7, 8]]
    assert measured[0]["Score mean"] == pytest.approx(ring.mean())
    assert measured[0]["Score max"] == ring.max()
    assert measured[2]["Area mm^2"] == pytest.approx((size * 0.25 / 1000) ** 2, rel=1e-3)
    hole = shapely.Polygon(polygons[0].interiors[0])
    assert hole.area == pytest.approx((2 * step - size) ** 2, rel=1e-3)
    if float(size).is_integer():
        assert all(float(v).is_integer() for polygon in polygons for v in np.ravel(polygon.exterior.coords))
        assert polygons[0].bounds == (0, 0, 2 * step + size, 2 * step + size)
    assert [feature["properties"]["name"] for feature in features] == ["High 1", "High 2", "High 3"]


def test_regions_are_the_tiles_that_were_chosen():
    """On random choices: no area is won or lost, and no centre of another tile lies in a region."""
    rng = np.random.default_rng(1)
    for share in (0.1, 0.5, 0.9):
        places, _ = places_of(np.ones((20, 20)), step=224)
        high = rng.random(400) < share
        features = check_conventions(regions_geojson(places, high, name="High", offset_px0=(100, 50)))
        united = shapely.union_all([shapely.geometry.shape(feature["geometry"]) for feature in features])
        assert united.area == high.sum() * 224**2
        assert (shapely.contains_xy(united, places.corners + 112 - (100, 50)) == high).all()
        assert sum(feature["properties"]["measurements"]["Tiles"] for feature in features) == high.sum()
        assert sum(feature["properties"]["measurements"]["Area mm^2"] for feature in features) == pytest.approx(
            high.sum() * 0.056**2
        )


def test_no_region_and_no_resolution():
    places, _ = places_of(np.ones((2, 2)), mpp=None)
    assert regions_geojson(places, np.zeros(4, bool), name="High")["features"] == []
    (region,) = regions_geojson(places, np.ones(4, bool), name="High")["features"]
    assert region["properties"]["measurements"] == {"Tiles": 4}


@pytest.mark.parametrize("unit", ["um", "px", "steps"])
def test_other_units_are_refused(unit):
    places = TilePlaces(np.zeros((1, 2)), 1.0, unit)
    with pytest.raises(DataError, match="QuPath needs level-0 pixels"):
        tiles_geojson(places, {})
    with pytest.raises(DataError, match="QuPath needs level-0 pixels"):
        regions_geojson(places, np.ones(1, bool), name="High")


def test_measurements_of_other_tiles_are_refused():
    places, _ = places_of(np.ones((2, 2)))
    with pytest.raises(ShapeError, match="'Score' is \\(3,\\)"):
        tiles_geojson(places, {"Score": np.zeros(3)})
    with pytest.raises(ShapeError, match="high is \\(3,\\)"):
        regions_geojson(places, np.zeros(3, bool), name="High")
    with pytest.raises(ShapeError, match="Score is \\(3,\\)"):
        regions_geojson(places, np.zeros(4, bool), name="High", measurements={"Score": np.zeros(3)})


def test_the_same_export_is_the_same_file(tmp_path, monkeypatch):
    places, values = places_of(PICTURE)

    def written(name, slide="a"):
        tiles = tiles_geojson(places, {"Score": np.sqrt(values)}, slide=slide)
        tiles["features"] += regions_geojson(places, values == 2, name="High", slide=slide)["features"]
        check_conventions(tiles)  # ids of tiles and regions differ
        return write_geojson(tmp_path / name, tiles)

    first, again, other = written("1.geojson"), written("2.geojson"), written("3.geojson", slide="b")
    assert first.name == "1.geojson"
    assert first.read_bytes() == again.read_bytes()
    ids = [{feature["id"] for feature in json.loads(file.read_text())["features"]} for file in (first, other)]
    assert ids[0].isdisjoint(ids[1])
    monkeypatch.setattr(qupath, "LARGE_BYTES", 1000)
    large, large_again = written("1.geojson"), written("2.geojson")
    assert large.name == "1.geojson.gz"
    assert large.read_bytes() == large_again.read_bytes()
    assert gzip.decompress(large.read_bytes()) == first.read_bytes()
