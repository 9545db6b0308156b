"""What a model scores that says the same of every patient. Where classes are rare, accuracy and F1 flatter it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pandas as pd

from psamil.evaluation.intervals import fold_summary
from psamil.evaluation.run_comparison import FinishedRun
from psamil.evaluation.scores import score
from psamil.files import without_nan
from psamil.training.class_tasks import ClassificationTask
from psamil.training.survival_task import SurvivalTask


def constant_metrics(run: FinishedRun) -> dict[str, dict[str, Any]]:
    """Mean and sd over the test folds of a run, as in its summary, of the constant classifier.

    It gives every class the share that it has among all patients, and so chooses the commonest; of survival, it gives
    everybody the same risk. Nothing for other tasks.
    """
    table = run.patients
    if isinstance(run.task, SurvivalTask):
        same = table.assign(risk=0.0)
    elif isinstance(run.task, ClassificationTask):
        shares = table["truth"].value_counts(normalize=True)
        same = table.assign(**{f"prob_{name}": shares.get(name, 0.0) for name in run.task.classes})
    else:
        return {}
    per_fold = pd.DataFrame([score(of_fold, run.task) for _, of_fold in same.groupby("fold")])
    return {str(name): without_nan(asdict(fold_summary(per_fold[name].to_numpy()))) for name in per_fold}
