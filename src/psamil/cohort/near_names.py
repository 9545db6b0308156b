"""The names that were probably meant: what an eye would see between two lists that should agree and do not."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

MOST_SUGGESTIONS = 20
MOST_COMPARED = 2000  # comparing letter by letter is slow: only the first few wanted names, with so many known ones


def near_names(wanted: Mapping[str, str], known: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Pairs of a wanted name (as it is to be shown) and the known name that it resembles; the first few.

    Alike are names that differ only in capitals, punctuation or leading zeros, names of which one begins with the
    other, and names with few different letters.
    """
    by_plain = {_plain(name): name for name in reversed(known)}
    by_beginning = {beginning: name for name in reversed(known) for beginning in _beginnings(name)}
    as_they_are = set(known)
    pairs: list[tuple[str, str]] = []
    read = 0
    for shown, name in wanted.items():
        if len(pairs) == MOST_SUGGESTIONS:
            break
        found = by_plain.get(_plain(name)) or by_beginning.get(name)
        found = found or next((beginning for beginning in _beginnings(name) if beginning in as_they_are), None)
        if found is None and read < MOST_SUGGESTIONS and len(known) <= MOST_COMPARED:
            read += 1
            found = next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.85)), None)
        if found is not None:
            pairs.append((shown, found))
    return tuple(pairs)


def _plain(name: str) -> str:
    """``Case 007.0`` and ``case-7`` are the same to the eye."""
    words = re.findall(r"[^\W\d_]+|\d+", re.sub(r"(?<=\d)\.0$", "", name).casefold())
    return " ".join(word.lstrip("0") or "0" if word.isdigit() else word for word in words)


def _beginnings(name: str) -> list[str]:
    """What stands before each punctuation mark, longest first."""
    return [name[: mark.start()] for mark in reversed(list(re.finditer(r"\W|_", name))) if mark.start() > 1]
