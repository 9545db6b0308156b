"""How training is shown: live on a terminal, as plain lines elsewhere."""

from __future__ import annotations

import time
from datetime import timedelta
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BAR_WIDTH = 30


class TrainingProgress:
    """Shows what ``fit`` and ``cross_validate`` report, while its ``with`` block lasts.

    A terminal shows the epoch that is worked on and keeps one line per job; elsewhere there is one line per epoch. The
    time left assumes that all jobs train all epochs and that nobody else works on the run: it is an upper bound.

    Args:
        console: where it is shown.
        epochs: that a job has, at most.
    """

    def __init__(self, console: Console, epochs: int) -> None:
        self.console, self.epochs = console, epochs
        self._job, self._jobs_left = "", 0
        self._step: dict[str, Any] = {}
        self._epoch: dict[str, Any] = {}  # the last one that is over
        self._steps_seen, self._start_s = 0, 0.0
        self._live = Live(console=console, get_renderable=self._picture, refresh_per_second=4, transient=True)

    def __enter__(self) -> TrainingProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live.is_started:
            self._live.stop()
            self._end_job()

    def on_step(self, job: str, jobs_left: int, step: dict[str, Any]) -> None:
        if self.console.is_interactive and job != self._job:
            self._end_job()
            self._live.start()
        self._job, self._jobs_left, self._step = job, jobs_left, step
        if not self._start_s:  # the first step is not timed: its beginning is not known
            self._start_s = time.monotonic()
        else:
            self._steps_seen += 1

    def report(self, job: str, record: dict[str, Any]) -> None:
        self._job, self._epoch = job, record
        if not self.console.is_interactive:
            self._print_epoch(self._time_left())

    def _end_job(self) -> None:
        """Keeps the last epoch of a job on the terminal."""
        if self._epoch:
            self._print_epoch("")
        self._epoch = {}

    def _print_epoch(self, more: str) -> None:
        words = [f"{self._job}  epoch {self._epoch['epoch'] + 1}/{self.epochs}", *_numbers(self._epoch), more]
        self.console.print("  ".join(word for word in words if word), markup=False, soft_wrap=True)

    def _time_left(self) -> str:
        if not self._steps_seen:
            return ""
        epoch, step, steps = (self._step[name] for name in ("epoch", "step", "steps"))
        steps_left = (self.epochs - epoch + self._jobs_left * self.epochs) * steps - (step + 1)
        left_s = (time.monotonic() - self._start_s) / self._steps_seen * steps_left
        return f"at most {timedelta(seconds=round(left_s))} left"

    def _picture(self) -> RenderableType:
        """Three lines: the epoch and its steps, the numbers of the last one, the time left."""
        if not self._step:
            return Text()
        epoch, step, steps, loss = (self._step[name] for name in ("epoch", "step", "steps", "loss"))
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"{self._job}", style="bold"),
            f"epoch {epoch + 1}/{self.epochs}",
            ProgressBar(total=steps, completed=step + 1, width=BAR_WIDTH),
            f"step {step + 1}/{steps}  loss {loss:.4f}",
        )
        last = [f"epoch {self._epoch['epoch'] + 1}:", *_numbers(self._epoch)] if self._epoch else []
        jobs = [f"{self._jobs_left} more to train after {self._job}"] if self._jobs_left else []
        lines = ["  ".join(last), ", ".join([word for word in (self._time_left(), *jobs) if word])]
        return Group(head, *(Text(line) for line in lines if line))


def _numbers(record: dict[str, Any]) -> list[str]:
    """Loss, validation and radii of an epoch."""
    words = [f"loss {record['loss']:.4f}"]
    words += [f"{name} {value:.3f}" for name, value in record.items() if name.startswith("validation")]
    if "radii_steps" in record:
        words += ["K " + " / ".join(" ".join(f"{k:.1f}" for k in layer) for layer in record["radii_steps"])]
    return words
