"""``psamil inspect``: what is in this folder, can it be used, and what next."""

from __future__ import annotations

import json as json_format
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from psamil.cohort.inspection import Inspection, inspect_folder
from psamil.errors import DataError, MissingExtraError
from psamil.readers import BagRef
from psamil.report.lattices import choose_slides, draw_lattices

LISTED = 10  # files, warnings and names that are listed one by one


def inspect(
    path: Path,
    *,
    labels: Path | None = None,
    target: str | None = None,
    time: str | None = None,
    event: str | None = None,
    censorship: str | None = None,
    unit: str = "slide",
    slide_table: Path | None = None,
    slide_column: str | None = None,
    patient_column: str | None = None,
    site_column: str | None = None,
    format: str | None = None,
    member: str | None = None,
    read_features: bool = True,
    picture: Path | None = Path("psamil-inspect.png"),
    json: bool = False,
) -> int:
    """Tells what is in a folder of features, whether it can be used, and what to do next.

    Example: psamil inspect features --labels labels.csv --target subtype

    Args:
        path: folder of features of any known format, or a single file.
        labels: table of labels: CSV, TSV, XLSX or Parquet.
        target: its column of classes or numbers; by default one called label, category or value.
        time: its column of survival times, instead of a target.
        event: its column where 1 means that the event was seen.
        censorship: its column where 1 means censored.
        unit: what is predicted: "slide" or "patient".
        slide_table: second table that says which slides a patient has.
        slide_column: column of slide names, where its name does not tell.
        patient_column: column of patients, where its name does not tell.
        site_column: column of hospitals, where its name does not tell.
        format: name of the format; by default each file tells.
        member: which features, in stores that hold those of several encoders.
        read_features: read all features, to find damage, NaN and infinite numbers.
        picture: where to draw a few slides; null draws none.
        json: print JSON for machines instead.

    Returns:
        0 if the folder can be used, else 1.
    """
    console = Console(stderr=True)
    options = {
        "target": target,
        "time": time,
        "event": event,
        "censorship": censorship,
        "unit": unit,
        "slide_table": slide_table,
        "slide_column": slide_column,
        "patient_column": patient_column,
        "site_column": site_column,
    }
    if labels is None and any(value is not None for key, value in options.items() if key != "unit"):
        raise DataError(path, "columns of a label table were named, but no table", "give it with --labels")

    def progress(refs: tuple[BagRef, ...]) -> Iterator[BagRef]:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            yield from bar.track(refs, description="slides")

    found = inspect_folder(
        path,
        labels=labels,
        labels_options=options,
        format=format,
        member=member,
        read_features=read_features,
        progress=progress,
    )
    drawn = _draw(found, picture)
    if json:
        print(json_format.dumps(found.to_json() | {"picture": str(drawn) if drawn else None}, indent=1))
    else:
        _tell(found, drawn, labels, Console(highlight=False, soft_wrap=True))
    return int(found.verdict == "unusable")


def _draw(found: Inspection, picture: Path | None) -> Path | None:
    chosen = choose_slides(found.bags)
    if picture is None or not chosen:
        return None
    try:
        draw_lattices(chosen, picture)
    except MissingExtraError:
        return None
    return picture


def _tell(found: Inspection, drawn: Path | None, labels: Path | None, console: Console) -> None:
    facts = Table.grid(padding=(0, 3))
    facts.add_column(style="bold")
    facts.add_column()
    for name, value in _facts(found):
        facts.add_row(name, Text(value))
    console.print(Text(str(found.path), style="bold underline"))
    console.print(facts)
    _list(console, "Set aside", (f"{entry.path}: {entry.reason}" for entry in found.set_aside))
    _list(console, "Notes", found.notes)
    if found.cohort is not None:
        console.print(Text(f"\n{labels}", style="bold underline"))
        console.print(Text(f"{found.cohort.headline}\n{found.cohort.report}"))
    if found.labels_error:
        console.print(Text(f"\n{labels}", style="bold underline"))
        console.print(Text(found.labels_error))
    if drawn:
        console.print(Text(f"\nPicture of some slides: {drawn}"))
    console.print(Text(f"\n{_verdict(found)}", style="bold"))
    console.print(Text(f"Next: {_next(found, labels)}"))


