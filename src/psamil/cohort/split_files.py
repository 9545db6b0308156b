"""Split files of other tools, read and written: CLAM, SurvPath, STAMP, Patho-Bench.

Files are read as they are written, with the ids that stand in them: slides or patients, with or without extensions.
:func:`fit_to_cohort` turns them into the samples of a cohort. Some tools keep two parts only: what they hold out is the
test part here, whatever they call it, and a validation part is written as part of the training part, out of which these
tools take their own (:func:`psamil.cohort.folds.with_validation` does the same here).
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from psamil.cohort.cohort import Cohort
from psamil.cohort.matching import slide_name
from psamil.cohort.splits import FOLD_COLUMN, LEAKS, PART_NAMES, PARTS, Split, Splits, splits_from_json, without_leaks
from psamil.cohort.tables import Table, quoted, read_table
from psamil.errors import DataError, OptionError, one_of
from psamil.files import atomic_write, escape_cell, read_json, unescape_cell, write_json

CLAM_FILE = re.compile(r"splits_(\d+)(_bool)?\.csv")
FORMATS = ("clam", "clam bool", "survpath", "stamp", "patho-bench")


@dataclass(frozen=True)
class FittedSplits:
    """Splits of the samples of a cohort, and what had no counterpart on either side."""

    splits: Splits
    unknown: tuple[str, ...]  # ids of the file that the cohort does not have
    unused: tuple[str, ...]  # samples of the cohort that are in no part of any fold


def read_splits(path: str | Path, *, sample_column: str = "slide_id") -> Splits:
    """Reads the splits of a file or folder, whichever tool wrote it.

    Args:
        path: a folder with ``splits_0.csv``, ``splits_1.csv``, ... of CLAM or SurvPath, or one of these files; a JSON
            file of STAMP or of ours; a table of Patho-Bench with the columns ``fold_0``, ``fold_1``, ...
        sample_column: of Patho-Bench tables, what is split: "slide_id" or "case_id".
    """
    path = Path(path)
    if path.is_dir() or CLAM_FILE.fullmatch(path.name):
        return _read_numbered_files(path)
    if path.suffix.lower() == ".json":
        content = read_json(path)
        is_stamp = isinstance(content, dict) and "splits" in content
        return _from_stamp(content, path) if is_stamp else splits_from_json(content, path)
    return _read_patho_bench(path, sample_column)


def write_splits(
    splits: Splits, path: str | Path, format: str, *, case_of_slide: Mapping[str, str] | None = None
) -> None:
    """Writes splits for another tool.

    Args:
        splits: of slides or patients, as the tool wants them: SurvPath and STAMP split patients, CLAM splits slides.
        path: a folder for "clam", "clam bool" and "survpath", a file for "stamp" (.json) and "patho-bench" (.tsv).
        format: one of these.
        case_of_slide: the patient of each slide, for "patho-bench", which writes one row per slide.
    """
    if format not in FORMATS:
        raise one_of("format of splits", format, FORMATS)
    path = Path(path)
    if format == "stamp":
        folds = [{"train_patients": sorted(f.train + f.val), "test_patients": list(f.test)} for f in splits.folds]
        write_json(path, {"splits": folds})
    elif format == "patho-bench":
        if case_of_slide is None:
            raise OptionError("tables of Patho-Bench name slide and patient: give case_of_slide")
        _write_patho_bench(splits, path, case_of_slide)
    else:
        for number, fold in enumerate(splits.folds):
            name = f"splits_{number}_bool.csv" if format == "clam bool" else f"splits_{number}.csv"
            _write_rows(path / name, _NUMBERED_ROWS[format](fold))


def fit_to_cohort(splits: Splits, cohort: Cohort, *, leaks: str = "refuse") -> FittedSplits:
    """The same splits in samples of the cohort. A slide stands for its sample, a patient for all of theirs.

    Ids that the cohort does not have are listed, not an error: a published split often covers more slides than
    somebody has. A fold of which nobody is left to train on is one. A patient in two parts is one too, unless ``leaks``
    is "drop": their slides then leave the training part, and the validation part if they are tested.
    """
    if leaks not in LEAKS:
        raise one_of("policy for leaks", leaks, LEAKS)
    patient_of = dict(zip(cohort.ids, cohort.patients, strict=True))
    samples_of = _samples_by_name(cohort)
    unknown: dict[str, None] = {}
    folds = []
    for fold in splits.folds:
        parts: dict[str, list[str]] = {}
        for part in PARTS:
            found: dict[str, None] = {}
            for id in getattr(fold, part):
                samples = samples_of.get(id) or samples_of.get(slide_name(id)) or ()
                found |= dict.fromkeys(samples)
                unknown |= {} if samples else {id: None}
            parts[part] = list(found)
        if not parts["train"]:
            cause = f"split {fold.name!r} of {splits.name!r} trains on none of the samples of the cohort"
            raise OptionError(f"{cause}; it names {quoted(fold.train)}, the cohort has {quoted(cohort.ids)}")
        folds.append(Split.of(without_leaks(parts, patient_of) if leaks == "drop" else parts, fold.name))
    fitted = Splits(tuple(folds), splits.name)
    fitted.check(cohort)
    used = {id for fold in folds for id in fold.ids}
    return FittedSplits(fitted, tuple(unknown), tuple(id for id in cohort.ids if id not in used))


def _samples_by_name(cohort: Cohort) -> dict[str, list[str]]:
    """Samples by their own name; where that is not taken, by their slides and their patients."""
    by_name: dict[str, list[str]] = {sample.id: [sample.id] for sample in cohort.samples}
    others: dict[str, list[str]] = defaultdict(list)
    for sample in cohort.samples:
        for name in {sample.patient, *(bag.id for bag in sample.bags)} - by_name.keys():
            others[name].append(sample.id)
    return by_name | others


def _read_numbered_files(path: Path) -> Splits:
    files: dict[int, Path] = {}
    for file in sorted(path.iterdir(), reverse=True) if path.is_dir() else [path]:  # plain files win over _bool ones
        if found := CLAM_FILE.fullmatch(file.name):
            files[int(found[1])] = file
    if not files:
        raise DataError(path, "has no files splits_0.csv, splits_1.csv, ...", "give the folder that holds them")
    return Splits(tuple(_read_numbered_file(files[number]) for number in sorted(files)), path.name)


def _read_numbered_file(path: Path) -> Split:
    table = read_table(path)
    if path.stem.endswith("_bool"):
        parts = _from_flags(table)
    else:
        columns = {name: name.lower().removesuffix("_slide_path") for name in table.columns}
        parts = {part: _ids(table.texts(name)) for name, part in columns.items() if part in PARTS}
    return _checked_split(path, parts, path.stem)


def _from_flags(table: Table) -> dict[str, list[str]]:
    """One row per id, True in the column of its part."""
    ids = table.texts("" if "" in table.columns else next(iter(table.columns)))
    flags = {part: table.texts(part) for part in PARTS if part in table.columns}
    wrong = {cell for cells in flags.values() for cell in cells if cell not in ("True", "False", None)}
    if wrong:
        raise DataError(table.name, f"holds {quoted(sorted(wrong))} where True or False should be")
    return {
        part: _ids([id for id, cell in zip(ids, cells, strict=True) if cell == "True"]) for part, cells in flags.items()
    }


def _checked_split(path: Path, parts: Mapping[str, Sequence[str]], name: str) -> Split:
    """Files without a test column (SurvPath) hold out what they call val."""
    if "test" not in parts:
        parts = {"train": parts.get("train", ()), "test": parts.get("val", ())}
    try:
        return Split.of(parts, name)
    except OptionError as error:
        raise DataError(path, str(error)) from error


def _from_stamp(content: Any, path: Path) -> Splits:
    try:
        folds = [
            _checked_split(
                path, {part: list(map(str, fold[f"{part}_patients"])) for part in ("train", "test")}, f"fold {number}"
            )
            for number, fold in enumerate(content["splits"])
        ]
        return Splits(tuple(folds), path.stem)
    except (KeyError, TypeError) as error:
        raise DataError(path, f"is not a splits.json of STAMP ({error})") from error
    except OptionError as error:
        raise DataError(path, str(error)) from error


def _read_patho_bench(path: Path, sample_column: str) -> Splits:
    table = read_table(path)
    ids = table.texts(sample_column)
    columns = {int(found[1]): name for name in table.columns if (found := FOLD_COLUMN.fullmatch(name))}
    if not columns:
        cause = f"has no columns fold_0, fold_1, ...; it has {table.column_names()}"
        raise DataError(path, cause, "give a file of splits")
    folds = []
    for number in sorted(columns):
        parts: dict[str, dict[str, None]] = {part: {} for part in PARTS}  # a case has a row for each of its slides
        for id, cell in zip(ids, table.texts(columns[number]), strict=True):
            if id and cell:
                if cell.lower() not in PART_NAMES:
                    raise DataError(path, f"column {columns[number]!r} says {cell!r}", "known: train, val, test")
                parts[PART_NAMES[cell.lower()]][unescape_cell(id)] = None
        folds.append(_checked_split(path, {part: list(found) for part, found in parts.items()}, columns[number]))
    return Splits(tuple(folds), path.stem)


def _write_patho_bench(splits: Splits, path: Path, case_of_slide: Mapping[str, str]) -> None:
    part_of = [{id: part for part in PARTS for id in getattr(fold, part)} for fold in splits.folds]
    lost = [id for id in part_of[0] if id not in case_of_slide and id not in set(case_of_slide.values())]
    if lost:
        raise OptionError(f"case_of_slide does not know {quoted(lost)}")
    rows = [
        [
            slide_case[1],
            slide_case[0],
            *(parts.get(slide_case[0]) or parts.get(slide_case[1]) or "" for parts in part_of),
        ]
        for slide_case in sorted(case_of_slide.items())
    ]
    header = ["case_id", "slide_id", *(f"fold_{number}" for number in range(len(splits)))]
    _write_rows(path, [header, *rows], separator="\t")


def _clam_rows(fold: Split) -> list[list[Any]]:
    """Columns of different lengths side by side, as CLAM has them."""
    rows = zip_longest(fold.train, fold.val, fold.test, fillvalue="")
    return [["", *PARTS], *([number, *row] for number, row in enumerate(rows))]


def _clam_bool_rows(fold: Split) -> list[list[Any]]:
    rows = [[id, *(part == other for other in PARTS)] for part in PARTS for id in getattr(fold, part)]
    return [["", *PARTS], *rows]


def _survpath_rows(fold: Split) -> list[list[Any]]:
    rows = zip_longest(sorted(fold.train + fold.val), fold.test, fillvalue="")
    return [["", "train", "val"], *([number, *row] for number, row in enumerate(rows))]


_NUMBERED_ROWS: dict[str, Callable[[Split], list[list[Any]]]] = {
    "clam": _clam_rows,
    "clam bool": _clam_bool_rows,
    "survpath": _survpath_rows,
}


def _write_rows(path: Path, rows: Iterable[Sequence[Any]], separator: str = ",") -> None:
    with atomic_write(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=separator, lineterminator="\n")
        writer.writerows([escape_cell(cell) for cell in row] for row in rows)


def _ids(cells: Iterable[str | None]) -> list[str]:
    return [unescape_cell(cell) for cell in cells if cell]
