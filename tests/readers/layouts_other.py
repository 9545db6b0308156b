"""Writes the same bag in the layouts of tools that do not use HDF5, and tables of cells."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import torch

N, DIM, STEP_PX0, TILE_PX0, MPP = 24, 20, 448, 512, 0.25

RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(N, DIM)).astype(np.float32)
COLUMN_AND_ROW = np.stack(np.divmod(RNG.permutation(40)[:N], 8), 1).astype(np.float64)
CORNERS_PX0 = COLUMN_AND_ROW * STEP_PX0 + (1000, 2000)


def assert_is_the_bag(tiles, coords=CORNERS_PX0):
    np.testing.assert_array_equal(tiles.features, FEATURES)
    assert tiles.features.dtype == np.float32
    if coords is None:
        assert tiles.coords is None
    else:
        np.testing.assert_array_equal(tiles.coords, coords)
        assert tiles.coords.dtype == np.float64


def assert_is_hollow(tiles, dtype=np.float32, shape=(N, DIM)):
    assert tiles.features.shape == shape
    assert tiles.features.dtype == dtype
    assert tiles.features.strides == (0, 0)
    assert not tiles.features.flags.writeable


def write_json(path: Path, content) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


# ---- wsidata and LazySlide


def write_wsidata(
    path: Path, zarr_format=3, *, with_xy=True, mpp=MPP, tables=("uni_tiles",), sparse=None, region_in="attributes"
) -> Path:
    """A store as wsidata writes it. Features are in another order than tiles, of which some have none."""
    import zarr

    root = zarr.open_group(str(path), mode="w", zarr_format=zarr_format)
    spec = {"height": 256, "width": 256, "stride_height": 224, "stride_width": 224, "mpp": 0.5, "ops_level": 0}
    spec |= {"ops_downsample": 2.0, "base_level": 0, "base_downsample": 2.0, "tissue_name": "tissues"}
    tile_keys = {table.split("_", 1)[1] for table in tables}
    root.attrs.update(
        {
            "spatialdata_attrs": {"version": "0.2"},
            "slide_properties": {"shape": [9000, 9000], "n_level": 1, "mpp": mpp, "magnification": 40.0},
            "tile_spec": dict.fromkeys(tile_keys, spec),
        }
    )
    tile_ids = 100 + np.arange(N)
    for tile_key in tile_keys:
        write_tile_shapes(path / "shapes" / tile_key / "shapes.parquet", tile_ids, with_xy)
    order = np.random.default_rng(1).permutation(N)
    for table in tables:
        write_table(root, table, tile_ids[order], sparse, region_in)
    return path


def write_tile_shapes(path: Path, tile_ids, with_xy: bool) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    import shapely

    path.parent.mkdir(parents=True, exist_ok=True)
    x, y = CORNERS_PX0.T
    columns = {"tile_id": tile_ids} | ({"x": x.astype(np.int64), "y": y.astype(np.int64)} if with_xy else {})
    boxes = shapely.box(x, y, x + TILE_PX0, y + TILE_PX0)
    columns |= {"tissue_id": np.zeros(N, np.int64), "geometry": shapely.to_wkb(boxes)}
    geo = {"version": "1.0.0", "primary_column": "geometry", "columns": {"geometry": {"encoding": "WKB"}}}
    pq.write_table(pa.table(columns).replace_schema_metadata({"geo": json.dumps(geo)}), path)


def write_table(root, name: str, tile_ids, sparse: str | None, region_in: str) -> None:
    """One AnnData table; its rows are those of the given tiles."""
    from scipy.sparse import csc_matrix, csr_matrix

    tile_key = name.split("_", 1)[1]
    table = root.create_group(f"tables/{name}")
    table.attrs.update({"encoding-type": "anndata"})
    about = {"region": tile_key, "region_key": "library_id", "instance_key": "tile_id"}
    if region_in == "attributes":
        table.attrs.update(about)
    elif region_in == "uns":
        uns = table.create_group("uns/spatialdata_attrs")
        write_array(uns, "region", np.array([tile_key]))
    x = FEATURES[tile_ids - 100]
    if sparse is None:
        write_array(table, "X", x, chunks=(5, 8))
    else:
        matrix = (csr_matrix if sparse == "csr" else csc_matrix)(x)
        group = table.create_group("X")
        group.attrs.update({"encoding-type": f"{sparse}_matrix", "shape": list(x.shape)})
        for part in ("data", "indices", "indptr"):
            write_array(group, part, getattr(matrix, part))
    obs = table.create_group("obs")
    obs.attrs.update({"encoding-type": "dataframe", "column-order": ["tile_id", "library_id"]})
    write_array(obs, "tile_id", tile_ids)
    library = obs.create_group("library_id")
    write_array(library, "codes", np.zeros(N, np.int8))
    write_array(library, "categories", np.array([tile_key]))


def write_array(group, name, values, chunks=None) -> None:
    dtype = str if values.dtype.kind == "U" else values.dtype
    group.create_array(name, shape=values.shape, dtype=dtype, chunks=chunks or values.shape)[...] = values


# ---- slideflow, the PSA-MIL authors, slide2vec


def write_slideflow(folder: Path, index="npz", config=True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(torch.from_numpy(FEATURES), folder / "S1.pt")
    centres = (CORNERS_PX0 + TILE_PX0 / 2).astype(np.int64)
    if index == "npz":
        np.savez(folder / "S1.index.npz", centres)
    elif index == "npy":
        np.save(folder / "S1.index.npy", centres)
    if config:
        extractor = {"class": "slideflow.model.extractors.uni.UNIFeatures", "kwargs": {}}
        write_json(folder / "bags_config.json", {"extractor": extractor, "tile_px": 256, "tile_um": "20x"})
    return folder / "S1.pt"


def write_psa_authors(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(torch.from_numpy(FEATURES), path)
    names = [f"/tiles/S1/{int(row)}_{int(column)}.jpg" for column, row in COLUMN_AND_ROW]
    pd.DataFrame({"slide_uuid": "S1", "path": names}).to_csv(path.with_name("df_slide.csv"), index=False)
    return path


def write_slide2vec(output: Path, format="npz", *, shuffled=False, nested=True) -> Path:
    folder, tiles = output / "tile_embeddings", output / "tiles"
    folder.mkdir(parents=True)
    tiles.mkdir()
    path = folder / f"S1.{format}"
    if format == "pt":
        torch.save(torch.from_numpy(FEATURES), path)
    else:
        np.savez_compressed(path, features=FEATURES, **({"tile_index": np.arange(N)} if shuffled else {}))
    about = {"sample_id": "S1", "artifact_type": "tile_embeddings", "format": format, "num_tiles": N}
    write_json(folder / "S1.meta.json", about | {"encoder_name": "uni", "tile_size_lv0": TILE_PX0})
    order = np.random.default_rng(2).permutation(N) if shuffled else np.arange(N)
    x, y = CORNERS_PX0[order].T.astype(np.int64)
    np.savez_compressed(tiles / "S1.coordinates.npz", tile_index=order.astype(np.int32), x=x, y=y)
    tiling = {"tile_size_lv0": TILE_PX0, "step_px_lv0": STEP_PX0}
    write_json(
        tiles / "S1.coordinates.meta.json",
        {"slide": {"base_spacing_um": MPP}, "tiling": tiling} if nested else tiling,
    )
    return path


# ---- cells

CELL_TYPES = ["B cell", "T cell", "tumour"]
TYPE_OF_CELL = RNG.integers(0, 3, N)
ONE_HOT = np.eye(3, dtype=np.float32)[TYPE_OF_CELL]
CELLS_XY = RNG.uniform(0, 2000, (N, 2))
MARKERS = RNG.normal(size=(N, 2)).astype(np.float32)


def cell_table(x="x", y="y", bag: str | None = None) -> pd.DataFrame:
    """24 cells with a type and two markers; of the two slides 007 and 008 if there is a column of bags."""
    table = pd.DataFrame({"cell_id": np.arange(N), x: CELLS_XY[:, 0], y: CELLS_XY[:, 1]})
    table["cell_type"] = [CELL_TYPES[i] for i in TYPE_OF_CELL]
    table[["CD3", "CD8"]] = MARKERS
    if bag is not None:
        table[bag] = np.where(np.arange(N) % 2, "008", "007")
    return table


def assert_are_the_cells(tiles, rows=slice(None)):
    np.testing.assert_array_equal(tiles.features, np.concatenate([ONE_HOT, MARKERS], 1)[rows])
    np.testing.assert_array_equal(tiles.coords, CELLS_XY[rows])
    assert tiles.continuous
