"""Which samples train, which choose the model, which are kept for the test.

- Patients are split, not slides: a patient in two parts is an error, wherever a split comes from.
- Splits are saved with a hash, so that a result can say on which of them it stands. The order of rows does not matter.
- They are made by :mod:`psamil.cohort.folds`, stand in columns of the label table, or come from files of other tools
  (:mod:`psamil.cohort.split_files`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol

from psamil.cohort.outcomes import Outcome
from psamil.cohort.tables import quoted
from psamil.errors import DataError, OptionError, one_of
from psamil.files import read_json, write_json

PARTS = ("train", "val", "test")
LEAKS = ("refuse", "drop")
PART_NAMES = {
    **{"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val"},
    **{"test": "test", "testing": "test", "holdout": "test"},
}
FOLD_COLUMN = re.compile(r"fold_?(\d+)", re.IGNORECASE)


class Splittable(Protocol):
    """What can be split: a :class:`psamil.cohort.Cohort`, or anything with these lists, one entry per sample."""

    @property
    def ids(self) -> Sequence[str]: ...
    @property
    def patients(self) -> Sequence[str]: ...
    @property
    def sites(self) -> Sequence[str | None]: ...
    @property
    def outcome(self) -> Outcome: ...


class WithColumns(Splittable, Protocol):
    """A cohort whose table can be asked for other columns."""

    @property
    def column_names(self) -> Sequence[str]: ...
    def column(self, name: str) -> Sequence[str | None]: ...


@dataclass(frozen=True)
class Split:
    """Ids of the samples of each part, sorted. ``val`` and ``test`` can be empty."""

    train: tuple[str, ...]
    val: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        for part in PARTS:
            ids = getattr(self, part)
            if len(set(ids)) < len(ids):
                twice = [sample for sample, count in Counter(ids).items() if count > 1]
                raise OptionError(f"split {self.name!r}: {quoted(twice)} stands twice in {part}")
            object.__setattr__(self, part, tuple(sorted(ids)))
        self.check_patients({sample: sample for sample in self.ids})
        if not self.train:
            raise OptionError(f"split {self.name!r} has nobody to train on")

    @staticmethod
    def of(parts: Mapping[str, Iterable[str]], name: str = "") -> Split:
        """From ids by the name of the part."""
        train, val, test = (tuple(parts.get(part, ())) for part in PARTS)
        return Split(train, val, test, name)

    @property
    def ids(self) -> tuple[str, ...]:
        return self.train + self.val + self.test

    def check_patients(self, patient_of: Mapping[str, str]) -> None:
        """OptionError if a patient is in two parts."""
        patients = {part: {patient_of[sample] for sample in getattr(self, part)} for part in PARTS}
        for one, other in combinations(PARTS, 2):
            shared = sorted(patients[one] & patients[other])
            if shared:
                where = f"split {self.name!r}: {one} and {other}"
                raise OptionError(f"{where} share {quoted(shared)}; a patient must be in one part only (see `leaks`)")


@dataclass(frozen=True)
class Splits:
    """The folds of an experiment. ``hash`` tells whether two experiments used the same ones."""

    folds: tuple[Split, ...]
    name: str = ""

    def __post_init__(self) -> None:
        if not self.folds:
            raise OptionError(f"splits {self.name!r} hold no fold")

    def __len__(self) -> int:
        return len(self.folds)

    def __getitem__(self, index: int) -> Split:
        return self.folds[index]

    @property
    def hash(self) -> str:
        """SHA-256 of the parts of all folds, in order."""
        parts = [[list(getattr(fold, part)) for part in PARTS] for fold in self.folds]
        return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()

    def check(self, cohort: Splittable) -> None:
        """OptionError if a fold names a sample that the cohort lacks, or puts a patient into two parts."""
        patient_of = dict(zip(cohort.ids, cohort.patients, strict=True))
        for fold in self.folds:
            unknown = [sample for sample in fold.ids if sample not in patient_of]
            if unknown:
                raise OptionError(f"split {fold.name!r} names {quoted(unknown)}, which the cohort does not have")
            fold.check_patients(patient_of)

    def save(self, path: str | Path) -> None:
        folds = [{"name": fold.name, **{part: list(getattr(fold, part)) for part in PARTS}} for fold in self.folds]
        write_json(path, {"name": self.name, "hash": self.hash, "folds": folds})

    @staticmethod
    def load(path: str | Path) -> Splits:
        return splits_from_json(read_json(path), path)


def splits_from_json(content: Any, path: str | Path) -> Splits:
    try:
        folds = [
            Split.of({part: map(str, fold[part]) for part in PARTS}, str(fold["name"])) for fold in content["folds"]
        ]
        splits, hash_of_file = Splits(tuple(folds), str(content["name"])), content.get("hash")
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(path, f"is not a file of splits ({error})", "write one with Splits.save") from error
    except OptionError as error:
        raise DataError(path, str(error)) from error
    if hash_of_file is not None and hash_of_file != splits.hash:
        raise DataError(path, "was changed after it was saved", "remove its 'hash' if that was intended")
    return splits


def without_leaks(parts: Mapping[str, Sequence[str]], patient_of: Mapping[str, str]) -> dict[str, list[str]]:
    """The parts without patients who are in a later part as well: the test part stays, and training gives way."""
    kept: dict[str, list[str]] = {}
    taken: set[str] = set()
    for part in reversed(PARTS):
        kept[part] = [sample for sample in parts.get(part, ()) if patient_of[sample] not in taken]
        taken |= {patient_of[sample] for sample in kept[part]}
    return kept


def splits_from_columns(cohort: WithColumns, columns: Sequence[str] | None = None, *, leaks: str = "refuse") -> Splits:
    """One fold per column; its cells are train, val or test. Samples with an empty cell are in no part.

    Args:
        cohort: whose label table holds the columns.
        columns: their names. Default: ``fold_0``, ``fold_1``, ... of the table, or else ``split`` or ``part``.
        leaks: a patient in two parts is an error; "drop" instead leaves the slides out that make it so, and keeps the
            test part as it is: published folds of slides are often like that.
    """
    if leaks not in LEAKS:
        raise one_of("policy for leaks", leaks, LEAKS)
    if columns is None:
        numbered = {name: FOLD_COLUMN.fullmatch(name) for name in cohort.column_names}
        columns = sorted((name for name in numbered if numbered[name]), key=lambda name: int(numbered[name][1]))  # type: ignore[index]
        columns = columns or [name for name in cohort.column_names if name.lower() in ("split", "part")]
    if not columns:
        raise OptionError(
            f"there are no columns fold_0, fold_1, ... or split or part among {quoted(cohort.column_names, 30)}"
        )
    folds = []
    patient_of = dict(zip(cohort.ids, cohort.patients, strict=True))
    for column in columns:
        parts: dict[str, list[str]] = {part: [] for part in PARTS}
        for sample, cell in zip(cohort.ids, cohort.column(column), strict=True):
            if cell is None:
                continue
            if cell.lower() not in PART_NAMES:
                raise OptionError(f"column {column!r} says {cell!r} for {sample!r}; known: train, val, test")
            parts[PART_NAMES[cell.lower()]].append(sample)
        folds.append(Split.of(without_leaks(parts, patient_of) if leaks == "drop" else parts, column))
    splits = Splits(tuple(folds), ", ".join(columns) if len(columns) < 4 else f"{columns[0]} to {columns[-1]}")
    splits.check(cohort)
    return splits
