"""Processes that read slides, and the order in which their work is asked for.

- Each process has its own pipes and answers one request at a time. One that is killed, or crashes in a decoder, harms
  nothing but the slide it was asked about; another takes its place.
- Slides are looked at, and their tiles read, before they are wanted, across the ends of slides. How much is asked for
  and not yet taken is bounded, and with it the memory, however large a slide is.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from psamil.errors import PsamilError
from psamil.slides.reading import Plan, SlideJob, plan_slide, read_tiles
from psamil.slides.tiling import TileGrid

CHUNKS_PER_WORKER = 2  # asked for and not yet taken: one that is read, and one that waits
SLIDES_AHEAD = 2  # besides the one that is worked on
LAST_WORDS_BYTES = 4096
RETURNED_BYTES = 1 << 20  # what is at least this large goes back to the system once it is not used, where glibc can
KILLED = -9  # by signal.SIGKILL, which not all systems have


class UnreadableSlideError(Exception):
    """Why a slide cannot be used, in words for the user."""


class Reader:
    """A reading process."""

    def __init__(self) -> None:
        self._errors: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        # The main module of a user's script is not imported again, unlike in processes of `multiprocessing`.
        code = f"import sys; sys.path[:] = {sys.path!r}; from psamil.slides.reading import serve; serve()"
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | threads | {"MALLOC_MMAP_THRESHOLD_": str(RETURNED_BYTES)},
        )

    def ask(self, *request: Any) -> tuple[str, Any]:
        """EOFError if the process is no more."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            pickle.dump(request, self.process.stdin, protocol=5)
            self.process.stdin.flush()
            answer: tuple[str, Any] = pickle.load(self.process.stdout)
        except (OSError, pickle.UnpicklingError) as error:
            raise EOFError from error
        return answer

    def end(self) -> str:
        """Ends the process, and says how it ended."""
        if self.process.poll() is None and self.process.stdin is not None:
            self.process.kill()
        code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # what was not sent is not needed
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
        words = self._errors.read().decode(errors="replace").split("\n")
        self._errors.close()
        last = next((line.strip() for line in reversed(words) if line.strip()), "")
        how = signal.strsignal(-code) if code < 0 else f"exit code {code}"
        return f"{how}: {last}" if last else str(how)


class ReadingPool:
    """A number of reading processes that share the requests. Use it in a ``with`` block."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reader")  # a thread waits for each process
        self._mine = threading.local()
        self._readers: set[Reader] = set()
        self._guard = threading.Lock()
        self._is_open = True

    def __enter__(self) -> ReadingPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._guard:
            self._is_open = False
            for reader in self._readers:
                reader.process.kill()
        self._threads.shutdown(cancel_futures=True)
        # Ctrl-C while a thread starts leaves one that nobody waits for: whoever takes a reader out ends it.
        with self._guard:
            left = self._readers.copy()
            self._readers.clear()
        for reader in left:
            reader.end()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Of :mod:`psamil.slides.reading`. The result, UnreadableSlideError, or PsamilError if no slide can be read."""
        return self._threads.submit(self._ask, function, *arguments)

    def _ask(self, *request: Any) -> Any:
        reader = self._reader()
        try:
            kind, value = reader.ask(*request)
        except EOFError:
            with self._guard:
                if reader not in self._readers:
                    raise UnreadableSlideError("the run ended") from None
                self._readers.remove(reader)
            del self._mine.reader
            how = reader.end()
            cause = f"the process that read it ended ({how})"
            hint = "; if memory was short, take fewer workers" if reader.process.returncode == KILLED else ""
            raise UnreadableSlideError(cause + hint) from None
        if kind == "slide":
            raise UnreadableSlideError(value)
        if kind == "run":
            raise PsamilError(value)
        return value

    def _reader(self) -> Reader:
        """That of this thread."""
        if not hasattr(self._mine, "reader"):
            with self._guard:
                if not self._is_open:
                    raise UnreadableSlideError("the run ended")
                self._mine.reader = Reader()
                self._readers.add(self._mine.reader)
        reader: Reader = self._mine.reader
        return reader


class SlideAhead:
    """A slide whose tiles are read before they are wanted."""

    def __init__(self, job: SlideJob, stream: SlideStream) -> None:
        self.job, self._stream = job, stream
        self._plan: Future[Plan] = stream.pool.submit(plan_slide, job, stream.grid)
        self._next = 0  # first tile that has not been asked for
        self._chunks: deque[Future[NDArray[np.uint8]]] = deque()

    def plan(self) -> Plan:
        """Waits for it. UnreadableSlideError if there is none."""
        plan = self._plan.result()
        self._stream.read_ahead()
        return plan

    def tiles(self) -> Iterator[NDArray[np.uint8]]:
        """All tiles in the order of the plan, in chunks (n, size, size, 3)."""
        self._stream.read_ahead()
        while self._chunks:
            chunk = self._chunks.popleft().result()
            self._stream.read_ahead()  # before the chunk is worked on
            yield chunk

    @property
    def is_planned(self) -> bool:
        return self._plan.done()

    @property
    def asked_for(self) -> int:
        return len(self._chunks)

    def ask(self, most: int) -> int:
        """Asks for further chunks, of which there may be fewer."""
        if self._plan.exception() is not None:
            return 0
        tiles, before = self._plan.result().tiles, len(self._chunks)
        while self._next < len(tiles) and len(self._chunks) - before < most:
            corners = tiles.coords_px0[self._next : self._next + self._stream.chunk_tiles]
            self._chunks.append(self._stream.pool.submit(read_tiles, self.job, corners, tiles.size_px, tiles.mpp))
            self._next += len(corners)
        return len(self._chunks) - before

    def drop(self) -> None:
        """Nothing more of it is wanted."""
        for chunk in self._chunks:
            chunk.cancel()
        self._chunks.clear()
        self._next = sys.maxsize


class SlideStream:
    """Slides one after the other, read ahead of whoever takes them.

    Args:
        pool: that reads them.
        jobs: the slides; one is taken from it only when its turn to be looked at has come.
        grid: of the tiles.
        chunk_tiles: number of tiles that are read, and given, together.
    """

    def __init__(self, pool: ReadingPool, jobs: Iterator[SlideJob], grid: TileGrid, chunk_tiles: int) -> None:
        self.pool, self.grid, self.chunk_tiles = pool, grid, chunk_tiles
        self._jobs = jobs
        self._slides: deque[SlideAhead] = deque()

    def __iter__(self) -> Iterator[SlideAhead]:
        self.read_ahead()
        while self._slides:
            yield self._slides[0]
            self._slides.popleft().drop()
            self.read_ahead()

    def read_ahead(self) -> None:
        """Asks for as much as may be asked for, in the order in which it will be wanted."""
        while len(self._slides) <= SLIDES_AHEAD and (job := next(self._jobs, None)) is not None:
            self._slides.append(SlideAhead(job, self))
        room = CHUNKS_PER_WORKER * self.pool.workers - sum(slide.asked_for for slide in self._slides)
        for slide in self._slides:
            if room <= 0 or not slide.is_planned:
                return
            room -= slide.ask(room)
