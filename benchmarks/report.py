"""What benchmarks/attention.py tells: a table, a plot, and whether the attention is as fast and lean as it must be."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator

LABELS = {
    "lattice": "psamil, lattice",
    "continuous": "psamil, continuous",
    "pytorch": "psamil in PyTorch",
    "gather": "(a) authors' gather",
    "biased": "(b) SDPA with bias",
    "flash": "(c) SDPA, no prior",
}
COLOURS = {"lattice": "C0", "continuous": "C9", "pytorch": "C2", "gather": "C3", "biased": "C1", "flash": "0.35"}


@dataclass
class Row:
    """One contender on one slide at one radius."""

    contender: str
    n: int
    radius: int
    pairs: int  # within the radius, over all heads
    skipped_bytes: float | None = None  # expected memory, if that was too much
    prepare_s: float | None = None
    median_s: float | None = None
    minimum_s: float | None = None
    rounds: int | None = None
    peak_bytes: int | None = None  # over baseline, preparation and first step of a process
    second_peak_bytes: int | None = None  # the same once more, with all libraries loaded
    gemm_share: float | None = None


@dataclass
class Results:
    rows: list[Row]
    scaling: tuple[int, int]
    growth: float  # time per tile at the larger size of ``scaling`` over that at the smaller one
    gradient_difference: float

    def row(self, contender: str, n: int, radius: int) -> Row:
        """Raises LookupError if it was not measured."""
        found = [r for r in self.rows if (r.contender, r.n, r.radius) == (contender, n, radius) and r.median_s]
        if not found:
            raise LookupError(f"{contender}, n = {n}, K = {radius} was not measured")
        return found[0]

    def seconds(self, contender: str, n: int, radius: int, prepare: bool = False) -> float:
        row = self.row(contender, n, radius)
        return (row.median_s or 0.0) + (row.prepare_s or 0.0) * prepare

    def megabytes(self, contender: str, n: int, radius: int) -> float:
        row = self.row(contender, n, radius)
        if row.peak_bytes is None:
            raise LookupError(f"memory of {contender}, n = {n}, K = {radius} was not measured")
        return row.peak_bytes / 1e6


@dataclass
class Requirement:
    name: str
    relation: str  # ">=" or "<="
    bound: float
    value: float | None  # None: not measured in this run

    @property
    def passed(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.bound if self.relation == ">=" else self.value <= self.bound


def requirements(results: Results) -> list[Requirement]:
    """On a lattice unless said."""
    seconds, megabytes = results.seconds, results.megabytes

    def speedup(rival: str, n: int, radius: int, prepare: bool = False) -> float:
        return seconds(rival, n, radius, prepare) / seconds("lattice", n, radius, prepare)

    def slowest_of(n: int) -> float:
        return max(1 / speedup("flash", n, radius) for radius in {row.radius for row in results.rows})

    def continuous(radius: int) -> float:
        return seconds("continuous", 10_000, radius) / seconds("lattice", 10_000, radius)

    def growth() -> float:
        if results.scaling != (10_000, 100_000):
            raise LookupError("time per tile was compared at other sizes")
        return results.growth

    def memory_ratio() -> float:
        return megabytes("gather", 10_000, 7) / megabytes("lattice", 10_000, 7)

    cases: list[tuple[str, str, float, Callable[[], float]]] = [
        ("times faster than (a), 10k, K = 7", ">=", 14, lambda: speedup("gather", 10_000, 7)),
        ("times faster than (a), 10k, K = 15", ">=", 40, lambda: speedup("gather", 10_000, 15)),
        (
            "times faster than (a) with preparation, 10k, K = 7",
            ">=",
            40,
            lambda: speedup("gather", 10_000, 7, True),
        ),
        ("times faster than (c), 10k, K = 7", ">=", 7, lambda: speedup("flash", 10_000, 7)),
        ("times faster than (c), 20k, K = 7", ">=", 14, lambda: speedup("flash", 20_000, 7)),
        ("times faster than in PyTorch, 10k, K = 7", ">=", 2, lambda: speedup("pytorch", 10_000, 7)),
        ("times faster than in PyTorch, 10k, K = 15", ">=", 2, lambda: speedup("pytorch", 10_000, 15)),
        ("times less memory than (a), 10k, K = 7", ">=", 25, memory_ratio),
        ("MB over baseline, 100k, K = 25", "<=", 600, lambda: megabytes("lattice", 100_000, 25)),
        ("time per tile, 100k over 10k, K = 7", "<=", 1.3, growth),
        ("time over (c), 1k, worst K", "<=", 3, lambda: slowest_of(1_000)),
        ("time over (c), 2k, worst K", "<=", 3, lambda: slowest_of(2_000)),
        ("continuous over lattice, 10k, K = 7", "<=", 3, lambda: continuous(7)),
        ("continuous over lattice, 10k, K = 15", "<=", 3, lambda: continuous(15)),
    ]
    return [Requirement(name, relation, bound, _measured(value)) for name, relation, bound, value in cases]


def _measured(value: Callable[[], float]) -> float | None:
    try:
        return value()
    except LookupError:
        return None


def format_requirements(results: Results) -> str:
    words = {True: "pass", False: "FAIL", None: "not measured"}
    lines = ["", "Requirements"]
    for requirement in requirements(results):
        value = "" if requirement.value is None else f"{requirement.value:.4g}"
        wanted = f"{requirement.relation} {requirement.bound:g}"
        lines.append(f"  {requirement.name:<58}{value:>8}  {wanted:<8}{words[requirement.passed]}")
    return "\n".join(lines)


def format_table(results: Results) -> str:
    lines = [
        "Forward and backward, 3 heads x 32 dims, float32, one thread. Times in ms of CPU time.",
        "ratio: median over that of psamil on the lattice; +prep: the same with both preparations counted;",
        "peak: MB over baseline, preparation included, in a fresh process; again: once more in that process;",
        "GEMM: useful FLOP/s over those of a matrix product.",
        f"Gradients of psamil and (b) differ by {results.gradient_difference:.1e} (relative).",
        "",
    ]
    columns = "{:>7} {:>3}  {:<20}{:>8}{:>10}{:>10}{:>10}{:>7}{:>8}{:>8}{:>9}{:>7}{:>7}"
    names = ("n", "K", "contender", "pairs/M", "prepare", "median", "min", "rounds", "ratio", "+prep", "peak", "again")
    lines.append(columns.format(*names, "GEMM"))
    block = (results.rows[0].n, results.rows[0].radius)
    for row in results.rows:
        if (row.n, row.radius) != block:
            block = (row.n, row.radius)
            lines.append("")
        start = (f"{row.n:,}", row.radius, LABELS[row.contender], f"{row.pairs / 1e6:.2f}")
        if row.skipped_bytes:
            lines.append(columns.format(*start, *[""] * 9).rstrip() + f"   skipped ({row.skipped_bytes / 1e9:.1f} GB)")
            continue
        ratios = [
            results.seconds(row.contender, *block, prepare) / results.seconds("lattice", *block, prepare)
            for prepare in (False, True)
        ]
        times = [f"{1e3 * (seconds or 0):.1f}" for seconds in (row.prepare_s, row.median_s, row.minimum_s)]
        peaks = ["-" if peak is None else f"{peak / 1e6:.0f}" for peak in (row.peak_bytes, row.second_peak_bytes)]
        over = [f"{ratio:.2f}" for ratio in ratios]
        lines.append(columns.format(*start, *times, row.rounds, *over, *peaks, f"{row.gemm_share:.1%}"))
    return "\n".join(lines)


def plot(results: Results, path: Path) -> None:
    """Time over n, one panel per radius."""
    radii = sorted({row.radius for row in results.rows})
    figure, axes = plt.subplots(1, len(radii), figsize=(4.4 * len(radii), 4.8), sharey=True, squeeze=False)
    for axis, radius in zip(axes[0], radii, strict=True):
        for name, label in LABELS.items():
            rows = [row for row in results.rows if row.contender == name and row.radius == radius and row.median_s]
            sizes = [row.n for row in rows]
            steps = [results.seconds(name, n, radius) for n in sizes]
            style = {"color": COLOURS[name], "marker": "o", "markersize": 4, "linewidth": 1.8}
            axis.plot(sizes, steps, label=label + (", operator" if name == "gather" else ""), **style)
            if name == "gather":
                prepared = [results.seconds(name, n, radius, prepare=True) for n in sizes]
                axis.plot(sizes, prepared, label=f"{label}, with preparation", **style | {"linestyle": "--"})
        axis.set(xscale="log", yscale="log", title=f"K = {radius} tile steps", xlabel="tiles n")
        axis.grid(True, which="major", color="0.88")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        ticks = sorted({row.n for row in results.rows})
        axis.set_xticks(ticks, [f"{n // 1000}k" for n in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
    axes[0, 0].set_ylabel("forward + backward, CPU seconds")
    axes[0, 0].yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
