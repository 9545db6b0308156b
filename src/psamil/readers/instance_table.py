"""Tables with one row per instance, such as the cells of spatial omics: CSV and TSV (also ``.gz``), Parquet.

    slide, x, y, cell_type, CD3, CD8, ...

| column                          | names                                                                             |
|---------------------------------|-----------------------------------------------------------------------------------|
| positions, both needed          | x and y; x_um, X_centroid, centroid_y, CellX, "Centroid X µm", CenterY_global_px  |
| type, if any: made one-hot      | cell_type, phenotype, class, ...                                                  |
| bag of the row, if any          | slide, image, sample, bag, core, fov, roi, each also with _id or _name            |
| features                        | all other columns of numbers, except ids, labels, facts about patients and further|
|                                 | positions, and except those that are the same in all rows of each of several bags |

Where positions begin anew in every image, core, field of view or region of a slide, each of these is a bag of its own.

A table without positions is a bag only if its columns are nothing but many numbered features, as in the per-slide files
of DSMIL (0, 1, 2, ...). Every other table, of labels for example, is none.
"""

from __future__ import annotations

import csv
import functools
import gzip
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from psamil.errors import DataError, MissingExtraError
from psamil.readers.arrays import hollow
from psamil.readers.instance_columns import Columns, bag_column, meaning_of, position_columns
from psamil.readers.tiles import Tiles

NAME = "instance_table"

TEXT = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
PARQUET = (".parquet", ".pq")
NOT_BAGS = ("df_slide.csv",)  # belongs to a bag beside it
SAMPLE_ROWS = 1000  # of a text, from which the type of each column is told
MAX_LINE_BYTES = 1 << 20
OTHER_NUMBER = r"\s*[-+]?\d[\d.,' \u00a0\u202f]*([eE][-+]?\d+)?\s*(px|um|µm|μm)?\s*"

FRAME_OVERLAP = 1.2  # of the areas of fields that share a slide, from which on they do not lie side by side
MAX_NAMED = 30  # columns in a note


def recognise(path: Path) -> bool:
    if not path.name.lower().endswith(TEXT + PARQUET) or path.name in NOT_BAGS:
        return False
    if _columns(path) is not None:
        return True
    if path.name.lower().endswith(TEXT):
        _refuse_other_numbers(path)
    return False


def _refuse_other_numbers(path: Path) -> None:
    """Positions that are numbers to a reader, but not to a program: 1,5 or 1 234.5."""
    sample = _load_text(path, None, SAMPLE_ROWS)
    x, y, _ = position_columns([str(name) for name in sample.columns])
    for name in (x, y):
        if name is not None and sample[name].dtype.kind == "O":
            is_number = sample[name].dropna().astype(str).str.fullmatch(OTHER_NUMBER)
            if len(is_number) and is_number.mean() > 0.5:
                cause = f"has positions in {name!r} that are not numbers, such as {sample[name].dropna().iloc[0]!r}"
                raise DataError(path, cause, "write numbers with a decimal point and without other signs")


def members(path: Path) -> list[str | None]:
    columns = _meaning(path)
    if columns.bag is None:
        return [None]
    needed = [columns.bag] if columns.field is None else [columns.x, columns.y, columns.bag, columns.field]
    return [*dict.fromkeys(_bag_of_row(path, _load(path, [str(name) for name in needed]), columns)[0])]


def read(path: Path, member: str | None = None, *, with_features: bool = True) -> Tiles:
    columns = _meaning(path)
    notes: tuple[str, ...] = ()
    if columns.bag is None:
        table = rows = _load(path, columns.used)
    else:  # one parse serves all bags of the file
        state = path.stat()
        table, bags, columns, notes = _load_once(path, columns, state.st_mtime_ns, state.st_size)
        rows = _rows_of(path, table, bags, columns.bag or "", member)
    types = None if columns.type is None else sorted(table[columns.type].dropna().astype(str).unique())
    table = rows
    notes += _notes(path, columns, types)
    return Tiles(
        features=_features(path, table, columns, types or [], with_features),
        coords=_coords(path, table, columns),
        unit=columns.unit,
        continuous=columns.x is not None,
        feature_names=(*(f"{columns.type}={name}" for name in types or ()), *columns.features),
        notes=notes,
    )


def _meaning(path: Path) -> Columns:
    columns = _columns(path)
    if columns is None:
        raise DataError(path, "is no table of instances", "it needs columns x and y, and columns of numbers or a type")
    return columns


