"""How far slides are read ahead, with readers that answer at once."""

from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from psamil.errors import PsamilError
from psamil.slides.reading import Plan, SlideJob, plan_slide, read_tiles
from psamil.slides.reading_pool import (
    CHUNKS_PER_WORKER,
    SLIDES_AHEAD,
    ReadingPool,
    SlideStream,
    UnreadableSlideError,
)
from psamil.slides.tiling import TileGrid, Tiles

CHUNK = 10


class InstantPool:
    """Remembers what it was asked for; tiles are their own numbers."""

    def __init__(self, workers, tiles_of):
        self.workers, self.tiles_of = workers, tiles_of
        self.planned, self.read = [], []

    def submit(self, function, job, *arguments):
        future = Future()
        if function is plan_slide:
            self.planned.append(job.name)
            n = self.tiles_of[job.name]
            if n is None:
                future.set_exception(UnreadableSlideError("damaged"))
            else:
                coords = np.stack([np.arange(n)] * 2, 1)
                future.set_result(Plan((1, 1), 0.5, 1, Tiles(coords, 1, 0.5, 1, 1, np.ones(n)), {}))
        else:
            assert function is read_tiles
            self.read.append(job.name)
            future.set_result(arguments[0][:, 0])
        return future


def stream_of(tiles_of, workers=2):
    pool = InstantPool(workers, tiles_of)
    taken = []

    def jobs():
        for name in tiles_of:
            taken.append(name)
            yield SlideJob(Path(name), name)

    return pool, taken, SlideStream(pool, jobs(), TileGrid(), CHUNK)


def test_what_waits_is_bounded():
    pool, taken, stream = stream_of(dict.fromkeys("abcdefgh", 1000), workers=3)
    done = 0
    for i, slide in enumerate(stream):
        assert len(taken) <= i + 1 + SLIDES_AHEAD
        slide.plan()
        for chunk in slide.tiles():
            done += len(chunk)
            assert len(pool.read) * CHUNK - done <= CHUNKS_PER_WORKER * pool.workers * CHUNK
    assert done == 8000


def test_tiles_come_in_order_and_readers_do_not_wait_between_slides():
    tiles_of = {"a": 95, "b": 3, "c": 0, "d": None, "e": 41}
    pool, _, stream = stream_of(tiles_of)
    seen = {}
    for slide in stream:
        name = slide.job.name
        if tiles_of[name] is None:
            with pytest.raises(UnreadableSlideError, match="damaged"):
                slide.plan()
            continue
        assert len(slide.plan().tiles) == tiles_of[name]
        seen[name] = [tile for chunk in slide.tiles() for tile in chunk.tolist()]
        if name == "a":
            assert "b" in pool.read  # before a is over
    assert seen == {name: list(range(n)) for name, n in tiles_of.items() if n is not None}


def test_a_slide_that_is_given_up_is_not_read_on():
    pool, _, stream = stream_of({"a": 1000, "b": 20})
    for slide in stream:
        slide.plan()
        tiles = slide.tiles()
        next(tiles)  # the rest is not wanted
    assert pool.read.count("a") == CHUNKS_PER_WORKER * pool.workers + 1


def test_errors_that_concern_all_slides_end_the_run():
    from tests.slides import crashing

    with ReadingPool(1) as pool, pytest.raises(PsamilError, match="no slide can be read"):
        pool.submit(crashing.refuse).result()
