"""Extraction of features as jobs: a slide each, or a few of them where there are thousands.

A process loads the encoder once and keeps it for its next slides. Features and records of slides are written by the
jobs, as :mod:`psamil.slides.extraction` does; the tables of all slides by the driver when they are over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from psamil.cluster.engine import Job
from psamil.errors import one_of
from psamil.readers import slide_id
from psamil.slides.encoders import Encoder, load_encoder
from psamil.slides.encoders.encoder import PRECISIONS
from psamil.slides.extraction import Outcome, extract
from psamil.slides.extraction_record import Extraction, write_tables
from psamil.slides.tiling import TileGrid

JOBS, MOST_SLIDES = 2000, 16  # so many jobs are enough for any cluster; a lost one must not cost many slides


@dataclass(frozen=True)
class SlideWork:
    """How slides are made features of. Calling it with slides does so."""

    out: Path
    encoder: str
    grid: TileGrid
    weights: Path | None = None
    device: str = "cpu"
    precision: str = "float32"
    mpp: float | None = None
    mpp_of: Mapping[str, float] = field(default_factory=dict)
    masks: Path | None = None
    workers: int = 1
    batch: int = 64

    def claim(self, encoder: Encoder) -> None:
        """Makes the folder one of these features before the first job begins.

        Args:
            encoder: the same one, on any device and in any precision that the driver has.
        """
        if self.precision not in PRECISIONS:
            raise one_of("precision", self.precision, PRECISIONS)
        settings = Extraction.of(encoder, self.grid, masks=self.masks is not None)
        replace(settings, precision=self.precision).claim(self.out)

    def extract(self, slides: Sequence[Path]) -> Outcome:
        """In a worker process."""
        return extract(
            slides,
            self.out,
            _loaded(self.encoder, self.weights, self.device, self.precision),
            self.grid,
            mpp=self.mpp,
            mpp_of=self.mpp_of,
            masks=self.masks,
            workers=self.workers,
            batch=self.batch,
            tables=False,
        )


@cache
def _loaded(encoder: str, weights: Path | None, device: str, precision: str) -> Encoder:
    return load_encoder(encoder, weights=weights, device=device, precision=precision)


@dataclass(frozen=True)
class _Chunk:
    """The slides of one job."""

    slides: tuple[Path, ...]

    def __call__(self, work: SlideWork) -> Outcome:
        return work.extract(self.slides)


def extract_as_jobs(slides: Sequence[Path], work: SlideWork, run: Callable[[Sequence[Job]], Sequence[Any]]) -> Outcome:
    """What became of all slides; see :func:`psamil.slides.extraction.extract`.

    Args:
        slides: no two of the same name.
        work: how; its folder is claimed.
        run: does the jobs, as :func:`psamil.cluster.engine.run_jobs`.
    """
    start_s = time.monotonic()
    size = slides_per_job(len(slides))
    chunks = [tuple(slides[first : first + size]) for first in range(0, len(slides), size)]
    outcome = Outcome()
    try:
        for of_chunk in run([Job(_name(chunk), _Chunk(chunk), work) for chunk in chunks]):
            outcome.add(of_chunk)
    finally:
        write_tables(work.out, outcome.refused)
    outcome.seconds = time.monotonic() - start_s
    return outcome


def slides_per_job(slides: int) -> int:
    return max(1, min(MOST_SLIDES, math.ceil(slides / JOBS)))


def _name(chunk: Sequence[Path]) -> str:
    first = slide_id(chunk[0])
    return first if len(chunk) == 1 else f"{first} and {len(chunk) - 1} more"
