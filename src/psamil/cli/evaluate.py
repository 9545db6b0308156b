"""``psamil evaluate``: external validation of a run on another cohort."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from psamil.cohort import Sample
from psamil.errors import OptionError
from psamil.evaluation.external import evaluate_run, open_like
from psamil.evaluation.predictor import load
from psamil.slides.tile_labels import label_tiles


def evaluate(
    features: Path,
    labels: Path,
    *,
    run: Path,
    out: Path = Path("evaluation"),
    target: str | list[str] | None = None,
    classes: list[str] | None = None,
    time: str | None = None,
    event: str | None = None,
    censorship: str | None = None,
    unit: str | None = None,
    slide_table: Path | None = None,
    slide_column: str | None = None,
    patient_column: str | None = None,
    overlap: str = "refuse",
    um_per_step: float | None = None,
    non_finite: str | None = None,
    positions: str | None = None,
    damaged: str = "set aside",
    tile_labels: Path | None = None,
    annotations: Path | None = None,
    least_share: float = 0.5,
    unannotated: str = "leave out",
    lesion_classes: list[str] | None = None,
    slides: Path | None = None,
    cache: Path | None = None,
    device: str = "cpu",
) -> int:
    """Tests the models of a run on another cohort. Nothing is fitted to it: thresholds and temperatures are the run's.

    Example: psamil evaluate other-features other-labels.csv --run run --out evaluation

    Writes metrics.json and predictions.csv. Options that are not given are as in training.

    Args:
        run: run directory, one of its folds (run/folds/0), or one model.safetensors.
        features: folder of features of any known format.
        labels: table of labels: CSV, TSV, XLSX or Parquet.
        out: new folder of the results.
        target: column of classes or numbers; several are yes/no labels.
        classes: those to be taken; samples of other classes are left out.
        time: column of survival times.
        event: column where 1 means that the event was seen.
        censorship: column where 1 means censored.
        unit: what is predicted: "slide" or "patient".
        slide_table: second table that says which slides a patient has.
        slide_column: column of slide names, where its name does not tell.
        patient_column: column of patients, where its name does not tell.
        overlap: samples or patients that were in the training data of the run: "refuse", "leave out" or "allow".
        um_per_step: gives physical positions: one step is this many micrometres.
        non_finite: what to do with tiles that have NaN or infinite features: "error", "drop" or "zero".
        positions: "file"; "row order" for files without coordinates; "shuffled" as a control.
        damaged: slides that cannot be read: "set aside" or "refuse".
        tile_labels: folder of labels of single tiles (<slide>.npy, 0 for normal), to test where the models look.
        annotations: instead of it, folder of outlines of lesions: <slide>.geojson, <slide>.xml of ASAP, or masks.
        least_share: how much of a tile annotations must cover for it to be positive.
        unannotated: slides without a file of annotations: "leave out", or "normal" if there is nothing to outline.
        lesion_classes: classes or groups of annotations that are lesions; by default Tumor, and those of CAMELYON.
        slides: folder of the slides, which masks need where features do not tell how large slides are.
        cache: folder of the cache; by default in the user's cache folder.
        device: where to compute, as torch names it: "cpu", "cuda".
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if annotations is not None and tile_labels is not None:
        raise OptionError("tiles are labelled either by --annotations or by --tile-labels; give one of them")
    predictor = load(run, device=device)
    cohort = open_like(
        predictor,
        features,
        labels,
        target=target,
        classes=classes,
        time=time,
        event=event,
        censorship=censorship,
        unit=unit,
        slide_table=slide_table,
        slide_column=slide_column,
        patient_column=patient_column,
        reading={"um_per_step": um_per_step, "non_finite": non_finite, "positions": positions},
        cache=cache,
    )
    with console.status("reading every slide once"):
        cohort = cohort.checked(damaged)

    def progress(samples: Sequence[Sample]) -> Iterator[Sample]:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            yield from bar.track(samples, description="predicting")

    with TemporaryDirectory(prefix="psamil-tile-labels-") as scratch:
        about = None
        if annotations is not None:
            with console.status("reading annotations"):
                labelling = label_tiles(
                    chain.from_iterable(sample.bags for sample in cohort.samples),
                    annotations,
                    Path(scratch),
                    least_share=least_share,
                    unannotated=unannotated,
                    lesion_classes=lesion_classes,
                    slides=slides,
                    mpp=cohort.reading_options.get("mpp"),
                )
            console.print(str(labelling), markup=False)
            tile_labels, about = Path(scratch), labelling.about()
        if tile_labels is not None:
            cohort = cohort.with_tile_labels(tile_labels)
        console.print(str(cohort), markup=False)
        result = evaluate_run(predictor, cohort, out, overlap=overlap, annotations=about, progress=progress)
    _tell_overlap(result["overlap"], console)
    _tell(result, out, Console(highlight=False))
    return 0


def _tell_overlap(found: dict[str, Any], console: Console) -> None:
    if found["samples"]:
        what = "left out" if found["policy"] == "leave out" else "counted all the same: this is no external validation"
        seen = f"{len(found['samples'])} samples of {len(found['patients'])} patients"
        console.print(f"Overlap: {seen} were in the training data of the run; {what}.")
    if found["unknown"]:
        console.print(f"Overlap: {found['unknown']}.")


def _tell(result: dict[str, Any], out: Path, console: Console) -> None:
    table = Table(title=f"{result['cohort']['headline']}; {len(result['models'])} models", title_justify="left")
    for column in ("metric", "by patient", "95% interval over patients"):
        table.add_column(column)
    for name, row in result["metrics"].items():
        table.add_row(name, _estimate(row), _interval(row))
    console.print(table)
    if "localisation" in result:
        found = result["localisation"]
        title = f"Localisation, {found['labelled_slides']} of {found['slides']} slides"
        tiles = Table("metric", "tiles of all slides", "95% interval over slides", title=title, title_justify="left")
        for name, row in found["metrics"].items():
            tiles.add_row(name, _estimate(row), _interval(row))
        console.print(tiles)
    console.print(f"results: {out}", markup=False)


def _interval(row: dict[str, Any]) -> str:
    return f"{row['low']:.3f} to {row['high']:.3f}" if row.get("low") is not None else ""


def _estimate(row: dict[str, Any]) -> str:
    return "-" if row["estimate"] is None else f"{row['estimate']:.3f}"
