"""What a cohort of 10,000 and of 1,000,000 slides takes, from rates that were measured on one core.

python benchmarks/cluster.py            # the tables of docs/how-to/cluster.md, from results/*.json
python benchmarks/cluster.py --measure  # measures first what jobs and records cost, into results/cluster.json

Everything is proportional: hours are those of all cores together, whatever their number. What a shared file system
gives is not known here; the tables say what it would have to give.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results"
COHORTS = (10_000, 1_000_000)  # slides
TILES = 10_000  # per slide
DIM, BYTES = 1280, 4  # of the embedded encoder
FOLDS, EPOCHS = 5, 20
TRAIN_SHARE = 0.8 * 0.8  # of the slides: neither test nor validation
EMPTY_JOBS, RECORDS = 2_000, 5_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    if parser.parse_args().measure:
        measured = {"jobs_per_s": jobs_per_s(), "records_per_s": records_per_s()}
        (RESULTS / "cluster.json").write_text(json.dumps(measured, indent=1) + "\n")
    for row in table():
        print(f"| {' | '.join(row)} |")


def table() -> list[list[str]]:
    extraction, training, loading, cluster = (read(name) for name in ("extraction", "training", "loading", "cluster"))
    turns = extraction["turns"]
    tiles_per_s = median(turn["tiles"] / turn["pipeline_s"] for turn in turns)
    reading_s = extraction["reading_cpu_ms_per_tile"] / 1e3
    cpu_s_per_slide = TILES * (1 / tiles_per_s + reading_s)
    setting = loading["setting"]
    cache_bytes_per_s = setting["slides"] * setting["tiles"] * setting["dim"] * 2 / loading["build_s"]
    slide_bytes = TILES * DIM * BYTES
    rows = [["", *(f"{slides:,} slides" for slides in COHORTS)]]

    def add(what: str, values: list[str]) -> None:
        rows.append([what, *values])

    add("features, float32", [size(n * slide_bytes) for n in COHORTS])
    add("extraction, core hours", [hours(n * cpu_s_per_slide) for n in COHORTS])
    add("extraction on 64 cores, hours", [hours(n * cpu_s_per_slide / 64) for n in COHORTS])
    add("jobs of an extraction", [f"{n / slides_per_job(n):,.0f}" for n in COHORTS])
    add("Ray's time for them, hours", [hours(n / slides_per_job(n) / cluster["jobs_per_s"]) for n in COHORTS])
    add("tables at the end, hours", [hours(n / cluster["records_per_s"]) for n in COHORTS])
    add("reading every slide once (one process), hours", [hours(n * slide_bytes / cache_bytes_per_s) for n in COHORTS])
    for preset in ("paper-demo", "paper-crc"):
        slide_s = training["presets"][preset]["seconds_per_slide"]["psamil"]["total"]
        of_job = [n * TRAIN_SHARE * EPOCHS * slide_s for n in COHORTS]
        add(f"training {preset}: one job, {EPOCHS} epochs, hours", [hours(s) for s in of_job])
        add(f"training {preset}: {FOLDS} folds, core hours", [hours(s * FOLDS) for s in of_job])
        rate = size(slide_bytes / slide_s)
        add(f"training {preset}: reads per second and job", [rate] * len(COHORTS))
    return rows


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def slides_per_job(slides: int) -> int:
    from psamil.cluster.extraction import slides_per_job

    return slides_per_job(slides)


def size(value: float) -> str:
    unit = next(unit for unit in ("MB", "GB", "TB") if value < 1e3 * UNITS[unit] or unit == "TB")
    return f"{value / UNITS[unit]:.3g} {unit}"


UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12}


def hours(seconds: float) -> str:
    value = seconds / 3600
    return "< 0.1" if value < 0.1 else f"{value:,.1f}" if value < 10 else f"{value:,.0f}"


def jobs_per_s() -> float:
    """Jobs without work on a Ray cluster of this computer, once its workers have started."""
    import ray

    from psamil.cluster.engine import Job, connected, run_jobs

    with connected(None):
        cpus = int(ray.cluster_resources()["CPU"])
        run_jobs([Job(str(i), time.sleep, 1) for i in range(cpus)])
        start_s = time.perf_counter()
        run_jobs([Job(str(i), time.sleep, 0) for i in range(EMPTY_JOBS)])
        return EMPTY_JOBS / (time.perf_counter() - start_s)


def records_per_s() -> float:
    """Records of slides that become the tables of an extraction."""
    from psamil.slides.extraction_record import SlideRecord, write_tables

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        for i in range(RECORDS):
            SlideRecord(f"slide-{i}", f"slides/slide-{i}.svs", "done", quality={"tissue_share": 0.3}).write(out)
        start_s = time.perf_counter()
        write_tables(out)
        return RECORDS / (time.perf_counter() - start_s)


if __name__ == "__main__":
    main()
