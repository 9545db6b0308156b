"""One epoch of reading a cohort: TRIDENT's files by h5py, through the cache, and as contiguous .npy files.

    python benchmarks/loading.py                           # 50 slides x 10,000 tiles x 1024, float16
    python benchmarks/loading.py --slides 5 --tiles 2000   # a small part of it, to try it out

How it is measured:

- Every contender reads features and coordinates of every slide and then adds all features up, as 64-bit integers, so
  that each byte has really arrived in memory: the cache and ``.npy (mapped)`` map files, the others copy them. What the
  adding alone costs, on features already in memory, is shown as a contender of its own.
- Contenders take turns slide by slide in one process, so that noise of the machine hits them alike. Files are in the
  page cache of the system for all of them (the first epoch is not counted). Times are wall-clock sums over one epoch,
  the median of the epochs; ratios are of one epoch, and their median.
- Building the cache is timed apart: it happens once.
- Two claims are checked: the cache is faster than h5py by ``LEAST_SPEEDUP``, and takes at most ``MOST_OVER_NPY`` times
  as long as ``.npy`` files that are copied into memory. Mapped ``.npy`` files are shown for comparison only.
"""

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import torch
from attention import cpu_name, progress

from psamil.cohort.cache import BagCache
from psamil.cohort.simulation import STEP_PX0, write_trident_bag
from psamil.files import write_json

CONTENDERS = ("h5py", "cache", ".npy", ".npy (mapped)", "adding alone")
LEAST_SPEEDUP, MOST_OVER_NPY = 8.0, 1.5
Arrays = tuple[np.ndarray, np.ndarray]


def main() -> None:
    example = "example: python benchmarks/loading.py --slides 5 --tiles 2000 --out quick-results"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], epilog=example)
    parser.add_argument("--slides", type=int, default=50)
    parser.add_argument("--tiles", type=int, default=10_000, help="of each slide")
    parser.add_argument("--dim", type=int, default=1024, help="width of the features, a multiple of 4")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16")
    parser.add_argument("--epochs", type=int, default=3, help="that are counted")
    parser.add_argument("--folder", type=Path, help="of the files, 3 x the bytes of all features; default: temporary")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        files = write_cohort(Path(folder), args.slides, args.tiles, args.dim, args.dtype)
        cache = BagCache(Path(folder) / "cache")
        build_s = build(cache, files)
        epochs = [read_epoch(cache, files, f"epoch {i} of {args.epochs}") for i in range(args.epochs + 1)][1:]
    progress("")
    seconds = {name: statistics.median(epoch[name] for epoch in epochs) for name in CONTENDERS}
    over_cache = {name: statistics.median(epoch[name] / epoch["cache"] for epoch in epochs) for name in CONTENDERS}
    over_npy = statistics.median(epoch["cache"] / epoch[".npy"] for epoch in epochs)
    gigabytes = args.slides * args.tiles * args.dim * np.dtype(args.dtype).itemsize / 1e9
    print(f"{args.slides} slides x {args.tiles:,} tiles x {args.dim} {args.dtype}: {gigabytes:.2f} GB of features")
    print(f"{'contender':<16}{'s/epoch':>9}{'ms/slide':>10}{'GB/s':>7}{'over cache':>12}")
    for name in CONTENDERS:
        per_slide = f"{1e3 * seconds[name] / args.slides:.2f}"
        rate = f"{gigabytes / seconds[name]:.1f}"
        print(f"{name:<16}{seconds[name]:>9.3f}{per_slide:>10}{rate:>7}{over_cache[name]:>12.2f}")
    print(f"building the cache, once: {build_s:.1f} s\n")
    claims = [
        claim("times faster than h5py", over_cache["h5py"], ">=", LEAST_SPEEDUP),
        claim("time over that of copied .npy", over_npy, "<=", MOST_OVER_NPY),
    ]
    results = {
        "machine": {"cpu": cpu_name(), "torch": torch.__version__, "python": platform.python_version()},
        "setting": {key: value for key, value in vars(args).items() if key not in ("folder", "out")},
        "build_s": build_s,
        "seconds_per_epoch": seconds,
        "over_cache": over_cache,
        "requirements": claims,
    }
    write_json(args.out / "loading.json", results)
    print(f"saved {args.out / 'loading.json'}")


