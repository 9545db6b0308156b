"""Peak memory of a contender, in a fresh process for each measurement.

    python benchmarks/memory.py lattice 10000 7   # contender, tiles, radius; prints bytes, twice

Preparation and one step are done twice, and the peak of each is taken over what was there before it. The first
includes what libraries load on first use, some tens of MB for any contender; the second does not.
"""

import contextlib
import ctypes
import gc
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from contenders import CONTENDERS, Contender, Slide, thetas
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def probe(contender: str, n: int, radius: int) -> tuple[int, int] | None:
    """Peaks in bytes in a fresh process, first and second time; None if it ends early, as for want of memory."""
    command = [sys.executable, __file__, contender, str(n), str(radius)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        return None
    first, second = map(int, done.stdout.split())
    return first, second


def peak_bytes(work: Callable[[], object]) -> int:
    """Of some work, over what was there before it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # freed memory goes back to the system, so that its reuse is seen
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = high_water_bytes()
    work()
    return high_water_bytes() - before


def tensor_bytes(work: Callable[[], object]) -> int:
    """Largest sum of the tensors that are held at one time in some work, over those that were there before it.

    It is the same in every run, other than the peak of the process, in which there is also what the allocator of the
    system keeps of freed memory. What is not a tensor is not in it.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        work()
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes), default=0)


def once(contender: Contender, theta: Tensor) -> None:
    contender.prepare()
    contender.step(theta)


def high_water_bytes() -> int:
    """Where there is no /proc, the mark cannot be reset, and memory that was freed before hides later memory."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if "VmHWM" in line)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    slide = Slide.random(int(sys.argv[2]))
    theta = thetas(int(sys.argv[3]))
    for _ in range(2):
        print(peak_bytes(partial(once, CONTENDERS[sys.argv[1]](slide), theta)))
