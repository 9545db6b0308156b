import gzip
import sys

import numpy as np
import pandas as pd
import pytest

from psamil.errors import DataError, MissingExtraError
from psamil.readers import find_bags, instance_table
from tests.readers import layouts_other as layouts

ENDINGS = [".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet", ".pq"]
EVEN, ODD = slice(0, None, 2), slice(1, None, 2)


def write(path, table):
    if path.suffix in (".parquet", ".pq"):
        table.to_parquet(path, index=False)
    else:
        table.to_csv(path, index=False, sep="\t" if ".tsv" in path.name else ",")
    return path


@pytest.mark.parametrize("ending", ENDINGS)
def test_cells_of_one_slide(tmp_path, ending):
    path = write(tmp_path / f"S1{ending}", layouts.cell_table())
    assert instance_table.recognise(path)
    assert instance_table.members(path) == [None]
    tiles = instance_table.read(path)
    layouts.assert_are_the_cells(tiles)
    assert tiles.features.dtype == np.float32
    assert tiles.unit == "px"
    one_hot = "'cell_type' is one-hot over the 3 types of this file: B cell, T cell, tumour."
    taken = "Columns of numbers taken as features: CD3, CD8. Left out: cell_id."
    assert tiles.notes == (f"{one_hot} Files of other slides must have the same types.", taken)
    types = ("cell_type=B cell", "cell_type=T cell", "cell_type=tumour")
    assert tiles.feature_names == (*types, "CD3", "CD8")
    layouts.assert_is_hollow(instance_table.read(path, with_features=False), shape=(layouts.N, 5))


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("column", ["slide_id", "Image", "SampleID", "bag", "fov"])
def test_cells_of_several_slides(tmp_path, ending, column):
    """Names that look like numbers stay names; types are those of the whole table."""
    path = write(tmp_path / f"cells{ending}", layouts.cell_table(bag=column))
    assert instance_table.members(path) == ["007", "008"]
    layouts.assert_are_the_cells(instance_table.read(path, "007"), EVEN)
    layouts.assert_are_the_cells(instance_table.read(path, "008"), ODD)
    with pytest.raises(DataError, match=f"holds 2 bags; name one of {column}: 007, 008"):
        instance_table.read(path)
    with pytest.raises(DataError, match=f"no rows of {column} '7'"):
        instance_table.read(path, "7")


def test_a_changed_table_is_read_again(tmp_path):
    table = layouts.cell_table(bag="slide")
    path = write(tmp_path / "cells.csv", table)
    instance_table.read(path, "007")
    write(path, table.assign(CD3=0.125))
    assert (instance_table.read(path, "007").features[:, 3] == 0.125).all()


@pytest.mark.parametrize(
    ("x", "y", "unit"),
    [
        ("x", "y", "px"),
        ("X", "Y", "px"),
        ("x_um", "y_um", "um"),
        ("centroid_x", "centroid_y", "px"),
        ("x_centroid", "y_centroid", "px"),
        ("X_centroid", "Y_centroid", "px"),
        ("CellX", "CellY", "px"),
        ("cell_x_px", "cell_y_px", "px"),
        ("Centroid X µm", "Centroid Y µm", "um"),
        ("Location_Center_X", "Location_Center_Y", "px"),
        ("CenterX_global_px", "CenterY_global_px", "px"),
    ],
)
def test_names_of_positions(tmp_path, x, y, unit):
    path = write(tmp_path / "S1.csv", layouts.cell_table(x, y))
    tiles = instance_table.read(path)
    layouts.assert_are_the_cells(tiles)
    assert tiles.unit == unit


def test_micrometres_are_preferred_to_pixels(tmp_path):
    table = layouts.cell_table("x_um", "y_um").assign(x=0.0, y=0.0)
    tiles = instance_table.read(write(tmp_path / "S1.csv", table))
    layouts.assert_are_the_cells(tiles)
    assert tiles.unit == "um"


def test_fields_of_view_in_one_frame_are_one_bag(tmp_path):
    table = layouts.cell_table("CenterX_global_px", "CenterY_global_px", bag="fov")
    path = write(tmp_path / "S1.csv", table)
    assert instance_table.members(path) == [None]
    layouts.assert_are_the_cells(instance_table.read(path))


def test_labels_are_no_features(tmp_path):
    table = layouts.cell_table().assign(label=1, patient=7, group=2, survival_months=3.5, fold_0=1, CellID=4)
    layouts.assert_are_the_cells(instance_table.read(write(tmp_path / "S1.csv", table)))


@pytest.mark.parametrize(
    "name",
    ["groups", "patients", "response", "OS_days", "MSI", "grade", "age", "roi", "Overall_Survival", "vital status"],
)
def test_facts_about_patients_are_no_features(tmp_path, name):
    table = layouts.cell_table().assign(**{name: np.arange(layouts.N)})
    tiles = instance_table.read(write(tmp_path / "S1.csv", table), "0" if name == "roi" else None)
    assert name not in tiles.feature_names
    assert tiles.features.shape[1] == 5


