"""Tables of every kind read as the same text; ids stay names; damage is named."""

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from psamil.cohort.tables import read_table
from psamil.errors import DataError, MissingExtraError

FRAME = pd.DataFrame({"slide_id": ["007", "12", "A b.c", "ü"], "label": ["x", None, "None", "y"], "n": [1, 2, 3, None]})


def write(folder: Path, ending: str) -> Path:
    path = folder / f"labels{ending}"
    if ending == ".xlsx":
        FRAME.to_excel(path, index=False)
    elif ending == ".parquet":
        FRAME.to_parquet(path)
    else:
        FRAME.to_csv(path, index=False, sep="\t" if "tsv" in ending or "txt" in ending else ",")
    return path


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".tsv", ".tsv.gz", ".txt", ".xlsx", ".parquet"])
def test_every_kind_of_table_reads_the_same(tmp_path: Path, ending: str) -> None:
    table = read_table(write(tmp_path, ending))
    assert table.texts("slide_id") == ("007", "12", "A b.c", "ü")
    assert table.texts("label") == ("x", None, "None", "y")  # "None" can be a class, an empty cell cannot
    np.testing.assert_array_equal(table.numbers("n"), [1, 2, 3, np.nan])


def test_data_frames_are_tables_too() -> None:
    assert read_table(FRAME).texts("n") == ("1", "2", "3", None)
    assert read_table(FRAME.set_index("slide_id")).texts("slide_id")[0] == "007"


def test_numbers_in_excel_and_parquet_are_names_without_decimals(tmp_path: Path) -> None:
    frame = pd.DataFrame({"patient": [1, 2, None], "age": [1.5, 2.0, 3.25]})
    frame.to_excel(tmp_path / "t.xlsx", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    for name in ("t.xlsx", "t.parquet"):
        table = read_table(tmp_path / name)
        assert table.texts("patient") == ("1", "2", None)
        assert table.numbers("age").tolist() == [1.5, 2.0, 3.25]


@pytest.mark.parametrize("word", ["", "NA", "nan", "N/A", "#N/A", "null", "  "])
def test_words_for_no_value(tmp_path: Path, word: str) -> None:
    (tmp_path / "t.csv").write_text(f"a,b\n1,{word}\n")
    assert read_table(tmp_path / "t.csv").texts("b") == (None,)


def test_semicolons_byte_order_mark_spaces_and_empty_rows(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes("\ufeffslide_id; label\r\n a ;x\r\n;\r\nb;y;\r\n".replace("y;", "y").encode())
    table = read_table(tmp_path / "t.csv")
    assert table.columns == {"slide_id": ("a", "b"), "label": ("x", "y")}


def test_gzip_of_several_pieces_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"a,b\n1,2\n", mtime=0) + gzip.compress(b"3,4\n"))
    assert read_table(tmp_path / "t.csv.gz").texts("a") == ("1", "3")


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("t.csv", b"", "not a table|empty"),
        ("t.csv", b"a,b\n", "no rows"),
        ("t.csv", b"a,a\n1,2\n", "more than one column 'a'"),
        ("t.csv", b"a,b\n1,2,3\n", "not a table"),
        ("t.csv", "a,b\n1,é\n".encode("latin-1"), "UTF-8"),
        ("t.csv.gz", gzip.compress(b"a,b\n1,2\n" * 50, mtime=0)[:-9], "cannot be read"),
        ("t.xlsx", b"not a zip", "cannot be read"),
        ("t.parquet", b"PAR1 nothing", "cannot be read"),
        ("t.xls", b"", "not known"),
    ],
)
def test_damaged_tables_are_named(tmp_path: Path, name: str, content: bytes, cause: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=cause) as caught:
        read_table(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_missing_files_columns_and_numbers_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a file"):
        read_table(tmp_path / "absent.csv")
    table = read_table(FRAME)
    with pytest.raises(DataError, match=r"no column 'grade'.*'slide_id', 'label', 'n'"):
        table.texts("grade")
    with pytest.raises(DataError, match="'x', 'None', 'y', which is not a number"):
        table.numbers("label")


def test_missing_packages_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write(tmp_path, ending) for ending in (".xlsx", ".parquet")]
    for package, path in zip(("openpyxl", "pyarrow"), paths, strict=True):
        monkeypatch.setitem(__import__("sys").modules, package, None)
        with pytest.raises(MissingExtraError, match=rf"{package}.*psamil\[tables\]"):
            read_table(path)
