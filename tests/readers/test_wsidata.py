import json
import shutil
import sys

import numpy as np
import pytest

from psamil.errors import DataError, MissingExtraError
from psamil.readers import wsidata
from tests.readers import layouts_other as layouts

ORDER = np.random.default_rng(1).permutation(layouts.N)


def assert_is_the_bag(tiles):
    """The table of a store holds the tiles in another order."""
    np.testing.assert_array_equal(tiles.features, layouts.FEATURES[ORDER])
    np.testing.assert_array_equal(tiles.coords, layouts.CORNERS_PX0[ORDER])
    assert tiles.features.dtype == np.float32


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("with_xy", [True, False])
@pytest.mark.parametrize("sparse", [None, "csr", "csc"])
def test_store(tmp_path, zarr_format, with_xy, sparse):
    path = layouts.write_wsidata(tmp_path / "S1.zarr", zarr_format, with_xy=with_xy, sparse=sparse)
    assert wsidata.recognise(path)
    assert wsidata.members(path) == [None]
    tiles = wsidata.read(path)
    assert_is_the_bag(tiles)
    assert (tiles.unit, tiles.nominal_step, tiles.tile_size) == ("px0", layouts.STEP_PX0, layouts.TILE_PX0)
    assert (tiles.mpp, tiles.encoder, tiles.continuous, tiles.notes) == (layouts.MPP, "uni", False, ())
    layouts.assert_is_hollow(wsidata.read(path, with_features=False))


@pytest.mark.parametrize("region_in", ["attributes", "uns", "name"])
def test_where_the_tiles_of_a_table_are_named(tmp_path, region_in):
    assert_is_the_bag(wsidata.read(layouts.write_wsidata(tmp_path / "S1.zarr", region_in=region_in)))


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_several_tables(tmp_path, zarr_format):
    tables = ("uni_tiles", "conch_tiles", "uni_tiles_10x")
    path = layouts.write_wsidata(tmp_path / "S1.scene-0.zarr", zarr_format, tables=tables)
    assert wsidata.members(path) == ["conch_tiles", "uni_tiles", "uni_tiles_10x"]
    for member in tables:
        assert_is_the_bag(wsidata.read(path, member))
    assert wsidata.read(path, "uni_tiles_10x").encoder == "uni"
    with pytest.raises(DataError, match="3 feature tables; name one of: conch_tiles, uni_tiles, uni_tiles_10x"):
        wsidata.read(path)
    with pytest.raises(DataError, match="no feature table 'virchow'"):
        wsidata.read(path, "virchow")


def test_mpp_can_be_unknown(tmp_path):
    assert wsidata.read(layouts.write_wsidata(tmp_path / "S1.zarr", mpp=None)).mpp is None


def test_other_folders_are_not_recognised(tmp_path):
    import zarr

    assert not wsidata.recognise(tmp_path)
    zarr.open_group(str(tmp_path / "image.zarr"), mode="w")
    assert not wsidata.recognise(tmp_path / "image.zarr")


def test_store_without_features(tmp_path):
    path = layouts.write_wsidata(tmp_path / "S1.zarr")
    shutil.rmtree(path / "tables")
    with pytest.raises(DataError, match="no table of tile features; extract"):
        wsidata.members(path)


def test_tiles_without_features_are_told(tmp_path):
    import zarr

    path = layouts.write_wsidata(tmp_path / "S1.zarr")
    shutil.rmtree(path / "tables")
    root = zarr.open_group(str(path), mode="a")
    tile_ids = 100 + ORDER
    layouts.write_table(root, "uni_tiles", tile_ids, None, "attributes")
    for part in ("X", "obs/tile_id"):
        values = root[f"tables/uni_tiles/{part}"][...][:20]
        shutil.rmtree(path / "tables" / "uni_tiles" / part)
        layouts.write_array(root["tables/uni_tiles"], part, values)
    tiles = wsidata.read(path)
    np.testing.assert_array_equal(tiles.coords, layouts.CORNERS_PX0[ORDER[:20]])
    assert tiles.notes == ("The table uni_tiles has features of 20 of the 24 tiles 'tiles'.",)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_missing_chunks_do_not_become_zeros(tmp_path, zarr_format):
    path = layouts.write_wsidata(tmp_path / "S1.zarr", zarr_format)
    (path / "tables/uni_tiles/X" / ("1.0" if zarr_format == 2 else "c/1/0")).unlink()
    with pytest.raises(DataError, match="1 of 15 chunks are missing"):
        wsidata.read(path)


