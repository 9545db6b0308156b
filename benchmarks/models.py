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
- Time is CPU time of the process; all models of one size take turns in it. The first call is not counted, unless slow.
- Memory is measured in a fresh process per cell: the peak of preparation and one step, over features and weights, once
  with what libraries load on first use (some tens of MB) and once again without it.
- Models with dense attention are left out where one step is expected to take more than ``HOPELESS_S``, from the time of
  the next smaller size.
- torchmil's models have their own default sizes, after our embedding where ours has one (to 512 numbers). They get a
  sparse adjacency, as its own data sets make it. What they compute is similar, not the same. One claim is checked, at
  ``CLAIMED_TILES`` tiles: ours need less memory, by ``LEAST_MEMORY_RATIO``.
"""

import argparse
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from attention import Job, cpu_name, progress, take_turns
from contenders import Slide
from loading import claim
from memory import peak_bytes
from torch import Tensor, nn

from psamil import Bag, PackedBags, list_models
from psamil.cohort.outcomes import Classification
from psamil.files import write_json
from psamil.spatial import Layout
from psamil.spatial.neighbours import neighbour_pairs
from psamil.training.fold import new_model
from psamil.training.objective import Objective, Pass
from psamil.training.settings import TrainingSettings
from psamil.training.tasks import Task

SIZES = (1_000, 10_000, 50_000)
DIM = 1024
DENSE = ("longmil", "msa", "ppeg", "rope", "rpe", "sm_transformer")  # O(n²) time
HOPELESS_S = 300.0  # CPU seconds of a step
CLAIMED_TILES, LEAST_MEMORY_RATIO = 10_000, 10.0
THEIRS = "torchmil "  # before the name of ours, in the name of a contender
EMBEDDED = 512  # numbers per tile, of our models that torchmil has too
TORCHMIL: dict[str, tuple[str, dict[str, Any]]] = {  # class and options
    "camil": ("CAMIL", {"n_landmarks": 256}),  # the default, None, fails
    "gtp": ("GTP", {}),
    "sm_abmil": ("SmABMIL", {}),
    "sm_transformer": ("SmTransformerABMIL", {}),
}


class Trainee(Protocol):
    def prepare(self) -> None:
        """What is done once per slide."""

    def step(self) -> None:
        """One step of training."""


class Ours:
    def __init__(self, name: str, bag: Bag) -> None:
        outcome = Classification("label", ("no", "yes"), np.array([0, 1]))
        task = Task.fit(outcome)
        self.bag, self.model = bag, new_model(TrainingSettings(model=name), DIM, task.n_out)
        self.objective, self.target = Objective(self.model, task), task.targets(outcome)[1:]
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def prepare(self) -> None:
        needs_layout = getattr(self.model, "needs_layout", False)
        self.batch = PackedBags.of(self.bag, Layout.of(self.bag.xy) if needs_layout else None)
        start_epoch = getattr(self.model, "start_epoch", None)
        if start_epoch is not None:  # the last epoch of two, in which everything is trained that predicts
            self.model.eval()
            with torch.no_grad():
                start_epoch(1, 2, lambda: [self.batch])
        self.model.train()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.objective(Pass(self.batch, self.target)).backward()
        self.optimizer.step()


class Torchmil:
    def __init__(self, name: str, bag: Bag) -> None:
        import torchmil.models

        kind, options = TORCHMIL[name]
        if name != "gtp":
            options = {**options, "feat_ext": nn.Sequential(nn.Linear(DIM, EMBEDDED), nn.ReLU())}
        self.bag, self.model = bag, getattr(torchmil.models, kind)((DIM,), **options)
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def prepare(self) -> None:
        """D^-1/2 A D^-1/2, which the Sm models want and others can be given."""
        i, j = neighbour_pairs(self.bag.xy, self.bag.slides)
        degree = torch.bincount(i, minlength=self.bag.n).float()
        places, shape = torch.stack((torch.zeros_like(i), i, j)), (1, self.bag.n, self.bag.n)
        weights = (degree[i] * degree[j]).rsqrt()
        self.adjacency = torch.sparse_coo_tensor(places, weights, shape, check_invariants=True).coalesce()

    def step(self) -> None:
        self.optimizer.zero_grad()
        _, losses = self.model.compute_loss(torch.ones(1), self.bag.features[None], self.adjacency)
        total: Tensor = sum(losses.values(), torch.zeros(()))
        total.backward()
        self.optimizer.step()


def trainee(contender: str, bag: Bag) -> Trainee:
    if contender.startswith(THEIRS):
        return Torchmil(contender.removeprefix(THEIRS), bag)
    return Ours(contender, bag)


def random_bag(n: int) -> Bag:
    features = torch.randn(n, DIM, generator=torch.Generator().manual_seed(1))
    return Bag(features, Slide.random(n).xy.float())


@dataclass
class Row:
    """One model at one size."""

    contender: str
    n: int
    parameters: int
    skipped: str | None = None  # why
    prepare_s: float | None = None
    step_s: float | None = None
    minimum_s: float | None = None
    rounds: int | None = None
    peak_bytes: int | None = None  # over baseline, preparation and first step of a process
    second_peak_bytes: int | None = None  # the same once more, with all libraries loaded


def time_size(n: int, contenders: Sequence[str], smaller: Sequence[Row]) -> list[Row]:
    """All at one size, taking turns, but for those that would take too long."""
    bag, rows, calls = random_bag(n), [], {}
    for name in contenders:
        made = trainee(name, bag)
        assert isinstance(made, Ours | Torchmil)
        row = Row(name, n, sum(parameter.numel() for parameter in made.model.parameters()))
        rows.append(row)
        row.skipped = reason_to_skip(row, smaller)
        if row.skipped is None:
            calls[Job(f"preparation of {name}", n)] = uncounted(made.prepare)
            calls[Job(name, n)] = uncounted(made.step)
    timings = take_turns(calls)
    for row in rows:
        if row.skipped is None:
            row.prepare_s = timings[Job(f"preparation of {row.contender}", n)].median_s
            row.step_s, row.minimum_s, row.rounds = timings[Job(row.contender, n)]
    return rows


def uncounted(call: Callable[[], None]) -> Callable[[int], None]:
    """Without the number of the call, which it does not want."""
    return lambda number: call()


def reason_to_skip(row: Row, smaller: Sequence[Row]) -> str | None:
    if row.contender not in DENSE:
        return None
    before = [other for other in smaller if other.contender == row.contender and other.n < row.n]
    if not before:
        return None
    if before[-1].step_s is None:
        return f"O(n²) time, left out at {before[-1].n:,} tiles already"
    expected_s = before[-1].step_s * (row.n / before[-1].n) ** 2
    return f"O(n²) time: {expected_s / 60:.0f} min expected" if expected_s > HOPELESS_S else None


def measure_memory(rows: Sequence[Row], torchmil: Path | None) -> None:
    for i, row in enumerate(rows):
        if row.skipped is None:
            progress(f"memory, {i + 1} of {len(rows)}: {row.contender}, n = {row.n:,}")
            command = [sys.executable, __file__, "--probe", row.contender, "--sizes", str(row.n)]
            command += ["--torchmil", str(torchmil)] if torchmil else []
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode == 0:
                row.peak_bytes, row.second_peak_bytes = map(int, done.stdout.split())
            else:
                row.skipped = f"ended with code {done.returncode}, as for want of memory"


def print_peaks(contender: str, n: int) -> None:
    """In the fresh process."""
    bag = random_bag(n)

    def once(made: Trainee) -> None:
        made.prepare()
        made.step()

    for _ in range(2):
        print(peak_bytes(partial(once, trainee(contender, bag))))


def format_table(rows: Sequence[Row]) -> str:
    columns = "{:>7}  {:<24}{:>12}{:>11}{:>12}{:>11}{:>8}{:>9}{:>9}"
    lines = [
        f"One training step on one slide of {DIM}-d tiles, float32, one thread. Times in ms of CPU time.",
        "peak: MB over baseline, preparation included, in a fresh process; again: once more in that process.",
        "",
        columns.format("n", "model", "parameters", "prepare", "step", "min", "rounds", "peak", "again"),
    ]
    for before, row in zip([rows[0], *rows], rows, strict=False):
        if row.n != before.n:
            lines.append("")
        start = (f"{row.n:,}", row.contender, f"{row.parameters:,}")
        if row.skipped is not None:
            lines.append(columns.format(*start, *["–"] * 6) + f"  {row.skipped}")
            continue
        times = [f"{1e3 * (seconds or 0):.1f}" for seconds in (row.prepare_s, row.step_s, row.minimum_s)]
        peaks = ["–" if peak is None else f"{peak / 1e6:.0f}" for peak in (row.peak_bytes, row.second_peak_bytes)]
        lines.append(columns.format(*start, *times, row.rounds, *peaks))
    return "\n".join(lines)


def requirements(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Of every model of torchmil that was measured, how much more memory it takes than ours."""
    peaks = {row.contender: row.peak_bytes for row in rows if row.n == CLAIMED_TILES}
    found = []
    for name in TORCHMIL:
        ours, theirs = peaks.get(name), peaks.get(THEIRS + name)
        if ours and theirs:
            found.append(claim(f"times less memory, {name}", theirs / ours, ">=", LEAST_MEMORY_RATIO))
    return found


