"""Time and memory of one training step of every model, at its default size, and of torchmil's models beside ours.

    python benchmarks/models.py                              # a table, results/models.json and results/models.png
    python benchmarks/models.py --sizes 1000                 # a small part of it, to try it out
    python benchmarks/models.py --torchmil torchmil-1.0.2    # with the models of torchmil, from a folder of its own:

    pip install --no-deps --target torchmil-1.0.2 torchmil==1.0.2 einops tensordict orjson pyvers torchmetrics \\
        lightning-utilities tqdm

One slide of 1024 float32 features per tile, on the lattice of benchmarks/attention.py, two classes, one thread. How it
is measured:

- A step is forward pass, all losses of the model, backward pass and Adam. What is done once per slide (layout, or for
  torchmil the adjacency) is preparation, timed apart.
- Each model at each size has a process of its own. Time is its CPU time: the median of 2 to ``ROUNDS`` steps, as many
  as fit into ``ENOUGH_S``, after a first one, which is counted only if it is slow, and then alone.
- Memory is that of preparation and first step, over what is there before: features and weights, of which both sides
  hold the same. Gradients and the state of Adam are counted. *Tensors* is the largest sum of tensors that are held at
  one time, the same in every run, and what claims are about. *Process* is the peak of the process. It depends on what
  the allocator of the system keeps of freed memory (for torchmil, by a factor of 3 between runs) and holds some tens of
  MB that libraries load on first use; where a claim is made, it is the median of ``PROBES`` processes.
- Models with dense attention are measured in a single step where it is expected to take more than ``SLOW_S``, from the
  time of the next smaller size, and left out where more than ``HOPELESS_S`` are expected.
- How torchmil's models are made stands in benchmarks/trainees.py.

What is claimed: at ``CLAIMED_TILES`` tiles, ours take less memory than torchmil's like them, by ``LEAST_MEMORY_RATIO``.
Between the two largest sizes, memory of all models that were measured at both, and time of those that are not
``DENSE``, grow like n to a power of at most ``MOST_MEMORY_EXPONENT`` and ``MOST_TIME_EXPONENT``: 20 % of noise in
time are 0.11 where n differs by a factor of 5. This time is the least of the rounds and without that of the system,
which zeroes memory anew for every large tensor and not for smaller ones.
"""

import argparse
import math
import multiprocessing
import platform
import resource
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from attention import cpu_name, progress
from loading import claim
from memory import peak_bytes, tensor_bytes
from trainees import AS_IT_IS, DIM, LIKE_OURS, TORCHMIL, once, random_bag, trainee

from psamil import list_models
from psamil.files import write_json

SIZES = (1_000, 10_000, 50_000)
DENSE = ("longmil", "msa", "ppeg", "rope", "rpe", "sm_transformer")  # O(n²) time
HOPELESS_S = 900.0  # CPU seconds of a step
ENOUGH_S, SLOW_S, ROUNDS = 3.0, 30.0, 5
CLAIMED_TILES, LEAST_MEMORY_RATIO, PROBES = 10_000, 10.0, 3
MOST_MEMORY_EXPONENT, MOST_TIME_EXPONENT = 1.1, 1.25


@dataclass
class Row:
    """One model at one size."""

    contender: str
    n: int
    parameters: int
    skipped: str | None = None  # why
    prepare_s: float | None = None
    step_s: float | None = None
    user_s: float | None = None  # of a step, the least, without the time of the system
    rounds: int = 0
    tensor_bytes: int | None = None  # held at one time, over baseline
    process_bytes: list[int] | None = None  # peaks over baseline, of fresh processes


def expected_s(row: Row, smaller: Sequence[Row]) -> float:
    """CPU seconds of a step of dense attention, from the next smaller size; 0 if it is not known, or not dense."""
    before = [other for other in smaller if other.contender == row.contender and other.n < row.n]
    if row.contender not in DENSE or not before:
        return 0
    return (before[-1].step_s or math.inf) * (row.n / before[-1].n) ** 2


