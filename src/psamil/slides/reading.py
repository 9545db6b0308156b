"""What a reading process does: it opens slides, finds their tissue, lays the lattice and cuts tiles.

The process serves requests from its standard input, one after the other, and answers on its standard output;
:mod:`psamil.slides.reading_pool` starts it. It imports no torch, so that it starts quickly and stays small.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psamil.errors import DataError, PsamilError
from psamil.slides.annotations import read_mask
from psamil.slides.quality import qc_picture, quality_row
from psamil.slides.slide import Slide, open_slide
from psamil.slides.tiling import TileGrid, Tiles, lay_tiles
from psamil.slides.tissue import tissue_of

OPEN_SLIDES = 2  # the one whose last tiles are read, and the next


@dataclass(frozen=True)
class SlideJob:
    """A slide, and what the user says about it."""

    path: Path
    name: str
    mpp: float | None = None  # None: the file tells
    mask: Path | None = None  # None: tissue is looked for
    picture: Path | None = None  # where to draw tissue and lattice


@dataclass(frozen=True)
class Plan:
    """The tiles of a slide, and what is known of it."""

    size_px0: tuple[int, int]
    mpp_px0: float
    level_count: int
    tiles: Tiles
    quality: dict[str, Any]


def plan_slide(job: SlideJob, grid: TileGrid) -> Plan:
    """Where the tiles of a slide lie. Draws the picture."""
    slide = _opened(job)
    tissue = tissue_of(slide) if job.mask is None else read_mask(job.mask, slide)
    tiles = lay_tiles(slide, tissue, grid)
    if job.picture is not None:
        qc_picture(slide, tissue, tiles, job.picture)
    return Plan(slide.size_px0, slide.mpp_px0, slide.level_count, tiles, quality_row(slide, tissue, tiles))


def read_tiles(job: SlideJob, coords_px0: NDArray[np.int64], size_px: int, mpp: float) -> NDArray[np.uint8]:
    """(n, size_px, size_px, 3): the tiles at these corners."""
    slide = _opened(job)
    tiles = np.empty((len(coords_px0), size_px, size_px, 3), np.uint8)
    for tile, (x, y) in zip(tiles, coords_px0.tolist(), strict=True):
        tile[:] = slide.read(x, y, size_px, mpp)
    return tiles


_open: OrderedDict[tuple[Path, float | None], Slide] = OrderedDict()


def _opened(job: SlideJob) -> Slide:
    key = job.path, job.mpp
    if key not in _open:
        _open[key] = open_slide(job.path, job.mpp)
        while len(_open) > OPEN_SLIDES:
            _open.popitem(last=False)[1].close()
    _open.move_to_end(key)
    return _open[key]


def serve() -> None:
    """Answers requests until the process that asks closes the pipe, or is no more."""
    for stop in (signal.SIGINT, signal.SIGTERM):  # the process that asks decides what they mean
        signal.signal(stop, signal.SIG_IGN)
    requests = sys.stdin.buffer
    with os.fdopen(os.dup(1), "wb") as replies, contextlib.suppress(BrokenPipeError):
        os.dup2(2, 1)  # what libraries print must not get among the replies
        for function, *arguments in _requests(requests):
            pickle.dump(_answer(function, arguments), replies, protocol=5)
            replies.flush()


def _requests(stream: Any) -> Iterator[tuple[Any, ...]]:
    with contextlib.suppress(EOFError):
        while True:
            yield pickle.load(stream)


def _answer(function: Any, arguments: list[Any]) -> tuple[str, Any]:
    """("result", value), ("slide", why this slide cannot be used) or ("run", why no slide can be)."""
    try:
        return "result", function(*arguments)
    except DataError as error:
        is_of_slide = any(isinstance(job, SlideJob) and str(job.path) == error.path for job in arguments)
        return "slide", str(error).removeprefix(f"{error.path}: " if is_of_slide else "")
    except PsamilError as error:
        return "run", str(error)
    except Exception as error:  # whatever a damaged file does to a decoder
        return "slide", f"cannot be read ({type(error).__name__}: {error})"