def test_truncated_chunk(tmp_path):
    path = layouts.write_wsidata(tmp_path / "S1.zarr")
    chunk = path / "tables/uni_tiles/X/c/1/0"
    chunk.write_bytes(chunk.read_bytes()[:20])
    with pytest.raises(DataError, match=r"X: is damaged"):
        wsidata.read(path)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_truncated_tiles(tmp_path, share):
    path = layouts.write_wsidata(tmp_path / "S1.zarr")
    shapes = path / "shapes/tiles/shapes.parquet"
    shapes.write_bytes(shapes.read_bytes()[: int(share * shapes.stat().st_size)])
    with pytest.raises(DataError, match=r"shapes\.parquet: is damaged"):
        wsidata.read(path)


def test_damaged_boxes(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = layouts.write_wsidata(tmp_path / "S1.zarr", with_xy=False)
    pq.write_table(
        pa.table({"tile_id": 100 + np.arange(layouts.N), "geometry": [b"no box"] * layouts.N}),
        path / "shapes/tiles/shapes.parquet",
    )
    with pytest.raises(DataError, match=r"shapes\.parquet: is damaged"):
        wsidata.read(path)


@pytest.mark.parametrize(
    "file", ["zarr.json", "tables/uni_tiles/X/zarr.json", "tables/uni_tiles/obs/tile_id/zarr.json"]
)
def test_damaged_metadata(tmp_path, file):
    path = layouts.write_wsidata(tmp_path / "S1.zarr")
    (path / file).write_text((path / file).read_text()[:30])
    with pytest.raises(DataError, match="is damaged"):
        wsidata.read(path)


def test_tile_ids_that_do_not_fit(tmp_path):
    import zarr

    path = layouts.write_wsidata(tmp_path / "S1.zarr")
    tile_ids = zarr.open_array(str(path / "tables/uni_tiles/obs/tile_id"), mode="a")
    tile_ids[0] = 5000
    with pytest.raises(DataError, match="lacks 1 of the 24 tiles that have features"):
        wsidata.read(path)
    tile_ids[:2] = 101
    with pytest.raises(DataError, match="24 rows for 23 tile ids"):
        wsidata.read(path)


def test_wrong_rows(tmp_path):
    import zarr

    path = layouts.write_wsidata(tmp_path / "S1.zarr")
    shutil.rmtree(path / "tables/uni_tiles/X")
    layouts.write_array(zarr.open_group(str(path / "tables/uni_tiles")), "X", layouts.FEATURES[:7])
    with pytest.raises(DataError, match=r"features of shape \(7, 20\) for 24 tile ids"):
        wsidata.read(path)


PICKLE = {"id": "pickle", "protocol": 5}
IN_SHARDS = {"name": "sharding_indexed", "configuration": {"codecs": [{"name": "numcodecs.pickle"}]}}


@pytest.mark.parametrize(
    ("zarr_format", "change"),
    [
        (2, {"filters": [PICKLE]}),
        (2, {"compressor": PICKLE}),
        (2, {"compressor": {"id": "mine"}}),
        (3, {"codecs": [{"name": "bytes"}, {"name": "numcodecs.pickle"}]}),
        (3, {"codecs": [IN_SHARDS]}),
    ],
    ids=str,
)
def test_codecs_that_could_run_code_are_refused(tmp_path, zarr_format, change):
    path = layouts.write_wsidata(tmp_path / "S1.zarr", zarr_format)
    metadata = path / "tables/uni_tiles/obs/tile_id" / ("zarr.json" if zarr_format == 3 else ".zarray")
    content = json.dumps(json.loads(metadata.read_text()) | change)
    metadata.write_text(content.replace("pickle", "pickl\\u0065"))  # JSON knows several ways to write a name
    with pytest.raises(DataError, match=r"is refused: it is packed by '(pickle|mine)', which could run code"):
        wsidata.read(path)


@pytest.mark.parametrize("sparse", [None, "csr"])
def test_sizes_far_beyond_what_is_stored(tmp_path, sparse):
    path = layouts.write_wsidata(tmp_path / "S1.zarr", sparse=sparse)
    metadata = path / "tables/uni_tiles/X/zarr.json"
    content = json.loads(metadata.read_text())
    (content if sparse is None else content["attributes"])["shape"] = [layouts.N, 1 << 40]
    metadata.write_text(json.dumps(content))
    with pytest.raises(DataError, match="is refused: it unpacks to"):
        wsidata.read(path)


@pytest.mark.parametrize(
    ("module", "package"), [("zarr", "zarr"), ("pyarrow.parquet", "pyarrow"), ("shapely", "shapely")]
)
def test_missing_extra(tmp_path, monkeypatch, module, package):
    path = layouts.write_wsidata(tmp_path / "S1.zarr", with_xy=False)
    monkeypatch.setitem(sys.modules, module, None)
    assert wsidata.recognise(path)
    with pytest.raises(MissingExtraError, match=rf"{package}; install it with: pip install 'psamil\[zarr\]'"):
        wsidata.read(path)
