"""From slides to features: the whole pipeline against the encoder alone, and peak memory by the size of a slide.

    python benchmarks/extraction.py                          # 6 drawn slides, 3 turns; some minutes
    python benchmarks/extraction.py --slides 2 --turns 1     # a small part of it, to try it out
    python benchmarks/extraction.py --probe slide.tif        # one slide: tiles, peak bytes of encoding and of reading

How speed is measured:

- The pipeline is everything that ``psamil extract`` does once the encoder is loaded: starting the reading process,
  finding tissue, drawing pictures, reading JPEG tiles, encoding, writing. Nothing is left out of its time. Slides are
  drawn, 0.5 um per pixel, with about 110 tiles each: small ones, so that their ends weigh more than in a real cohort.
- The encoder alone gets random tensors of the same number of tiles and batches, in the same process.
- Both use one thread for the encoder. The pipeline has one reading process besides: a fair comparison needs a second
  core for it, as a graphics card has cores beside it. What reading costs is shown apart, as seconds of CPU per tile.
  Where encoder and readers have to share cores, the pipeline is slower by that share, and no order of work can change
  it.
- They take turns; the ratio is of neighbouring turns, and its median counts. On a machine that is busy with something
  else, wall-clock times of two processes say little: the ratio of the CPU time of this process is shown, too. It says
  what the pipeline costs beside the encoder, without what it waits for.

How memory is measured: a fresh process for each slide extracts one that is 2,000 or 100,000 px wide (and 2,000 or
20,000 high), with an encoder of no size. Peaks are of the process that encodes, and of the one that reads.
"""

import argparse
import itertools
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import torch
from attention import cpu_name, progress
from loading import claim

from psamil.files import write_json
from psamil.slides.encoders import Encoder, Preprocessing, load_encoder
from psamil.slides.extraction import Step, extract
from psamil.slides.procedural import draw_slides
from psamil.slides.slide import find_slides
from psamil.slides.tiling import TileGrid

LEAST_RATIO, MOST_GROWTH = 0.85, 1.1
SIZES_PX0 = {2_000: 2_000, 100_000: 20_000}  # width: height
TISSUE_HEIGHT_PX0 = 1_024
SEGMENT_PX, LEVEL_STEP = 256, 8
MPP = 0.5


def main() -> None:
    example = "example: python benchmarks/extraction.py --slides 2 --turns 1 --out quick-results"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], epilog=example)
    parser.add_argument("--slides", type=int, default=6)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--probe", type=Path, help="slide whose extraction takes how much memory")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.probe is not None:
        print(*probe(args.probe))
        return
    with tempfile.TemporaryDirectory() as folder:
        turns = measure_speed(Path(folder), args.slides, args.turns, args.batch)
        memory = measure_memory(Path(folder))
    progress("")
    ratio = statistics.median(turn["encoder_s"] / turn["pipeline_s"] for turn in turns)
    cpu_ratio = statistics.median(turn["encoder_cpu_s"] / turn["pipeline_cpu_s"] for turn in turns)
    reading_ms = statistics.median(1e3 * turn["reading_cpu_s"] / turn["tiles"] for turn in turns)
    print(f"{'turn':<6}{'tiles':>7}{'pipeline/s':>12}{'encoder/s':>11}{'ratio':>8}{'ratio of CPU':>14}")
    for i, turn in enumerate(turns):
        rates = [turn["tiles"] / turn[name] for name in ("pipeline_s", "encoder_s")]
        cpu = turn["encoder_cpu_s"] / turn["pipeline_cpu_s"]
        print(f"{i:<6}{turn['tiles']:>7.0f}{rates[0]:>12.1f}{rates[1]:>11.1f}{rates[0] / rates[1]:>8.2f}{cpu:>14.2f}")
    print(f"reading takes {reading_ms:.1f} ms of CPU per tile, with the start of the process and all pictures\n")
    print(f"{'width px':<10}{'tiles':>8}{'encoding MB':>13}{'reading MB':>12}")
    for width, row in memory.items():
        print(f"{width:<10,}{row['tiles']:>8,}{row['encoding'] / 1e6:>13.0f}{row['reading'] / 1e6:>12.0f}")
    small, large = (row["encoding"] + row["reading"] for row in memory.values())
    claims = [
        claim("pipeline over encoder alone", ratio, ">=", LEAST_RATIO),
        claim("memory of the largest slide", large / small, "<=", MOST_GROWTH),
    ]
    results = {
        "machine": {"cpu": cpu_name(), "torch": torch.__version__, "python": platform.python_version()},
        "setting": {"slides": args.slides, "turns": args.turns, "batch": args.batch, "workers": 1, "threads": 1},
        "turns": turns,
        "ratio": ratio,
        "ratio_of_cpu": cpu_ratio,
        "reading_cpu_ms_per_tile": reading_ms,
        "memory_bytes": memory,
        "requirements": claims,
    }
    write_json(args.out / "extraction.json", results)
    print(f"saved {args.out / 'extraction.json'}")


