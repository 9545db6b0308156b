"""Whether the features of slides mean the same: as many columns and, where columns have names, the same in one order.

Features are joined and learned from by position. So columns that are called CD3, CD8 on one slide and CD8, CD3 on the
next must not come together, however well their number fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import TypeVar

from psamil.errors import DataError
from psamil.readers import READERS, BagRef

NAMING_FORMATS = ("h5ad", "instance_table", "npz")  # features of the others are an encoder's, without names
SAME_COLUMNS = "give all slides the same columns in the same order"
Names = tuple[str, ...]
Kind = TypeVar("Kind", bound=Hashable)


def feature_names(ref: BagRef) -> Names | None:
    """Names of the columns of a slide's features; None if the file does not say them."""
    if ref.format not in NAMING_FORMATS:
        return None
    try:
        return _feature_names(ref, ref.path.stat().st_mtime_ns)
    except OSError as error:
        raise DataError(ref.path, f"cannot be read: {error.strerror}", "check the path and its permissions") from error


@lru_cache(maxsize=4096)
def _feature_names(ref: BagRef, changed_ns: int) -> Names | None:
    return READERS[ref.format].read(ref.path, ref.member, with_features=False).feature_names


def refuse_other_names(names: Mapping[BagRef, Names | None]) -> None:
    """DataError if columns of these slides, which are to be joined, have different names."""
    known = [(ref, of) for ref, of in names.items() if of is not None]
    for ref, of in known[1:]:
        if of != known[0][1]:
            cause = f"features are named otherwise than in {known[0][0].path}: {difference(known[0][1], of)}"
            raise DataError(ref.path, cause, SAME_COLUMNS)


def odd_slides(widths: Mapping[BagRef, int], names: Mapping[BagRef, Names | None]) -> dict[BagRef, DataError]:
    """Slides whose features are not what those of most slides are, with the reason. DataError if there is no "most"."""
    odd = {
        ref: DataError(
            ref.path,
            f"features are {widths[ref]} wide, those of {many} other slides {usual}",
            "extract them again with the same encoder",
        )
        for ref, usual, many in _unlike_most(widths, _two_widths, "keep those of one encoder")
    }
    named = {ref: of for ref, of in names.items() if of is not None and ref not in odd}
    return odd | {
        ref: DataError(
            ref.path,
            f"features are named otherwise than those of {many} other slides: {difference(usual, named[ref])}",
            SAME_COLUMNS,
        )
        for ref, usual, many in _unlike_most(named, _two_lists, SAME_COLUMNS)
    }


def difference(usual: Names, other: Names) -> str:
    """The first column that differs: ``column 1 is 'CD8', there 'CD3'``."""
    for place, (there, here) in enumerate(zip(usual, other, strict=False), start=1):
        if there != here:
            return f"column {place} is {here!r}, there {there!r}"
    return f"{len(other)} columns, there {len(usual)}"


def _unlike_most(
    kinds: Mapping[BagRef, Kind], tie: Callable[[Kind, Kind], str], remedy: str
) -> list[tuple[BagRef, Kind, int]]:
    """Slides that are not of the most frequent kind, with that kind and how many slides are of it."""
    counts = Counter(kinds.values()).most_common(2)
    if len(counts) < 2:
        return []
    (usual, many), (other, as_many) = counts
    if many == as_many:
        one, two = (str(next(ref.path for ref in kinds if kinds[ref] == kind)) for kind in (usual, other))
        raise DataError(f"{one} and {two}", tie(usual, other), remedy)
    return [(ref, usual, many) for ref, kind in kinds.items() if kind != usual]


def _two_widths(one: int, other: int) -> str:
    return f"features are {one} and {other} wide"


def _two_lists(one: Names, other: Names) -> str:
    return f"features are not named alike: {difference(other, one)}"
