"""What is in a folder of features, and whether a study can be made of it: the facts behind ``psamil inspect``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from psamil.cohort.cohort import Cohort
from psamil.errors import DataError, MissingExtraError, OptionError
from psamil.readers import BagRef, BagSummary, SetAside, describe_bag, find_bags

NAMED = 3  # slides that a note names
SPREAD_OF_STEPS = 1.25  # ratio of physical tile steps in a cohort from which on it matters


@dataclass(frozen=True, eq=False)
class Inspection:
    """Bags, what was set aside, and the labels where a table was given."""

    path: Path
    bags: tuple[BagSummary, ...]
    set_aside: tuple[SetAside, ...]
    ignored: int  # files that are no bags
    cohort: Cohort | None = None
    labels_error: str | None = None

    @property
    def verdict(self) -> str:
        """ "ready", "usable" (read the notes first) or "unusable"."""
        if not any(bag.n for bag in self.bags) or self.labels_error:
            return "unusable"
        return "usable" if self.notes or self.set_aside else "ready"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know before training on these bags, in whole sentences."""
        notes = [
            *self._several("widths of features", lambda bag: bag.dim, "keep those of one encoder"),
            *self._several("precisions of features", lambda bag: bag.dtype, "they cannot share a batch"),
            *self._several("encoders", lambda bag: bag.encoder, "keep those of one encoder"),
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

    Args:
        path: folder, or a single file.
        labels: table of labels.
        labels_options: of :meth:`psamil.cohort.Cohort.open`: ``target``, ``time``, ``event`` and so on.
        format, member: as for :func:`psamil.readers.find_bags`.
        read_features: read all features, so that damage, NaN and infinite numbers are found.
        progress: wraps the bags while they are looked at.
    """
    found = find_bags(path, format=format, member=member)
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
    return Inspection(Path(path), tuple(bags), set_aside, found.ignored, cohort, labels_error)


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
        "samples": len(cohort),
        "patients": len(set(cohort.patients)),
        "report": str(cohort.report),
    }
