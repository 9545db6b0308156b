"""Finished runs on the same splits, side by side: their metrics, and whether they differ.

Each run is compared with a reference on the metric that chose its epochs, by all tests that apply. P-values of one test
are adjusted for the number of runs by Holm's method. Only folds count of which every seed is finished.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from psamil.cohort import Splits
from psamil.errors import DataError, OptionError, one_of
from psamil.evaluation.comparison import (
    Comparison,
    corrected_t_test,
    delong_test,
    holm,
    paired_bootstrap,
    paired_t_test,
)
from psamil.evaluation.fold_localisation import LOCALISATION_METRICS, labelled_slides
from psamil.evaluation.resampling import (
    Statistic,
    auc_statistic,
    concordance_statistic,
    mean_over_folds,
    statistic_of_rows,
)
from psamil.evaluation.run_folder import (
    PREDICTIONS_FILE,
    SPLITS_FILE,
    SUMMARY_FILE,
    finished_folds,
    is_finished,
    jobs_by_fold,
    read_run,
)
from psamil.evaluation.scores import by_patient, mean_over_seeds, read_predictions
from psamil.files import read_json
from psamil.training import metrics
from psamil.training.class_tasks import ClassificationTask, MultiLabelTask
from psamil.training.fold import HISTORY_FILE, MODEL_FILE
from psamil.training.metrics import Floats, Integers
from psamil.training.saved_model import SavedModel
from psamil.training.survival_task import SurvivalTask
from psamil.training.tasks import Task

REFERENCES = ("first", "best")
LOWER_IS_BETTER = ("brier", "ece", "mae")


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """What a run directory holds, as far as it is finished."""

    path: Path
    name: str
    about: dict[str, Any]  # run.json
    summary: dict[str, Any]  # summary.json
    splits: Splits
    task: Task
    step_um: float | None

    @staticmethod
    def load(path: Path | str, name: str = "") -> FinishedRun:
        path = Path(path)
        about, splits = read_run(path), Splits.load(path / SPLITS_FILE)
        finished = finished_folds(path, len(splits))
        if not finished:
            raise DataError(path, "has no fold of which every seed is finished", "go on with psamil train")
        summary = read_json(path / SUMMARY_FILE) if (path / SUMMARY_FILE).is_file() else {}
        if summary.get("finished") != sorted(finished):
            summed_up = f"its summary is of {summary['finished']}" if "finished" in summary else "no summary of them"
            cause = f"has finished the folds {sorted(finished)}, and {summed_up}"
            raise DataError(path, cause, "call psamil train again with its options, which sums it up")
        model = SavedModel.load(next(iter(finished.values()))[0] / MODEL_FILE)
        return FinishedRun(path, name or path.name, about, summary, splits, model.task, model.about.get("step_um"))

    @property
    def headline(self) -> str:
        """The metric that chose the epochs."""
        return self.task.score_name.lstrip("-")

    @cached_property
    def patients(self) -> pd.DataFrame:
        """Test predictions by fold and patient (by slide where slides of a patient differ in their truth)."""
        table = by_patient(read_predictions(self.path / PREDICTIONS_FILE))
        keys = [name for name in ("fold", "patient", "sample") if name in table]
        return table.sort_values(keys, kind="stable").reset_index(drop=True)

    def jobs(self) -> list[tuple[int, Path]]:
        """Fold and folder of every training that counts."""
        return [(k, job) for k, jobs in self._finished.items() for job in jobs]

    @property
    def trainings(self) -> int:
        """Of each fold, whose predictions are averaged."""
        return int(self.about.get("seeds", 1))

    def unfinished(self) -> dict[int, int]:
        """How many seeds are finished of the folds that do not count, where there are any."""
        jobs = jobs_by_fold(self.path, len(self.splits))
        some = {k: sum(map(is_finished, of_fold)) for k, of_fold in jobs.items() if k not in self._finished}
        return {k: count for k, count in some.items() if count}

    def validation(self, fold: int) -> pd.DataFrame:
        """Validation predictions of a fold by patient, mean over its seeds; empty without a validation part."""
        mean = mean_over_seeds(self._finished[fold])
        mean = mean[mean["part"] == "val"].reset_index(drop=True)
        return by_patient(mean) if len(mean) else mean

    @cached_property
    def _finished(self) -> dict[int, list[Path]]:
        return finished_folds(self.path, len(self.splits))


def read_history(job: Path) -> list[dict[str, Any]]:
    """One record per epoch of a finished training."""
    lines = (job / HISTORY_FILE).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


@dataclass(frozen=True)
class Tested:
    """A run against the reference by one test."""

    run: str
    reference: str
    metric: str
    comparison: Comparison
    p_holm: float


@dataclass(frozen=True, eq=False)
class RunComparison:
    """Runs on the same splits. Differences are run minus reference."""

    runs: tuple[FinishedRun, ...]
    reference: FinishedRun
    tests: tuple[Tested, ...]  # test by test, each for all runs but the reference

    @property
    def metric_names(self) -> list[str]:
        """Of the predictions of all runs, the headline first."""
        names = [name for name in self._all_names if name not in LOCALISATION_METRICS]
        return sorted(names, key=lambda name: name != self.runs[0].headline)

    @property
    def localisation_names(self) -> list[str]:
        """Of the metrics of localisation, where runs have any."""
        return [name for name in LOCALISATION_METRICS if name in self._all_names]

    @property
    def unlabelled(self) -> list[str]:
        """A sentence for every run that was localised on a part of its test slides."""
        found = [(run.name, labelled_slides(run.summary)) for run in self.runs]
        return [f"{name}: {sentence}" for name, sentence in found if sentence]

    @property
    def _all_names(self) -> list[str]:
        return list(dict.fromkeys(name for run in self.runs for name in run.summary["metrics"]))

    @property
    def caveats(self) -> list[str]:
        """A sentence for every fold that does not count because some of its seeds are missing, and one where runs have
        different numbers of trainings per fold."""
        told = [
            f"Fold {k} of {run.name} is left out: {count} of its {run.trainings} seeds are finished."
            for run in self.runs
            for k, count in run.unfinished().items()
        ]
        trainings = {run.name: run.trainings for run in self.runs}
        if len(set(trainings.values())) > 1:
            unequal = ", ".join(f"{name} {number}" for name, number in trainings.items())
            told.append(f"Trainings per fold are not the same, and the mean of several is often better: {unequal}.")
        return told


def compare_runs(
    folders: Sequence[Path | str], *, names: Sequence[str] | None = None, reference: str = "first"
) -> RunComparison:
    """Loads runs and tests each against the reference.

    Args:
        folders: run directories with the same splits and the same finished folds.
        names: of the runs; by default the model, with the settings in which runs of it differ.
        reference: the name of a run; "first"; or "best": highest mean of the headline metric (lowest for an error).
            Where the best was chosen on these test results, differences from it are somewhat too large.
    """
    if not folders:
        raise OptionError("name at least one run directory")
    if names is not None and len(names) != len(folders):
        raise OptionError(f"{len(folders)} runs need as many names, got {len(names)}")
    runs = [FinishedRun.load(folder) for folder in folders]
    chosen = list(names) if names is not None else names_of(runs)
    if len(set(chosen)) < len(chosen):
        raise OptionError(f"names of runs must differ, got {', '.join(map(repr, chosen))}")
    if reference not in (*chosen, *REFERENCES):
        raise one_of("reference", reference, (*chosen, *REFERENCES))
    for run in runs[1:]:
        _refuse_other_data(runs[0], run)
    named = [replace(run, name=name) for run, name in zip(runs, chosen, strict=True)]
    if reference in chosen:
        against = named[chosen.index(reference)]
    else:
        against = named[0] if reference == "first" else max(named, key=_goodness)
    return RunComparison(tuple(named), against, tuple(_tests([run for run in named if run is not against], against)))


def names_of(runs: Sequence[FinishedRun]) -> list[str]:
    """The model, with the settings in which runs of this model differ; the folder where that does not tell."""
    settings = [_flat({**run.about["settings"], "seeds": run.about.get("seeds")}) for run in runs]
    names = []
    for own in settings:
        alike = [other for other in settings if other["model"] == own["model"]]
        differing = [key for key in own if any(other.get(key) != own[key] for other in alike)]
        changed = ", ".join(f"{key.rpartition('.')[2]} {own[key]}" for key in differing)
        names.append(f"{own['model']} ({changed})" if changed else str(own["model"]))
    return [
        name if names.count(name) == 1 else f"{name} [{run.path.name}]" for name, run in zip(names, runs, strict=True)
    ]


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _refuse_other_data(first: FinishedRun, other: FinishedRun) -> None:
    remedy = f"compare runs that were trained with the same splits as {first.path} (psamil train --splits)"
    if other.splits.hash != first.splits.hash:
        raise DataError(other.path, f"has other splits than {first.path}", remedy)
    if other.summary["finished"] != first.summary["finished"]:
        cause = f"has finished folds {other.summary['finished']}, {first.path} has {first.summary['finished']}"
        raise DataError(other.path, cause, "finish both with psamil train")
    known = [
        name
        for name in first.patients
        if name in ("fold", "patient", "sample", "time", "event") or str(name).startswith("truth")
    ]
    if other.task.kind != first.task.kind or not set(known) <= set(other.patients):
        raise DataError(other.path, f"predicts something else than {first.path}", remedy)
    if not first.patients[known].equals(other.patients[known]):
        raise DataError(other.path, f"has other patients or labels than {first.path}", remedy)


def _goodness(run: FinishedRun) -> float:
    mean = run.summary["metrics"][run.headline]["mean"]
    if mean is None:
        return -np.inf
    return -mean if run.headline in LOWER_IS_BETTER else mean


def _tests(others: Sequence[FinishedRun], reference: FinishedRun) -> list[Tested]:
    found = [_compared(run, reference) for run in others]
    tests: list[Tested] = []
    for same_test in zip(*found, strict=True):
        adjusted = holm([comparison.p_value for comparison in same_test])
        for run, comparison, p_holm in zip(others, same_test, adjusted.tolist(), strict=True):
            tests.append(Tested(run.name, reference.name, run.headline, comparison, p_holm))
    return tests


def _compared(run: FinishedRun, reference: FinishedRun) -> list[Comparison]:
    """Over folds, where there are several, then over patients."""
    first, second = (_per_fold(one) for one in (run, reference))
    shares = [len(fold.test) / len(fold.train) for fold in (run.splits[k] for k in run.summary["finished"])]
    comparisons = []
    if len(shares) > 1:
        corrected = corrected_t_test(first, second, test_to_train=float(np.mean(shares)))
        comparisons = [paired_t_test(first, second), corrected]
    patients = run.patients["patient"].to_numpy()
    strata = _strata(run)
    comparisons.append(paired_bootstrap(statistic_of(run), statistic_of(reference), patients, strata))
    each_once = len(set(patients)) == len(patients)
    if isinstance(run.task, ClassificationTask) and run.task.n_out == 1 and each_once:
        positive = run.task.classes[1]
        labels = (run.patients["truth"] == positive).to_numpy().astype(int)
        own, others = (one.patients[f"prob_{positive}"].to_numpy() for one in (run, reference))
        comparisons.append(delong_test(labels, own, others, run.patients["fold"].to_numpy()))
    return comparisons


def _per_fold(run: FinishedRun) -> Floats:
    values = run.summary["metrics"][run.headline]["per_fold"]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _strata(run: FinishedRun) -> Any:
    """Classes, or event and censored; resamples keep how many there are of each."""
    if isinstance(run.task, SurvivalTask):
        return run.patients["event"].to_numpy()
    return run.patients["truth"].to_numpy() if isinstance(run.task, ClassificationTask) else None


def statistic_of(run: FinishedRun) -> Statistic:
    """The headline metric, taken in each fold and averaged, of resampled patients."""
    table, task = run.patients, run.task
    if isinstance(task, SurvivalTask):
        times, events, risks = (table[name].to_numpy() for name in ("time", "event", "risk"))
        return mean_over_folds(
            table["fold"], lambda rows: concordance_statistic(times[rows], events[rows], risks[rows])
        )
    if isinstance(task, ClassificationTask | MultiLabelTask):
        labels, scores = indicators(run)
        return mean_over_folds(table["fold"], lambda rows: _macro_auc(labels[rows], scores[rows]))
    values, predicted = table["truth"].to_numpy(), table["value"].to_numpy()

    def error_of(rows: Integers) -> Statistic:
        return statistic_of_rows(lambda drawn: metrics.mean_absolute_error(values[rows][drawn], predicted[rows][drawn]))

    return mean_over_folds(table["fold"], error_of)


def indicators(run: FinishedRun) -> tuple[Integers, Floats]:
    """Yes or no, and probability, of every class or label (n, m); of two classes, the positive one alone."""
    table, task = run.patients, run.task
    if isinstance(task, MultiLabelTask):
        labels, scores = (table[[f"{kind}_{name}" for name in task.labels]] for kind in ("truth", "prob"))
        return labels.to_numpy(dtype=np.int64), scores.to_numpy(dtype=np.float64)
    assert isinstance(task, ClassificationTask)
    classes = task.classes[1:] if task.n_out == 1 else task.classes
    labels = np.stack([(table["truth"] == name).to_numpy().astype(np.int64) for name in classes], axis=1)
    return labels, table[[f"prob_{name}" for name in classes]].to_numpy(dtype=np.float64)


def _macro_auc(labels: Integers, scores: Floats) -> Statistic:
    """The mean over classes, or labels, for which it is defined."""
    each = [auc_statistic(labels[:, i], scores[:, i]) for i in range(labels.shape[1])]

    def statistic(counts: Floats) -> Floats:
        values = np.stack([one(counts) for one in each])
        defined = np.isfinite(values).sum(0)
        return np.divide(np.nansum(values, axis=0), defined, out=np.full(len(counts), np.nan), where=defined > 0)

    return statistic


def comparison_row(tested: Tested) -> dict[str, Any]:
    """As a row of a table."""
    who = {"run": tested.run, "reference": tested.reference, "metric": tested.metric}
    return {**who, **asdict(tested.comparison), "p_holm": tested.p_holm}
