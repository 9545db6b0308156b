"""What is written beside the features: how they were made, and what became of each slide.

TRIDENT's files have no place for it. ``extraction.json`` holds the settings, which are those of the whole folder:
features made in two ways do not mix. ``slide_records/<slide>.json`` says what became of a slide; ``failures.csv`` and
``quality.csv`` are tables of these records.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import psamil
from psamil.errors import DataError
from psamil.files import Lock, atomic_write, escape_cell, read_json, without_nan, write_json
from psamil.readers.extraction_settings import SETTINGS_FILE, extraction_settings
from psamil.slides.encoders import Encoder
from psamil.slides.tiling import TileGrid

RECORDS, FAILURES, QUALITY = "slide_records", "failures.csv", "quality.csv"
LOCK_WAIT_S = 60.0


@dataclass(frozen=True)
class Extraction:
    """How the features of a folder were made: what another slide has to share for its features to be comparable."""

    encoder: str
    fingerprint: str
    """Of the encoder's weights and preprocessing."""
    dim: int
    precision: str
    mpp: float
    """Micrometres per pixel of the tiles; that of single slides differs by rounding, see their records."""
    tile_px: int
    tile_um: float
    overlap_px: int
    least_tissue: float
    masks: bool
    """Whether the user said where to look."""
    reference: str | None = field(default=None, compare=False)
    """What loads the encoder again; None for a module, which only its owner has."""
    psamil_version: str = field(default=psamil.__version__, compare=False)

    @staticmethod
    def of(encoder: Encoder, grid: TileGrid, *, masks: bool = False) -> Extraction:
        return Extraction(
            encoder=encoder.name,
            fingerprint=encoder.fingerprint,
            dim=encoder.dim,
            precision=encoder.precision,
            mpp=grid.mpp,
            tile_px=grid.size_px,
            tile_um=grid.size_px * grid.mpp if grid.size_um is None else grid.size_um,
            overlap_px=grid.overlap_px,
            least_tissue=grid.least_tissue,
            masks=masks,
            reference=encoder.reference,
        )

    @staticmethod
    def from_json(content: Mapping[str, Any], path: str | Path) -> Extraction:
        """DataError, which names the path, if another version of psamil wrote it."""
        try:
            return Extraction(**content)
        except TypeError as error:
            raise DataError(path, f"is not of this version of psamil: {error}", "extract the features again") from error

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def grid(self) -> TileGrid:
        """That lays the same tiles."""
        size_um = None if self.tile_um == self.tile_px * self.mpp else self.tile_um
        return TileGrid(self.mpp, self.tile_px, size_um, self.overlap_px, self.least_tissue)

    def claim(self, out: Path) -> None:
        """Makes a folder one of these settings. DataError if it is one of others."""
        path = out / SETTINGS_FILE
        if not path.exists():
            with Lock(out / f".{SETTINGS_FILE}.lock", wait_s=LOCK_WAIT_S):
                if not path.exists():
                    write_json(path, self.to_json())
        before = Extraction.from_json(read_json(path), path)
        names = [setting.name for setting in fields(self) if setting.compare]
        other = [name for name in names if getattr(before, name) != getattr(self, name)]
        if other:
            differences = ", ".join(f"{name} {getattr(before, name)!r}, not {getattr(self, name)!r}" for name in other)
            raise DataError(out, f"has features made with {differences}", "choose another folder, or the same options")


def read_extraction(features: str | Path) -> Extraction | None:
    """How the features of a folder, or one inside of it, were made; None if ``psamil extract`` did not make them."""
    found = extraction_settings(features)
    return None if found is None else Extraction.from_json(found, features)


@dataclass(frozen=True)
class SlideRecord:
    """What became of a slide."""

    slide: str
    path: str
    status: str
    """"done"; "empty": no tile has enough tissue; "failed"."""
    reason: str = ""
    bytes: int | None = None
    """Of the file, which tell slides of the same name apart."""
    tiles: int = 0
    mpp_px0: float | None = None
    """Micrometres per level-0 pixel of the slide."""
    tile_mpp: float | None = None
    """Micrometres per pixel of its tiles, exactly."""
    tile_px0: int | None = None
    step_px0: int | None = None
    quality: dict[str, Any] = field(default_factory=dict)

    def write(self, out: Path) -> None:
        write_json(record_path(out, self.slide), without_nan(asdict(self)))


def record_path(out: Path, slide: str) -> Path:
    return out / RECORDS / f"{slide}.json"


def read_records(out: Path) -> list[SlideRecord]:
    """Of all slides, in order of their names. One that cannot be read says so itself."""
    records = []
    for path in sorted((out / RECORDS).glob("*.json")):
        try:
            records.append(SlideRecord(**read_json(path)))
        except (DataError, TypeError) as error:
            records.append(SlideRecord(path.stem, "", "failed", f"its record cannot be read: {error}"))
    return records


def write_tables(out: Path, refused: Iterable[SlideRecord] = ()) -> None:
    """``failures.csv``, if there are any, and ``quality.csv``, from the records of all slides.

    Slides that failed and are no longer there are not among the failures: nobody can try them again.
    Refused are slides that have no record, since it is that of another slide of the same name.
    """
    records = read_records(out)
    failed = [*(r for r in records if r.status == "failed" and not _is_gone(r.path)), *refused]
    if failed:
        _write_table(out / FAILURES, [{"slide": r.slide, "path": r.path, "reason": r.reason} for r in failed])
    else:
        (out / FAILURES).unlink(missing_ok=True)
    rows = [
        {"slide": r.slide, "status": r.status, "tiles": r.tiles, **r.quality} for r in records if r.status != "failed"
    ]
    if rows:
        _write_table(out / QUALITY, rows)


def _is_gone(slide: str) -> bool:
    """False for a link that leads nowhere, a folder that cannot be entered, and a record that does not say."""
    if not slide:
        return False
    try:
        os.lstat(slide)
    except OSError as error:
        return isinstance(error, (FileNotFoundError, NotADirectoryError))
    return False


def _write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    columns: Iterable[str] = dict.fromkeys(name for row in rows for name in row)
    with atomic_write(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(columns), restval="")
        table.writeheader()
        table.writerows([{name: escape_cell(value) for name, value in row.items()} for row in rows])
