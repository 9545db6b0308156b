"""The task of predicting a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from psamil.cohort.outcomes import Regression
from psamil.training import losses, metrics
from psamil.training.tasks import Columns, Task, TaskOptions, untrainable


@dataclass(frozen=True)
class RegressionTask(Task):
    """One number, learned in standard deviations from the mean of the training part."""

    kind: ClassVar[str] = "regression"
    outcome_type: ClassVar[type] = Regression

    mean: float
    std: float

    @classmethod
    def of(cls, training: Regression, options: TaskOptions) -> RegressionTask:
        std = float(training.values.std()) if len(training) else 0.0
        if std == 0:
            cause = f"the values of the training part do not differ ({training.describe()})"
            raise untrainable(training.column, cause)
        return cls(float(training.values.mean()), std)

    @property
    def score_name(self) -> str:
        return "-mae"

    @property
    def n_out(self) -> int:
        return 1

    def _targets(self, outcome: Regression) -> Tensor:
        return torch.tensor((outcome.values - self.mean) / self.std, dtype=torch.float32)

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        return losses.huber(logits, targets)

    def _predictions(self, logits: Tensor) -> Columns:
        return {"value": np.asarray(self.mean + self.std * logits[:, 0])}

    def _score(self, outcome: Regression, predictions: Columns) -> float:
        return -metrics.mean_absolute_error(outcome.values, predictions["value"])
