"""What a run predicted for each of its samples, with what was true.

Each sample is predicted by the models of the fold in whose test part it is. Its error says how wrong this is, so that
samples can be sorted by it:

- classes: 1 - p of the true class; labels: the largest |p - truth| of any label
- numbers: |value - truth|
- survival: the share of comparable samples of the fold that its risk puts on the wrong side
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from psamil.cohort import Splits
from psamil.errors import DataError
from psamil.evaluation.run_folder import SPLITS_FILE, data_of, finished_folds, sample_of_slide
from psamil.evaluation.scores import by_patient, chosen_classes, mean_over_seeds, threshold_of
from psamil.files import without_nan
from psamil.training.class_tasks import ClassificationTask, MultiLabelTask
from psamil.training.fold import MODEL_FILE
from psamil.training.regression_task import RegressionTask
from psamil.training.saved_model import SavedModel
from psamil.training.tasks import Task

VALUES = ("prob_", "survival_", "risk", "value")
NOTHING: dict[str, Any] = {
    "fold": None,
    "truth": None,
    "predicted": None,
    "values": {},
    "confidence": None,
    "error": None,
    "wrong": None,
}


@dataclass(frozen=True, eq=False)
class RunPredictions:
    """Predictions of the test parts of a run."""

    task: Task
    rows: Mapping[str, dict[str, Any]]  # by sample
    samples: frozenset[str]  # of all parts
    data: Mapping[str, Mapping[str, Any]]  # what run.json says of it, as psamil.evaluation.run_folder.data_of gives it

    @staticmethod
    def of(run: Path) -> RunPredictions:
        splits = Splits.load(run / SPLITS_FILE)
        finished = finished_folds(run, len(splits))
        if not finished:
            raise DataError(run, "has no finished fold", "go on with psamil train")
        task = SavedModel.load(next(iter(finished.values()))[0] / MODEL_FILE).task
        rows: dict[str, dict[str, Any]] = {}
        for fold, jobs in finished.items():
            for row in _rows_of_fold(mean_over_seeds(jobs), task, fold):
                rows.setdefault(row.pop("sample"), row)  # repeated folds: the first
        samples = frozenset(id for k in range(len(splits)) for id in splits[k].ids)
        return RunPredictions(task, rows, samples, data_of(run))

    def sample_of(self, slide: str) -> str | None:
        """The sample that a slide belongs to: itself, or its patient; None if the run does not know it."""
        return sample_of_slide(self.data, self.samples, slide)

    def of_slide(self, slide: str) -> dict[str, Any]:
        """Its row of the list; nothing but None where the run does not know it."""
        return dict(self.rows.get(self.sample_of(slide) or "", NOTHING))


def _rows_of_fold(table: pd.DataFrame, task: Task, fold: int) -> list[dict[str, Any]]:
    val, test = (table[table["part"] == part].reset_index(drop=True) for part in ("val", "test"))
    if not len(test):
        return []
    columns = [name for name in test.columns if name.startswith(VALUES)]
    if isinstance(task, ClassificationTask):
        known = _classes(test, task, threshold_of(by_patient(val), task) if len(val) else 0.5)
    elif isinstance(task, MultiLabelTask):
        known = _labels(test, task)
    elif isinstance(task, RegressionTask):
        errors = (test["value"] - test["truth"]).abs()
        known = [{"truth": t, "error": e} for t, e in zip(test["truth"], errors, strict=True)]
    else:
        known = _survival(test)
    values = test[columns].to_dict("records")
    return [
        {"sample": sample, **NOTHING, **without_nan({"fold": fold, "values": of_sample, **row})}
        for sample, of_sample, row in zip(test["sample"], values, known, strict=True)
    ]


def _classes(test: pd.DataFrame, task: ClassificationTask, threshold: float) -> list[dict[str, Any]]:
    labels, chosen = chosen_classes(test, task, threshold)
    p = test[[f"prob_{name}" for name in task.classes]].to_numpy(dtype=np.float64)
    return [
        {
            "truth": task.classes[label],
            "predicted": task.classes[choice],
            "confidence": float(of_classes[choice]),
            "error": 1 - float(of_classes[label]),
            "wrong": bool(label != choice),
        }
        for label, choice, of_classes in zip(labels, chosen, p, strict=True)
    ]


def _labels(test: pd.DataFrame, task: MultiLabelTask) -> list[dict[str, Any]]:
    p = test[[f"prob_{name}" for name in task.labels]].to_numpy(dtype=np.float64)
    truth = test[[f"truth_{name}" for name in task.labels]].to_numpy(dtype=np.float64)
    chosen = p >= 0.5
    return [
        {
            "truth": ", ".join(name for name, yes in zip(task.labels, true_of, strict=True) if yes),
            "predicted": ", ".join(name for name, yes in zip(task.labels, chosen_of, strict=True) if yes),
            "confidence": float(np.maximum(p_of, 1 - p_of).min()),
            "error": float(np.abs(p_of - true_of).max()),
            "wrong": bool((chosen_of != (true_of > 0)).any()),
        }
        for p_of, true_of, chosen_of in zip(p, truth, chosen, strict=True)
    ]


def _survival(test: pd.DataFrame) -> list[dict[str, Any]]:
    time, risk = (test[name].to_numpy(dtype=np.float64) for name in ("time", "risk"))
    event = test["event"].to_numpy(dtype=np.float64) > 0
    first = event[:, None] & (time[:, None] < time[None, :])  # i is known to have its event before j
    wrong = np.where(risk[:, None] < risk[None, :], 1.0, np.where(risk[:, None] == risk[None, :], 0.5, 0.0)) * first
    comparable = first.sum(1) + first.sum(0)
    errors = np.divide(wrong.sum(1) + wrong.sum(0), comparable, out=np.full(len(time), np.nan), where=comparable > 0)
    return [
        {"truth": f"{'event' if seen else 'censored'} at {t:g}", "error": float(error)}
        for t, seen, error in zip(time, event, errors, strict=True)
    ]
