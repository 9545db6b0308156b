"""Jobs of tests: each node passes for a computer of its own, every attempt is logged, and one waits for its node's end.

In these clusters all nodes are processes of this computer. Ray is the same; only names of hosts have to be made up.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from psamil.cluster.engine import Job
from psamil.cluster.search import Search, TrialResult
from psamil.cluster.search_space import Trial
from psamil.evaluation.experiment import Training
from psamil.slides.encoders import Preprocessing

HANGS_S = 300.0  # longer than any test may take: only a lost node ends it


@dataclass(frozen=True)
class Lossy:
    """A job that is watched; on the doomed node, once enough jobs are over, it stops in the middle of its work."""

    name: str
    call: Any
    log: Path
    doomed: str  # id of the node
    after: int  # jobs

    def __call__(self, shared: Any) -> Any:
        import ray

        global _current
        _current = self
        node = ray.get_runtime_context().get_node_id()
        socket.gethostname = lambda: node
        self.write("begun")
        if isinstance(self.call, Training):
            self.call.train(shared, report=lambda record: hang_if_doomed())
        result = self.call(shared)
        self.write("done")
        return result

    def write(self, what: str) -> None:
        with open(self.log, "a") as file:  # a line is written at once
            file.write(f"{what} {self.name}\n")

    def hang_if_doomed(self) -> None:
        if socket.gethostname() == self.doomed and len(lines(self.log, "done")) >= self.after:
            self.write("hung")
            time.sleep(HANGS_S)


_current: Lossy | None = None  # in a worker


def hang_if_doomed() -> None:
    if _current is not None:
        _current.hang_if_doomed()


def lossy(jobs: Sequence[Job], log: Path, doomed: str, after: int) -> list[Job]:
    return [Job(job.name, Lossy(job.name, job.call, log, doomed, after), job.shared) for job in jobs]


def lines(log: Path, what: str) -> list[str]:
    """Names of the jobs to which that happened."""
    words = [line.split(maxsplit=1) for line in log.read_text().splitlines()] if log.exists() else []
    return [name for kind, name in words if kind == what]


class HangingNetwork(nn.Module):
    """Colours of a tile, as long as its node lives."""

    def forward(self, tiles: Tensor) -> Tensor:
        hang_if_doomed()
        return tiles.flatten(1)


def hanging_encoder() -> tuple[nn.Module, Preprocessing]:
    return HangingNetwork(), Preprocessing(4)


def note(folder: Path, name: str) -> str:
    (folder / name).touch()
    return name


def fail(error: BaseException) -> None:
    raise error


def end_worker_once(marker: Path) -> str:
    if not marker.exists():
        marker.touch()
        os._exit(1)
    return "at last"


def end_worker() -> None:
    os._exit(1)


def hold(lock: Path, marker: Path) -> None:
    from psamil.files import Lock

    with Lock(lock):
        marker.touch()
        while True:  # at work
            time.sleep(0.01)


class LossySearch(Search):
    """Its trials are logged; the first loses its worker once, the second is a bug, the third loses every worker."""

    def run(self, trial: Trial, after_step: Any = None) -> TrialResult:
        log = self.folder / "log"
        before = lines(log, "begun").count(str(trial.number))
        with open(log, "a") as file:
            file.write(f"begun {trial.number}\n")
        if trial.number == 1:
            raise ZeroDivisionError("a bug")
        if trial.number == 2 or not before:
            end_worker()
        return TrialResult(trial, "finished", "auc", 0.5)
