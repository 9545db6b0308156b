"""Outcomes from the columns of a table. The polarity of a survival column is never guessed.

A column says by its name, or the user says by the option, whether 1 means that the event was seen or that the patient
was censored. Where the two contradict each other, or what the source of the table is known to mean, we refuse.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from psamil.cohort.outcomes import Classification, MultiLabel, Outcome, Regression, Survival
from psamil.cohort.tables import Table, has_decimal_comma, number, quoted
from psamil.errors import DataError, OptionError, one_of

KINDS = ("auto", "classification", "regression")
TARGET_NAMES = ("label", "category", "value")
MOST_WHOLE_NUMBER_CLASSES = 10  # more different whole numbers than this can be classes or measurements

YES, NO = {"1", "true", "yes", "y"}, {"0", "false", "no", "n"}  # what they mean depends on the column
# Words that say by themselves what happened; "1:DECEASED" and "0:LIVING" are how cBioPortal writes them.
EVENT_WORDS = {"dead", "deceased", "died", "event", "1:deceased", "1:recurred/progressed", "1:progression"}
CENSORED_WORDS = {"alive", "living", "censored", "0:living", "0:diseasefree", "0:censored"}

# Words of column names. A column is taken by its name only if every word of it is among these.
EVENT, CENSORSHIP = {"event", "events"}, {"censorship", "censored", "censor", "censoring"}
ENDPOINTS = {"os", "pfs", "dss", "pfi", "dfi", "dfs", "rfs", "efs"}
SAYS_NO_MORE = {"status", "indicator", "flag", "is"}
NEGATIONS = {"no", "not", "non", "un", "never", "free", "without", "none"}


@dataclass(frozen=True)
class OutcomeColumns:
    """Where the outcome stands in a table.

    Args:
        target: a column of classes or of numbers; several columns are several yes/no labels. Default: a column called
            label, category or value.
        kind: of a single target: "classification" or "regression"; "auto" decides where there is no doubt.
        classes: their order; of two classes the second is the positive one. Samples of other classes are left out.
            Default: all, in numerical or alphabetical order.
        time: column of survival times, for survival instead of a target.
        event: column where 1 means that the event was seen.
        censorship: column where 1 means censored.
    """

    target: str | tuple[str, ...] | None = None
    kind: str = "auto"
    classes: tuple[str, ...] | None = None
    time: str | None = None
    event: str | None = None
    censorship: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise one_of("kind of outcome", self.kind, KINDS)
        if self.target is not None and (self.time or self.event or self.censorship):
            raise OptionError("an outcome is either a target or a survival time: give target, or time and event")
        if (self.event or self.censorship) and not self.time:
            raise OptionError("survival needs the column of times as well: give time")
        if self.event and self.censorship:
            raise OptionError("give event (1 = event seen) or censorship (1 = censored), not both")


def read_outcome(table: Table, columns: OutcomeColumns) -> tuple[Outcome, NDArray[np.bool_]]:
    """The outcome of the rows that have one, and which rows these are."""
    if columns.time is not None:
        return _survival(table, columns, columns.time)
    target = columns.target if columns.target is not None else _only_target(table)
    if not isinstance(target, str):
        return _multi_label(table, target) if len(target) > 1 else _single(table, columns, target[0])
    return _single(table, columns, target)


def _only_target(table: Table) -> str:
    found = [name for name in table.columns if name.lower() in TARGET_NAMES]
    if len(found) != 1:
        cause = f"has the columns {table.column_names()}: which of them is to be predicted?"
        raise DataError(table.name, cause, "name it with target, or with time and event")
    return found[0]


def _single(table: Table, columns: OutcomeColumns, target: str) -> tuple[Outcome, NDArray[np.bool_]]:
    kind = columns.kind
    if kind == "auto":
        kind = "classification" if columns.classes else _evident_kind(table, target)
    if kind == "regression":
        return _regression(table, target)
    outcome, present = _classification(table, target, columns.classes)
    if columns.kind == "auto" and not columns.classes:
        _refuse_names(table, outcome)
    return outcome, present


def _evident_kind(table: Table, target: str) -> str:
    present = {text for text in table.texts(target) if text}
    values = {number(text) for text in present}
    with_comma = sorted(text for text in present if has_decimal_comma(text))
    if with_comma:
        cause = f"column {target!r} holds {quoted(with_comma)}: numbers with a decimal comma, or classes?"
        raise DataError(table.name, cause, "write numbers with a point, or say kind='classification'")
    if None in values:
        return "classification"
    if any(value is not None and value != int(value) for value in values):
        return "regression"
    if len(values) > MOST_WHOLE_NUMBER_CLASSES:
        cause = f"column {target!r} holds {len(values)} different whole numbers"
        raise DataError(table.name, cause, "say kind='classification' or kind='regression'")
    return "classification"


def _refuse_names(table: Table, outcome: Classification) -> None:
    """A column of names or remarks, in which hardly anything occurs twice, is no column of classes."""
    once = int((np.bincount(outcome.labels, minlength=len(outcome.classes)) == 1).sum())
    if len(outcome.classes) > 2 and 2 * once > len(outcome.classes):
        cause = f"{once} of the {len(outcome.classes)} classes of column {outcome.column!r} have one sample"
        remedy = "name another target, or the classes that you want, or say kind='classification' if all are meant"
        raise DataError(table.name, f"{cause}: {quoted(outcome.classes)}", remedy)


def _classification(
    table: Table, target: str, classes: Sequence[str] | None
) -> tuple[Classification, NDArray[np.bool_]]:
    texts = _without_decimals(table.texts(target))
    names = tuple(classes) if classes is not None else _in_order({text for text in texts if text})
    if len(names) != len(set(names)):
        raise OptionError(f"classes are named twice: {quoted(names)}")
    place = {name: index for index, name in enumerate(names)}
    absent = [name for name in names if name not in texts]
    if absent:
        remedy = f"it has {quoted(_in_order({text for text in texts if text}))}"
        parts = [part.strip() for part in absent[0].split(",")]
        if len(parts) > 1 and all(part in texts for part in parts):
            remedy += f"; name them one after the other: --classes {' '.join(parts)}"
        raise DataError(table.name, f"column {target!r} has no class {quoted(absent)} in these samples", remedy)
    if len(names) < 2:
        held = f"only the class {quoted(names)}" if names else "no value"
        raise DataError(table.name, f"column {target!r} holds {held} in the {len(table)} rows that have bags")
    present = np.array([text in place for text in texts], dtype=bool)
    labels = np.array([place[text] for text in texts if text in place], dtype=np.int64)
    return Classification(target, names, labels), present


def _regression(table: Table, target: str) -> tuple[Regression, NDArray[np.bool_]]:
    values = table.numbers(target)
    present = ~np.isnan(values)
    if not present.any():
        raise DataError(table.name, f"column {target!r} holds no value in the {len(table)} rows that have bags")
    return Regression(target, values[present]), present


def _multi_label(table: Table, targets: Sequence[str]) -> tuple[MultiLabel, NDArray[np.bool_]]:
    """A sample with a gap in any label is left out."""
    if len(targets) != len(set(targets)):
        raise OptionError(f"a target is named twice: {quoted(targets)}")
    answers = np.stack([_yes_no(table, target, YES, NO) for target in targets], axis=1)
    present = ~np.isnan(answers.sum(axis=1))
    if not present.any():
        raise DataError(table.name, f"no row has a value in all of {quoted(targets)}")
    return MultiLabel(tuple(targets), answers[present].astype(np.int64)), present


def _survival(table: Table, columns: OutcomeColumns, time: str) -> tuple[Survival, NDArray[np.bool_]]:
    column, censorship = _polarity(table, columns)
    times = table.numbers(time)
    if (times < 0).any():
        raise DataError(table.name, f"column {time!r} holds {int((times < 0).sum())} negative times")
    if censorship:
        events = 1 - _yes_no(table, column, YES | CENSORED_WORDS, NO | EVENT_WORDS)
    else:
        events = _yes_no(table, column, YES | EVENT_WORDS, NO | CENSORED_WORDS)
    present = ~(np.isnan(times) | np.isnan(events))
    if not present.any():
        raise DataError(table.name, f"no row has both a time ({time!r}) and a status ({column!r})")
    return Survival(time, column, times[present], events[present] == 1), present


def _polarity(table: Table, columns: OutcomeColumns) -> tuple[str, bool]:
    """The column of the status, and whether its 1 means censored."""
    if columns.event:
        if _mentions(CENSORSHIP, columns.event):
            cause = f"column {columns.event!r} was given as event, but by its name 1 means censored (MCAT, SurvPath)"
            raise DataError(table.name, cause, f"give censorship={columns.event!r}, or rename the column")
        return columns.event, False
    if columns.censorship:
        source = _source_with_events(table) if _mentions(EVENT, columns.censorship) else None
        if source:
            cause = f"column {columns.censorship!r} was given as censorship, but in tables of {source} 1 is the event"
            raise DataError(table.name, cause, f"give event={columns.censorship!r}, or rename the column")
        return columns.censorship, True
    others = [name for name in table.columns if name != columns.time]
    found = [name for name in others if says_event(name) or says_censorship(name)]
    if len(found) != 1:
        unclear = [name for name in others if set(_words(name)) & (EVENT | CENSORSHIP) and name not in found]
        cause = (
            f"which column says whether the event was seen? By name it could be {quoted(found) if found else 'none'}"
            + (f"; what 1 means in {quoted(unclear)} is not clear" if unclear else "")
        )
        remedy = "give event (1 = event seen) or censorship (1 = censored); columns: "
        raise DataError(table.name, cause, remedy + table.column_names())
    if says_event(found[0]) and {"patient_id", "cohort"} <= set(table.columns):
        cause = f"column {found[0]!r} is in doubt: the authors of PSA-MIL write 1 = censored under this name"
        raise DataError(table.name, cause, f"give event={found[0]!r} or censorship={found[0]!r}")
    return found[0], says_censorship(found[0])


def says_event(column: str) -> bool:
    """Whether 1 means by the name of the column, beyond doubt, that the event was seen."""
    return _mentions(EVENT, column) and set(_words(column)) <= EVENT | ENDPOINTS | SAYS_NO_MORE | {"observed"}


def says_censorship(column: str) -> bool:
    """Whether 1 means by the name of the column, beyond doubt, that the patient was censored."""
    return _mentions(CENSORSHIP, column) and set(_words(column)) <= CENSORSHIP | ENDPOINTS | SAYS_NO_MORE


def _mentions(meaning: set[str], column: str) -> bool:
    words = set(_words(column))
    return bool(words & meaning) and not words & NEGATIONS


def _words(column: str) -> list[str]:
    """``OS_event`` and ``OSEvent`` are "os", "event"; signs that do more than divide words are words."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\sA-Za-z\d_.-]+", column)]


