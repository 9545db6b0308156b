"""A table of the micrometres per pixel of slides that do not tell, or tell wrongly."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from psamil.cohort.tables import read_table
from psamil.errors import DataError
from psamil.readers import slide_id
from psamil.slides.resolution import PLAUSIBLE_UM, is_plausible

SLIDE_COLUMNS = ("slide", "slide_id", "filename")


def read_mpp_table(path: str | Path) -> dict[str, float]:
    """Micrometres per level-0 pixel of each slide, by its name, from columns ``slide`` and ``mpp``."""
    table = read_table(path)
    column = next((name for name in table.columns if name.lower() in SLIDE_COLUMNS), None)
    if column is None:
        raise DataError(path, f"has no column {SLIDE_COLUMNS[0]!r}", f"its columns are {table.column_names()}")
    found: dict[str, float] = {}
    for slide, mpp in zip(table.texts(column), table.numbers("mpp").tolist(), strict=True):
        if slide is None or mpp != mpp:
            continue  # nothing is said about it
        name = slide_id(slide)
        if not is_plausible(mpp):
            low, high = PLAUSIBLE_UM
            remedy = f"write a number from {low:g} to {high:g}, which is not the magnification"
            raise DataError(path, f"slide {slide!r} has {mpp:g} micrometres per pixel", remedy)
        if found.get(name, mpp) != mpp:
            raise DataError(path, f"slide {slide!r} has both {found[name]:g} and {mpp:g} um", "keep one row of it")
        found[name] = mpp
    return found


def unmatched(named: Iterable[str], slides: Iterable[str]) -> list[str]:
    """Names of a table that are no slide, each with the slide that could be meant, if one is nearly called so."""
    known = {name.casefold(): name for name in slides}
    lines = []
    for name in sorted(set(named) - set(known.values())):
        near = difflib.get_close_matches(name.casefold(), known, n=1, cutoff=0.8)
        lines.append(f"{name} (like {known[near[0]]})" if near else name)
    return lines
