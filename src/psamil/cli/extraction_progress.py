"""How an extraction is shown: two bars on a terminal, a line per slide elsewhere."""

from __future__ import annotations

import time
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from psamil.slides.extraction import Step

BAR_WIDTH = 30


class ExtractionProgress:
    """Shows what ``extract`` reports, while its ``with`` block lasts.

    The time left assumes that the slides to come are like those done by this process, which did all of the work.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (TextColumn("{task.description}"), BarColumn(BAR_WIDTH), TextColumn("{task.fields[words]}"))
        self._bars = Progress(*columns, console=console, transient=True, disable=not console.is_interactive)
        self._slides_bar = self._bars.add_task("slides", total=None, words="")
        self._tiles_bar = self._bars.add_task("tiles", total=None, words="")
        self._start_s, self._slides_done, self._tiles_done = 0.0, 0, 0

    def __enter__(self) -> ExtractionProgress:
        self._bars.start()
        self._start_s = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def report(self, step: Step) -> None:
        self._bars.update(self._slides_bar, total=step.slides, completed=step.slides_over)
        if step.status not in (None, "finished before"):
            self._end_of_slide(step)
        rate = (self._tiles_done + (step.tiles_done if step.status is None else 0)) / self._passed_s()
        words = f"{step.slides_over:,}/{step.slides:,}  {self._time_left(step)}"
        self._bars.update(self._slides_bar, words=words)
        tiles = f"{step.tiles_done:,}/{step.tiles:,}  {rate:.0f} per second  {step.slide}"
        self._bars.update(self._tiles_bar, total=step.tiles, completed=step.tiles_done, words=tiles)

    def _end_of_slide(self, step: Step) -> None:
        self._slides_done += 1
        self._tiles_done += step.tiles_done
        place = f"{step.slides_over}/{step.slides} {step.slide}"
        if step.status == "failed":
            self._print(f"{place}: failed: {step.reason}")
        elif step.status == "empty":
            self._print(f"{place}: no tile has enough tissue")
        elif not self.console.is_interactive:
            rate = f"{self._tiles_done / self._passed_s():.0f} per second"
            self._print(f"{place}: {step.tiles:,} tiles, {rate}, {self._time_left(step)}")

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, soft_wrap=True)

    def _passed_s(self) -> float:
        return max(time.monotonic() - self._start_s, 1e-3)

    def _time_left(self, step: Step) -> str:
        begun = step.tiles_done / step.tiles if step.status is None and step.tiles else 0.0
        done, left = self._slides_done + begun, step.slides - step.slides_over - begun
        return f"about {timedelta(seconds=round(self._passed_s() / done * left))} left" if done else ""
