"""Time and memory of posterior attention, forward and backward, beside the authors' algorithm and torch's attention.

    python benchmarks/attention.py           # the full run: a table, results/attention.json and results/attention.png
    python benchmarks/attention.py --claims  # only what the requirements at its end are about: 4 minutes
    python benchmarks/attention.py --quick   # a small part of it, to try it out

One thread, float32, 3 heads of 32 dims, Gaussian prior, radii K - 0.3, K, K + 0.3. How it is measured:

- Time is CPU time of the process. All contenders on a slide take turns in one process, so that noise of the machine
  hits them alike; ratios are of medians of the same run. The first call of each is not counted, unless it is slow.
- Memory is measured in a fresh process per cell: the peak of preparation and one step, over what was there before.
- Useful work is 14 d FLOP per query-key pair within the radius (7 products of 2 d: two forward, five backward),
  compared with a square matrix product that takes turns with the rest.
"""

import argparse
import contextlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from contenders import CONTENDERS, DECAY, DIMS, GEMM_SIDE, HEADS, TAU, Contender, Slide, expected_bytes, thetas
from memory import probe
from report import Results, Row, format_requirements, format_table, plot, requirements

from psamil.spatial.reference import squared_radius

SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
RADII = (7, 15, 25)
SCALING = (10_000, 100_000)  # sizes whose time per tile is compared
LARGEST = {"pytorch": 20_000, "gather": 20_000, "biased": 20_000, "flash": 20_000}  # beyond, the time is hopeless
MEMORY_LIMIT = 10e9  # bytes
SLOW = 5.0  # seconds
CLAIMED_MEMORY = {("lattice", 10_000, 7), ("gather", 10_000, 7), ("lattice", 100_000, 25)}
CLAIMED = {
    *CLAIMED_MEMORY,
    *((name, n, radius) for name in ("lattice", "flash") for n in (1_000, 2_000) for radius in RADII),
    *((name, 10_000, radius) for name in ("lattice", "continuous", "pytorch", "gather") for radius in (7, 15)),
    *((name, n, 7) for name in ("lattice", "flash") for n in (10_000, 20_000)),
}


class Job(NamedTuple):
    """What is timed. No radius: the contender has none, or it is a preparation."""

    name: str
    n: int
    radius: int | None = None


class Timing(NamedTuple):
    median_s: float
    minimum_s: float
    rounds: int


def main() -> None:
    example = "example: python benchmarks/attention.py --quick --out quick-results"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], epilog=example)
    parser.add_argument("--quick", action="store_true", help="small slides and little memory, in about a minute")
    parser.add_argument("--claims", action="store_true", help="only what the requirements are about; no plot")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    args.out.mkdir(parents=True, exist_ok=True)

    sizes, radii, scaling = (SIZES[:2], RADII[:2], SIZES[:2]) if args.quick else (SIZES, RADII, SCALING)
    wanted = CLAIMED if args.claims else None
    rows = [row for n in sizes for row in time_slide(n, radii, wanted)]
    growth = compare_time_per_tile(scaling, radii[0])
    if args.claims:
        measure_memory([row for row in rows if (row.contender, row.n, row.radius) in CLAIMED_MEMORY])
    else:
        measure_memory([row for row in rows if not args.quick or (row.n, row.radius) == (sizes[-1], radii[0])])
    progress("")
    results = Results(rows, scaling, growth, gradient_difference(sizes[0], radii[0]))

    print(format_table(results))
    print(format_requirements(results))
    name = "attention-claims" if args.claims else "attention"
    (args.out / f"{name}.json").write_text(json.dumps(as_json(results), indent=1) + "\n")
    print(f"\nsaved {args.out / name}.json")
    if not args.claims:
        plot(results, args.out / "attention.png")
        print(f"saved {args.out / 'attention.png'}")


def time_slide(n: int, radii: Sequence[int], wanted: Container[tuple[str, int, int]] | None = None) -> list[Row]:
    """All contenders and radii on one slide, or those wanted, taking turns."""
    if wanted is not None and not any((name, n, radius) in wanted for name in CONTENDERS for radius in radii):
        return []
    slide = Slide.random(n)
    rows: list[Row] = []
    for radius in radii:
        keep_d2 = squared_radius(DECAY, thetas(radius), TAU).tolist()
        pairs = {continuous: slide.count_pairs(keep_d2, continuous) for continuous in (False, True)}
        for name in CONTENDERS:
            if wanted is not None and (name, n, radius) not in wanted:
                continue
            if name != "gemm" and n <= LARGEST.get(name, n):
                expected = expected_bytes(name, n, radius)
                kept = HEADS * n**2 if name == "flash" else pairs[name == "continuous"]
                rows.append(Row(name, n, radius, kept, expected if expected > MEMORY_LIMIT else None))
    gemm = Job("gemm", n)
    timings = take_turns(calls_of(slide, [*(step_of(row) for row in rows if not row.skipped_bytes), gemm]))
    peak_flops = 2 * GEMM_SIDE**3 / timings[gemm].median_s
    for row in rows:
        if not row.skipped_bytes:
            row.prepare_s = timings[preparation_of(row.contender, n)].median_s
            row.median_s, row.minimum_s, row.rounds = timings[step_of(row)]
            row.gemm_share = 14 * DIMS * row.pairs / row.median_s / peak_flops
    return rows


