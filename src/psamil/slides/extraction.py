"""From slides to features: tiles are read in other processes, encoded here, and written slide by slide.

- A slide's features have their final name only when they are whole. Whatever is finished is not done again.
- Several processes, also on several computers, may work on one folder: each slide has a lock.
- A slide that cannot be used is recorded with the reason, and tried again when the command is run again.
- Features go to the disk as they are computed, and what is read ahead is bounded: memory does not depend on slides.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from psamil.errors import BusyError, DataError, OptionError
from psamil.files import Lock, read_json, remove_temporaries
from psamil.readers import slide_id, trident
from psamil.readers.trident_writing import (
    TridentSlide,
    feature_path,
    magnification_of_slide,
    magnification_of_tiles,
    new_feature_file,
    state_path,
    tiling_folder,
    tiling_path,
    write_state,
    write_tiling,
)
from psamil.slides.annotations import find_mask
from psamil.slides.encoders import Encoder
from psamil.slides.encoders.encoder import NonFiniteFeaturesError
from psamil.slides.extraction_record import Extraction, SlideRecord, record_path, write_tables
from psamil.slides.quality import is_enlarged
from psamil.slides.reading import Plan, SlideJob
from psamil.slides.reading_pool import ReadingPool, SlideAhead, SlideStream, UnreadableSlideError
from psamil.slides.resolution import checked_mpp
from psamil.slides.tiling import TileGrid

CHUNK_ROWS = 32  # rows of features that are stored together: TRIDENT's single rows take ten times as long to read


@dataclass(frozen=True)
class Step:
    """How far an extraction is: told when a slide is begun, after each batch, and when a slide is over."""

    slide: str
    slides_over: int  # including this one, if it is over
    slides: int
    tiles_done: int  # of this slide
    tiles: int
    status: str | None = None  # of a slide that is over: "done", "empty", "failed", "finished before"
    reason: str = ""


@dataclass
class Outcome:
    """What became of the slides."""

    done: list[str] = field(default_factory=list)
    finished_before: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)  # no tile has enough tissue; also those found so before
    failed: dict[str, str] = field(default_factory=dict)  # with the reason
    elsewhere: list[str] = field(default_factory=list)  # other processes work on them
    enlarged: dict[str, float] = field(default_factory=dict)  # done now, though scanned more coarsely, at so many um
    refused: list[SlideRecord] = field(default_factory=list)  # of those failed that have the name of another slide
    tiles: int = 0
    seconds: float = 0.0

    def add(self, other: Outcome) -> None:
        """What became of other slides, in the same time."""
        for name in ("done", "finished_before", "empty", "elsewhere", "refused"):
            getattr(self, name).extend(getattr(other, name))
        self.failed |= other.failed
        self.enlarged |= other.enlarged
        self.tiles += other.tiles


def extract(
    slides: Sequence[Path],
    out: str | Path,
    encoder: Encoder,
    grid: TileGrid | None = None,
    *,
    mpp: float | None = None,
    mpp_of: Mapping[str, float] | None = None,
    masks: Path | None = None,
    workers: int = 1,
    batch: int = 64,
    tables: bool = True,
    report: Callable[[Step], None] = lambda step: None,
) -> Outcome:
    """Writes the features of slides in TRIDENT's layout, and goes on where an earlier call was stopped.

    Args:
        slides: as :func:`psamil.slides.slide.find_slides` finds them; no two of the same name.
        out: folder of the features. It holds those of one encoder and one lattice.
        encoder: from :func:`psamil.slides.encoders.load_encoder`.
        grid: of the tiles.
        mpp: micrometres per level-0 pixel of all slides, whatever they say themselves.
        mpp_of: the same for single slides, by name; wins over ``mpp``.
        masks: folder with a mask or GeoJSON for each slide, instead of a search for tissue.
        workers: processes that read.
        batch: tiles that are encoded together.
        tables: write those of all slides at the end; False leaves that to whoever calls this for one share of them.
        report: is told how far it is.
    """
    for name, value in (("workers", workers), ("batch", batch)):
        if value < 1:
            raise OptionError(f"{name} must be at least 1, got {value}")
    for given in (*(() if mpp is None else (mpp,)), *(mpp_of or {}).values()):
        checked_mpp(given)
    out, grid = Path(out), grid or TileGrid()
    Extraction.of(encoder, grid, masks=masks is not None).claim(out)
    work = _Work(out, encoder, grid, list(slides), report)
    start_s = time.monotonic()
    try:
        with ReadingPool(workers) as pool:
            for slide in SlideStream(pool, work.jobs(mpp, mpp_of or {}, masks), grid, batch):
                work.on(slide)
    finally:
        work.unlock_all()
        if tables:
            write_tables(out, work.outcome.refused)
    work.outcome.seconds = time.monotonic() - start_s
    return work.outcome


class _Work:
    """The slides of one extraction, and what has become of them."""

    def __init__(
        self, out: Path, encoder: Encoder, grid: TileGrid, slides: list[Path], report: Callable[[Step], None]
    ) -> None:
        self.out, self.encoder, self.grid, self.report = out, encoder, grid, report
        self.slides = {slide_id(path): path for path in slides}
        self.outcome = Outcome()
        self._encoder = re.sub(r"[^\w.-]+", "-", encoder.name)  # a name of a folder
        self._tiling = tiling_folder(magnification_of_tiles(grid.mpp), grid.size_px, grid.overlap_px)
        self._locks: dict[str, Lock] = {}
        self._over = 0

    def jobs(self, mpp: float | None, mpp_of: Mapping[str, float], masks: Path | None) -> Iterator[SlideJob]:
        """The slides that are to be done, each locked when its turn has come. Those of others are asked for again."""
        waiting = list(self.slides)
        while waiting:
            busy = []
            for name in waiting:
                asked_mpp = mpp_of.get(name, mpp)
                lock = Lock(self._features(name).with_name(f"{name}.h5.lock"))
                if self._is_finished(name, asked_mpp):
                    if lock.path.exists():  # of a process that was killed after its last write, or is about to go
                        with contextlib.suppress(BusyError), lock:
                            pass
                    continue
                self._locks[name] = lock  # before it is taken: Ctrl-C in between must not leave it behind
                try:
                    lock.__enter__()
                except BusyError:
                    del self._locks[name]
                    busy.append(name)
                    continue
                if self._is_finished(name, asked_mpp):  # by another process, in the meantime
                    self._unlock(name)
                    continue
                self._clear(name)
                try:
                    mask = None if masks is None else find_mask(masks, name)
                except DataError as error:
                    self._fail(name, str(error))
                    continue
                picture = self.out / self._tiling / "visualization" / f"{name}.jpg"
                yield SlideJob(self.slides[name].absolute(), name, asked_mpp, mask, picture)
            if len(busy) == len(waiting):
                self.outcome.elsewhere = busy
                return
            waiting = busy

    def on(self, slide: SlideAhead) -> None:
        """Encodes and writes a slide, unless it cannot be read."""
        name = slide.job.name
        try:
            plan = slide.plan()
            self._write(slide, plan)
        except (UnreadableSlideError, NonFiniteFeaturesError) as error:
            self._fail(name, str(error))
            return
        n = len(plan.tiles)
        (self.outcome.done if n else self.outcome.empty).append(name)
        self.outcome.tiles += n
        if n and is_enlarged(plan.tiles.mpp, plan.mpp_px0):
            self.outcome.enlarged[name] = plan.mpp_px0
        self._unlock(name)
        self._tell_over(name, "done" if n else "empty", n)

    def _write(self, slide: SlideAhead, plan: Plan) -> None:
        """In such an order that a slide with features has all the rest."""
        name, tiles = slide.job.name, plan.tiles
        about = TridentSlide(
            name=name,
            size_px0=plan.size_px0,
            mpp_px0=plan.mpp_px0,
            patch_px=tiles.size_px,
            patch_px0=tiles.size_px0,
            overlap_px=self.grid.overlap_px,
            magnification=magnification_of_tiles(self.grid.mpp),
            slide_magnification=magnification_of_slide(plan.mpp_px0),
            level_count=plan.level_count,
        )
        dtype = np.float16 if self.encoder.precision == "float16" else np.float32
        write_tiling(self.out, about, tiles.coords_px0, chunk_rows=CHUNK_ROWS)
        write_state(self.out, about, str(slide.job.path))
        with new_feature_file(self.out, about, self._encoder, chunk_rows=CHUNK_ROWS) as file:
            file.begin(np.empty((0, self.encoder.dim), dtype), tiles.coords_px0)
            done = 0
            self._tell(name, done, len(tiles))
            for chunk in slide.tiles():
                file.append(self._encode(chunk).astype(dtype, copy=False))
                done += len(chunk)
                self._tell(name, done, len(tiles))
            assert done == len(tiles), f"{done} of {len(tiles)} tiles were read"
            SlideRecord(
                slide=name,
                path=str(slide.job.path),
                bytes=_bytes(slide.job.path),
                status="done" if len(tiles) else "empty",
                tiles=len(tiles),
                mpp_px0=plan.mpp_px0,
                tile_mpp=tiles.mpp,
                tile_px0=tiles.size_px0,
                step_px0=tiles.step_px0,
                quality=plan.quality,
            ).write(self.out)

    def _encode(self, chunk: NDArray[np.uint8]) -> NDArray[np.float32]:
        try:
            return self.encoder.encode(chunk).numpy()
        except torch.OutOfMemoryError as error:
            cause = f"{len(chunk)} tiles do not fit into the memory of {self.encoder.device}"
            raise OptionError(f"{cause}; take a smaller batch") from error

    def _fail(self, name: str, reason: str) -> None:
        SlideRecord(name, str(self.slides[name].absolute()), "failed", reason).write(self.out)
        self.outcome.failed[name] = reason
        self._unlock(name)
        self._tell_over(name, "failed", 0, reason)

    def _is_finished(self, name: str, asked_mpp: float | None) -> bool:
        """Whether its features are there, whole, and of the resolution that is asked for, if one is."""
        path = self._features(name)
        if not path.exists():
            return False
        try:
            found = trident.read(path, with_features=False)
        except DataError:
            return False
        if found.features.shape[1] != self.encoder.dim or not self._has_mpp(name, asked_mpp):
            return False
        if self._is_another(name):
            reason = f"{path} has the features of another slide of this name; rename this one, or choose another folder"
            self.outcome.refused.append(SlideRecord(name, str(self.slides[name].absolute()), "failed", reason))
            self.outcome.failed[name] = reason
            self._tell_over(name, "failed", 0, reason)
            return True
        (self.outcome.finished_before if len(found.features) else self.outcome.empty).append(name)
        self._tell_over(name, "finished before", len(found.features))
        return True

    def _is_another(self, name: str) -> bool:
        """Whether the features of this name are those of another file: moved slides keep their size."""
        return self._recorded(name, "bytes") not in (None, _bytes(self.slides[name]))

    def _has_mpp(self, name: str, asked: float | None) -> bool:
        """False if the scan was taken for one of another resolution; True where nothing else is known."""
        known = self._recorded(name, "mpp_px0")
        return known is None or asked is None or math.isclose(known, asked, rel_tol=1e-6)

    def _recorded(self, name: str, what: str) -> Any:
        """None without a record, or with a damaged one: then nothing speaks against the features."""
        try:
            return read_json(record_path(self.out, name)).get(what)
        except (DataError, AttributeError):
            return None

    def _clear(self, name: str) -> None:
        """Removes what a killed process left half-written. The slide is locked."""
        source = str(self.slides[name].absolute())
        remove_temporaries(self._features(name))
        remove_temporaries(tiling_path(self.out, self._tiling, name))
        remove_temporaries(state_path(self.out, name, source))
        remove_temporaries(record_path(self.out, name))
        remove_temporaries(self.out / self._tiling / "visualization" / f"{name}.jpg")

    def _features(self, name: str) -> Path:
        return feature_path(self.out, self._tiling, self._encoder, name)

    def _unlock(self, name: str) -> None:
        self._locks.pop(name).__exit__(None, None, None)

    def unlock_all(self) -> None:
        for name in list(self._locks):
            self._unlock(name)

    def _tell(self, name: str, done: int, tiles: int) -> None:
        self.report(Step(name, self._over, len(self.slides), done, tiles))

    def _tell_over(self, name: str, status: str, tiles: int, reason: str = "") -> None:
        self._over += 1
        self.report(Step(name, self._over, len(self.slides), tiles, tiles, status, reason))


def _bytes(slide: Path) -> int | None:
    """None for folders."""
    return slide.stat().st_size if slide.is_file() else None