def _columns(path: Path) -> Columns | None:
    if path.name.lower().endswith(PARQUET):
        parquet = _parquet()
        try:
            schema = parquet.read_schema(path)
        except Exception as error:  # pyarrow raises errors of many kinds for damaged files
            raise _damaged(path, error) from error
        kinds = {name: str(kind) for name, kind in zip(schema.names, schema.types, strict=True)}
        is_number = re.compile(r"(u?int|float|double|halffloat|bool)\d*")
        return meaning_of({n: "number" if is_number.fullmatch(kind) else "text" for n, kind in kinds.items()})
    sample = _load_text(path, None, SAMPLE_ROWS)
    numbers = set(sample.select_dtypes(["number", "bool"]).columns)
    return meaning_of({str(name): "number" if name in numbers else "text" for name in sample.columns})


@functools.lru_cache(maxsize=1)
def _load_once(
    path: Path, columns: Columns, modified_ns: int, size_bytes: int
) -> tuple[pd.DataFrame, pd.Series[str], Columns, tuple[str, ...]]:
    """The table, the bag of each row, the columns without those that describe bags, and what to say about that."""
    table = _load(path, columns.used)
    bags, notes = _bag_of_row(path, table, columns)
    of_bags = _facts_about_bags(table, bags, columns.features)
    if not of_bags:
        return table, bags, columns, notes
    kept = tuple(name for name in columns.features if name not in of_bags)
    if not kept and columns.type is None:
        cause = f"has no features: {', '.join(of_bags)} are the same in all rows of each bag"
        raise DataError(path, cause, "add columns that differ between the rows")
    notes += (f"Left out since they are the same in all rows of each bag: {_named(of_bags)}.",)
    return table, bags, replace(columns, features=kept), notes


def _bag_of_row(path: Path, table: pd.DataFrame, columns: Columns) -> tuple[pd.Series[str], tuple[str, ...]]:
    """Name of the bag of each row, and a note if that is only a part of what the table calls a bag."""
    for name in (columns.bag, columns.field):
        if name is not None and table[name].isna().any():
            raise DataError(path, f"has {int(table[name].isna().sum())} rows without {name!r}", "complete the column")
    bags = table[columns.bag].astype(str)
    if columns.field is None or not _begin_anew(path, table, columns):
        return bags, ()
    fields = table[columns.field].astype(str)
    is_unique = not pd.DataFrame({"bag": bags, "field": fields}).drop_duplicates()["field"].duplicated().any()
    note = f"Positions begin anew in every {columns.field!r} of a {columns.bag!r}: each is a bag of its own."
    return (fields if is_unique else bags + "_" + fields), (note,)


def _begin_anew(path: Path, table: pd.DataFrame, columns: Columns) -> bool:
    """Whether fields of a bag lie over each other, as they do if each has its own origin, and not side by side."""
    x, y = (pd.Series(_numbers(path, table, str(name), np.float64)) for name in (columns.x, columns.y))
    bags = table[columns.bag].astype(str).to_numpy()
    fields = pd.DataFrame({"x": x, "y": y, "bag": bags, "field": table[columns.field].astype(str).to_numpy()})

    def area(by: list[str]) -> pd.Series[float]:
        sides = fields.groupby(by)[["x", "y"]].agg(np.ptp)
        return sides["x"] * sides["y"]

    together, single = area(["bag"]), area(["bag", "field"]).groupby("bag").sum()
    return bool((single > FRAME_OVERLAP * together.reindex(single.index)).any())


def _facts_about_bags(table: pd.DataFrame, bags: pd.Series[str], names: tuple[str, ...]) -> list[str]:
    """Columns with one value in every bag and several in the table: of the patient or slide, not of a cell."""
    groups = table.groupby(bags.to_numpy())
    if len(groups) < 2 or (groups.size() > 1).sum() < 2:
        return []
    facts = []
    for name in names:
        lowest, highest = groups[name].min(), groups[name].max()
        if lowest.equals(highest) and lowest.nunique() > 1:
            facts.append(name)
    return facts


def _load(path: Path, columns: list[str]) -> pd.DataFrame:
    if not path.name.lower().endswith(PARQUET):
        return _load_text(path, columns, None)
    parquet = _parquet()
    try:
        return pd.DataFrame(parquet.read_table(path, columns=columns).to_pandas(ignore_metadata=True))
    except Exception as error:
        raise _damaged(path, error) from error


def _load_text(path: Path, columns: list[str] | None, rows: int | None) -> pd.DataFrame:
    try:
        with _open_text(path) as file:
            header, first_row = file.readline(), file.readline()
        separator = max(",;\t", key=header.count)
        _check_width(path, header, first_row, separator)
        bags = [name for name in columns or [] if bag_column([name]) is not None]
        table = pd.read_csv(
            path,
            sep=separator,
            usecols=columns,
            nrows=rows,
            low_memory=False,
            float_precision="round_trip",
            index_col=False,
            dtype=dict.fromkeys(bags, str),  # "007" is a name
        )
    except (OSError, ValueError, EOFError, zlib.error) as error:  # parser errors of pandas are ValueErrors
        raise _damaged(path, error) from error
    if rows is None and path.suffix != ".gz" and _last_line(path).count(separator) < header.count(separator):
        raise DataError(path, "is incomplete: it ends within a row", "write the file again, or leave it out")
    return table


