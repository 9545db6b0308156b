"""The options ``--engine``, ``--address``, ``--cpus-per-job`` and ``--gpus-per-job`` of verbs that consist of jobs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from psamil.cluster.engine import ENGINES, Job, Tell, run_jobs
from psamil.errors import OptionError, one_of

ENGINE_OPTIONS = ("engine", "address", "cpus_per_job", "gpus_per_job")
RunJobs = Callable[[Sequence[Job]], list[Any]]


def chosen_engine(
    engine: str, address: str | None, cpus_per_job: int, gpus_per_job: float, tell: Tell
) -> RunJobs | None:
    """What does jobs; None where the verb does its work itself, without jobs."""
    if engine not in ENGINES:
        raise one_of("engine", engine, ENGINES)
    if engine == "local":
        if address is not None or cpus_per_job != 1 or gpus_per_job:
            raise OptionError("address, cpus_per_job and gpus_per_job are for --engine ray")
        return None
    torch.set_num_threads(max(1, cpus_per_job))  # what the driver writes down about a run holds for its jobs

    def run(jobs: Sequence[Job]) -> list[Any]:
        with stopped_by_sigterm():
            return run_jobs(jobs, address=address, cpus_per_job=cpus_per_job, gpus_per_job=gpus_per_job, tell=tell)

    return run


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """A cluster asks a job to end before it kills it. Like after Ctrl-C, no locks are left to other computers."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