def _source_with_events(table: Table) -> str | None:
    """The tool whose tables these columns are, of those that write 1 = event."""
    names = set(table.columns)
    if any(re.fullmatch(r"fold_\d+", name) for name in names):
        return "Patho-Bench"
    if "PATIENT" in names:
        return "STAMP"
    return "slideflow" if {"slide", "patient", "time", "event"} <= names else None


def _yes_no(table: Table, column: str, yes: set[str], no: set[str]) -> NDArray[np.float64]:
    """1, 0 or NaN per row."""
    texts = _without_decimals(table.texts(column))
    wrong = [text for text in texts if text and text.lower() not in yes | no]
    if wrong:
        cause = f"column {column!r} should hold 1 and 0 (or yes and no), but holds {quoted(sorted(set(wrong)))}"
        raise DataError(table.name, cause, "write 1 and 0 into it")
    return np.array([np.nan if text is None else float(text.lower() in yes) for text in texts])


def _without_decimals(texts: Sequence[str | None]) -> list[str | None]:
    """``1.0`` is ``1`` in a column of whole numbers: a program wrote it so because of a gap."""
    numbers = [number(text) for text in texts if text]
    if not numbers or any(value is None or value != int(value) for value in numbers):
        return list(texts)
    return [None if text is None else str(int(float(text))) for text in texts]


def _in_order(names: set[str]) -> tuple[str, ...]:
    """Numbers by value, names by alphabet."""
    if all(number(name) is not None for name in names):
        return tuple(sorted(names, key=lambda name: (float(name), name)))
    return tuple(sorted(names))
