"""Tasks of classes: one of several per sample, or several yes/no labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from psamil.cohort.outcomes import Classification, MultiLabel
from psamil.cohort.tables import quoted
from psamil.errors import DataError
from psamil.training import losses, metrics
from psamil.training.tasks import Columns, Task, TaskOptions, untrainable


@dataclass(frozen=True)
class ClassificationTask(Task):
    """One of several classes. Two classes have one logit, that of the second class; more have one logit each."""

    kind: ClassVar[str] = "classification"
    exclusive: ClassVar[bool] = True
    outcome_type: ClassVar[type] = Classification

    classes: tuple[str, ...]
    class_weights: tuple[float, ...]
    balance: str

    @classmethod
    def of(cls, training: Classification, options: TaskOptions) -> ClassificationTask:
        counts = np.bincount(training.labels, minlength=len(training.classes))
        missing = [name for name, count in zip(training.classes, counts, strict=True) if not count]
        if missing:
            cause = f"the training part has no sample of class {quoted(missing)} ({training.describe()})"
            raise untrainable(training.column, cause)
        if len(counts) < 2:
            raise untrainable(training.column, f"there is one class only ({training.describe()})")
        return cls(training.classes, class_weights(counts, options.balance), options.balance)

    @property
    def score_name(self) -> str:
        return "auc" if self.n_out == 1 else "macro_auc"

    @property
    def n_out(self) -> int:
        return 1 if len(self.classes) == 2 else len(self.classes)

    def _targets(self, outcome: Classification) -> Tensor:
        """Classes are matched by name: another cohort may have them in another order, or lack some."""
        present = [outcome.classes[label] for label in np.unique(outcome.labels)]
        unknown = [name for name in present if name not in self.classes]
        if unknown:
            cause = f"the model does not know class {quoted(unknown)}"
            raise DataError(f"column {outcome.column!r}", cause, f"its classes are {quoted(self.classes)}")
        own = {name: index for index, name in enumerate(self.classes)}
        return torch.tensor([own[outcome.classes[label]] for label in outcome.labels], dtype=torch.long)

    def class_indices(self, targets: Tensor) -> Tensor:
        return targets

    def absent(self, targets: Tensor) -> Tensor | None:
        """Of two classes, the first one lacks what makes the second; among more there is no telling."""
        return (targets == 0)[:, None].float() if self.n_out == 1 else None

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        return losses.cross_entropy(logits, targets, torch.tensor(self.class_weights, device=logits.device))

    def _predictions(self, logits: Tensor) -> Columns:
        two_classes = self.n_out == 1
        p = torch.cat((-logits, logits), dim=1).sigmoid() if two_classes else logits.softmax(1)
        return {f"prob_{name}": column.numpy() for name, column in zip(self.classes, p.unbind(1), strict=True)}

    def _score(self, outcome: Classification, predictions: Columns) -> float:
        labels, p = self._targets(outcome).numpy(), list(predictions.values())
        if self.n_out == 1:
            return metrics.roc_auc(labels, p[1])
        return metrics.macro(metrics.roc_auc, metrics.one_hot(labels, len(p)), np.stack(p, axis=1))


@dataclass(frozen=True)
class MultiLabelTask(Task):
    """Several labels, each yes or no, one logit each."""

    kind: ClassVar[str] = "multilabel"
    outcome_type: ClassVar[type] = MultiLabel

    labels: tuple[str, ...]
    class_weights: tuple[tuple[float, ...], ...]  # of no and yes, for each label
    balance: str

    @classmethod
    def of(cls, training: MultiLabel, options: TaskOptions) -> MultiLabelTask:
        yes = training.labels.sum(0)
        counts = np.stack((len(training) - yes, yes), axis=1)  # (labels, 2)
        for name, (no, some) in zip(training.columns, counts.tolist(), strict=True):
            if not (no and some):
                cause = f"the training part has {some} yes and {no} no of this label, both are needed"
                raise untrainable(name, cause)
        weights = tuple(class_weights(of_label, options.balance) for of_label in counts)
        return cls(training.columns, weights, options.balance)

    @property
    def score_name(self) -> str:
        return "macro_auc"

    @property
    def n_out(self) -> int:
        return len(self.labels)

    def _targets(self, outcome: MultiLabel) -> Tensor:
        missing = [name for name in self.labels if name not in outcome.columns]
        if missing:
            cause = f"the model predicts label {quoted(missing)} as well"
            raise DataError(f"columns {quoted(outcome.columns)}", cause, "name all its labels")
        order = [outcome.columns.index(name) for name in self.labels]
        return torch.tensor(outcome.labels[:, order], dtype=torch.float32)

    def absent(self, targets: Tensor) -> Tensor:
        return 1 - targets

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        weights = torch.tensor(self.class_weights, device=logits.device)
        return losses.multilabel_cross_entropy(logits, targets, weights)

    def _predictions(self, logits: Tensor) -> Columns:
        p = logits.sigmoid().unbind(1)
        return {f"prob_{name}": column.numpy() for name, column in zip(self.labels, p, strict=True)}

    def _score(self, outcome: MultiLabel, predictions: Columns) -> float:
        p = np.stack(list(predictions.values()), axis=1)
        return metrics.macro(metrics.roc_auc, self._targets(outcome).numpy(), p)


def class_weights(counts: NDArray[np.int64], balance: str) -> tuple[float, ...]:
    """w_c = n / (C n_c), whose mean over the n samples is 1; ones unless classes are balanced by weights."""
    if balance != "weights":
        return (1.0,) * len(counts)
    return tuple((counts.sum() / (len(counts) * counts)).tolist())
