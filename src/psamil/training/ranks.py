"""Several processes that train one model: each takes a share of every batch, and gradients are summed.

The sum over the ranks r of the gradients of (n_r / n) L_r, where L_r is the mean loss of the n_r samples of a rank, is
the gradient of the mean loss of all n samples: that of one process, whatever the shares are. A rank may have none.
DistributedDataParallel would take the mean over ranks during the backward pass instead, of which every rank then needs
one with all parameters in it. Models here are small: one sum after it costs little.

The calling process takes no share. It starts the ranks, hears from them and ends them, so that its locks, its display
and its errors are those of training in one process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import FileStore

from psamil.errors import PsamilError

Item = TypeVar("Item")
Tell = Callable[[str, Any], None]

CAUSE_S = 2.0  # between the failure of a process and that of the one that is its cause, which may be heard later


@dataclass(frozen=True)
class Ranks:
    """The processes that train together, seen from one of them; by default it is alone."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Of this rank: every size-th item."""
        return items[self.rank :: self.size]

    def gather(self, item: Item) -> list[Item]:
        """The items of all ranks, in their order: the same list everywhere."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        distributed.all_gather_object(items, item)
        return items

    def sum_gradients(self, model: nn.Module) -> None:
        """Makes each gradient its sum over ranks. What has none on any rank still has none, as in one process."""
        if self.size == 1:
            return
        parameters = list(model.parameters())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        present = gradients[0].new_tensor([p.grad is not None for p in parameters])
        summed = torch.cat([present, *(gradient.flatten() for gradient in gradients)])
        distributed.all_reduce(summed)
        pieces = summed[len(parameters) :].split([p.numel() for p in parameters])
        for parameter, piece, count in zip(parameters, pieces, summed[: len(parameters)].tolist(), strict=True):
            parameter.grad = piece.view_as(parameter) if count else None

    def take_tensors_of_first(self, tensors: Iterable[Tensor]) -> None:
        """For buffers of a model that change while it trains, and then differ between shares."""
        if self.size > 1:
            for tensor in tensors:
                distributed.broadcast(tensor, src=0)


def run_on_ranks(size: int, work: Callable[[Ranks, Tell], None], calls: Mapping[str, Callable[[Any], None]]) -> None:
    """Does ``work(ranks, tell)`` in processes of their own; there, ``tell(name, content)`` calls ``calls[name]`` here.

    An error, here or in any of them, ends all. ``work`` must be picklable: processes start anew. That is also
    why a script needs ``if __name__ == "__main__":`` around what it does.
    """
    spawn = get_context("spawn")  # forks of a process with threads or a GPU may hang
    threads = max(1, torch.get_num_threads() // size)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as started:
        processes: dict[Any, Any] = {}  # by what we hear them through
        for rank in range(size):
            hear, tell = spawn.Pipe(duplex=False)
            args = (Ranks(rank, size), str(Path(folder) / "meeting"), threads, work, tell)
            process = spawn.Process(target=_rank, args=args, daemon=True)
            process.start()
            started.callback(_end, process)
            tell.close()  # so that the only open one is that of the process, whose end is heard
            processes[hear] = process
        failures: list[str] = []
        while processes:
            heard: list[Any] = connection.wait(list(processes), timeout=CAUSE_S if failures else None)
            if not heard:
                break  # the others wait for the one that failed
            for one in heard:
                try:
                    kind, content = one.recv()
                except EOFError:
                    _check_exit(processes.pop(one))
                    continue
                if kind == "error":
                    raise content
                if kind == "failure":
                    failures.append(content)
                else:
                    calls[kind](content)
        if failures:
            raise RuntimeError("\n".join(failures))


def _rank(ranks: Ranks, meeting: str, threads: int, work: Callable[[Ranks, Tell], None], pipe: Any) -> None:
    """One of the processes, from its start to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever presses Ctrl-C stops the caller, and the caller us
    threading.Thread(target=_end_with_caller, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        distributed.init_process_group(store=FileStore(meeting, ranks.size), rank=ranks.rank, world_size=ranks.size)
        work(ranks, lambda kind, content: pipe.send((kind, content)))
        distributed.destroy_process_group()
        pipe.close()  # the caller hears the end of the work
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # all is written; threads of torch that still run when the process is taken down may abort it
    except PsamilError as error:
        pipe.send(("error", error))
    except Exception:
        pipe.send(("failure", f"in training process {ranks.rank}:\n{traceback.format_exc()}"))


def _end_with_caller() -> None:
    """A caller that is killed cannot end us, and somebody else may take over its run."""
    caller = parent_process()
    assert caller is not None
    connection.wait([caller.sentinel])
    os._exit(1)


def _check_exit(process: Any) -> None:
    process.join()
    if process.exitcode:
        cause = f"a training process ended with code {process.exitcode}"
        raise PsamilError(f"{cause}; if memory was short, use fewer devices or samples_per_pass, and go on")


def _end(process: Any) -> None:
    process.kill()  # it may wait for others for ever; what it writes, it writes atomically
    process.join()
    process.close()
