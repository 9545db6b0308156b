"""Independent jobs on a Ray cluster: what a node takes with it is done again elsewhere.

- A job whose worker or node is lost is tried again. An error of the job itself is not: it would come again. It is told
  when the other jobs are done.
- Every job goes on with what an earlier attempt has left, and takes over its locks
  (:func:`psamil.files.locks_of_task`).
- A job works with as many threads as it has CPUs: two engines with the same number of threads compute the same bits.
- Jobs see the files of the driver under the same paths, in the same working directory: nothing is copied.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psamil.errors import DataError, MissingExtraError, OptionError, PsamilError
from psamil.files import locks_of_task

Tell = Callable[[str], None]

ENGINES = ("local", "ray")
LOCAL_ADDRESS = "local"  # Ray's word for a cluster of this computer alone
LOCAL_STORE_BYTES = 256 << 20  # what jobs share is small, and /dev/shm often is; more goes to the disk
LOSSES = 5  # of workers and nodes that one job survives: one that crashes them itself must end
MOST_AT_ONCE = 4096  # jobs that Ray is given: more than CPUs, and few enough to ask about again and again
ANSWER_S = 10.0  # for a cluster to accept a connection
STOP_S = 10.0  # for jobs to let go of their locks when the driver is stopped


class JobsError(PsamilError):
    """Jobs that failed, by their names, after all others are done."""

    def __init__(self, failures: Mapping[str, str], jobs: int) -> None:
        self.failures = dict(failures)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
        super().__init__(f"{len(failures)} of {jobs} jobs failed, the others are done: {reasons}")


@dataclass(frozen=True)
class Job:
    """Something to be done once, by any process that sees the files."""

    name: str
    call: Callable[..., Any]
    """Picklable: of a module that all nodes have."""
    shared: Any = None
    """What ``call`` is called with, if anything. An object that several jobs share travels once."""


def run_jobs(
    jobs: Sequence[Job],
    *,
    address: str | None = None,
    cpus_per_job: int = 1,
    gpus_per_job: float = 0,
    tell: Tell = lambda text: None,
) -> list[Any]:
    """Does all jobs, in no particular order, and gives what they return, in their order.

    Args:
        jobs: whose names differ.
        address: of a Ray cluster; "auto" is the one that this node belongs to, None starts one on this computer.
        cpus_per_job: that Ray reserves, and the number of threads that a job computes with.
        gpus_per_job: that Ray reserves; a job sees no others. Less than 1 shares one among jobs.
        tell: called with one line for each job that is over.

    Raises:
        JobsError: when all other jobs are done, with the names of those that failed and their reasons.
    """
    if cpus_per_job < 1 or gpus_per_job < 0:
        raise OptionError(f"a job needs at least 1 CPU and 0 GPUs, got {cpus_per_job} and {gpus_per_job}")
    if not jobs:
        return []
    with connected(address) as ray:
        refuse_too_much(ray.nodes(), cpus_per_job, gpus_per_job)
        # Processes are kept, also those with GPUs, and with them what they have loaded.
        attempt = ray.remote(max_calls=0)(run_attempt).options(
            num_cpus=cpus_per_job, num_gpus=gpus_per_job, max_retries=LOSSES, scheduling_strategy="SPREAD"
        )
        sent = {id(job.shared): ray.put(job.shared) for job in {id(job.shared): job for job in jobs}.values()}
        where = os.getcwd()

        def start(job: Job) -> Any:
            return attempt.remote(job.call, sent[id(job.shared)], secrets.token_hex(8), cpus_per_job, where)

        return _done(ray, jobs, start, tell)


def _done(ray: Any, jobs: Sequence[Job], start: Callable[[Job], Any], tell: Tell) -> list[Any]:
    """Starts all jobs and waits for them. Whatever stops the driver stops them, too."""
    results: list[Any] = [None] * len(jobs)
    failures: dict[str, str] = {}
    bugs: list[BaseException] = []
    over, begun = 0, 0
    running: dict[Any, int] = {}
    try:
        while over < len(jobs):
            while begun < len(jobs) and len(running) < MOST_AT_ONCE:
                running[start(jobs[begun])] = begun
                begun += 1
            (ended, *_), _ = ray.wait(list(running))
            i = running.pop(ended)
            failure = None
            try:
                results[i], failure = ray.get(ended)
            except ray.exceptions.RayTaskError as error:  # no error of psamil: a bug, which deserves its traceback
                bugs.append(error)
                failure = f"{type(error.cause).__name__}: {error.cause}"
            except ray.exceptions.RayError as error:
                failure = f"its worker was lost again and again: {' '.join(str(error).split())}"
            over += 1
            if failure is not None:
                failures[jobs[i].name] = failure
            tell(f"{over}/{len(jobs)} {jobs[i].name}" + ("" if failure is None else f": failed: {failure}"))
    except BaseException:
        for reference in running:
            ray.cancel(reference)
        if running:
            ray.wait(list(running), num_returns=len(running), timeout=STOP_S)
        raise
    if bugs:
        raise bugs[0]
    if failures:
        raise JobsError(failures, len(jobs))
    return results


def run_attempt(call: Callable[..., Any], shared: Any, task: str, cpus: int, folder: str) -> tuple[Any, str | None]:
    """One attempt at a job, in a worker process: its result, or the reason why there is none."""
    import torch

    torch.set_num_threads(cpus)
    try:
        _work_in(folder)
        with locks_of_task(task):
            return call() if shared is None else call(shared), None
    except PsamilError as error:
        return None, str(error)


def _work_in(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        cause = f"is not there on the node {socket.gethostname()}: {error.strerror}"
        raise DataError(folder, cause, "work in a folder that all nodes share") from error


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Ray, connected to a cluster; one that it is connected to already stays so."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read when it is imported
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise MissingExtraError("ray", "cluster", "a cluster") from error
    if ray.is_initialized():
        yield ray
        return
    _refuse_unreachable(address)
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address is None:
        quiet |= {"include_dashboard": False, "object_store_memory": LOCAL_STORE_BYTES}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address or LOCAL_ADDRESS, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        cause = " ".join(str(error).split())
        remedy = "start one with ray start --head, or leave --address out"
        raise OptionError(f"no Ray cluster at {address or 'this computer'}: {cause}; {remedy}") from error
    try:
        _react_as_before(on_sigterm)
        yield ray
    finally:
        ray.shutdown()


def _react_as_before(on_sigterm: Any) -> None:
    """Ray has begun to end the process on SIGTERM, without a chance for jobs to let go of their locks."""
    if signal.getsignal(signal.SIGTERM) is not on_sigterm:  # as in all threads but the main one
        signal.signal(signal.SIGTERM, on_sigterm)


def _refuse_unreachable(address: str | None) -> None:
    """Ray would try for more than a minute, and then end the process."""
    host, _, port = (address or "").rpartition("/")[2].rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        remedy = "see that ray start --head runs there, and that the port is right"
        raise OptionError(f"no Ray cluster at {address}: {error}; {remedy}") from error


def refuse_too_much(nodes: Sequence[Mapping[str, Any]], cpus: int, gpus: float) -> None:
    """Ray would wait for ever for a node that has enough."""
    present = [node["Resources"] for node in nodes if node["Alive"]]
    if not any(of.get("CPU", 0) >= cpus and of.get("GPU", 0) >= gpus for of in present):
        raise OptionError(f"a job asks for {cpus} CPUs and {gpus:g} GPUs, which no node of the cluster has")
