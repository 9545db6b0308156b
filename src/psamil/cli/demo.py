"""``psamil demo``: the whole way from drawn slides to a report, in a few minutes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

from psamil.cli.compare import tell
from psamil.cli.extract import CPU_BATCH
from psamil.cli.extraction_progress import ExtractionProgress
from psamil.cli.progress import TrainingProgress
from psamil.cli.slide_features import scored_picture
from psamil.cohort import BagCache, Cohort, k_fold
from psamil.errors import DataError
from psamil.evaluation.experiment import cross_validate
from psamil.evaluation.fold_localisation import TILE_SCORES_FILE
from psamil.evaluation.run_comparison import FinishedRun, RunComparison, compare_runs, read_history
from psamil.files import read_json
from psamil.readers.extraction_settings import extraction_settings
from psamil.report.drawing import Figure
from psamil.report.examination import examine
from psamil.report.heat_maps import heat_maps
from psamil.report.run_report import write_report
from psamil.report.tables import save_tables
from psamil.slides.encoders import load_encoder
from psamil.slides.encoders.registry import DEFAULT_ENCODER
from psamil.slides.extraction import extract
from psamil.slides.procedural import APART_STEPS, draw_slides
from psamil.slides.slide import find_slides
from psamil.slides.tile_labels import label_tiles
from psamil.training.settings import TrainingSettings

SETTINGS = {
    "psa_evidence": TrainingSettings(
        model="psa_evidence",
        model_options={"components": 8, "tau": 0.1, "k_init": 3.0},
        epochs=40,
        optimizer="adamw",
        weight_decay=0.01,
        lr=3e-3,
        prior_lr_scale=10.0,
        patience=None,  # nothing seems to happen in the first epochs
    ),
    "psa": TrainingSettings(
        model="psa",
        model_options={"heads": 3, "head_dim": 32, "tau": 0.1, "k_init": 3.0, "alpha": 0.0},
        epochs=40,
        lr=1e-3,
        prior_lr_scale=10.0,
        patience=None,
    ),
    "abmil": TrainingSettings(model="abmil", model_options={"hidden": 96}, epochs=40, lr=1e-3, patience=None),
}
SHOWN_PER_CLASS = 2


def demo(out: Path = Path("demo-report"), *, slides: int = 60, tiles: int = 90, folds: int = 3) -> Path:
    """Draws slides, extracts features, trains PSA-MIL and ABMIL by cross-validation, and compares them in a report.

    Example: psamil demo --out demo-report

    The label of a slide depends only on whether nests of a tumour lie together or apart. What is finished is not done
    again.

    Args:
        out: folder of everything: cohort, features, runs, tables, index.html.
        slides: number of slides.
        tiles: median number of tiles of a slide.
        folds: of the cross-validation.

    Returns:
        The report.
    """
    console = Console(highlight=False, soft_wrap=True)
    cohort = _cohort(out, slides, tiles, console)
    splits = k_fold(cohort, folds)
    torch.set_num_threads(1)  # tensors this small are fastest on one thread
    about = {
        "extraction": extraction_settings(out / "features"),  # so that predict can make those of other slides
        "features": str((out / "features").resolve()),
    }
    for name, settings in SETTINGS.items():
        console.print(f"\n{name}: {folds} folds of {settings.epochs} epochs", markup=False)
        with TrainingProgress(console, settings.epochs) as shown:
            cross_validate(
                cohort, splits, settings, out / name, about=about, report=shown.report, on_step=shown.on_step
            )
    comparison = compare_runs([out / name for name in SETTINGS])
    console.print()
    tell(comparison, console)
    _tell_radii(comparison.runs[0], console)
    save_tables(comparison, out)
    notes = [
        "Drawn slides: nests of a tumour lie side by side in positive slides, and more than "
        f"{APART_STEPS:g} tile steps from each other in negative ones. Their number and looks are the same, so a model "
        "that does not look at positions can only guess.",
        "psa_evidence: evidence of tiles from what is around them, by the attention of PSA-MIL. psa: the model of the "
        "paper, whose tile scores say where it looks, for either class. abmil: attention without positions.",
    ]
    write_report(
        comparison,
        out / "index.html",
        title="PSA-MIL and ABMIL on drawn slides",
        notes=notes,
        planted_steps=(1.0, APART_STEPS),
        pictures=[_pictures(comparison, cohort, out)],
        examination=examine(comparison.runs, features=out / "features", cases=0),
    )
    return out / "index.html"


def _cohort(out: Path, slides: int, tiles: int, console: Console) -> Cohort:
    """Slides, features and labels of tiles, made unless they are there; the table of labels is written last."""
    drawn, features, tile_labels = out / "cohort", out / "features", out / "tile-labels"
    if not (drawn / "labels.csv").exists():
        if drawn.exists():
            shutil.rmtree(drawn)  # left by a demo that was stopped
        console.print(f"drawing {slides} slides of about {tiles} tiles", markup=False)
        draw_slides(drawn, slides=slides, tiles=tiles)
    torch.set_num_threads(os.cpu_count() or 1)
    encoder = load_encoder(DEFAULT_ENCODER)
    console.print(f"extracting features with {encoder.name} ({encoder.dim} numbers per tile)", markup=False)
    with ExtractionProgress(console) as progress:
        found = extract(find_slides(drawn / "slides"), features, encoder, batch=CPU_BATCH, report=progress.report)
    if found.failed or found.elsewhere:
        raise DataError(features, "is not complete", f"see {features / 'failures.csv'}, and start the demo again")
    label_tiles(features, drawn / "lesions", tile_labels, unannotated="normal")
    cohort = Cohort.open(features, drawn / "labels.csv", target="label", cache=BagCache(out / "cache")).checked()
    console.print(str(cohort), markup=False)
    return cohort.with_tile_labels(tile_labels)


def _tell_radii(run: FinishedRun, console: Console) -> None:
    um = run.step_um
    title = f"Learned radii K in tile steps{f' of {um:g} um' if um else ''}; nests touch, or are {APART_STEPS:g} apart"
    table = Table(title=title, title_justify="left")
    for column in ("fold", "after 1 epoch", "of the kept epoch", "at the end", "kept, in um"):
        table.add_column(column)
    for fold, job in run.jobs():
        history = read_history(job)
        kept = read_json(job / "metrics.json")["best_epoch"]
        radii = [history[epoch]["radii_steps"][0] for epoch in (0, kept, -1)]
        in_um = " ".join(f"{k * um:.0f}" for k in radii[1]) if um else "-"
        table.add_row(str(fold), *(" ".join(f"{k:.1f}" for k in heads) for heads in radii), in_um)
    console.print(table)


def _pictures(comparison: RunComparison, cohort: Cohort, out: Path) -> Figure:
    """The first slides of each class in the test part of the first fold, with the scores of the models that never saw
    them."""
    first = comparison.runs[0].splits.folds[0]
    samples = {sample.id: sample for sample in cohort.samples}
    tested = sorted((samples[id] for id in first.test), key=lambda sample: sample.id)
    shown = [
        sample
        for label in sorted({sample.outcome for sample in tested}, reverse=True)
        for sample in [sample for sample in tested if sample.outcome == label][:SHOWN_PER_CLASS]
    ]
    scores = {run.name: load_file(run.path / "folds" / "0" / TILE_SCORES_FILE) for run in comparison.runs}
    caption = (
        f"The first {SHOWN_PER_CLASS} slides of each class in the test part of the first fold, beside the scores that "
        "models gave their tiles which had not seen them. Scores of psa_evidence are evidence for the second class; "
        "those of the others say how much the prediction rests on a tile, not for which class. Red: the lesion as it "
        "was drawn. Colours of a model mean the same in all of its pictures."
    )
    pictures = []
    for sample in shown:
        (ref,) = sample.bags
        of_slide = {run: of_slides[ref.id] for run, of_slides in scores.items()}
        path, title = out / "cohort" / "slides" / f"{ref.id}.tiff", f"{ref.id}: {sample.outcome}"
        labelled = cohort.labels_of_tiles(ref, len(next(iter(of_slide.values()))))
        pictures.append(scored_picture(path, ref.path, of_slide, title, labelled=labelled))
    return heat_maps(pictures, caption)
