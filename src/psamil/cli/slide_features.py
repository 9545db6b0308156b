"""From raw slides to features that the models of a run understand: made as those they were trained on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from psamil.cli.engine import stopped_by_sigterm
from psamil.cli.extract import reading_processes
from psamil.cli.extraction_progress import ExtractionProgress
from psamil.errors import DataError
from psamil.readers import SetAside, TilePlaces, find_bags, slide_id, trident
from psamil.readers.extraction_settings import differences
from psamil.report.heat_maps import ScoredPicture, save_heat_map
from psamil.report.overviews import Overview
from psamil.slides.encoders import load_encoder
from psamil.slides.extraction import extract
from psamil.slides.extraction_record import Extraction
from psamil.slides.slide import DICOM_SUFFIXES, IMAGE_SUFFIXES, SLIDE_SUFFIXES, find_slides

CODE = "python:"  # of encoders that are code


def slides_of(path: Path) -> list[Path]:
    """A slide, or the slides of a folder in which there are no features; else nothing."""
    if path.is_file():
        return [path] if path.suffix.lower() in (*SLIDE_SUFFIXES, *DICOM_SUFFIXES, *IMAGE_SUFFIXES) else []
    if not path.is_dir() or find_bags(path).bags:
        return []
    try:
        return find_slides(path)
    except DataError as error:
        if error.path != str(path):  # about slides, which are there
            raise
        return []  # nothing is in there; who looks for features says so


def extract_like(
    trained: Mapping[str, Any],
    slides: list[Path],
    out: Path,
    *,
    run: Path,
    mpp: float | None,
    weights: Path | None,
    trust: bool,
    workers: int | None,
    device: str,
    console: Console,
) -> list[SetAside]:
    """Writes the features of slides into a folder; returns the slides that failed.

    Args:
        trained: how the features of the run were made, as its run.json says.
        run: that is named where its features cannot be made again.
        trust: whether an encoder of Python code, which the run names, may be run.
        mpp, weights, workers, device: see :func:`psamil.cli.extract.extract`.
    """
    if not trained:
        cause = "does not say how the features it was trained on were made"
        raise DataError(run, cause, "extract those of the slides in the same way and predict from the features")
    made = Extraction.from_json(trained, run)
    if made.reference is None:
        cause = f"was trained on features of {made.encoder!r}, a module that only Python code has"
        raise DataError(run, cause, "extract those of the slides with psamil.slides.extraction and predict from these")
    if made.reference.startswith(CODE) and not trust:
        cause = f"wants the code {made.reference} to be run, as its encoder"
        raise DataError(run, cause, "add --trust-encoder if you know the run and the code")
    processes = reading_processes(workers, device)
    encoder = load_encoder(made.reference, weights=weights, device=device, precision=made.precision)
    other = differences(Extraction.of(encoder, made.grid).to_json(), dict(trained))
    if other:
        remedy = "give the weights of the encoder that the run was trained with (--encoder-weights)"
        raise DataError(run, f"was trained on features made with another encoder: {'; '.join(other)}", remedy)
    with stopped_by_sigterm(), ExtractionProgress(console) as shown:
        done = extract(slides, out, encoder, made.grid, mpp=mpp, workers=processes, report=shown.report)
    paths = {slide_id(path): path for path in slides}
    failed = {**done.failed, **dict.fromkeys(done.elsewhere, "another process works on it; predict again later")}
    return [SetAside(paths[name], reason) for name, reason in failed.items()]


def write_heat_map(slide: Path, features: Path, scores: Tensor, title: str, out: Path, mpp: float | None) -> None:
    """The slide beside the scores of its tiles, as a PNG."""
    save_heat_map(scored_picture(slide, features, {"tile scores": scores.numpy()}, title, mpp=mpp), out)


def scored_picture(
    slide_path: Path,
    features: Path,
    scores: Mapping[str, NDArray[np.floating]],
    title: str,
    *,
    mpp: float | None = None,
    labelled: NDArray[np.bool_] | None = None,
) -> ScoredPicture:
    """A slide with the scores that runs gave the tiles of its features, as :mod:`psamil.report.heat_maps` draws it."""
    tiles = trident.read(features, with_features=False)
    assert tiles.coords is not None
    assert tiles.tile_size is not None
    overview = Overview.of(slide_path, mpp)
    places = TilePlaces(np.asarray(tiles.coords, dtype=np.float64), tiles.tile_size, "px0", overview.mpp)
    return ScoredPicture(title, places, scores, overview, labelled)
