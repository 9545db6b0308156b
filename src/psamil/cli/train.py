"""``psamil train``: cross-validation of a model on a cohort, in a run directory that can be gone on with."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from psamil.cli.engine import ENGINE_OPTIONS, chosen_engine
from psamil.cli.progress import TrainingProgress
from psamil.cluster.trainings import training_jobs
from psamil.evaluation.fold_localisation import LOCALISATION_METRICS
from psamil.evaluation.run import fit
from psamil.training.settings import TrainingSettings


def train(
    features: Path,
    labels: Path,
    out: Path,
    *,
    target: str | list[str] | None = None,
    kind: str = "auto",
    classes: list[str] | None = None,
    time: str | None = None,
    event: str | None = None,
    censorship: str | None = None,
    unit: str = "slide",
    slide_table: Path | None = None,
    slide_column: str | None = None,
    patient_column: str | None = None,
    site_column: str | None = None,
    folds: int = 5,
    val: float = 0.2,
    repeats: int = 1,
    split_seed: int = 0,
    by_site: bool = False,
    splits: Path | None = None,
    fold: int | None = None,
    seeds: int | None = None,
    training: TrainingSettings = TrainingSettings(),  # noqa: B008 (frozen)
    um_per_step: float | None = None,
    non_finite: str = "error",
    positions: str = "file",
    damaged: str = "set aside",
    tile_labels: Path | None = None,
    cache: Path | None = None,
    loggers: list[str] | None = None,
    engine: str = "local",
    address: str | None = None,
    cpus_per_job: int = 1,
    gpus_per_job: float = 0,
) -> int:
    """Trains a model by cross-validation, and goes on where an earlier run in the same folder was stopped.

    Example: psamil train features labels.csv run --target subtype --training.epochs 20

    Args:
        features: folder of features of any known format.
        labels: table of labels: CSV, TSV, XLSX or Parquet.
        out: the run directory; one that exists is gone on with.
        target: column of classes or numbers; several are yes/no labels. By default one called label, category or value.
        kind: of a target: "classification" or "regression", where there is a doubt.
        classes: their order; of two, the second is the positive one. Samples of other classes are left out.
        time: column of survival times, instead of a target.
        event: column where 1 means that the event was seen.
        censorship: column where 1 means censored.
        unit: what is predicted: "slide" or "patient".
        slide_table: second table that says which slides a patient has.
        slide_column: column of slide names, where its name does not tell.
        patient_column: column of patients, where its name does not tell.
        site_column: column of hospitals, where its name does not tell.
        folds: number of folds.
        val: share of the patients outside of the test part that choose the epoch; with 0 the last one is kept.
        repeats: how often everything is split anew.
        split_seed: of the splits.
        by_site: all patients of a site stay in one part.
        splits: file or folder of splits (ours, CLAM, STAMP, SurvPath, Patho-Bench) instead of new ones.
        fold: work on this fold alone, for instance in a job array.
        seeds: trainings per fold, whose predictions are averaged; by default as many as the recipe says, 3 or 1.
        training: settings of the model and its training.
        um_per_step: gives physical positions: one step is this many micrometres.
        non_finite: what to do with tiles that have NaN or infinite features: "error", "drop" or "zero".
        positions: "file"; "row order" for files without coordinates; "shuffled" as a control.
        damaged: slides that cannot be read: "set aside" or "refuse".
        tile_labels: folder of labels of single tiles (<slide>.npy, 0 for normal), to test where the models look.
        cache: folder of the cache; by default in the user's cache folder.
        loggers: other programs that shall show the history, in the run directory: "tensorboard", "mlflow". The latter
            also takes a server from MLFLOW_TRACKING_URI.
        engine: "local", or "ray": every fold and seed is a job, on a Ray cluster.
        address: of the Ray cluster; "auto" is that of this node. Without it, one is started on this computer.
        cpus_per_job: with Ray, the CPUs and threads of a job.
        gpus_per_job: with Ray, the graphics cards of a job; 0.5 lets two jobs share one.
    """
    options = dict(locals())  # each is an option of `fit` by the same name, but those of the engine
    console = Console(stderr=True, highlight=False)
    tell = partial(console.print, markup=False)
    run_jobs = chosen_engine(**{name: options.pop(name) for name in ENGINE_OPTIONS}, tell=tell)
    with TrainingProgress(console, training.epochs) as progress:
        calls: dict[str, Any] = {"tell": tell, "report": progress.report, "on_step": progress.on_step}
        if run_jobs is not None:
            calls["engine"] = lambda cohort, trainings: run_jobs(training_jobs(cohort, trainings))
        run = fit(**options, **calls)
    _tell(run.summary, out, Console(highlight=False))
    return 0


def _tell(summary: dict[str, Any], out: Path, console: Console) -> None:
    head = f"{len(summary['finished'])} of {summary['folds']} folds; test part"
    of_tiles = {name: row for name, row in summary["metrics"].items() if name in LOCALISATION_METRICS}
    of_patients = {name: row for name, row in summary["metrics"].items() if name not in of_tiles}
    console.print(_table(f"{head}, by patient", of_patients))
    if of_tiles:
        console.print(_table(f"{head}, tiles", of_tiles))
    console.print(f"run directory: {out}", markup=False)


def _table(title: str, metrics: dict[str, dict[str, Any]]) -> Table:
    table = Table("metric", "mean", "sd over folds", title=title, title_justify="left")
    has_intervals = any(row.get("low") is not None for row in metrics.values())
    if has_intervals:
        table.add_column("95% interval over patients")
    for name, row in metrics.items():
        numbers = ["-" if row[key] is None else f"{row[key]:.3f}" for key in ("mean", "sd")]
        interval = f"{row['low']:.3f} to {row['high']:.3f}" if row.get("low") is not None else ""
        table.add_row(name, *numbers, *([interval] if has_intervals else []))
    return table
