"""A cohort: bags and what is known about them, matched and checked.

>>> cohort = Cohort.open("features", "labels.csv", target="subtype", unit="patient")
>>> print(cohort)  # what matched, what did not, the classes
>>> bag = cohort.load(cohort.samples[0])
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from psamil.bag import Bag, PackedBags
from psamil.cohort.matching import Match, MatchReport, find_column, link_rows, match_bags
from psamil.cohort.outcome_columns import OutcomeColumns, read_outcome
from psamil.cohort.outcomes import Outcome
from psamil.cohort.same_features import Names, feature_names, odd_slides, refuse_other_names
from psamil.cohort.tables import Table, quoted, read_table
from psamil.cohort.tile_labels import SlideLabels, TileLabels
from psamil.errors import DataError, OptionError, one_of
from psamil.files import content_hash, files_below
from psamil.readers import BagRef, Found, SetAside, find_bags, open_bag, slide_id

UNITS = ("slide", "patient")
DAMAGED = ("set aside", "refuse")
SAME_STEP = 1.01  # ratio of steps in micrometres that counts as one


class Loader(Protocol):
    """Opens bags: a :class:`psamil.cohort.cache.BagCache`, for instance."""

    def load(self, bag: BagRef, /) -> Bag: ...


@dataclass(frozen=True)
class Sample:
    """One bag to be predicted: a slide, or all slides of a patient."""

    id: str
    patient: str
    site: str | None
    bags: tuple[BagRef, ...]
    outcome: Any  # class name, tuple of 0 and 1, number, or (time, event)


@dataclass(frozen=True, eq=False)
class Cohort:
    """Samples in order of their ids, and their outcome as arrays in the same order. Made by :meth:`open`."""

    samples: tuple[Sample, ...]
    outcome: Outcome
    unit: str
    report: MatchReport
    set_aside: tuple[SetAside, ...] = ()
    rows: tuple[tuple[int, ...], ...] = ()  # of the label table, those that speak about each sample
    table: Table = field(default_factory=lambda: Table("no table", {}))
    loader: Loader | None = None
    reading: Mapping[str, Any] = field(default_factory=dict)
    precision: torch.dtype | None = None  # of features as they are loaded; None: as they are in the files
    tile_labels: TileLabels | None = None  # see :meth:`with_tile_labels`

    @staticmethod
    def open(
        features: str | Path | Found,
        labels: str | Path | pd.DataFrame,
        *,
        target: str | Sequence[str] | None = None,
        kind: str = "auto",
        classes: Sequence[str] | None = None,
        time: str | None = None,
        event: str | None = None,
        censorship: str | None = None,
        unit: str = "slide",
        slide_table: str | Path | pd.DataFrame | None = None,
        slide_column: str | None = None,
        patient_column: str | None = None,
        site_column: str | None = None,
        cache: Loader | None = None,
        reading: Mapping[str, Any] | None = None,
    ) -> Cohort:
        """Joins a folder of features with a table of labels. No features are read yet.

        Args:
            features: a folder, or what :func:`psamil.readers.find_bags` found in it.
            labels: a CSV, TSV, XLSX or Parquet table, or a data frame.
            target, kind, classes, time, event, censorship: what is predicted; see
                :class:`psamil.cohort.outcome_columns.OutcomeColumns`.
            unit: "slide": one bag per slide; "patient": one per patient, of all of their slides.
            slide_table: a second table that says which slides a patient has, if ``labels`` is about patients.
            slide_column, patient_column, site_column: of the tables, where their names do not tell.
            cache: loads the bags; by default they are opened anew each time.
            reading: options of :func:`psamil.readers.open_bag`, such as ``non_finite``; not with a cache, which has its
                own.
        """
        if unit not in UNITS:
            raise one_of("unit", unit, UNITS)
        if cache is not None and reading:
            raise OptionError("the options of reading belong to the cache; give them to it")
        found = features if isinstance(features, Found) else find_bags(features)
        table = read_table(labels)
        wanted = target if target is None or isinstance(target, str) else tuple(target)
        columns = OutcomeColumns(wanted, kind, None if classes is None else tuple(classes), time, event, censorship)
        aside = {slide_id(entry.path) for entry in found.set_aside}
        links, linked = link_rows(
            table,
            found.bags,
            set_aside=aside,
            slide_table=None if slide_table is None else read_table(slide_table),
            slide_column=slide_column,
            patient_column=patient_column,
        )
        matches, matched = match_bags(links, found.bags, aside)
        report = replace(
            matched,
            without_slide=linked.without_slide,
            near_misses=linked.near_misses + matched.near_misses,
            notes=linked.notes + matched.notes,
        )
        if not matches:
            raise DataError(table.name, f"none of the {len(found.bags)} bags match a row", str(report))
        site = find_column(table, site_column, ("site",), "site_column")
        samples, rows, outcome, without = _samples(table, matches, columns, unit, site)
        report = replace(report, without_outcome=without)
        return Cohort(samples, outcome, unit, report, found.set_aside, rows, table, cache, reading or {})

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        return f"Cohort({self.headline})"

    def __str__(self) -> str:
        aside = [f"set aside: {entry.path}: {entry.reason}" for entry in self.set_aside[:10]]
        more = [f"and {len(self.set_aside) - 10} more set aside"] if len(self.set_aside) > 10 else []
        return "\n".join([self.headline, str(self.report), *aside, *more])

    @property
    def headline(self) -> str:
        """How many samples, of how many patients, with which outcome: ``60 slides of 50 patients: MSI 20 / MSS 40``."""
        return f"{len(self)} {self.unit}s of {len(set(self.patients))} patients: {self.outcome.describe()}"

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(sample.id for sample in self.samples)

    @property
    def patients(self) -> tuple[str, ...]:
        return tuple(sample.patient for sample in self.samples)

    @property
    def sites(self) -> tuple[str | None, ...]:
        return tuple(sample.site for sample in self.samples)

    @property
    def column_names(self) -> tuple[str, ...]:
        return tuple(self.table.columns)

    @property
    def reading_options(self) -> Mapping[str, Any]:
        """By which :func:`psamil.open_bag` reads the slides: those of the cache, if there is one."""
        options: Mapping[str, Any] = getattr(self.loader, "reading", self.reading)
        return options

    def column(self, name: str) -> tuple[str | None, ...]:
        """Another column of the label table, per sample. DataError if rows of a sample contradict each other."""
        return tuple(_agreed(self.table, name, *of) for of in zip(self.rows, self.ids, strict=True))

    def select(self, ids: Collection[str]) -> Cohort:
        """The cohort of these samples alone."""
        unknown = sorted(set(ids) - set(self.ids))
        if unknown:
            raise OptionError(f"the cohort has no sample {quoted(unknown)}")
        chosen = set(ids)
        kept = [i for i, sample in enumerate(self.samples) if sample.id in chosen]
        samples = tuple(self.samples[i] for i in kept)
        return replace(self, samples=samples, outcome=self.outcome.take(kept), rows=tuple(self.rows[i] for i in kept))

    def load(self, sample: Sample) -> Bag:
        """The tiles of a sample. DataError if a file of it is damaged; see :meth:`checked`."""
        if len(sample.bags) > 1:
            refuse_other_names({ref: feature_names(ref) for ref in sample.bags})
        return join_slides([self.load_slide(ref) for ref in sample.bags], sample.id)

    def load_slide(self, ref: BagRef) -> Bag:
        """The tiles of one slide."""
        bag = self.loader.load(ref) if self.loader is not None else open_bag(ref, **self.reading)
        return bag if self.precision is None else _in_precision(bag, self.precision)

    def checked(self, damaged: str = "set aside") -> Cohort:
        """Reads every slide once, which also fills the cache, and returns the cohort of those that can be used.

        Slides of different precision are kept, and all are loaded in the widest one from then on.

        Args:
            damaged: "set aside" leaves damaged slides out, and samples without any other slide, and lists them in
                ``set_aside``; "refuse" raises DataError. Features that are not as wide as those of most slides, or
                whose columns have other names, count as damage.
        """
        if damaged not in DAMAGED:
            raise one_of("policy for damaged slides", damaged, DAMAGED)
        if damaged == "refuse":
            self._refuse_unusable_files()
        reasons: dict[BagRef, DataError] = {}
        widths: dict[BagRef, int] = {}
        names: dict[BagRef, Names | None] = {}
        precisions: dict[BagRef, torch.dtype] = {}
        for ref in chain.from_iterable(sample.bags for sample in self.samples):
            try:
                bag = self.load_slide(ref)
                names_of_bag = feature_names(ref)
            except DataError as error:
                reasons[ref] = error
                continue
            if bag.n:  # a slide without tiles may not know how wide features are
                widths[ref], names[ref], precisions[ref] = bag.features.shape[1], names_of_bag, bag.features.dtype
        reasons |= odd_slides(widths, names)
        alike = self._in_one_precision({dtype for ref, dtype in precisions.items() if ref not in reasons})
        if not reasons:
            return alike
        if damaged == "refuse":
            raise next(iter(reasons.values()))
        samples = [replace(s, bags=tuple(ref for ref in s.bags if ref not in reasons)) for s in self.samples]
        kept = [sample.id for sample in samples if sample.bags]
        if not kept:
            first = next(iter(reasons.values()))
            raise DataError(first.path, f"{first.cause}, and no slide of the cohort can be used", first.remedy)
        aside = [SetAside(ref.path, "; ".join(filter(None, (e.cause, e.remedy)))) for ref, e in reasons.items()]
        return replace(alike, samples=tuple(samples), set_aside=self.set_aside + tuple(aside)).select(kept)

    def _refuse_unusable_files(self) -> None:
        """Of slides that have a row in the table; others do not matter."""
        wanted = {name.casefold() for name in self.report.set_aside}
        for entry in self.set_aside:
            if slide_id(entry.path).casefold() in wanted:
                raise DataError(entry.path, entry.reason)

    def with_tile_labels(self, folder: str | Path) -> Cohort:
        """The cohort with labels of its tiles, which say where a model should have looked.

        Every file is read once. DataError if one does not have a label for each tile, or if no slide has a file.

        Args:
            folder: of files ``<slide>.npy`` or ``.npz``; see :mod:`psamil.cohort.tile_labels`. Slides may be without,
                which the report notes.
        """
        labelled = replace(self, tile_labels=TileLabels.open(folder))
        slides = list(chain.from_iterable(sample.bags for sample in self.samples))
        without = [ref.id for ref in slides if labelled.labels_of_tiles(ref, self.load_slide(ref).n) is None]
        if len(without) == len(slides):
            cause = f"has no labels of any of the {len(slides)} slides"
            raise DataError(folder, cause, f"name the files as slides: {slides[0].id}.npy")
        if not without:
            return labelled
        note = f"{len(without)} of {len(slides)} slides have no tile labels and do not count in localisation"
        return replace(labelled, report=self.report.with_note(f"{note}: {quoted(without)}."))

    def labels_of_tiles(self, ref: BagRef, tiles: int) -> NDArray[np.bool_] | None:
        """(tiles,) whether each is positive, in the order of the slide's bag; None where there are none."""
        found = self.lesions_of_tiles(ref, tiles)
        return None if found is None else found.positive

    def lesions_of_tiles(self, ref: BagRef, tiles: int) -> SlideLabels | None:
        """As :meth:`labels_of_tiles`, with the lesions that tiles belong to."""
        if self.tile_labels is None:
            return None
        return self.tile_labels.with_lesions(ref, tiles, dropped=self.reading_options.get("non_finite") == "drop")

    def _in_one_precision(self, precisions: Collection[torch.dtype]) -> Cohort:
        if len(precisions) < 2:
            return self
        widest = _widest(precisions)
        had = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in precisions))
        note = f"Features are {had}; all are loaded as {str(widest).removeprefix('torch.')}, so that they fit together."
        return replace(self, precision=widest, report=self.report.with_note(note))

    def fingerprint(self, *, content: bool = False) -> str:
        """SHA-256 of ids, outcomes and files. It does not depend on where the files are.

        Args:
            content: take the files by their content, which reads all of them and survives copying; by default they are
                taken by size and time of change.
        """
        entries = [
            [s.id, s.patient, s.outcome, [[r.id, r.format, r.member, _file_state(r.path, content)] for r in s.bags]]
            for s in self.samples
        ]
        text = json.dumps([self.unit, self.outcome.kind, self.outcome.classes, entries], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def join_slides(bags: Sequence[Bag], id: str) -> Bag:
    """The bag of a patient. Slides stay apart: their tiles are pooled together but never neighbours.

    Features of different precision become those of the widest one, which loses nothing.
    """
    if len(bags) == 1:
        return replace(bags[0], id=id)
    filled = [bag.features.dtype for bag in bags if bag.n]
    packed = PackedBags.of([_in_precision(bag, _widest(filled)) for bag in bags] if filled else bags)
    names = chain.from_iterable(bag.slide_ids or (bag.id,) * (len(bag.slides) - 1) for bag in bags)
    lengths = [bag.step_um or 0.0 for bag in bags]
    alike = min(lengths) > 0 and max(lengths) <= SAME_STEP * min(lengths)
    return Bag(
        features=packed.features,
        xy=packed.xy,
        id=id,
        slides=packed.slides,
        step_um=bags[0].step_um if alike else None,
        step=bags[0].step if all(bag.step == bags[0].step for bag in bags) else None,
        slide_ids=tuple(names),
    )


def _samples(
    table: Table, matches: Sequence[Match], columns: OutcomeColumns, unit: str, site: str | None
) -> tuple[tuple[Sample, ...], tuple[tuple[int, ...], ...], Outcome, tuple[str, ...]]:
    """Samples with an outcome, their rows, the outcome, and the ids of the samples without one."""
    matches_of: dict[str, list[Match]] = defaultdict(list)
    for match in matches:
        matches_of[match.bag.id if unit == "slide" else match.patient].append(match)
    used = sorted({match.row for match in matches})
    values, present = read_outcome(table.rows(used), columns)
    place = {used[i]: order for order, i in enumerate(present.nonzero()[0].tolist())}  # of a row in the outcome
    samples, all_rows, chosen = [], [], []
    for id in sorted(matches_of):
        rows = tuple(sorted({match.row for match in matches_of[id]}))
        places = [place[row] for row in rows if row in place]
        if not places:
            continue
        different = sorted({str(values[i]) for i in places})
        if len(different) > 1:
            raise DataError(table.name, f"rows of {id!r} contradict each other: {', '.join(different)}", "correct them")
        bags = tuple(sorted({match.bag for match in matches_of[id]}))
        where = _agreed(table, site, rows, id) if site else None
        samples.append(Sample(id, matches_of[id][0].patient, where, bags, values[places[0]]))
        all_rows.append(rows)
        chosen.append(places[0])
    without = sorted(matches_of.keys() - {sample.id for sample in samples})
    return tuple(samples), tuple(all_rows), values.take(chosen), tuple(without)


def _agreed(table: Table, column: str, rows: Sequence[int], id: str) -> str | None:
    texts = table.texts(column)
    cells = sorted({cell for row in rows if (cell := texts[row])})
    if len(cells) > 1:
        cause = f"column {column!r} has different values for {id!r}: {quoted(cells)}"
        raise DataError(table.name, cause, "correct the table; all rows of a sample must agree")
    return cells[0] if cells else None


def _widest(precisions: Iterable[torch.dtype]) -> torch.dtype:
    """The narrowest precision that holds the numbers of all of them."""
    return reduce(torch.promote_types, precisions)


def _in_precision(bag: Bag, precision: torch.dtype) -> Bag:
    return bag if bag.features.dtype == precision else replace(bag, features=bag.features.to(precision))


def _file_state(path: Path, content: bool) -> list[Any]:
    if content:
        return [content_hash(path)]
    states = [file.stat() for file in files_below(path)]
    return [sum(state.st_size for state in states), max((state.st_mtime_ns for state in states), default=0)]
