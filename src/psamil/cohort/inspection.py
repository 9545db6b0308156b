"""What is in a folder of features, and whether a study can be made of it: the facts behind ``psamil inspect``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from psamil.cohort.cohort import Cohort
from psamil.cohort.same_features import difference, odd_slides
from psamil.errors import DataError, MissingExtraError, OptionError
from psamil.readers import BagRef, BagSummary, SetAside, describe_bag, find_bags
from psamil.readers.formats import is_store

NAMED = 3  # slides that a note names
SPREAD_OF_STEPS = 1.25  # ratio of physical tile steps in a cohort from which on it matters


@dataclass(frozen=True)
class Choice:
    """One of several folders that hold bags of the same names."""

    path: Path
    slides: int


@dataclass(frozen=True, eq=False)
class Inspection:
    """Bags, what was set aside, and the labels where a table was given."""

    path: Path
    bags: tuple[BagSummary, ...]
    set_aside: tuple[SetAside, ...]
    ignored: int  # files that are no bags
    cohort: Cohort | None = None
    labels_error: str | None = None
    error: str | None = None  # why the bags of this folder cannot be told apart
    choices: tuple[Choice, ...] = ()  # folders of which one has to be chosen then

    @property
    def verdict(self) -> str:
        """ "ready", "usable" (read the notes, and what did not match, first) or "unusable"."""
        if not self.loadable or self.labels_error:
            return "unusable"
        is_complete = self.cohort is None or self.cohort.report.is_complete
        return "ready" if is_complete and not self.notes and not self.set_aside else "usable"

    @cached_property
    def loadable(self) -> tuple[str, ...]:
        """Ids of the samples, or without labels of the slides, that ``Cohort.checked`` keeps and that have tiles."""
        if self.cohort is None:
            return tuple(ref.id for ref in sorted(self._loadable_among(bag.ref for bag in self.bags)))
        samples = self.cohort.samples
        kept = self._loadable_among(ref for sample in samples for ref in sample.bags)
        return tuple(sample.id for sample in samples if kept.intersection(sample.bags))

    def _loadable_among(self, refs: Iterable[BagRef]) -> set[BagRef]:
        wanted = set(refs)
        good = {bag.ref: bag for bag in self.bags if bag.ref in wanted and bag.n and bag.step and not bag.non_finite}
        try:
            odd = odd_slides(
                {ref: bag.dim for ref, bag in good.items()}, {ref: bag.feature_names for ref, bag in good.items()}
            )
        except DataError:  # half of the slides are of one kind, half of another
            return set()
        return good.keys() - odd.keys()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know before training on these bags, in whole sentences."""
        notes = [
            *self._several("widths of features", lambda bag: bag.dim, "keep those of one encoder"),
            *self._several("precisions of features", lambda bag: bag.dtype, "a checked cohort reads all in the widest"),
            *self._several("encoders", lambda bag: bag.encoder, "keep those of one encoder"),
            *self._other_names(),
            *self._note(
                lambda bag: bag.step is None, 'has no positions and can only be read with positions="row order"'
            ),
            *self._note(lambda bag: bag.n == 0, "has no tiles and says nothing about its patient"),
            *self._note(
                lambda bag: bool(bag.non_finite),
                'has NaN or infinite features; read it with non_finite="drop" or "zero", or extract it again',
            ),
        ]
        lengths = [bag.step.um for bag in self.bags if bag.step is not None and bag.step.um and bag.n > 1]
        if lengths and max(lengths) > SPREAD_OF_STEPS * min(lengths):
            notes.append(
                f"A tile step is {min(lengths):.0f} to {max(lengths):.0f} um long; "
                f"for distances that mean the same on all slides, read them with um_per_step={median(lengths):.0f}."
            )
        for warning in dict.fromkeys(warning for bag in self.bags for warning in bag.warnings):
            slides = self._named([bag for bag in self.bags if warning in bag.warnings])
            notes.append(f"{slides}: {warning}")
        return tuple(notes)

    def _several(self, what: str, of: Callable[[BagSummary], Hashable], remedy: str) -> list[str]:
        counts = self.counts(of)
        if len(counts) < 2:
            return []
        groups = [(value, [bag for bag in self.bags if bag.n and of(bag) == value]) for value in counts]
        listed = "; ".join(f"{value} in {self._named(bags)}" for value, bags in groups)
        return [f"There are {len(counts)} {what}: {listed}; {remedy}."]

    def _other_names(self) -> Iterator[str]:
        counts = self.counts(lambda bag: bag.feature_names)
        usual = next(iter(counts), ())
        there = [bag for bag in self.bags if bag.n and bag.feature_names == usual]
        for names in list(counts)[1:]:
            here = [bag for bag in self.bags if bag.n and bag.feature_names == names]
            what = f"columns of features are not named as in {self._named(there)}: {difference(usual, names)}"
            yield f"{self._named(here)}: {what}; give all slides the same columns in the same order."

    def _note(self, odd: Callable[[BagSummary], bool], what: str) -> list[str]:
        bags = [bag for bag in self.bags if odd(bag)]
        return [f"{self._named(bags)}: {what}."] if bags else []

    def _named(self, bags: Sequence[BagSummary]) -> str:
        """``slides a, b and 17 more``."""
        names = ", ".join(bag.ref.id for bag in bags[:NAMED])
        more = f" and {len(bags) - NAMED} more" if len(bags) > NAMED else ""
        return f"slide{'s' if len(bags) > 1 else ''} {names}{more}"

    def counts(self, what: Callable[[BagSummary], Hashable]) -> dict[Any, int]:
        """How many slides have each value, most frequent first; slides for which it is None are left out."""
        values = (what(bag) for bag in self.bags if bag.n)
        return dict(Counter(value for value in values if value is not None).most_common())

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "verdict": self.verdict,
            "loadable": list(self.loadable),
            "error": self.error,
            "choices": [{"path": str(choice.path), "slides": choice.slides} for choice in self.choices],
            "notes": list(self.notes),
            "ignored_files": self.ignored,
            "set_aside": [{"path": str(entry.path), "reason": entry.reason} for entry in self.set_aside],
            "slides": [_slide_json(bag) for bag in self.bags],
            "labels_error": self.labels_error,
            "labels": None if self.cohort is None else _cohort_json(self.cohort),
        }