def measure(row: Row, torchmil: Path | None, slow: bool) -> None:
    """Fills in times and memory, from fresh processes, made from one that has all libraries loaded."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["attention", "memory", "trainees"])
    row.process_bytes = []
    compared = row.n == CLAIMED_TILES and row.contender.removeprefix(LIKE_OURS) in TORCHMIL
    for number in range(PROBES if compared else 1):
        receiver, sender = processes.Pipe(duplex=False)
        target = probe_peak if number else probe_slow if slow else probe
        process = processes.Process(target=target, args=(row.contender, row.n, torchmil, sender))
        process.start()
        sender.close()
        try:
            found = receiver.recv()
        except EOFError:
            process.join()
            row.skipped = f"ended with code {process.exitcode}, as for want of memory"
            return
        process.join()
        row.process_bytes.append(found.pop("peak"))
        for name, value in found.items():
            setattr(row, name, value)


def probe_peak(contender: str, n: int, torchmil: Path | None, sender: Connection) -> None:
    """In a fresh process: its peak alone."""
    set_up(torchmil)
    made = trainee(contender, random_bag(n))
    sender.send({"peak": peak_bytes(partial(once, made))})


def probe(contender: str, n: int, torchmil: Path | None, sender: Connection) -> None:
    """In a fresh process: its peak, times, and in a run of its own the tensors."""
    set_up(torchmil)
    bag = random_bag(n)
    made = trainee(contender, bag)
    first: list[tuple[float, float]] = []
    peak = peak_bytes(lambda: first.extend((seconds(made.prepare), seconds(made.step))))
    times = first[1:] if sum(first[1]) > SLOW_S else []
    while sum(map(sum, times)) < SLOW_S and (
        len(times) < 2 or (len(times) < ROUNDS and sum(map(sum, times)) < ENOUGH_S)
    ):
        times.append(seconds(made.step))
    found = {
        "prepare_s": min(sum(first[0]), sum(seconds(made.prepare))),
        "step_s": statistics.median(map(sum, times)),
        "user_s": min(user for user, _ in times),
        "rounds": len(times),
        "tensor_bytes": tensor_bytes(partial(once, trainee(contender, bag))),
    }
    sender.send({"peak": peak, **found})


def probe_slow(contender: str, n: int, torchmil: Path | None, sender: Connection) -> None:
    """In a fresh process: everything from one step."""
    set_up(torchmil)
    made = trainee(contender, random_bag(n))
    found: dict[str, float] = {"rounds": 1}

    def work() -> None:
        found["prepare_s"] = sum(seconds(made.prepare))
        found["user_s"], system_s = seconds(made.step)
        found["step_s"] = found["user_s"] + system_s

    peak = peak_bytes(lambda: found.update(tensor_bytes=tensor_bytes(work)))
    sender.send({"peak": peak, **found})


def seconds(work: Callable[[], None]) -> tuple[float, float]:
    """CPU time of the process and of the system."""
    start = resource.getrusage(resource.RUSAGE_SELF)
    work()
    end = resource.getrusage(resource.RUSAGE_SELF)
    return end.ru_utime - start.ru_utime, end.ru_stime - start.ru_stime


def set_up(torchmil: Path | None) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if torchmil is not None:
        sys.path.append(str(torchmil))  # after all other packages, of which it may hold copies


def format_table(rows: Sequence[Row]) -> str:
    columns = "{:>7}  {:<34}{:>12}{:>11}{:>12}{:>11}{:>8}{:>10}{:>10}"
    lines = [
        f"One training step on one slide of {DIM}-d tiles, float32, one thread. Times in ms of CPU time.",
        "tensors, process: peak memory in MB over baseline, preparation included.",
        "",
        columns.format("n", "model", "parameters", "prepare", "step", "user", "rounds", "tensors", "process"),
    ]
    for before, row in zip([rows[0], *rows], rows, strict=False):
        if row.n != before.n:
            lines.append("")
        start = (f"{row.n:,}", row.contender, f"{row.parameters:,}")
        if row.skipped is not None:
            lines.append(columns.format(*start, *["–"] * 6) + f"  {row.skipped}")
            continue
        times = [f"{1e3 * (seconds or 0):.1f}" for seconds in (row.prepare_s, row.step_s, row.user_s)]
        process = statistics.median(row.process_bytes or [0])
        lines.append(
            columns.format(*start, *times, row.rounds, *(f"{m / 1e6:.1f}" for m in (row.tensor_bytes or 0, process)))
        )
    return "\n".join(lines)


def requirements(rows: Sequence[Row]) -> list[dict[str, object]]:
    """How much more memory every model of torchmil takes than ours, and how steeply models grow that may not."""
    tensors = {row.contender: row.tensor_bytes for row in rows if row.n == CLAIMED_TILES}
    found = []
    for name in TORCHMIL:
        ours, theirs = tensors.get(name), tensors.get(LIKE_OURS + name)
        if ours and theirs:
            found.append(claim(f"times less memory, {name}", theirs / ours, ">=", LEAST_MEMORY_RATIO))
    powers = {"memory": exponents(rows, lambda row: row.tensor_bytes), "time": exponents(rows, lambda row: row.user_s)}
    for what, bound in (("memory", MOST_MEMORY_EXPONENT), ("time", MOST_TIME_EXPONENT)):
        linear = {name: power for name, power in powers[what].items() if what == "memory" or name not in DENSE}
        if linear:
            steepest = max(linear, key=lambda name: linear[name])
            found.append(claim(f"power of n, {what}: {steepest}", linear[steepest], "<=", bound))
    return found


def exponents(rows: Sequence[Row], value: Callable[[Row], float | None]) -> dict[str, float]:
    """log(y_2 / y_1) / log(n_2 / n_1) between the two largest sizes, of models that were measured at both."""
    sizes = sorted({row.n for row in rows})[-2:]
    if len(sizes) < 2:
        return {}
    small, large = ({row.contender: y for row in rows if row.n == n and (y := value(row))} for n in sizes)
    step = math.log(sizes[1] / sizes[0])
    return {name: math.log(large[name] / small[name]) / step for name in small.keys() & large.keys()}


def plot(rows: Sequence[Row], path: Path) -> None:
    """Time and memory over n, in which every straight line is a power of n."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    names = list(dict.fromkeys(row.contender for row in rows))
    figure, axes = plt.subplots(1, 2, figsize=(12, 7.2))
    quantities: list[tuple[str, Callable[[Row], float | None]]] = [
        ("one training step, CPU seconds", lambda row: row.step_s),
        ("memory held in tensors, MB over baseline", lambda row: row.tensor_bytes and row.tensor_bytes / 1e6),
    ]
    for axis, (title, value) in zip(axes, quantities, strict=True):
        for i, name in enumerate(names):
            points = [(row.n, y) for row in rows if row.contender == name and (y := value(row))]
            marker = "x" if name.startswith("torchmil") else "osv^"[i // 10]
            style = {
                "color": f"C{i % 10}",
                "marker": marker,
                "markersize": 5,
                "linewidth": 2.4 if name == "psa" else 1.2,
            }
            axis.plot(*(zip(*points, strict=True) if points else ((), ())), label=name, **style)
        axis.set(xscale="log", yscale="log", xlabel="tiles n", ylabel=title)
        axis.grid(True, which="major", color="0.88")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        ticks = sorted({row.n for row in rows})
        axis.set_xticks(ticks, [f"{n / 1000:g}k" for n in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0.15, 1, 1))
    figure.legend(handles, labels, loc="lower center", ncols=7, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    example = "example: python benchmarks/models.py --sizes 1000 --models psa abmil --out quick-results"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], epilog=example)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="tiles of a slide, ascending")
    parser.add_argument("--models", nargs="+", default=list_models(), choices=list_models(), metavar="MODEL")
    parser.add_argument("--torchmil", type=Path, help="folder into which torchmil 1.0.2 was installed")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    args = parser.parse_args()
    set_up(args.torchmil)

    rows: list[Row] = []
    for n in args.sizes:
        compared = [name for name in TORCHMIL if args.torchmil and n == CLAIMED_TILES and name in args.models]
        theirs = [before + name for before in (LIKE_OURS, AS_IT_IS) for name in compared]
        bag = random_bag(n)
        for name in [*args.models, *theirs]:
            progress(f"n = {n:,}: {name}")
            row = Row(name, n, sum(parameter.numel() for parameter in trainee(name, bag).model.parameters()))
            expected = expected_s(row, rows)
            rows.append(row)
            if expected > HOPELESS_S:
                row.skipped = f"O(n²) time: {expected / 60:.0f} min expected"
            else:
                measure(row, args.torchmil, slow=expected > SLOW_S)
    progress("")
    print(format_table(rows))
    print()
    if args.torchmil is None:
        print("torchmil was not compared: its folder was not given with --torchmil")
    args.out.mkdir(parents=True, exist_ok=True)
    results = {
        "machine": {"cpu": cpu_name(), "torch": torch.__version__, "python": platform.python_version()},
        "setting": {
            "command": " ".join(["python", "benchmarks/models.py", *sys.argv[1:]]),
            **{"threads": 1, "dim": DIM, "dtype": "float32", "torchmil": "1.0.2" if args.torchmil else None},
        },
        "requirements": requirements(rows),
        "rows": [asdict(row) for row in rows],
    }
    write_json(args.out / "models.json", results)
    plot(rows, args.out / "models.png")
    print(f"\nsaved {args.out / 'models.json'} and {args.out / 'models.png'}")


if __name__ == "__main__":
    main()
