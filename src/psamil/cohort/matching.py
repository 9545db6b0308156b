"""Rows of a label table joined with bags, by the names of slides and patients.

Slides are named in tables with and without extensions, with folders, in other capitals; patients stand in the same
table or in one of their own. Columns are recognised by the names that the tools of the field give them, and a bag
belongs to a row if both have the same slide name once folders and known extensions are off. Nothing is dropped
silently: :class:`MatchReport` lists what did not match, from both sides, with the names that were probably meant.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from psamil.cohort.near_names import near_names
from psamil.cohort.tables import Table, quoted
from psamil.errors import DataError
from psamil.readers.ids import slide_id
from psamil.readers.tiles import BagRef

SLIDE_COLUMNS = ("slide_id", "slide", "slide_path", "slide_name", "slide_uuid", "filename")
PATIENT_COLUMNS = ("patient", "patient_id", "case_id", "case", "case_submitter_id")
TCGA_PATIENT = re.compile(r"(TCGA-\w{2}-\w{4})(?=-|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Link:
    """A row of the label table that speaks about a slide."""

    slide: str  # as the table writes it
    patient: str
    row: int


@dataclass(frozen=True)
class Match:
    """A row of the label table and the bag it speaks about."""

    bag: BagRef
    patient: str
    row: int


@dataclass(frozen=True)
class MatchReport:
    """What matched, and what did not, from both sides. Names are as the table or the folder has them."""

    matched: int = 0  # bags
    without_bag: tuple[str, ...] = ()  # slides of the table
    set_aside: tuple[str, ...] = ()  # slides of the table whose file is there and cannot be used
    without_label: tuple[str, ...] = ()  # bags of the folder
    without_slide: tuple[str, ...] = ()  # patients of the label table of whom no slide is known
    without_outcome: tuple[str, ...] = ()  # samples whose value is missing, or of a class that was not asked for
    near_misses: tuple[tuple[str, str], ...] = ()  # name in the table, name that was perhaps meant
    notes: tuple[str, ...] = ()  # whole sentences

    def __str__(self) -> str:
        lines = [f"{self.matched} bags have a label"]
        for names, what in (
            (self.set_aside, "slides of the table are left out, since their file was set aside"),
            (self.without_bag, "slides of the table have no bag"),
            (self.without_label, "bags have no label"),
            (self.without_slide, "patients of the table have no slide"),
            (self.without_outcome, "samples have no value and are left out"),
        ):
            if names:
                lines.append(f"{len(names)} {what}: {quoted(names)}")
        lines += [f"the table has {table!r}; was {bag!r} meant?" for table, bag in self.near_misses[:5]]
        return "\n".join([*lines, *self.notes])

    def with_note(self, sentence: str) -> MatchReport:
        return replace(self, notes=(*self.notes, sentence))

    @property
    def is_complete(self) -> bool:
        """Whether every bag has a label, every row a bag, and there is nothing to note."""
        return self == MatchReport(matched=self.matched)


def slide_name(text: str) -> str:
    """The slide that a cell of a table or a file stands for; folders may be written in either way."""
    return slide_id(PurePosixPath(text.replace("\\", "/")))


def find_column(table: Table, given: str | None, known: Sequence[str], option: str) -> str | None:
    """The column that the user named, or the only one with a known name; None if there is none."""
    if given is not None:
        table.texts(given)
        return given
    found = [name for name in table.columns if re.sub(r"[\s-]+", "_", name).lower() in known]
    if len(found) > 1:
        what = option.removesuffix("_column")
        raise DataError(table.name, f"{quoted(found)} could all be the {what}", f"name one of them with {option}")
    return found[0] if found else None


def link_rows(
    labels: Table,
    bags: Sequence[BagRef],
    *,
    set_aside: Collection[str] = (),
    slide_table: Table | None = None,
    slide_column: str | None = None,
    patient_column: str | None = None,
) -> tuple[list[Link], MatchReport]:
    """Which slide each row speaks about. The report holds only what can be said without looking for the bags.

    ``set_aside`` are the names of slides whose files cannot be used: a row may speak about them as well.
    """
    if slide_table is not None:
        return _link_by_slide_table(labels, slide_table, slide_column, patient_column)
    patient = find_column(labels, patient_column, PATIENT_COLUMNS, "patient_column")
    slide = find_column(labels, slide_column, SLIDE_COLUMNS, "slide_column")
    if slide is not None:
        return _link_by_slide(labels, slide, patient)
    if patient is not None:
        return _link_by_patient(labels, patient, [*(bag.id for bag in bags), *sorted(set_aside)])
    cause = f"no column of {labels.column_names()} is known to name slides or patients"
    raise DataError(labels.name, cause, "name it with slide_column or patient_column")


def match_bags(
    links: Sequence[Link], bags: Sequence[BagRef], set_aside: Collection[str] = ()
) -> tuple[list[Match], MatchReport]:
    """The bag of each row; DataError if a row could mean several bags or a slide belongs to several patients."""
    by_name, by_folded = _grouped(bags, str), _grouped(bags, str.casefold)
    names = [slide_name(link.slide) for link in links]
    spellings = defaultdict(set)
    for name in names:
        spellings[name.casefold()].add(name)
    matches, without_bag, recased = [], [], set()
    for link, name in zip(links, names, strict=True):
        found = by_name.get(name, [])
        if not found and len(spellings[name.casefold()]) == 1:  # other capitals, and no doubt on either side
            alike = by_folded.get(name.casefold(), [])
            found = alike if len({bag.id for bag in alike}) == 1 else []
            recased.update([name] if found else [])
        if not found:
            without_bag.append(link.slide)
        else:
            matches.append(Match(_only(found), link.patient, link.row))
    _refuse_shared_slides(matches)
    matched = {match.bag for match in matches}
    without_label = sorted({bag.id for bag in bags if bag not in matched} - {bag.id for bag in matched})
    unusable = {name.casefold() for name in set_aside}
    broken = tuple(dict.fromkeys(text for text in without_bag if slide_name(text).casefold() in unusable))
    missing = tuple(dict.fromkeys(text for text in without_bag if text not in broken))
    notes = [f"{len(recased)} slides are written with other capitals: {quoted(sorted(recased))}."] if recased else []
    return matches, MatchReport(
        matched=len(matched),
        without_bag=missing,
        set_aside=broken,
        without_label=tuple(without_label),
        near_misses=near_names({text: slide_name(text) for text in missing}, without_label),
        notes=(*notes, *_case_collisions(by_folded)),
    )


def tcga_patient(slide: str) -> str | None:
    """The patient inside the barcode of a TCGA slide: ``TCGA-05-4250-01Z-00-DX1...`` is of ``TCGA-05-4250``.

    Capitals mean nothing in a barcode: files in small letters are of the same patient.
    """
    found = TCGA_PATIENT.match(slide)
    return found[1].upper() if found else None


def _link_by_slide(labels: Table, slide: str, patient: str | None) -> tuple[list[Link], MatchReport]:
    named = [(row, text) for row, text in enumerate(labels.texts(slide)) if text]
    notes = _note_gaps(labels, slide, len(labels) - len(named))
    if patient is not None:
        _refuse_patients_alike(labels, patient)
        patients = labels.texts(patient)
        nobody = [text for row, text in named if not patients[row]]
        if nobody:
            cause = f"column {patient!r} is empty for {quoted(nobody)}"
            raise DataError(labels.name, cause, "fill it in: slides of one patient must stay together")
        return [Link(text, patients[row] or "", row) for row, text in named], MatchReport(notes=notes)
    barcodes = [tcga_patient(slide_name(text)) for _, text in named]
    links = [Link(text, code or slide_name(text), row) for code, (row, text) in zip(barcodes, named, strict=True)]
    return links, MatchReport(notes=(*notes, f"There is no column of patients: {_owners(barcodes)}."))


def _owners(barcodes: Sequence[str | None]) -> str:
    coded = sum(code is not None for code in barcodes)
    if not coded:
        return "every slide counts as a patient of its own"
    others = len(barcodes) - coded
    more = f" for {coded} slides, and each of the {others} others counts as a patient of its own" if others else ""
    return f"they are taken from the TCGA barcodes{more}"


def _link_by_slide_table(
    labels: Table, slides: Table, slide_column: str | None, patient_column: str | None
) -> tuple[list[Link], MatchReport]:
    patient, found = (_patient_column_of(table, patient_column, (labels, slides)) for table in (labels, slides))
    slide = find_column(slides, slide_column, SLIDE_COLUMNS, "slide_column")
    if slide is None:
        cause = f"no column of {slides.column_names()} is known to name slides"
        raise DataError(slides.name, cause, "name it with slide_column")
    rows = _rows_by_patient(labels, patient)
    _refuse_patients_alike(slides, found)
    pairs = [(p, text) for p, text in zip(slides.texts(found), slides.texts(slide), strict=True) if p and text]
    links = [Link(text, p, row) for p, text in pairs for row in rows.get(p, ())]
    known = {p for p, _ in pairs}
    unknown = sorted(known - rows.keys())
    notes = _note_gaps(slides, slide, len(slides) - len(pairs))
    if unknown:
        notes = (*notes, f"{len(unknown)} patients of {slides.name} have no row in {labels.name}: {quoted(unknown)}.")
    without_slide = tuple(sorted(rows.keys() - known))
    near = near_names({name: name for name in without_slide}, unknown)
    return links, MatchReport(without_slide=without_slide, near_misses=near, notes=notes)


def _patient_column_of(table: Table, given: str | None, tables: Sequence[Table]) -> str:
    """The two tables may name their patients differently: the given column counts where it exists."""
    if given not in table.columns and any(given in other.columns for other in tables):
        given = None
    found = find_column(table, given, PATIENT_COLUMNS, "patient_column")
    if found is None:
        cause = f"no column of {table.column_names()} is known to name patients"
        raise DataError(table.name, cause, "name it with patient_column")
    return found


def _link_by_patient(labels: Table, patient: str, slides: Sequence[str]) -> tuple[list[Link], MatchReport]:
    """Without any column of slides: a bag is named after its patient, or carries a TCGA barcode."""
    rows = _rows_by_patient(labels, patient)
    as_written = {name.upper(): name for name in rows}
    owners = [(name, name if name in rows else as_written.get(tcga_patient(name) or "")) for name in slides]
    links = [Link(name, owner, row) for name, owner in dict.fromkeys(owners) if owner for row in rows.get(owner, ())]
    without_slide = tuple(sorted(rows.keys() - {link.patient for link in links}))
    note = "There is no column of slides: bags are matched to patients by name (or TCGA barcode)."
    loose = [name for name, owner in owners if owner not in rows]
    near = near_names({name: name for name in without_slide}, loose)
    return links, MatchReport(without_slide=without_slide, near_misses=near, notes=(note,))


def _rows_by_patient(labels: Table, patient: str) -> dict[str, list[int]]:
    _refuse_patients_alike(labels, patient)
    rows = defaultdict(list)
    for row, name in enumerate(labels.texts(patient)):
        if name:
            rows[name].append(row)
    return dict(rows)


def _refuse_patients_alike(table: Table, patient: str) -> None:
    """A patient who is written in two ways would be two, and could be learned from and tested on at once."""
    spellings = defaultdict(set)
    for name in table.texts(patient):
        spellings[(name or "").casefold()].add(name or "")
    alike = [" and ".join(map(repr, sorted(names))) for names in spellings.values() if len(names) > 1]
    if alike:
        more = f", and {len(alike) - 3} other pairs" if len(alike) > 3 else ""
        cause = f"patients of column {patient!r} differ only in capitals: {'; '.join(sorted(alike)[:3])}{more}"
        raise DataError(table.name, cause, "write each in one way; if they are different people, rename one of them")


def _grouped(bags: Iterable[BagRef], key: Callable[[str], str]) -> dict[str, list[BagRef]]:
    groups = defaultdict(list)
    for bag in bags:
        groups[key(bag.id)].append(bag)
    return dict(groups)


def _only(found: Sequence[BagRef]) -> BagRef:
    if len(found) > 1:
        places = ", ".join(str(bag.path) + (f" [{bag.member}]" if bag.member else "") for bag in found[:4])
        raise DataError(places, f"{len(found)} bags are called {found[0].id!r}", "give a folder that holds one of them")
    return found[0]


def _refuse_shared_slides(matches: Sequence[Match]) -> None:
    patient_of: dict[BagRef, str] = {}
    for match in matches:
        other = patient_of.setdefault(match.bag, match.patient)
        if other != match.patient:
            cause = f"slide {match.bag.id!r} belongs to two patients in the table, {other!r} and {match.patient!r}"
            raise DataError(match.bag.path, cause, "correct the table")


def _case_collisions(by_folded: dict[str, list[BagRef]]) -> list[str]:
    collisions = [sorted({bag.id for bag in bags}) for bags in by_folded.values() if len({bag.id for bag in bags}) > 1]
    if not collisions:
        return []
    shown = "; ".join(" and ".join(names) for names in sorted(collisions)[:3])
    return [f"{len(collisions)} names of bags differ only in capitals, and are kept apart: {shown}."]


def _note_gaps(table: Table, column: str, count: int) -> tuple[str, ...]:
    return (f"{count} rows of {table.name} name no slide in column {column!r}.",) if count else ()