def compare_time_per_tile(sizes: tuple[int, int], radius: int) -> float:
    """At the larger size over that at the smaller one, the two taking turns."""
    jobs = [Job("lattice", n, radius) for n in sizes]
    timings = take_turns({job: call for j in jobs for job, call in calls_of(Slide.random(j.n), [j]).items()})
    small, large = (timings[job].median_s / job.n for job in jobs)
    return large / small


def step_of(row: Row) -> Job:
    """Without a prior there is no radius: one measurement serves all."""
    return Job(row.contender, row.n, None if row.contender == "flash" else row.radius)


def preparation_of(contender: str, n: int) -> Job:
    return Job(f"preparation of {contender}", n)


def calls_of(slide: Slide, steps: Sequence[Job]) -> dict[Job, Callable[[int], object]]:
    """These steps and, before those of each contender, its preparation: to be called with the number of the call."""
    calls: dict[Job, Callable[[int], object]] = {}
    for name in dict.fromkeys(job.name for job in steps):
        contender = CONTENDERS[name](slide)
        calls[preparation_of(name, len(slide.xy))] = partial(_prepare, contender)
        calls |= {job: partial(_step, contender, job.radius or RADII[0]) for job in steps if job.name == name}
    return calls


def _prepare(contender: Contender, call: int) -> None:
    contender.prepare()


def _step(contender: Contender, radius: int, call: int) -> None:
    contender.step(thetas(radius, call))


def take_turns(calls: Mapping[Job, Callable[[int], object]]) -> dict[Job, Timing]:
    """Calls everything several times, round-robin."""
    seconds: dict[Job, list[float]] = {job: [] for job in calls}
    rounds = dict.fromkeys(calls, 1)
    for turn in range(10):
        for job, call in calls.items():
            if len(seconds[job]) == rounds[job]:
                continue
            progress(f"time, n = {job.n:,}, round {turn}: {job.name}{f', K = {job.radius}' if job.radius else ''}")
            start = time.process_time()
            call(turn)
            taken = time.process_time() - start
            if turn == 0 and taken <= SLOW:
                continue  # a warm-up
            if not seconds[job]:
                rounds[job] = 2 if taken > SLOW else 5 if taken > SLOW / 10 else 9
            seconds[job].append(taken)
    return {job: Timing(statistics.median(s), min(s), len(s)) for job, s in seconds.items()}


def measure_memory(rows: Sequence[Row]) -> None:
    """Fills in the peaks. Where they do not depend on the radius, one measurement serves all."""
    peaks: dict[Job, tuple[int, int] | None] = {}
    for i, row in enumerate(rows):
        if not row.skipped_bytes:
            progress(f"memory, {i + 1} of {len(rows)}: {row.contender}, n = {row.n:,}, K = {row.radius}")
            job = Job(row.contender, row.n, None if row.contender in ("biased", "flash") else row.radius)
            if job not in peaks:
                peaks[job] = probe(row.contender, row.n, row.radius)
            row.peak_bytes, row.second_peak_bytes = peaks[job] or (None, None)


def gradient_difference(n: int, radius: int) -> float:
    """Relative difference of gradients between ours and torch's attention with the prior as a bias."""
    slide = Slide.random(n)
    ours, biased = CONTENDERS["lattice"](slide), CONTENDERS["biased"](slide)
    ours.prepare()
    biased.prepare()
    pairs = zip(ours.step(thetas(radius)), biased.step(thetas(radius)), strict=True)
    aligned = [(a, b.transpose(0, 1) if b.ndim == 3 else b) for a, b in pairs]  # (n, heads, d), or theta's (heads,)
    return max(float((a - b).norm() / b.norm()) for a, b in aligned)


def as_json(results: Results) -> dict[str, object]:
    return {
        "machine": {"cpu": cpu_name(), "torch": torch.__version__, "python": platform.python_version()},
        "setting": {"threads": 1, "heads": HEADS, "dims": DIMS, "tau": TAU, "decay": DECAY.name, "dtype": "float32"},
        "gradient_difference": results.gradient_difference,
        "time_per_tile": {"sizes": results.scaling, "ratio": results.growth},
        "requirements": [vars(requirement) | {"passed": requirement.passed} for requirement in requirements(results)],
        "rows": [vars(row) for row in results.rows],
    }


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def progress(line: str) -> None:
    """One line on stderr that is written over."""
    print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
