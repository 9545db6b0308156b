"""Cross-validation in a run directory: every fold and seed is a job of its own, and any of them can be killed.

Its files are listed in :mod:`psamil.evaluation.run_folder`. Several processes may work on one run: a fold is locked
while it is worked on, and what is finished is not done again.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from psamil.cohort import Cohort, Split, Splits
from psamil.cohort.same_features import feature_names
from psamil.errors import BusyError, DataError, OptionError
from psamil.evaluation.fold_localisation import (
    localisation_intervals,
    localisation_of,
    localisation_scores,
    localise_fold,
)
from psamil.evaluation.intervals import bootstrap_interval, fold_summary
from psamil.evaluation.resampling import auc_statistic, concordance_statistic, mean_over_folds
from psamil.evaluation.run_folder import (
    METRICS_FILE,
    PREDICTIONS_FILE,
    RUN_FILE,
    SPLITS_FILE,
    SUMMARY_FILE,
    finished_folds,
    is_finished,
    job_folder,
)
from psamil.evaluation.scores import (
    by_fold_and_patient,
    by_patient,
    mean_over_seeds,
    prediction_table,
    score,
    temperature_of,
    threshold_of,
)
from psamil.files import Lock, atomic_write, escape_cell, read_json, without_nan, write_json
from psamil.training.devices import new_fabric
from psamil.training.fold import HISTORY_FILE, MODEL_FILE, new_model, train_fold, width_of_features
from psamil.training.loggers import check_loggers, with_logs
from psamil.training.objective import NO_NEGATIVES
from psamil.training.prediction import loader_for, predict_logits
from psamil.training.saved_model import SavedModel
from psamil.training.settings import TrainingSettings
from psamil.training.tasks import Task

PACKAGES = ("psamil", "torch", "numpy", "pandas", "lightning-fabric", "safetensors")

MOST_NAMES = 256  # of features, in run.json: kinds of tiles and markers, not genes
WAIT_S = 60.0  # for a process that makes the run directory or the summary

Report = Callable[[str, dict[str, Any]], None]
OnStep = Callable[[str, int, dict[str, Any]], None]


@dataclass(frozen=True)
class Training:
    """One fold with one seed: work for any process that sees the files, on this computer or on another one."""

    name: str
    split: Split
    settings: TrainingSettings  # with its own seed
    run: Path
    folder: Path
    of_fold: tuple[Path, ...]  # folders of all trainings of the fold
    loggers: tuple[str, ...] = ()

    def __call__(self, cohort: Cohort) -> None:
        """All of it; the last training of a fold that is finished leads to its localisation."""
        self.train(cohort)
        self.localise(cohort)

    def train(
        self,
        cohort: Cohort,
        report: Callable[[dict[str, Any]], None] = lambda record: None,
        on_step: Callable[[dict[str, Any]], None] = lambda step: None,
    ) -> None:
        """Trains and tests, unless that is done. BusyError if another process is at it."""
        with Lock(self.folder / "lock"):
            _remove_abandoned(self.folder)
            with with_logs(report, self.loggers, self.run, self.name, self.folder / HISTORY_FILE) as logged:
                if not is_finished(self.folder):
                    model = train_fold(cohort, self.split, self.settings, self.folder, logged, on_step)
                    evaluate_fold(cohort, self.split, model, self.folder)

    def localise(self, cohort: Cohort) -> None:
        """By all models of the fold, once the last is trained; whoever is at it already is left to it."""
        if cohort.tile_labels is None or not all(map(is_finished, self.of_fold)):
            return
        folder = self.folder.parent
        with contextlib.suppress(BusyError), Lock(folder / "lock"):
            _remove_abandoned(folder)
            localise_fold(cohort, self.split, self.of_fold, folder)


Engine = Callable[[Cohort, Sequence[Training]], None]


def cross_validate(
    cohort: Cohort,
    splits: Splits,
    settings: TrainingSettings,
    run: Path,
    *,
    seeds: int = 1,
    fold: int | None = None,
    about: Mapping[str, Any] | None = None,
    loggers: Sequence[str] = (),
    report: Report = lambda job, record: None,
    on_step: OnStep = lambda job, jobs_left, step: None,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """Trains and tests on every fold, or on one, and summarises whatever folds are finished.

    A run that exists is gone on with; it must have the same settings, data and splits.

    Args:
        cohort: whose damaged slides are set aside already (:meth:`psamil.cohort.Cohort.checked`). If it has labels of
            tiles, models are tested on localisation as well, those of finished folds too.
        splits: of its samples.
        settings: ``seed`` is that of the first of ``seeds`` trainings per fold.
        run: the run directory.
        seeds: trainings per fold; their probabilities are averaged.
        fold: work on this fold alone.
        about: more to be written into ``run.json``; what is there already stays.
        loggers: other programs that shall show the history: "tensorboard", "mlflow".
        report: called with the name of the job and its line of the history after each epoch.
        on_step: called with the name of the job, the number of unfinished jobs after it, and what
            :func:`psamil.training.fold.train_fold` says after each step of the optimiser.
        engine: is given the trainings, each to be called with the cohort, instead of their being done here one by one;
            neither ``report`` nor ``on_step`` is called then.

    Returns:
        The summary, as in ``summary.json``.
    """
    splits.check(cohort)
    if fold is not None and not 0 <= fold < len(splits):
        raise OptionError(f"fold must be from 0 to {len(splits) - 1}, got {fold}")
    if seeds < 1:
        raise OptionError(f"seeds must be at least 1, got {seeds}")
    folds = range(len(splits)) if fold is None else [fold]
    check_loggers(loggers)
    if engine is None:
        new_fabric(settings)  # an engine may have devices that this computer lacks
    _check(cohort, splits, settings, folds)
    _claim(run, cohort, splits, settings, seeds, about or {})
    trainings = _trainings(splits, settings, run, folds, seeds, tuple(loggers))
    if engine is None:
        train_here(cohort, trainings, report, on_step)
    else:
        engine(cohort, trainings)
    return summarise(run)


def _trainings(
    splits: Splits, settings: TrainingSettings, run: Path, folds: Sequence[int], seeds: int, loggers: tuple[str, ...]
) -> list[Training]:
    trainings = []
    for k in folds:
        of_fold = {seed: job_folder(run, k, seed) for seed in range(settings.seed, settings.seed + seeds)}
        for seed, folder in of_fold.items():
            name = f"fold {k}, seed {seed}" if seeds > 1 else f"fold {k}"
            of_seed = replace(settings, seed=seed)
            trainings.append(Training(name, splits[k], of_seed, run, folder, tuple(of_fold.values()), loggers))
    return trainings


def train_here(cohort: Cohort, trainings: Sequence[Training], report: Report, on_step: OnStep) -> None:
    """One after the other, but those that others work on. BusyError if these are all."""
    busy: list[BusyError] = []
    for i, training in enumerate(trainings):
        left = sum(not is_finished(other.folder) for other in trainings[i + 1 :])
        try:
            training.train(cohort, partial(report, training.name), partial(on_step, training.name, left))
        except BusyError as error:
            if Path(error.path) != training.folder / "lock":
                raise
            busy.append(error)
    if len(busy) == len(trainings):
        raise busy[0]
    for training in {of.folder.parent: of for of in trainings}.values():
        training.localise(cohort)


def _check(cohort: Cohort, splits: Splits, settings: TrainingSettings, folds: Sequence[int]) -> None:
    """Finds out before the first epoch what would stop the last fold."""
    new_model(settings, width_of_features(cohort), 1)
    for k in folds:
        training = cohort.select(splits[k].train).outcome
        try:
            task = Task.fit(training, **asdict(settings.task))
        except DataError as error:
            raise DataError(f"fold {k}, {error.path}", error.cause, error.remedy) from error
        if settings.negative_tiles and task.absent(task.targets(training)) is None:
            raise OptionError(NO_NEGATIVES)


def _remove_abandoned(folder: Path) -> None:
    """Temporary files of a process that was killed: the lock is ours."""
    for abandoned in folder.glob(".*.tmp"):
        abandoned.unlink()


def evaluate_fold(cohort: Cohort, split: Split, model: SavedModel, folder: Path) -> None:
    """Writes predictions and metrics. Temperature and threshold come from the validation part."""
    parts = {name: cohort.select(ids) for name, ids in (("val", split.val), ("test", split.test))}
    loader = loader_for(model.model, cohort, model.about["in_dim"])
    logits = {name: predict_logits(model.model, loader, part.samples) for name, part in parts.items() if len(part)}
    temperature = temperature_of(model.task, parts["val"].outcome, logits["val"]) if "val" in logits else 1.0
    tables = {
        name: prediction_table(parts[name], model.task, of_part, part=name, temperature=temperature)
        for name, of_part in logits.items()
    }
    patients = {name: by_patient(table) for name, table in tables.items()}
    threshold = threshold_of(patients["val"], model.task) if "val" in patients else 0.5
    nobody = pd.DataFrame(columns=["sample", "patient", "part"])
    write_table(folder / PREDICTIONS_FILE, pd.concat(list(tables.values())) if tables else nobody)
    scores = {name: score(table, model.task, threshold) for name, table in patients.items()}
    about = {"temperature": temperature, "threshold": threshold, "best_epoch": model.about["best_epoch"]}
    write_json(folder / METRICS_FILE, {**about, **without_nan(scores)})


def summarise(run: Path) -> dict[str, Any]:
    """Of the folds whose seeds are all finished. Writes ``summary.json`` and ``predictions.csv``."""
    with Lock(run / ".summary.lock", wait_s=WAIT_S):  # who comes later has seen more folds, and must write later
        splits = Splits.load(run / SPLITS_FILE)
        finished = finished_folds(run, len(splits))
        summary: dict[str, Any] = {"folds": len(splits), "finished": sorted(finished), "metrics": {}}
        tested = {k: jobs for k, jobs in finished.items() if splits[k].test}
        if tested:
            summary["metrics"] = test_metrics(run, tested)
        localised = [found for jobs in tested.values() if (found := localisation_of(jobs)) is not None]
        if localised:
            counts = {name: sum(found[name]["test"] for found in localised) for name in ("slides", "labelled_slides")}
            summary["localisation"] = counts
        write_json(run / SUMMARY_FILE, summary)
    return summary


def test_metrics(run: Path, jobs_of_fold: dict[int, list[Path]]) -> dict[str, Any]:
    """Over folds and over patients; writes the test predictions of all folds."""
    task = SavedModel.load(next(iter(jobs_of_fold.values()))[0] / MODEL_FILE).task
    tables, scores = [], []
    for k, jobs in jobs_of_fold.items():
        mean = mean_over_seeds(jobs)
        val, test = (mean[mean["part"] == part].reset_index(drop=True) for part in ("val", "test"))
        threshold = threshold_of(by_patient(val), task) if len(val) else 0.5
        scores.append(score(by_patient(test), task, threshold) | localisation_scores(jobs))
        tables.append(test.assign(fold=k))
    everything, per_fold = pd.concat(tables, ignore_index=True), pd.DataFrame(scores)
    write_table(run / PREDICTIONS_FILE, everything)
    metrics: dict[str, Any] = {
        str(name): {
            **without_nan(asdict(fold_summary(per_fold[name].to_numpy()))),
            "per_fold": without_nan(per_fold[name].tolist()),
        }
        for name in per_fold
    }
    for name, interval in _intervals(everything, task).items():
        metrics[name] |= without_nan({"low": interval.low, "high": interval.high})
    for name, (low, high) in localisation_intervals(list(jobs_of_fold.values())).items():
        metrics[name] |= without_nan({"low": low, "high": high})
    return metrics


def _intervals(table: pd.DataFrame, task: Any) -> dict[str, Any]:
    """Bootstrap intervals over patients of the measures that folds share."""
    patients = by_fold_and_patient(table)
    names, folds = patients["patient"].to_numpy(), patients["fold"].to_numpy()
    if task.kind == "classification" and task.n_out == 1:
        positive = task.classes[1]
        labels = (patients["truth"] == positive).to_numpy().astype(int)
        scores = patients[f"prob_{positive}"].to_numpy()
        statistic = mean_over_folds(folds, lambda rows: auc_statistic(labels[rows], scores[rows]))
        return {"auc": bootstrap_interval(statistic, names, labels)}
    if task.kind == "survival":
        times, events, risks = (patients[name].to_numpy() for name in ("time", "event", "risk"))
        statistic = mean_over_folds(folds, lambda rows: concordance_statistic(times[rows], events[rows], risks[rows]))
        return {"c_index": bootstrap_interval(statistic, names, events)}
    return {}


def _claim(
    run: Path, cohort: Cohort, splits: Splits, settings: TrainingSettings, seeds: int, about: Mapping[str, Any]
) -> None:
    """Makes the run directory, or refuses one that was made for something else."""
    wanted = {
        "settings": settings.to_json(),
        "seeds": seeds,
        "cohort": {"headline": cohort.headline, "fingerprint": cohort.fingerprint()},
        "reading": _reading(cohort),
        "splits": splits.hash,
    }
    with Lock(run / ".lock", wait_s=WAIT_S):
        if (run / RUN_FILE).exists():
            found = read_json(run / RUN_FILE)
            differing = [
                _named(name, found.get(name), wanted[name]) for name in wanted if found.get(name) != wanted[name]
            ]
            if differing:
                cause = f"is a run with other {', '.join(differing)}"
                remedy = "choose a new folder, or the options it was made with (they are in run.json)"
                raise DataError(run, cause, remedy)
        else:
            if any(not file.name.startswith(".") for file in run.iterdir()):
                raise DataError(run, "is not empty and no run", "choose a new folder")
            patients = dict(zip(cohort.ids, cohort.patients, strict=True))
            who: dict[str, Any] = {"patients": patients}
            if cohort.unit == "patient":
                who["slides"] = {ref.id: sample.id for sample in cohort.samples for ref in sample.bags}
            names = feature_names(cohort.samples[0].bags[0])
            if names is not None and len(names) <= MOST_NAMES:
                who["feature_names"] = list(names)
            write_json(run / RUN_FILE, {**wanted, **_environment(), **about, **who})
        if not (run / SPLITS_FILE).exists():  # new, or killed in between
            splits.save(run / SPLITS_FILE)


def _named(name: str, found: Any, wanted: Any) -> str:
    """What differs, with its parts: "settings (lr, epochs)"."""
    if not isinstance(found, dict) or not isinstance(wanted, dict):
        return name
    parts = [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]
    return f"{name} ({', '.join(parts)})"


def _reading(cohort: Cohort) -> dict[str, Any]:
    """Options that decide what is read from the files."""
    chosen = {name: value for name, value in cohort.reading_options.items() if value is not None}
    return {name: value if isinstance(value, str | int | float) else str(value) for name, value in chosen.items()}


def _environment() -> dict[str, Any]:
    versions = {package: version(package) for package in PACKAGES}
    environment = {"python": platform.python_version(), "platform": platform.platform(), "packages": versions}
    return {"environment": environment, "threads": torch.get_num_threads()}


def write_table(path: Path, table: pd.DataFrame) -> None:
    """A CSV that spreadsheets do not execute; numbers keep all their digits."""
    escaped = table.rename(columns=escape_cell)
    for name in escaped.select_dtypes("object"):
        escaped[name] = escaped[name].map(escape_cell)
    with atomic_write(path) as temporary:
        escaped.to_csv(temporary, index=False, float_format="%.17g")