def test_proteins_with_names_like_facts_are_features(tmp_path):
    table = layouts.cell_table().assign(OS9=1.5, MSI1=2.5, AGER=3.5)
    names = instance_table.read(write(tmp_path / "S1.csv", table)).feature_names
    assert names[-3:] == ("OS9", "MSI1", "AGER")


def test_columns_that_describe_bags_are_no_features(tmp_path):
    table = layouts.cell_table(bag="slide").assign(hospital=np.arange(layouts.N) % 2, gain=1.0)
    path = write(tmp_path / "cells.csv", table)
    for slide in ("007", "008"):
        tiles = instance_table.read(path, slide)
        assert tiles.feature_names[-3:] == ("CD3", "CD8", "gain")
        assert "Left out since they are the same in all rows of each bag: hospital." in tiles.notes
        layouts.assert_is_hollow(instance_table.read(path, slide, with_features=False), shape=(layouts.N // 2, 6))
    only = table[["slide", "x", "y", "hospital"]]
    with pytest.raises(DataError, match="has no features: hospital"):
        instance_table.read(write(tmp_path / "only.csv", only), "007")


@pytest.mark.parametrize(
    ("bag", "field"),
    [("slide", "fov"), ("sample_id", "roi"), ("slide", "core"), ("slide", "Image"), ("image", "sample")],
)
def test_fields_with_positions_of_their_own_are_bags(tmp_path, bag, field):
    table = layouts.cell_table(bag=bag)
    table[field] = np.where(np.arange(layouts.N) % 4 < 2, "1", "2")
    path = write(tmp_path / "cells.csv", table)
    assert sorted(instance_table.members(path)) == ["007_1", "007_2", "008_1", "008_2"]
    tiles = instance_table.read(path, "008_2")
    layouts.assert_are_the_cells(tiles, slice(3, None, 4))
    assert f"Positions begin anew in every '{field}' of a '{bag}'" in tiles.notes[0]
    table[field] = table[bag] + table[field]  # names that need no slide
    assert sorted(instance_table.members(write(path, table))) == ["0071", "0072", "0081", "0082"]


def test_fields_side_by_side_are_one_bag(tmp_path):
    table = layouts.cell_table(bag="slide")
    table["roi"] = (table["x"] > 1000).astype(int)
    path = write(tmp_path / "cells.csv", table)
    assert instance_table.members(path) == ["007", "008"]
    layouts.assert_are_the_cells(instance_table.read(path, "007"), EVEN)


@pytest.mark.parametrize("number", ["{},5", "1.00{},25", "{} µm"])
def test_positions_that_only_people_read_as_numbers(tmp_path, number):
    rows = [f"{number.format(i)};{number.format(i)};0.5\n" for i in range(5)]
    (tmp_path / "S1.csv").write_text("x;y;CD3\n" + "".join(rows))
    found = find_bags(tmp_path)
    assert found.bags == ()
    assert "positions in 'x' that are not numbers" in found.set_aside[0].reason


@pytest.mark.parametrize("kind", [bool, "int8", "float64"])
def test_kinds_of_numbers(tmp_path, kind):
    table = pd.DataFrame({"x": [1, 2], "y": [3.0, 4.0], "CD3": np.array([0, 1]).astype(kind)})
    for name, wide in (("S1.csv", False), ("S1.parquet", kind == "float64")):
        tiles = instance_table.read(write(tmp_path / name, table))
        assert tiles.features.tolist() == [[0], [1]]
        assert tiles.features.dtype == (np.float64 if wide else np.float32)


def test_types_that_are_codes_or_missing(tmp_path):
    table = pd.DataFrame({"x": [1, 2, 3], "y": [3.0, 4.0, 5.0], "phenotype": [7, 2, 7]})
    assert instance_table.read(write(tmp_path / "S1.csv", table)).features.tolist() == [[0, 1], [1, 0], [0, 1]]
    table["phenotype"] = ["b", None, "a"]
    assert instance_table.read(write(tmp_path / "S2.csv", table)).features.tolist() == [[0, 1], [0, 0], [1, 0]]


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("prefix", ["", "feature_"])
def test_features_without_positions(tmp_path, index, prefix):
    table = pd.DataFrame(layouts.FEATURES, columns=[f"{prefix}{i}" for i in range(layouts.DIM)])
    table.to_csv(tmp_path / "S1.csv", index=index)
    assert instance_table.recognise(tmp_path / "S1.csv")
    tiles = instance_table.read(tmp_path / "S1.csv")
    layouts.assert_is_the_bag(tiles, None)
    assert not tiles.continuous


@pytest.mark.parametrize(
    "table",
    [
        {"case_id": ["a"], "slide_id": ["b"], "label": ["c"]},
        {"slide_id": [1], "label": [0]},
        {"": [0], "train": ["a"], "val": ["b"], "test": ["c"]},
        {"case_id": [1], "survival_months": [3.5], "censorship": [0], "age": [60]},
        {"tile_index": [0], "x": [1], "y": [2]},
        {"x": [1], "y": [2], "label": [0]},
        {"x": ["a"], "y": ["b"], "CD3": [0.5]},
        {"case_id": ["a"], **{f"gene_{i}": [0.5] for i in range(40)}},
        {f"fold_{i}": [1] for i in range(40)},
    ],
    ids=lambda table: ",".join(table)[:40],
)
def test_other_tables_are_not_recognised(tmp_path, table):
    for name in ("labels.csv", "labels.parquet"):
        assert not instance_table.recognise(write(tmp_path / name, pd.DataFrame(table)))


def test_other_files_are_not_recognised(tmp_path):
    write(tmp_path / "df_slide.csv", layouts.cell_table())
    (tmp_path / "notes.txt").write_text("x,y\n")
    assert not any(instance_table.recognise(path) for path in tmp_path.iterdir())
    write(tmp_path / "labels.csv", pd.DataFrame({"slide_id": ["a"], "label": [1]}))
    with pytest.raises(DataError, match="no table of instances; it needs columns x and y"):
        instance_table.read(tmp_path / "labels.csv")


def test_semicolons(tmp_path):
    layouts.cell_table().to_csv(tmp_path / "S1.csv", index=False, sep=";")
    layouts.assert_are_the_cells(instance_table.read(tmp_path / "S1.csv"))


@pytest.mark.parametrize("name", ["S1.parquet", "S1.csv.gz"])
def test_truncated(tmp_path, name):
    path = write(tmp_path / name, layouts.cell_table())
    content = path.read_bytes()
    for length in range(0, len(content) - 10, max(len(content) // 20, 1)):
        path.write_bytes(content[:length])
        with pytest.raises(DataError, match=r"S1.*: is damaged"):
            instance_table.read(path)


def test_text_that_ends_within_a_row(tmp_path):
    path = write(tmp_path / "S1.csv", layouts.cell_table())
    content = path.read_text()
    path.write_text(content.rstrip("\n").rpartition(",")[0])
    with pytest.raises(DataError, match="ends within a row"):
        instance_table.read(path)
    path.write_text(content.rstrip("\n"))
    tiles = instance_table.read(path)
    layouts.assert_are_the_cells(tiles)
    assert tiles.notes[-1] == "The file does not end with a line break: it may have been cut off."


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00\x81", gzip.compress(b"x,y\n")], ids=["empty", "bytes", "gzip"])
def test_files_that_are_no_text(tmp_path, content):
    (tmp_path / "S1.csv").write_bytes(content)
    with pytest.raises(DataError, match=r"S1\.csv: is damaged, incomplete or no table"):
        instance_table.recognise(tmp_path / "S1.csv")


def test_cells_without_position_or_number(tmp_path):
    table = layouts.cell_table()
    table.loc[3, "x"] = np.nan
    with pytest.raises(DataError, match="1 of 24 rows without a position in 'x', 'y'"):
        instance_table.read(write(tmp_path / "S1.csv", table))
    wrong = pd.concat([layouts.cell_table()] * 50).astype({"CD3": object})
    wrong.iloc[-1, wrong.columns.get_loc("CD3")] = "high"
    with pytest.raises(DataError, match="column 'CD3' is not all numbers"):
        instance_table.read(write(tmp_path / "S2.csv", wrong))


def test_rows_that_do_not_fit_the_header(tmp_path):
    """Names of rows without a column name of their own, as R writes them; a row that is too long; a comma too many."""
    path = tmp_path / "S1.csv"
    path.write_text("x,y,CD3\n1,10.5,20.5,0.25\n2,11.5,21.5,0.5\n")
    with pytest.raises(DataError, match="3 names of columns for 4 cells in its first row; name all columns"):
        instance_table.recognise(path)
    path.write_text("x,y,CD3\n1,2,3\n4,5,6,7\n")
    with pytest.raises(DataError, match="Expected 3 fields in line 3, saw 4"):
        instance_table.recognise(path)
    path.write_text("x,y,CD3\n1,2,3,\n4,5,6,\n")
    assert instance_table.read(path).features.tolist() == [[3], [6]]


def test_rows_without_bag(tmp_path):
    table = layouts.cell_table(bag="slide")
    table.loc[3, "slide"] = None
    with pytest.raises(DataError, match="1 rows without 'slide'"):
        instance_table.members(write(tmp_path / "cells.csv", table))


def test_missing_extra(tmp_path, monkeypatch):
    path = write(tmp_path / "S1.parquet", layouts.cell_table())
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"pyarrow; install it with: pip install 'psamil\[tables\]'"):
        instance_table.read(path)
