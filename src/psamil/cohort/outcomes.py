"""What is to be predicted: classes, several yes/no labels, a number, or the time to an event.

Every outcome holds one value per sample as NumPy arrays and offers the same methods:

- ``kind``: "binary", "multiclass", "multilabel", "regression" or "survival";
- ``outcome[i]``: the value of one sample as plain Python, for tables and for comparing rows;
- ``take(indices)``: the outcome of a choice of samples;
- ``categories()``: names of coarse groups and the group of each sample (classes; censored and event);
- ``strata()``: the finer groups that the parts of a split should share evenly, in an order that keeps the coarse groups
  together: classes; event x quartile of time; quartile of a number;
- ``counts()``: how many samples have each class or label, the event or none; nothing for numbers;
- ``describe()``: the same, for people.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Integers: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Categories: TypeAlias = tuple[tuple[str, ...], Integers]


@dataclass(frozen=True, eq=False)
class Classification:
    """One of several classes per sample. Of two classes, the second is the positive one."""

    column: str
    classes: tuple[str, ...]
    labels: Integers  # (n,) index of the class

    @property
    def kind(self) -> str:
        return "binary" if len(self.classes) == 2 else "multiclass"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> str:
        return self.classes[self.labels[index]]

    def take(self, indices: Sequence[int]) -> Classification:
        return Classification(self.column, self.classes, self.labels[_index(indices)])

    def categories(self) -> Categories:
        return self.classes, self.labels

    def strata(self) -> Integers:
        return self.labels

    def counts(self) -> dict[str, int]:
        counts = np.bincount(self.labels, minlength=len(self.classes)).tolist()
        return dict(zip(self.classes, counts, strict=True))

    def describe(self) -> str:
        return _listed(self.counts())


@dataclass(frozen=True, eq=False)
class MultiLabel:
    """Several labels per sample, each of them yes or no."""

    columns: tuple[str, ...]
    labels: Integers  # (n, labels) 0 or 1

    @property
    def kind(self) -> str:
        return "multilabel"

    @property
    def classes(self) -> tuple[str, ...]:
        return self.columns

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return tuple(self.labels[index].tolist())

    def take(self, indices: Sequence[int]) -> MultiLabel:
        return MultiLabel(self.columns, self.labels[_index(indices)])

    def categories(self) -> Categories:
        """Each sample counts for the rarest of its labels, or for none."""
        counts = self.labels.sum(0)
        by_rarity = np.argsort(counts, kind="stable")
        first = self.labels[:, by_rarity].argmax(1)
        return (*self.columns, "none"), np.where(self.labels.any(1), by_rarity[first], len(self.columns))

    def strata(self) -> Integers:
        return self.categories()[1]

    def counts(self) -> dict[str, int]:
        return dict(zip(self.columns, self.labels.sum(0).tolist(), strict=True))

    def describe(self) -> str:
        return f"{_listed(self.counts())} of {len(self)}"


@dataclass(frozen=True, eq=False)
class Regression:
    """One number per sample."""

    column: str
    values: Floats  # (n,)

    @property
    def kind(self) -> str:
        return "regression"

    @property
    def classes(self) -> tuple[str, ...]:
        return ()

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> float:
        return float(self.values[index])

    def take(self, indices: Sequence[int]) -> Regression:
        return Regression(self.column, self.values[_index(indices)])

    def categories(self) -> Categories:
        return ("all",), np.zeros(len(self), dtype=np.int64)

    def strata(self) -> Integers:
        return quartiles(self.values)

    def counts(self) -> dict[str, int]:
        return {}

    def describe(self) -> str:
        if not len(self):
            return "0 values"
        low, middle, high = np.quantile(self.values, [0, 0.5, 1]).tolist()
        return f"{len(self)} values from {low:g} to {high:g}, median {middle:g}"


@dataclass(frozen=True, eq=False)
class Survival:
    """Time to an event, or to the end of observation where the event was not seen (censored)."""

    time_column: str
    event_column: str
    times: Floats  # (n,) in the unit of the table
    events: NDArray[np.bool_]  # (n,) True where the event was seen

    @property
    def kind(self) -> str:
        return "survival"

    @property
    def classes(self) -> tuple[str, ...]:
        return ()

    def __len__(self) -> int:
        return len(self.times)

    def __getitem__(self, index: int) -> tuple[float, bool]:
        return float(self.times[index]), bool(self.events[index])

    def take(self, indices: Sequence[int]) -> Survival:
        chosen = _index(indices)
        return Survival(self.time_column, self.event_column, self.times[chosen], self.events[chosen])

    def categories(self) -> Categories:
        return ("censored", "event"), self.events.astype(np.int64)

    def strata(self) -> Integers:
        """Event x quartile of time, the quartiles taken among the events and among the censored separately."""
        strata = np.zeros(len(self), dtype=np.int64)
        for event in (False, True):
            chosen = self.events == event
            strata[chosen] = 4 * event + quartiles(self.times[chosen])
        return strata

    def counts(self) -> dict[str, int]:
        events = int(self.events.sum())
        return {"events": events, "censored": len(self) - events}

    def describe(self) -> str:
        return _listed(self.counts())


Outcome: TypeAlias = Classification | MultiLabel | Regression | Survival


def quartiles(values: Floats) -> Integers:
    """0 to 3 for each value; equal values share a quartile."""
    if len(values) == 0:
        return np.zeros(0, dtype=np.int64)
    ordered = np.sort(values)
    bounds = ordered[[len(ordered) * quarter // 4 for quarter in (1, 2, 3)]]
    return np.searchsorted(bounds, values, side="right").astype(np.int64)


def _index(indices: Sequence[int]) -> Integers:
    return np.asarray(indices, dtype=np.int64)


def _listed(counts: dict[str, int]) -> str:
    return " / ".join(f"{name} {count}" for name, count in counts.items())
