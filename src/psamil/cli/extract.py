"""``psamil extract``: from a folder of slides to a folder of features."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from psamil.cli.engine import chosen_engine, stopped_by_sigterm
from psamil.cli.extraction_progress import ExtractionProgress
from psamil.cluster.extraction import SlideWork, extract_as_jobs
from psamil.errors import DataError
from psamil.readers import slide_id
from psamil.slides.encoders import load_encoder
from psamil.slides.encoders.registry import DEFAULT_ENCODER
from psamil.slides.extraction import Outcome
from psamil.slides.extraction import extract as extract_slides
from psamil.slides.extraction_record import FAILURES, QUALITY
from psamil.slides.mpp_table import read_mpp_table, unmatched
from psamil.slides.slide import find_slides
from psamil.slides.tiling import TileGrid

CPU_BATCH, GPU_BATCH = 16, 64  # tiles; activations of few fit into the caches of a CPU
ALL_DONE, SOME_FAILED, OTHERS_AT_WORK = 0, 1, 3


def extract(
    slides: Path,
    *,
    out: Path = Path("features"),
    encoder: str = DEFAULT_ENCODER,
    weights: Path | None = None,
    target_mpp: float = 0.5,
    tile_px: int = 224,
    tile_um: float | None = None,
    overlap_px: int = 0,
    least_tissue: float = 0.25,
    mpp: float | None = None,
    mpp_table: Path | None = None,
    masks: Path | None = None,
    workers: int | None = None,
    batch: int | None = None,
    device: str = "auto",
    precision: str = "float32",
    engine: str = "local",
    address: str | None = None,
    cpus_per_job: int = 1,
    gpus_per_job: float = 0,
) -> int:
    """Finds the tissue of slides, cuts it into tiles, and writes the features of a frozen encoder in TRIDENT's layout.

    Example: psamil extract slides --out features --encoder efficientnet-lite0 --target-mpp 0.5 --tile-px 224

    What is finished is not done again; slides that failed are. Several processes may work on the same folder. The exit
    code is 0 if all slides are done, 1 if some failed (features/failures.csv says why), and 3 if others are still at
    work on the last ones.

    Args:
        slides: a slide, or a folder of slides.
        out: folder of the features, of one encoder and one kind of tiles.
        encoder: its name, a folder or "python:module:function".
        weights: file of the weights, for an encoder given by name.
        target_mpp: micrometres per pixel at which tiles are read.
        tile_px: side of a tile in these pixels.
        tile_um: side of a tile in micrometres, instead of tile_px.
        overlap_px: of neighbouring tiles, in pixels of a tile.
        least_tissue: share of a tile that has to be tissue.
        mpp: micrometres per pixel of the scans, whatever they say themselves.
        mpp_table: table with columns slide and mpp, for scans that differ.
        masks: folder with <slide>.geojson, .png, .tif or .npy for each slide, instead of a search for tissue.
        workers: processes that read slides; by default a quarter of the cores, or most of them beside a graphics card.
        batch: tiles that are encoded together; by default 16 on a CPU, whose caches are small, else 64.
        device: where to encode, as torch names it; "auto" is the graphics card, where there is one.
        precision: "float32", or "bfloat16" or "float16" for mixed precision.
        engine: "local", or "ray": a slide, or a few of thousands, is a job, on a Ray cluster.
        address: of the Ray cluster; "auto" is that of this node. Without it, one is started on this computer.
        cpus_per_job: with Ray, the CPUs and threads of a job.
        gpus_per_job: with Ray, the graphics cards of a job; 0.5 lets two jobs share one.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    grid = TileGrid(target_mpp, tile_px, tile_um, overlap_px, least_tissue)
    found = find_slides(slides)
    if masks is not None and not masks.is_dir():
        raise DataError(masks, "is no folder", "name the folder of the masks")
    mpp_of = read_mpp_table(mpp_table) if mpp_table is not None else {}
    unknown = unmatched(mpp_of, map(slide_id, found))
    tell = partial(console.print, markup=False)
    run_jobs = chosen_engine(engine, address, cpus_per_job, gpus_per_job, tell)
    if run_jobs is None:
        device = chosen_device(device)
        workers = reading_processes(workers, device)
        frozen = load_encoder(encoder, weights=weights, device=device, precision=precision)
    else:  # nodes need not have what this computer has: here the encoder is only looked at
        device = ("cuda" if gpus_per_job else "cpu") if device == "auto" else device
        workers = usual_processes(cpus_per_job, device) if workers is None else workers
        frozen = load_encoder(encoder, weights=weights)
    if batch is None:
        batch = CPU_BATCH if device == "cpu" else GPU_BATCH
    console.print(
        f"{len(found)} slides, {frozen.name} ({frozen.dim} features; licence: {frozen.licence}) on {device}, "
        f"tiles of {grid.size_px} px at {grid.mpp:g} um, {workers} reading processes",
        markup=False,
    )
    if frozen.mpp is not None and (frozen.mpp, frozen.tile_px) != (grid.mpp, grid.size_px):
        own = f"tiles of {frozen.tile_px} px at {frozen.mpp:g} um"
        console.print(f"Note: {frozen.name} was trained on {own}.", markup=False)
    if unknown:
        console.print(f"Warning: {mpp_table} names no slide of {slides}: {_some(unknown)}.", markup=False)
    how: dict[str, Any] = {"mpp": mpp, "mpp_of": mpp_of, "masks": masks, "workers": workers, "batch": batch}
    if run_jobs is None:
        with stopped_by_sigterm(), ExtractionProgress(console) as shown:
            outcome = extract_slides(found, out, frozen, grid, **how, report=shown.report)
    else:
        work = SlideWork(out, encoder, grid, weights, device, precision, **how)
        work.claim(frozen)
        outcome = extract_as_jobs(found, work, run_jobs)
    _tell(outcome, out, Console(highlight=False, soft_wrap=True))
    return SOME_FAILED if outcome.failed else OTHERS_AT_WORK if outcome.elsewhere else ALL_DONE