def measure_speed(folder: Path, slides: int, turns: int, batch: int) -> list[dict[str, float]]:
    """Seconds of both in each turn, wall clock and CPU."""
    draw_slides(folder / "cohort", slides=max(2, slides))
    paths = find_slides(folder / "cohort" / "slides")[:slides]
    encoder = load_encoder("efficientnet-lite0")
    encode_random(encoder, batch, batch)  # what is done on first use
    rows = []
    for turn in range(turns):
        progress(f"turn {turn + 1} of {turns}: pipeline")
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        outcome = extract(paths, folder / f"features-{turn}", encoder, workers=1, batch=batch)
        pipeline_s, pipeline_cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if outcome.failed:
            sys.exit(f"slides failed: {outcome.failed}")
        progress(f"turn {turn + 1} of {turns}: encoder alone")
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        encode_random(encoder, outcome.tiles, batch)
        rows.append(
            {
                "tiles": outcome.tiles,
                "pipeline_s": pipeline_s,
                "pipeline_cpu_s": pipeline_cpu_s,
                "reading_cpu_s": after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime,
                "encoder_s": time.perf_counter() - start_s,
                "encoder_cpu_s": time.process_time() - start_cpu_s,
            }
        )
    return rows


def encode_random(encoder: Encoder, tiles: int, batch: int) -> None:
    side = TileGrid().size_px
    images = torch.randint(0, 256, (batch, side, side, 3), dtype=torch.uint8)
    for first in range(0, tiles, batch):
        encoder.encode(images[: min(batch, tiles - first)])


def measure_memory(folder: Path) -> dict[int, dict[str, int]]:
    rows = {}
    for width, height in SIZES_PX0.items():
        progress(f"memory: a slide {width:,} px wide")
        slide = folder / f"{width}.tif"
        write_large_slide(slide, width, height)
        done = subprocess.run([sys.executable, __file__, "--probe", slide], stdout=subprocess.PIPE, check=True)
        rows[width] = dict(zip(("tiles", "encoding", "reading"), map(int, done.stdout.split()), strict=True))
    return rows


def probe(slide: Path) -> tuple[int, int, int]:
    """Tiles, and peaks in bytes of this process and of the one that reads."""
    network = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    peaks = [0]

    def look(step: Step) -> None:
        """Its own high-water mark; that of ended children, which the system keeps, begins with the parent's memory."""
        peaks.extend(high_water_bytes(child.pid) for child in psutil.Process().children())

    with tempfile.TemporaryDirectory() as out:
        outcome = extract([slide], Path(out), Encoder("mean", network, Preprocessing(224)), workers=1, report=look)
    if outcome.failed:
        sys.exit(f"{slide}: {outcome.failed}")
    return outcome.tiles, high_water_bytes(os.getpid()), max(peaks)


def high_water_bytes(pid: int) -> int:
    """Needs /proc."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def write_large_slide(path: Path, width: int, height: int) -> None:
    """A pyramid with a strip of tissue on white, written segment by segment: the same one again and again."""
    import tifffile

    random = np.random.default_rng(0)
    tissue = np.array([190, 100, 160]) + random.integers(-30, 30, (SEGMENT_PX // 8, SEGMENT_PX // 8, 1))
    stained = zlib.compress(tissue.astype(np.uint8).repeat(8, 0).repeat(8, 1).tobytes())
    white = zlib.compress(np.full((SEGMENT_PX, SEGMENT_PX, 3), 245, np.uint8).tobytes())
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for level in itertools.count():
            downsample = LEVEL_STEP**level
            columns, rows = (side // downsample for side in (width, height))
            file.write(
                _segments(columns, rows, TISSUE_HEIGHT_PX0 // downsample, stained, white),
                shape=(rows, columns, 3),
                dtype="uint8",
                tile=(SEGMENT_PX, SEGMENT_PX),
                compression="adobe_deflate",
                photometric="rgb",
                subfiletype=int(level > 0),
                resolution=(1e4 / MPP / downsample,) * 2,
                resolutionunit="CENTIMETER",
                metadata=None,
            )
            if max(columns, rows) <= 2 * SEGMENT_PX:
                return


def _segments(columns: int, rows: int, stained_rows: int, stained: bytes, white: bytes) -> Iterator[bytes]:
    """Row by row; tissue is in the rows of segments that begin above ``stained_rows``."""
    for y in range(0, rows, SEGMENT_PX):
        yield from itertools.repeat(stained if y < stained_rows else white, -(-columns // SEGMENT_PX))


if __name__ == "__main__":
    main()