def inspect_folder(
    path: Path,
    *,
    labels: Path | None = None,
    labels_options: Mapping[str, Any] | None = None,
    format: str | None = None,
    member: str | None = None,
    read_features: bool = True,
    progress: Callable[[tuple[BagRef, ...]], Iterable[BagRef]] = iter,
) -> Inspection:
    """Looks at every bag below a folder, and joins them with a table of labels if there is one.

    A folder that holds slides more than once (features of two encoders, say) is reported with the folders to choose
    from.

    Args:
        path: folder, or a single file.
        labels: table of labels.
        labels_options: of :meth:`psamil.cohort.Cohort.open`: ``target``, ``time``, ``event`` and so on.
        format, member: as for :func:`psamil.readers.find_bags`.
        read_features: read all features, so that damage, NaN and infinite numbers are found.
        progress: wraps the bags while they are looked at.
    """
    try:
        found = find_bags(path, format=format, member=member)
    except DataError as error:
        if not path.is_dir():
            raise
        return Inspection(path, (), (), 0, error=str(error), choices=tuple(_choices(path, format, member)))
    bags, broken = [], []
    for ref in progress(found.bags):
        try:
            bags.append(describe_bag(ref, count_non_finite=read_features))
        except DataError as error:
            broken.append(SetAside(ref.path, "; ".join(filter(None, (error.cause, error.remedy)))))
        except MissingExtraError as error:
            broken.append(SetAside(ref.path, str(error)))
    cohort, labels_error = None, None
    if labels is not None and bags:
        whole = type(found)(tuple(bag.ref for bag in bags), (*found.set_aside, *broken), found.ignored)
        try:
            cohort = Cohort.open(whole, labels, **(labels_options or {}))
        except (DataError, OptionError, MissingExtraError) as error:
            labels_error = str(error)
    set_aside = tuple(sorted((*found.set_aside, *broken)))
    return Inspection(path, tuple(bags), set_aside, found.ignored, cohort, labels_error)


def _choices(path: Path, format: str | None, member: str | None) -> Iterator[Choice]:
    """The topmost folders below this one in which every slide occurs once."""
    for folder in sorted(path.iterdir()):
        if not folder.is_dir() or folder.is_symlink() or folder.name.startswith(".") or is_store(folder):
            continue
        try:
            slides = len(find_bags(folder, format=format, member=member).bags)
        except DataError:
            yield from _choices(folder, format, member)
            continue
        if slides:
            yield Choice(folder, slides)


def _slide_json(bag: BagSummary) -> dict[str, Any]:
    step = bag.step
    return {
        "id": bag.ref.id,
        "path": str(bag.ref.path),
        "member": bag.ref.member,
        "format": bag.ref.format,
        "encoder": bag.encoder,
        "tiles": bag.n,
        "dim": bag.dim,
        "dtype": bag.dtype,
        "step": None if step is None else {**vars(step), "um": step.um},
        "duplicates": bag.duplicates,
        "phases": bag.phases,
        "non_finite": bag.non_finite,
        "warnings": list(bag.warnings),
    }


def _cohort_json(cohort: Cohort) -> dict[str, Any]:
    return {
        "headline": cohort.headline,
        "kind": cohort.outcome.kind,
        "classes": list(cohort.outcome.classes or ()),
        "counts": cohort.outcome.counts(),
        "unit": cohort.unit,
        "samples": len(cohort),
        "patients": len(set(cohort.patients)),
        **asdict(cohort.report),
    }