def reading_processes(asked: int | None, device: str) -> int:
    """As many as asked for. The encoder gets the cores that they leave.

    By default a quarter of the cores, where the encoder needs the others; beside a graphics card all but one, up to 16.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = usual_processes(cores, device) if asked is None else asked
    torch.set_num_threads(max(1, cores - processes))
    return processes


def usual_processes(cores: int, device: str) -> int:
    """That read slides for an encoder on this device."""
    return max(1, cores // 4) if device == "cpu" else min(16, max(1, cores - 1))


def chosen_device(device: str) -> str:
    """As torch names it; "auto" is the graphics card, where there is one."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _tell(outcome: Outcome, out: Path, console: Console) -> None:
    rate = f", {outcome.tiles / outcome.seconds:.0f} per second" if outcome.tiles else ""
    lines = [f"done: {len(outcome.done)} slides, {outcome.tiles:,} tiles{rate}"]
    if outcome.finished_before:
        lines += [f"finished before: {len(outcome.finished_before)}"]
    if outcome.empty:
        lines += [f"without tissue: {len(outcome.empty)} ({_some(outcome.empty)}); see {out / QUALITY}"]
    if outcome.enlarged:
        scanned = [f"{name}: {mpp:.3g} um" for name, mpp in outcome.enlarged.items()]
        lines += [f"enlarged, as they were scanned more coarsely than asked for: {len(scanned)} ({_some(scanned)})"]
    if outcome.elsewhere:
        lines += [f"other processes work on {len(outcome.elsewhere)}: {_some(outcome.elsewhere)}"]
    if outcome.failed:
        lines += [f"failed: {len(outcome.failed)} ({_some(list(outcome.failed))}); see {out / FAILURES}"]
        lines += ["Run the same command again to retry them."]
    lines += [f"Next: psamil inspect {out}"]
    console.print("\n".join(lines), markup=False)


def _some(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