def claim(name: str, value: float, relation: str, bound: float) -> dict[str, object]:
    passed = value >= bound if relation == ">=" else value <= bound
    print(f"  {name:<30}{value:>8.2f}  {relation} {bound:<6g}{'pass' if passed else 'FAIL'}")
    return {"name": name, "value": value, "relation": relation, "bound": bound, "passed": passed}


def write_cohort(folder: Path, slides: int, tiles: int, dim: int, dtype: str) -> list[Path]:
    """TRIDENT's files, and the same arrays as .npy files in ``folder/npy``."""
    files = []
    (folder / "npy").mkdir()
    side = int(np.ceil(np.sqrt(tiles)))
    coords = np.stack(np.divmod(np.arange(tiles), side)[::-1], 1) * STEP_PX0
    for i in range(slides):
        progress(f"writing slide {i + 1} of {slides}")
        random = np.random.default_rng(i)
        features = random.standard_normal((tiles, dim), dtype=np.float32).astype(dtype)
        files.append(write_trident_bag(folder / "job", "benchmark", f"slide_{i:03d}", features, coords))
        for name, array in (("features", features), ("coords", coords)):
            np.save(folder / "npy" / f"slide_{i:03d}_{name}.npy", array)
    return files


def build(cache: BagCache, files: list[Path]) -> float:
    start = time.perf_counter()
    for i, file in enumerate(files):
        progress(f"building the cache: slide {i + 1} of {len(files)}")
        cache.load(file)
    return time.perf_counter() - start


def read_epoch(cache: BagCache, files: list[Path], what: str) -> dict[str, float]:
    """Seconds of each contender over all slides; all must have read the same."""
    seconds = dict.fromkeys(CONTENDERS, 0.0)
    resident: dict[str, np.ndarray] = {}
    for turn, file in enumerate(files):
        progress(f"{what}: slide {turn + 1} of {len(files)}")
        npy = file.parents[3] / "npy"
        reads: dict[str, Callable[[], Arrays]] = {
            "h5py": lambda file=file: read_h5(file),
            "cache": lambda file=file: read_cache(cache, file),
            ".npy": lambda npy=npy, file=file: read_npy(npy, file.stem, None),
            ".npy (mapped)": lambda npy=npy, file=file: read_npy(npy, file.stem, "r"),
        }
        sums = set()
        names = list(reads)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:  # nobody always goes first
            start = time.perf_counter()
            features, coords = reads[name]()
            sums.add((add_up(features), len(coords)))
            seconds[name] += time.perf_counter() - start
            if name == ".npy":
                resident["features"] = features
        start = time.perf_counter()
        sums.add((add_up(resident["features"]), len(resident["features"])))
        seconds["adding alone"] += time.perf_counter() - start
        if len(sums) != 1:
            sys.exit(f"contenders read different features of {file}")
    return seconds


def read_h5(file: Path) -> Arrays:
    with h5py.File(file) as h5:
        return h5["features"][:], h5["coords"][:]


def read_cache(cache: BagCache, file: Path) -> Arrays:
    bag = cache.load(file)
    return bag.features.numpy(), bag.xy.numpy()


def read_npy(folder: Path, slide: str, mmap_mode: str | None) -> Arrays:
    return np.load(folder / f"{slide}_features.npy", mmap_mode), np.load(folder / f"{slide}_coords.npy")


def add_up(features: np.ndarray) -> int:
    return int(features.reshape(-1).view(np.int64).sum())


if __name__ == "__main__":
    main()