def _check_width(path: Path, header: str, first_row: str, separator: str) -> None:
    """R can write the names of rows without a name of their column: every cell would be taken for its neighbour."""
    names, cells = (next(csv.reader([line], delimiter=separator), []) for line in (header, first_row))
    if len(cells) > len(names) and cells[-1].strip():
        cause = f"has {len(names)} names of columns for {len(cells)} cells in its first row"
        raise DataError(path, cause, "name all columns (in R: write.csv, or col.names = NA)")


def _rows_of(path: Path, table: pd.DataFrame, bags: pd.Series[str], column: str, member: str | None) -> pd.DataFrame:
    if member is None and bags.nunique() == 1:
        return table
    rows = table[bags == member]
    if member is None or rows.empty:
        known = ", ".join(bags.unique()[:10])
        cause = f"holds {bags.nunique()} bags" if member is None else f"has no rows of {column} {member!r}"
        raise DataError(path, cause, f"name one of {column}: {known}{', ...' if bags.nunique() > 10 else ''}")
    return rows


def _coords(path: Path, table: pd.DataFrame, columns: Columns) -> NDArray[np.float64] | None:
    if columns.x is None or columns.y is None:
        return None
    coords = np.stack([_numbers(path, table, name, np.float64) for name in (columns.x, columns.y)], 1)
    without = int((~np.isfinite(coords)).any(1).sum())
    if without:
        cause = f"has {without} of {len(coords)} rows without a position in {columns.x!r}, {columns.y!r}"
        raise DataError(path, cause, "it may be cut off: write it again, or remove these rows")
    return coords


def _features(
    path: Path, table: pd.DataFrame, columns: Columns, types: list[str], with_features: bool
) -> NDArray[np.floating]:
    """(n, types + features): one-hot types first."""
    kinds = {table[name].dtype for name in columns.features}
    is_narrow = kinds <= {np.dtype(np.float16)} and bool(kinds)
    is_wide = path.name.lower().endswith(PARQUET) and np.dtype(np.float64) in kinds
    dtype = np.float16 if is_narrow else np.float64 if is_wide else np.float32
    shape = (len(table), len(types) + len(columns.features))
    if not with_features:
        return hollow(shape, dtype)
    features = np.zeros(shape, dtype)
    if columns.type is not None:
        of_row = pd.Index(types).get_indexer(table[columns.type].astype(str))
        rows = np.flatnonzero(of_row >= 0)  # rows of no type have no 1
        features[rows, of_row[rows]] = 1
    for i, name in enumerate(columns.features, start=len(types)):
        features[:, i] = _numbers(path, table, name, dtype)
    return features


def _numbers(path: Path, table: pd.DataFrame, name: str, dtype: type[np.floating]) -> NDArray[Any]:
    try:
        return table[name].to_numpy(dtype, na_value=np.nan)
    except (ValueError, TypeError) as error:
        raise DataError(path, f"column {name!r} is not all numbers ({error})", "correct these cells") from error


def _notes(path: Path, columns: Columns, types: list[str] | None) -> tuple[str, ...]:
    notes = []
    if types is not None:
        one_hot = f"{columns.type!r} is one-hot over the {len(types)} types of this file: {', '.join(types)}."
        notes.append(f"{one_hot} Files of other slides must have the same types.")
    if columns.left_out:
        features = _named(columns.features) or "none"
        notes.append(f"Columns of numbers taken as features: {features}. Left out: {_named(columns.left_out)}.")
    if path.name.lower().endswith((".csv", ".tsv")) and not _last_line(path).endswith(("\n", "\r")):
        notes.append("The file does not end with a line break: it may have been cut off.")
    return tuple(notes)


def _named(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _last_line(path: Path) -> str:
    """The last line, with its line break if it has one."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - MAX_LINE_BYTES, 0))
        lines = file.read().splitlines(keepends=True)
    return lines[-1].decode("utf-8", "replace") if lines else ""


def _open_text(path: Path) -> IO[str]:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _parquet() -> ModuleType:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "tables", "reading .parquet") from error
    return parquet


def _damaged(path: Path, error: Exception) -> DataError:
    reason = " ".join(str(error).split())
    return DataError(path, f"is damaged, incomplete or no table ({reason})", "write the file again, or leave it out")
