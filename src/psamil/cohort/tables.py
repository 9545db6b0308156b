"""Tables of labels as people keep them: CSV, TSV, Excel, Parquet, with everything read as text first.

- An id that looks like a number is still a name: ``007`` stays ``007``, and a column of ids with a gap does not turn
  into ``7.0``. Columns become numbers only where numbers are asked for, and what is not a number is then named.
- Empty cells and the usual words for "no value" are missing. ``None`` is not among them: it can be a class.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from psamil.errors import DataError, MissingExtraError

MISSING_WORDS = frozenset({"", "na", "n/a", "nan", "nat", "<na>", "#n/a", "null"})
TEXT_SEPARATORS = {".csv": ",", ".tsv": "\t", ".txt": "\t"}


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of text, None where a value is missing, and the name of the file for messages."""

    name: str
    columns: dict[str, tuple[str | None, ...]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def texts(self, column: str) -> tuple[str | None, ...]:
        if column not in self.columns:
            raise DataError(self.name, f"has no column {column!r}", f"its columns are {self.column_names()}")
        return self.columns[column]

    def numbers(self, column: str) -> NDArray[np.float64]:
        """The column as numbers, NaN where a value is missing. Infinite values are not numbers."""
        numbers = [number(text) for text in self.texts(column)]
        wrong = [text for text, value in zip(self.texts(column), numbers, strict=True) if text and value is None]
        if wrong:
            remedy = "write numbers with a point" if any(map(has_decimal_comma, wrong)) else ""
            raise DataError(self.name, f"column {column!r} holds {quoted(wrong)}, which is not a number", remedy)
        return np.array([np.nan if value is None else value for value in numbers], dtype=np.float64)

    def rows(self, indices: Sequence[int]) -> Table:
        return Table(self.name, {name: tuple(cells[i] for i in indices) for name, cells in self.columns.items()})

    def column_names(self) -> str:
        return ", ".join(repr(name) for name in self.columns if name) or "(none)"


def read_table(source: str | Path | pd.DataFrame) -> Table:
    """Reads a table whose first row names the columns.

    Args:
        source: a file that ends in .csv, .tsv, .txt (each also as .gz), .xlsx (its first sheet), .parquet or .pq; or a
            data frame.
    """
    if isinstance(source, pd.DataFrame):
        return _checked("data frame", _named_columns(source))
    path = Path(source)
    if not path.is_file():
        raise DataError(path, "is not a file", "give the path of a CSV, TSV, XLSX or Parquet table")
    suffix = (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()
    if suffix in TEXT_SEPARATORS:
        return _checked(str(path), _first_row_names(path, _read_text(path, TEXT_SEPARATORS[suffix])))
    if suffix == ".xlsx":
        return _checked(str(path), _first_row_names(path, _read_excel(path)))
    if suffix in (".parquet", ".pq"):
        return _checked(str(path), _named_columns(_read_parquet(path)))
    raise DataError(path, f"tables that end in {suffix!r} are not known", "save it as .csv, .tsv, .xlsx or .parquet")


def number(text: str | None) -> float | None:
    """The finite number that the text stands for, or None."""
    try:
        value = float(text) if text is not None else np.nan
    except ValueError:
        return None
    return value if np.isfinite(value) else None


def has_decimal_comma(text: str | None) -> bool:
    """Whether the text is a number with a comma, ``0,5``: half, or a list, or, in other countries, thousands."""
    return bool(re.fullmatch(r"[+-]?\d*,\d+(e[+-]?\d+)?", text or "", re.IGNORECASE))


def quoted(texts: Sequence[str | None], limit: int = 5) -> str:
    """The first few different values, for messages: ``'a', 'b' and 3 more``."""
    different = list(dict.fromkeys(map(str, texts)))
    shown = ", ".join(repr(text) for text in different[:limit])
    return shown + (f" and {len(different) - limit} more" if len(different) > limit else "")


def _read_text(path: Path, separator: str) -> pd.DataFrame:
    try:
        raw = path.read_bytes()
        if path.suffix.lower() == ".gz":
            raw = gzip.decompress(raw)
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(path, f"is not UTF-8 text ({error.reason})", "save it again as UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(path, f"cannot be read: {error}") from error
    first_line = text.split("\n", 1)[0]
    if separator not in first_line:  # semicolons where the comma is the decimal sign, tabs in .csv and the reverse
        separator = next((other for other in (";", "\t", ",") if other in first_line), separator)
    try:
        return pd.read_csv(io.StringIO(text), sep=separator, header=None, dtype=str, keep_default_na=False)
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise DataError(path, f"is not a table: {str(error).strip()}") from error


def _read_excel(path: Path) -> pd.DataFrame:
    try:
        return pd.read_excel(path, engine="openpyxl", header=None, dtype=str, keep_default_na=False)
    except ImportError as error:
        raise MissingExtraError("openpyxl", "tables", f"reading {path.name}") from error
    except Exception as error:  # openpyxl has no error of its own for a damaged file
        raise DataError(path, f"cannot be read as .xlsx: {error}", "save it again, or as CSV") from error


def _read_parquet(path: Path) -> pd.DataFrame:
    try:
        import pyarrow
    except ImportError as error:
        raise MissingExtraError("pyarrow", "tables", f"reading {path.name}") from error
    try:
        return pd.read_parquet(path, engine="pyarrow")
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(path, f"cannot be read as Parquet: {error}") from error


def _first_row_names(path: Path, frame: pd.DataFrame) -> list[tuple[str, list[str | None]]]:
    if frame.empty:
        raise DataError(path, "is empty")
    cells = frame.to_numpy(dtype=object)
    return [(_text(column[0]) or "", [_text(cell) for cell in column[1:]]) for column in cells.T]


def _named_columns(frame: pd.DataFrame) -> list[tuple[str, list[str | None]]]:
    if any(name is not None for name in frame.index.names):
        frame = frame.reset_index()
    return [(str(name), _column_text(frame.iloc[:, place])) for place, name in enumerate(frame.columns)]


def _column_text(column: pd.Series) -> list[str | None]:
    """Floats that are all whole are integers that had to make room for a missing value."""
    missing = column.isna().tolist()
    values = [None if gone else value for gone, value in zip(missing, column.tolist(), strict=True)]
    floats = [value for value in values if isinstance(value, float)]
    if floats and all(value.is_integer() for value in floats):
        values = [int(value) if isinstance(value, float) else value for value in values]
    return [_text(value) for value in values]


def _text(cell: object) -> str | None:
    text = "" if cell is None or cell is pd.NA else str(cell).strip()
    return None if text.lower() in MISSING_WORDS else text


def _checked(name: str, columns: list[tuple[str, list[str | None]]]) -> Table:
    """The table without empty rows; every named column must have a name of its own."""
    names = [column for column, _ in columns if column]
    repeated = [column for column in dict.fromkeys(names) if names.count(column) > 1]
    if repeated:
        raise DataError(name, f"has more than one column {quoted(repeated)}", "rename or remove the repeated ones")
    filled = [i for i, row in enumerate(zip(*(cells for _, cells in columns), strict=True)) if any(row)]
    if not filled:
        raise DataError(name, "has no rows")
    return Table(name, {column: tuple(cells) for column, cells in columns}).rows(filled)
