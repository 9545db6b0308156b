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
    target: list[str] | None = None,
    kind: str = "auto",
    classes: list[str] | None = None,
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
        target: its column of classes or numbers; by default one called label, category or value. Several columns are
            several yes/no labels.
        kind: of the target: "classification" or "regression"; "auto" decides where there is no doubt.
        classes: which ones, in what order: "--classes MSS MSI"; of two, the second is the positive one. By default all.
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
        "target": target[0] if target and len(target) == 1 else target,
        "kind": None if kind == "auto" else kind,
        "classes": classes,
        "time": time,
        "event": event,
        "censorship": censorship,
        "unit": None if unit == "slide" else unit,
        "slide_table": slide_table,
        "slide_column": slide_column,
        "patient_column": patient_column,
        "site_column": site_column,
    }
    options = {name: value for name, value in options.items() if value is not None}
    if labels is None and options:
        named = ", ".join(f"--{name}" for name in options)
        raise DataError(path, f"{named} is about a table of labels, but none was given", "give it with --labels")

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
    asked = {"format": format, "member": member}
    then = _next(found, labels, options, {name: value for name, value in asked.items() if value is not None})
    if json:
        more = {"picture": str(drawn) if drawn else None, "next": then}
        print(json_format.dumps(found.to_json() | more, indent=1))
    else:
        _tell(found, drawn, labels, then, Console(highlight=False, soft_wrap=True))
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


def _tell(found: Inspection, drawn: Path | None, labels: Path | None, then: list[str], console: Console) -> None:
    facts = Table.grid(padding=(0, 3))
    facts.add_column(style="bold")
    facts.add_column()
    for name, value in _facts(found):
        facts.add_row(name, Text(value))
    console.print(Text(str(found.path), style="bold underline"))
    if found.error:
        console.print(Text(found.error))
        _list(console, "Choose one of these folders", (f"{c.path}: {c.slides:,} slides" for c in found.choices))
    else:
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
    for command in then[:LISTED]:
        console.print(Text(f"{'or:' if command != then[0] else 'Next:'} {command}"))


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
    if found.error:
        return "Not usable as it is: slides occur more than once."
    total, unit = (len(found.bags), "slide") if found.cohort is None else (len(found.cohort), found.cohort.unit)
    usable = len(found.loadable)
    count = f"{usable} {unit}s" if usable == total else f"{usable} of {total} {unit}s"
    aside = f", {len(found.set_aside)} files set aside" if found.set_aside else ""
    if found.verdict == "unusable":
        return f"Not usable: {count}{aside}" + ("; the labels do not fit." if found.labels_error else ".")
    if found.verdict == "ready":
        return f"Ready: {count}."
    is_complete = found.cohort is None or found.cohort.report.is_complete
    return f"Usable: {count}{aside}; read the notes" + ("." if is_complete else " and what is said about the labels.")


def _next(found: Inspection, labels: Path | None, options: dict[str, Any], asked: dict[str, str]) -> list[str]:
    """Commands to go on with; more than one where there is a choice."""
    if found.choices:
        given = {**({} if labels is None else {"labels": labels}), **options, **asked}
        return [_command("inspect", [choice.path], given) for choice in found.choices]
    if found.error:
        return ["mend the folder, or point at another one"]
    if found.labels_error:
        return ["mend the table, or name its columns; see psamil inspect --help"]
    if found.verdict == "unusable":
        return ["point at the folder that holds the features, or extract them again"]
    if labels is None:
        return [_command("inspect", [found.path], asked) + " --labels TABLE"]
    where = f"psamil.find_bags({_python(found.path, asked)})" if asked else _python(found.path, {})
    in_python = f"in Python, cohort = psamil.Cohort.open({where}, {_python(labels, options)}).checked()"
    train = _command("train", [found.path, labels, "run"], options)
    return [in_python] if asked else [train, in_python]


def _command(verb: str, places: list[Path | str], options: dict[str, Any]) -> str:
    words = ["psamil", verb, *map(str, places)]
    for name, value in options.items():
        words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return shlex.join(words)


def _python(path: Path, options: dict[str, Any]) -> str:
    """The arguments of a call."""
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    return ", ".join([repr(str(path)), *(f"{name}={value!r}" for name, value in plain.items())])
