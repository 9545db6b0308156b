"""``psamil demo``: the whole way on simulated slides, from nothing to a report, in a few minutes."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from psamil.cli.compare import tell
from psamil.cli.progress import TrainingProgress
from psamil.cohort import BagCache, Cohort, k_fold, simulate
from psamil.evaluation.experiment import cross_validate
from psamil.evaluation.run_comparison import FinishedRun, compare_runs, read_history
from psamil.files import read_json
from psamil.report.run_report import write_report
from psamil.report.tables import save_tables
from psamil.training.settings import TrainingSettings

RANGE_STEPS = 3.0
APART_STEPS = 1.5 * RANGE_STEPS + 0.5  # beyond which the two phenotypes lie in negative slides
SETTINGS = {
    "psa": TrainingSettings(
        model="psa",
        model_options={"heads": 3, "head_dim": 32, "tau": 0.1, "alpha": 0.0},
        epochs=12,
        lr=1e-3,
        prior_lr_scale=10.0,
        patience=None,  # nothing seems to happen in the first epochs
    ),
    "abmil": TrainingSettings(model="abmil", model_options={"hidden": 96}, epochs=12, lr=1e-3, patience=None),
}


def demo(out: Path = Path("demo-report"), *, slides: int = 240, tiles: int = 400, folds: int = 3) -> Path:
    """Simulates slides, trains PSA-MIL and ABMIL by cross-validation, and compares them in a report.

    Example: psamil demo --out demo-report

    The label of a slide depends only on how near two kinds of tiles are to each other. What is finished is not done
    again.

    Args:
        out: folder of everything: cohort, runs, tables, index.html.
        slides: number of slides.
        tiles: median number of tiles of a slide.
        folds: of the cross-validation.

    Returns:
        The report.
    """
    console = Console(highlight=False)
    torch.set_num_threads(1)  # tensors this small are fastest on one thread
    cohort = _cohort(out, slides, tiles, console)
    splits = k_fold(cohort, folds)
    for name, settings in SETTINGS.items():
        console.print(f"\n{name}: {folds} folds of {settings.epochs} epochs", markup=False)
        with TrainingProgress(console, settings.epochs) as shown:
            cross_validate(cohort, splits, settings, out / name, report=shown.report, on_step=shown.on_step)
    comparison = compare_runs([out / name for name in SETTINGS])
    console.print()
    tell(comparison, console)
    _tell_radii(comparison.runs[0], console)
    save_tables(comparison, out)
    notes = [
        f"Simulated slides: two kinds of tiles lie within {RANGE_STEPS:g} tile steps of each other in positive slides, "
        f"and more than {APART_STEPS:g} steps apart in negative ones. Nothing else differs, so a model that does not "
        "look at positions can only guess."
    ]
    write_report(
        comparison,
        out / "index.html",
        title="PSA-MIL and ABMIL on simulated slides",
        notes=notes,
        planted_steps=(RANGE_STEPS, APART_STEPS),
    )
    return out / "index.html"


def _cohort(out: Path, slides: int, tiles: int, console: Console) -> Cohort:
    """The simulated cohort, made unless it is there; its table of labels is written last."""
    folder = out / "cohort"
    if not (folder / "labels.csv").exists():
        if folder.exists():
            shutil.rmtree(folder)  # left by a demo that was stopped
        console.print(f"simulating {slides} slides of about {tiles} tiles", markup=False)
        simulate(folder, slides=slides, tiles=tiles, range_steps=RANGE_STEPS, phenotype_share=0.04)
    cohort = Cohort.open(folder, folder / "labels.csv", target="label", cache=BagCache(out / "cache")).checked()
    console.print(str(cohort), markup=False)
    return cohort


def _tell_radii(run: FinishedRun, console: Console) -> None:
    title = f"Learned radii K in tile steps; planted: within {RANGE_STEPS:g} or beyond {APART_STEPS:g}"
    table = Table(title=title, title_justify="left")
    for column in ("fold", "after 1 epoch", "of the kept epoch", "at the end"):
        table.add_column(column)
    for fold, job in run.jobs():
        history = read_history(job)
        kept = read_json(job / "metrics.json")["best_epoch"]
        radii = [history[epoch]["radii_steps"][0] for epoch in (0, kept, -1)]
        table.add_row(str(fold), *(" ".join(f"{k:.1f}" for k in heads) for heads in radii))
    console.print(table)