def plot(rows: Sequence[Row], path: Path) -> None:
    """Time and memory over n, in which every straight line is a power of n."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    names = list(dict.fromkeys(row.contender for row in rows))
    figure, axes = plt.subplots(1, 2, figsize=(11, 6.4))
    quantities: list[tuple[str, Callable[[Row], float | None]]] = [
        ("one training step, CPU seconds", lambda row: row.step_s),
        ("peak memory, MB over baseline", lambda row: row.peak_bytes and row.peak_bytes / 1e6),
    ]
    for axis, (title, value) in zip(axes, quantities, strict=True):
        for i, name in enumerate(names):
            points = [(row.n, y) for row in rows if row.contender == name and (y := value(row))]
            marker = "x" if name.startswith(THEIRS) else "osv^"[i // 10]
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
    figure.tight_layout(rect=(0, 0.16, 1, 1))
    figure.legend(handles, labels, loc="lower center", ncols=7, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    example = "example: python benchmarks/models.py --sizes 1000 --models psa abmil --out quick-results"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], epilog=example)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="tiles of a slide, ascending")
    parser.add_argument("--models", nargs="+", default=list_models(), choices=list_models(), metavar="MODEL")
    parser.add_argument("--torchmil", type=Path, help="folder into which torchmil 1.0.2 was installed")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    parser.add_argument("--probe", metavar="CONTENDER", help="print its peaks at the first size, and nothing else")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if args.torchmil is not None:
        sys.path.append(str(args.torchmil))  # after all other packages, of which it may hold copies
    if args.probe is not None:
        print_peaks(args.probe, args.sizes[0])
        return

    rows: list[Row] = []
    for n in args.sizes:
        theirs = [THEIRS + name for name in TORCHMIL if args.torchmil and n == CLAIMED_TILES and name in args.models]
        rows += time_size(n, [*args.models, *theirs], rows)
    measure_memory(rows, args.torchmil)
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
