"""A table of the micrometres per pixel of slides that do not tell, or tell wrongly."""

from __future__ import annotations

from pathlib import Path

from psamil.cohort.tables import read_table
from psamil.errors import DataError
from psamil.readers import slide_id

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
        if not mpp > 0:
            raise DataError(path, f"slide {slide!r} has {mpp:g} micrometres per pixel", "write a positive number")
        if found.get(name, mpp) != mpp:
            raise DataError(path, f"slide {slide!r} has both {found[name]:g} and {mpp:g} um", "keep one row of it")
        found[name] = mpp
    return found