def _facts(found: Inspection) -> Iterator[tuple[str, str]]:
    bags = [bag for bag in found.bags if bag.n]
    yield "format", _counts(found.counts(lambda bag: bag.ref.format)) or "no bag of a known format"
    yield "slides", f"{len(found.bags):,}, of which {len(found.bags) - len(bags)} empty; {found.ignored:,} other files"
    if not bags:
        return
    sizes = [bag.n for bag in bags]
    yield "tiles", f"{sum(sizes):,}; per slide {min(sizes):,} to {max(sizes):,}, median {median(sizes):,.0f}"
    yield "features", _counts(found.counts(lambda bag: f"{bag.dim} x {bag.dtype}"))
    yield "encoder", _counts(found.counts(lambda bag: bag.encoder)) or "not named in the files"
    lengths = found.counts(lambda bag: bag.step and f"{bag.step.length:.5g} {bag.step.unit}")
    yield "tile step", _counts(lengths) or "no positions"
    yield "found by", _counts(found.counts(lambda bag: bag.step and bag.step.source)) or "-"
    supports = [bag.step.support for bag in bags if bag.step is not None and bag.n > 1]
    if supports:
        yield "support", f"{min(supports):.0%} to {max(supports):.0%} of a slide's tiles have a neighbour one step away"
    yield "um per pixel", _counts(found.counts(lambda bag: bag.mpp and f"{bag.mpp:.4g}")) or "not known"
    overlaps = found.counts(lambda bag: None if bag.step is None else bag.step.overlap)
    yield "overlap", _counts({f"{overlap:.0%}": count for overlap, count in overlaps.items()}) or "not known"
    yield "phases", _counts(found.counts(lambda bag: bag.phases)) or "-"
    yield "duplicates", f"{sum(bag.duplicates for bag in bags):,} tiles at the position of another"
    counted = [bag.non_finite for bag in bags if bag.non_finite is not None]
    yield "NaN, infinite", f"{sum(counted):,} tiles" if counted else "not counted"


def _counts(counts: dict[Any, int]) -> str:
    if len(counts) == 1:
        return str(next(iter(counts)))
    shown = [f"{value} ({count} slides)" for value, count in list(counts.items())[:5]]
    return ", ".join([*shown, *([f"and {len(counts) - 5} more"] if len(counts) > 5 else [])])


def _list(console: Console, title: str, entries: Iterable[str]) -> None:
    lines = list(entries)
    if not lines:
        return
    console.print(Text(f"\n{title} ({len(lines)})", style="bold"))
    for line in lines[:LISTED]:
        console.print(Text(f"- {line}"))
    if len(lines) > LISTED:
        console.print(f"  and {len(lines) - LISTED} more; --json lists all")


def _verdict(found: Inspection) -> str:
    usable = sum(bag.n > 0 for bag in found.bags)
    aside = f", {len(found.set_aside)} files set aside" if found.set_aside else ""
    words = {
        "ready": f"Ready: {usable} slides",
        "usable": f"Usable: {usable} slides{aside}; read the notes",
        "unusable": f"Not usable: {usable} slides{aside}" + ("; the labels do not fit" if found.labels_error else ""),
    }
    return words[found.verdict] + "."


def _next(found: Inspection, labels: Path | None) -> str:
    here = shlex.quote(str(found.path))
    if found.verdict == "unusable":
        if found.labels_error:
            return "mend the table, or name its columns; see psamil inspect --help"
        return "point at the folder that holds the features, or extract them again"
    if labels is None:
        return f"psamil inspect {here} --labels TABLE"
    return f'in Python, cohort = psamil.Cohort.open("{found.path}", "{labels}", ...) with the same options'
