"""Predictions as a table, and the metrics of a part, with everything that is chosen chosen on validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from psamil.cohort import Classification, Cohort, MultiLabel, Outcome, Regression, Survival
from psamil.evaluation.calibration import fit_temperature
from psamil.evaluation.patients import patient_predictions
from psamil.evaluation.run_folder import PREDICTIONS_FILE
from psamil.files import unescape_cell
from psamil.training import metrics
from psamil.training.class_tasks import ClassificationTask, MultiLabelTask
from psamil.training.metrics import Floats, Integers
from psamil.training.regression_task import RegressionTask
from psamil.training.tasks import Task


def truth(outcome: Outcome) -> dict[str, Any]:
    """Columns of what is known."""
    if isinstance(outcome, Classification):
        return {"truth": [outcome.classes[label] for label in outcome.labels]}
    if isinstance(outcome, MultiLabel):
        return {f"truth_{name}": outcome.labels[:, i] for i, name in enumerate(outcome.columns)}
    if isinstance(outcome, Regression):
        return {"truth": outcome.values}
    assert isinstance(outcome, Survival)
    return {"time": outcome.times, "event": outcome.events.astype(int)}


def prediction_table(
    cohort: Cohort, task: Task, logits: Floats, *, part: str, temperature: float = 1.0
) -> pd.DataFrame:
    """One row per sample: who, the truth, raw logits, and calibrated probabilities, value or risk."""
    raw = {f"logit_{i}": column for i, column in enumerate(logits.T)}
    who = {"sample": cohort.ids, "patient": cohort.patients, "part": part}
    return pd.DataFrame({**who, **truth(cohort.outcome), **raw, **task.predictions(logits / temperature)})


def read_predictions(path: Path) -> pd.DataFrame:
    """A table of predictions from its file, with the same names and the same bits: a class "0" or "NA" is a name."""
    table = pd.read_csv(path, dtype=str, keep_default_na=False).rename(columns=unescape_cell)
    names = ["sample", "patient", "part", "predicted", "note", *([] if "value" in table else ["truth"])]
    for column in table.columns:
        values = table[column].map(unescape_cell)
        table[column] = values if column in names else values.replace("", "nan").map(float)
    return table


def mean_over_seeds(jobs: Sequence[Path]) -> pd.DataFrame:
    """Predictions of one fold; probabilities, risks and values are averaged over its models."""
    tables = [read_predictions(job / PREDICTIONS_FILE) for job in jobs]
    mean = tables[0].copy()
    numbers = [name for name in mean if name.startswith(("logit_", "prob_", "survival_")) or name in ("risk", "value")]
    mean[numbers] = np.mean([table[numbers].to_numpy() for table in tables], axis=0)
    return mean


def temperature_of(task: Task, outcome: Outcome, logits: Floats) -> float:
    """Fitted to the validation part; 1 where the task has no probabilities of classes or there is nothing to fit to."""
    if len(logits) == 0 or not isinstance(task, ClassificationTask | MultiLabelTask):
        return 1.0
    labels = task.targets(outcome).numpy()
    if isinstance(task, MultiLabelTask):
        return fit_temperature(logits.ravel(), labels.ravel().astype(int))
    return fit_temperature(logits[:, 0] if task.n_out == 1 else logits, labels)


def by_patient(table: pd.DataFrame) -> pd.DataFrame:
    """The mean over the slides of each patient; slides that differ in their truth are kept as they are."""
    known = [name for name in table.columns if name.startswith("truth") or name in ("time", "event")]
    predicted = [name for name in table.columns if name.startswith("prob_") or name in ("risk", "value")]
    if (table.groupby("patient")[known].nunique(dropna=False) > 1).any(axis=None):
        return table
    return patient_predictions(table, known, predicted)


def by_fold_and_patient(table: pd.DataFrame) -> pd.DataFrame:
    """The same of each fold by itself."""
    return pd.concat([by_patient(of_fold) for _, of_fold in table.groupby("fold")], ignore_index=True)


def threshold_of(table: pd.DataFrame, task: Task) -> float:
    """Of the positive class, where balanced accuracy is highest on validation; one half where that is not defined."""
    if len(table) == 0 or not isinstance(task, ClassificationTask) or task.n_out > 1:
        return 0.5
    positive = task.classes[1]
    best = metrics.threshold_of_best_balanced_accuracy(table["truth"] == positive, table[f"prob_{positive}"])
    return 0.5 if math.isnan(best) else best


def score(table: pd.DataFrame, task: Task, threshold: float = 0.5) -> dict[str, float]:
    """Metrics of a table of patients (or slides); NaN where one is not defined."""
    if isinstance(task, ClassificationTask):
        return _score_classes(table, task, threshold)
    if isinstance(task, MultiLabelTask):
        known, p = (table[[f"{kind}_{name}" for name in task.labels]].to_numpy() for kind in ("truth", "prob"))
        return {
            "macro_auc": metrics.macro(metrics.roc_auc, known, p),
            "macro_average_precision": metrics.macro(metrics.average_precision, known, p),
        }
    if isinstance(task, RegressionTask):
        return {
            "mae": metrics.mean_absolute_error(table["truth"], table["value"]),
            "r2": metrics.r2(table["truth"], table["value"]),
        }
    return {"c_index": metrics.concordance_index(table["time"], table["event"], table["risk"])}


def chosen_classes(table: pd.DataFrame, task: ClassificationTask, threshold: float) -> tuple[Integers, Integers]:
    """Indices of the true and of the predicted classes. Of two, the second is taken from the threshold on."""
    number = {name: index for index, name in enumerate(task.classes)}
    labels = table["truth"].map(number).to_numpy(dtype=np.int64)
    p = table[[f"prob_{name}" for name in task.classes]].to_numpy(dtype=np.float64)
    return labels, (p[:, 1] >= threshold).astype(np.int64) if task.n_out == 1 else p.argmax(1)


def _score_classes(table: pd.DataFrame, task: ClassificationTask, threshold: float) -> dict[str, float]:
    labels, chosen = chosen_classes(table, task, threshold)
    p = table[[f"prob_{name}" for name in task.classes]].to_numpy(dtype=np.float64)
    if task.n_out == 1:
        positive = p[:, 1]
        ranked = {
            "auc": metrics.roc_auc(labels, positive),
            "average_precision": metrics.average_precision(labels, positive),
            "f1": metrics.f1(labels, chosen),
        }
    else:
        positive = p
        one_hot = metrics.one_hot(labels, len(task.classes))
        ranked = {
            "macro_auc": metrics.macro(metrics.roc_auc, one_hot, p),
            "macro_average_precision": metrics.macro(metrics.average_precision, one_hot, p),
            "macro_f1": metrics.macro_f1(labels, chosen),
        }
    return ranked | {
        "balanced_accuracy": metrics.balanced_accuracy(labels, chosen),
        "accuracy": metrics.accuracy(labels, chosen),
        "brier": metrics.brier(labels, positive),
        "ece": metrics.expected_calibration_error(labels, positive),
    }
