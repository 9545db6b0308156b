"""Cross-validation in a run directory: every fold and seed is a job of its own, and any of them can be killed.

    RUN/
      run.json                     settings, fingerprint of the data, hash of the splits, versions
      splits.json
      folds/<fold>/seed-<seed>/    history.jsonl, model.safetensors, predictions.csv, metrics.json (written last)
      predictions.csv              test predictions of all finished folds, mean over seeds
      summary.json                 metrics: mean and standard deviation over folds, intervals over patients

Several processes may work on one run: a fold is locked while it is worked on, and what is finished is not done again.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from psamil.cohort import Cohort, Split, Splits
from psamil.errors import DataError, OptionError
from psamil.evaluation.intervals import bootstrap_interval, fold_summary
from psamil.evaluation.resampling import auc_statistic, concordance_statistic, mean_over_folds
from psamil.evaluation.scores import by_patient, prediction_table, score, temperature_of, threshold_of
from psamil.files import Lock, atomic_write, escape_cell, read_json, write_json
from psamil.training.fold import MODEL_FILE, train_fold
from psamil.training.prediction import loader_for, predict_logits
from psamil.training.saved_model import SavedModel
from psamil.training.settings import TrainingSettings

PACKAGES = ("psamil", "torch", "numpy", "pandas", "lightning-fabric", "safetensors")

Report = Callable[[str, dict[str, Any]], None]


def cross_validate(
    cohort: Cohort,
    splits: Splits,
    settings: TrainingSettings,
    run: Path,
    *,
    seeds: int = 1,
    fold: int | None = None,
    report: Report = lambda job, record: None,
) -> dict[str, Any]:
    """Trains and tests on every fold, or on one, and summarises whatever folds are finished.

    A run that exists is gone on with; it must have the same settings, data and splits.

    Args:
        cohort: whose damaged slides are set aside already (:meth:`psamil.cohort.Cohort.checked`).
        splits: of its samples.
        settings: ``seed`` is that of the first of ``seeds`` trainings per fold.
        run: the run directory.
        seeds: trainings per fold; their probabilities are averaged.
        fold: work on this fold alone.
        report: called with the name of the job and its line of the history after each epoch.

    Returns:
        The summary, as in ``summary.json``.
    """
    splits.check(cohort)
    if fold is not None and not 0 <= fold < len(splits):
        raise OptionError(f"fold must be from 0 to {len(splits) - 1}, got {fold}")
    _claim(run, cohort, splits, settings, seeds)
    busy: DataError | None = None
    for k in range(len(splits)) if fold is None else [fold]:
        for seed in range(settings.seed, settings.seed + seeds):
            folder = run / "folds" / str(k) / f"seed-{seed}"
            try:
                with Lock(folder / "lock"):
                    _work(cohort, splits[k], settings, seed, folder, report)
            except DataError as error:
                if "in use by process" not in error.cause:
                    raise
                busy = error
    summary = summarise(run)
    if busy is not None and not summary["finished"]:
        raise busy
    return summary


def _work(cohort: Cohort, split: Split, settings: TrainingSettings, seed: int, folder: Path, report: Report) -> None:
    if (folder / "metrics.json").exists():
        return
    own = TrainingSettings(**{**_fields(settings), "seed": seed})
    job = f"fold {folder.parent.name}" + (f", seed {seed}" if seed else "")
    model = train_fold(cohort, split, own, folder, lambda record: report(job, record))
    evaluate_fold(cohort, split, model, folder)


def evaluate_fold(cohort: Cohort, split: Split, model: SavedModel, folder: Path) -> None:
    """Writes predictions and metrics. Temperature and threshold come from the validation part."""
    parts = {name: cohort.select(ids) for name, ids in (("val", split.val), ("test", split.test)) if ids}
    loader = loader_for(model.model, cohort, model.about["in_dim"])
    logits = {name: predict_logits(model.model, loader, part.samples) for name, part in parts.items()}
    temperature = temperature_of(model.task, parts["val"].outcome, logits["val"]) if "val" in parts else 1.0
    tables = {
        name: prediction_table(part, model.task, logits[name], part=name, temperature=temperature)
        for name, part in parts.items()
    }
    patients = {name: by_patient(table) for name, table in tables.items()}
    threshold = threshold_of(patients["val"], model.task) if "val" in parts else 0.5
    write_table(folder / "predictions.csv", pd.concat(list(tables.values())))
    scores = {name: _finite(score(table, model.task, threshold)) for name, table in patients.items()}
    about = {"temperature": temperature, "threshold": threshold, "best_epoch": model.about["best_epoch"]}
    write_json(folder / "metrics.json", {**about, **scores})


def summarise(run: Path) -> dict[str, Any]:
    """Of the folds that are finished. Writes ``summary.json`` and ``predictions.csv``."""
    splits = Splits.load(run / "splits.json")
    finished: dict[int, list[Path]] = {}
    for k in range(len(splits)):
        jobs = sorted((run / "folds" / str(k)).glob("seed-*/metrics.json"))
        if jobs:
            finished[k] = [job.parent for job in jobs]
    summary: dict[str, Any] = {"folds": len(splits), "finished": sorted(finished), "metrics": {}}
    if finished:
        task = SavedModel.load(next(iter(finished.values()))[0] / MODEL_FILE).task
        tables = [_mean_over_seeds(jobs).assign(fold=k) for k, jobs in finished.items()]
        thresholds = [
            np.mean([read_json(job / "metrics.json")["threshold"] for job in jobs]) for jobs in finished.values()
        ]
        per_fold = pd.DataFrame([score(by_patient(t), task, h) for t, h in zip(tables, thresholds, strict=True)])
        everything = pd.concat(tables, ignore_index=True)
        write_table(run / "predictions.csv", everything)
        for name in per_fold:
            of_folds = fold_summary(per_fold[name].to_numpy())
            summary["metrics"][str(name)] = {**_finite(asdict(of_folds)), "per_fold": _finite_list(per_fold[name])}
        for name, interval in _intervals(everything, task).items():
            summary["metrics"][name] |= _finite({"low": interval.low, "high": interval.high})
    write_json(run / "summary.json", summary)
    return summary


def _mean_over_seeds(jobs: list[Path]) -> pd.DataFrame:
    """Test predictions of one fold; probabilities, risks and values are averaged over its models."""
    tables = [pd.read_csv(job / "predictions.csv", dtype={"sample": str, "patient": str}) for job in jobs]
    tables = [table[table["part"] == "test"].reset_index(drop=True) for table in tables]
    mean = tables[0].copy()
    numbers = [name for name in mean if name.startswith(("logit_", "prob_", "survival_")) or name in ("risk", "value")]
    mean[numbers] = np.mean([table[numbers].to_numpy() for table in tables], axis=0)
    return mean


def _intervals(table: pd.DataFrame, task: Any) -> dict[str, Any]:
    """Bootstrap intervals over patients of the measures that folds share."""
    patients = by_patient(table)
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


def _claim(run: Path, cohort: Cohort, splits: Splits, settings: TrainingSettings, seeds: int) -> None:
    """Makes the run directory, or refuses one that was made for something else."""
    wanted = {
        "settings": asdict(settings),
        "seeds": seeds,
        "cohort": {"headline": cohort.headline, "fingerprint": cohort.fingerprint()},
        "splits": splits.hash,
    }
    wanted = json.loads(json.dumps(wanted))  # as it reads back
    if (run / "run.json").exists():
        found = read_json(run / "run.json")
        differing = [name for name in wanted if found.get(name) != wanted[name]]
        if differing:
            cause = f"is a run with other {', '.join(differing)}"
            raise DataError(run, cause, "choose a new folder, or the options it was made with (they are in run.json)")
        return
    if run.exists() and any(run.iterdir()):
        raise DataError(run, "is not empty and no run", "choose a new folder")
    versions = {package: version(package) for package in PACKAGES}
    environment = {"python": platform.python_version(), "platform": platform.platform(), "packages": versions}
    splits.save(run / "splits.json")
    write_json(run / "run.json", {**wanted, "environment": environment, "threads": torch.get_num_threads()})


def write_table(path: Path, table: pd.DataFrame) -> None:
    """A CSV that spreadsheets do not execute; numbers keep all their digits."""
    escaped = table.rename(columns=escape_cell)
    for name in escaped.select_dtypes("object"):
        escaped[name] = escaped[name].map(escape_cell)
    with atomic_write(path) as temporary:
        escaped.to_csv(temporary, index=False, float_format="%.17g")


def _fields(settings: TrainingSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """NaN, which JSON does not have, as null."""
    return {name: None if isinstance(v, float) and not np.isfinite(v) else v for name, v in values.items()}


def _finite_list(values: Any) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]
