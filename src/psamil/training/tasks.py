"""What a model learns: from an outcome and raw logits to targets, loss, predictions and a validation score.

A task is fitted to the outcome of the training part alone, whose class weights, time bins, mean and spread it keeps. It
is plain numbers and goes into a checkpoint as JSON.

>>> task = Task.fit(train.outcome)
>>> loss = task.loss(model(batch).logits, task.targets(train.outcome)[rows])

A training part from which the task cannot be learned is an error: a class (or a yes or no of a label) without samples,
survival without a single event, numbers that are all equal. A class with one sample is trained on. What the validation
part lacks is no error: its score is taken over the classes it has, and is the loss where no measure is defined.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from psamil.cohort.outcomes import Outcome
from psamil.errors import DataError, OptionError, ShapeError, one_of

Columns: TypeAlias = dict[str, NDArray[np.float64]]
Logits: TypeAlias = Tensor | NDArray[np.floating[Any]]

BALANCES = ("weights", "sampling", "none")
SURVIVAL_LOSSES = ("nll", "ce")
REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class TaskOptions:
    """Settings of all kinds of tasks; each takes those that concern it."""

    balance: str = "weights"
    """Of classes and labels, which would otherwise count by their frequency. "weights" gives each of C classes the same
    weight in the loss, w_c = n / (C n_c); "sampling" draws each class equally often; or "none"."""
    bins: int = 4
    """Bins of survival times, of about equally many events; fewer where events share their times."""
    survival_loss: str = "nll"
    """"nll" (likelihood) or "ce" (cross-entropy), see :mod:`psamil.training.losses`."""
    event_weight: float = 0.0
    """Share of the survival loss that counts events only. 0 is maximum likelihood; the authors of PSA-MIL take 0.5."""

    def __post_init__(self) -> None:
        if self.balance not in BALANCES:
            raise one_of("balance", self.balance, BALANCES)
        if self.survival_loss not in SURVIVAL_LOSSES:
            raise one_of("survival_loss", self.survival_loss, SURVIVAL_LOSSES)
        if self.bins < 1:
            raise OptionError(f"bins must be at least 1, got {self.bins}")
        if not 0 <= self.event_weight <= 1:
            raise OptionError(f"event_weight must be from 0 to 1, got {self.event_weight}")


class Task(ABC):
    """What the tasks of all outcomes have in common. Each is a frozen dataclass of plain numbers and texts."""

    kind: ClassVar[str]
    exclusive: ClassVar[bool] = False  # outputs are classes of which one holds
    outcome_type: ClassVar[type]

    @staticmethod
    def fit(training: Outcome, **options: Any) -> Task:
        """The task of an outcome, fitted to its training part; options are those of :class:`TaskOptions`."""
        known = [option.name for option in fields(TaskOptions)]
        for name in options:
            if name not in known:
                raise one_of("option of a task", name, known)
        (kind,) = (kind for kind in _kinds() if isinstance(training, kind.outcome_type))
        return kind.of(training, TaskOptions(**options))

    @classmethod
    @abstractmethod
    def of(cls, training: Any, options: TaskOptions) -> Task:
        """The task of an outcome of type ``outcome_type``."""

    @property
    @abstractmethod
    def n_out(self) -> int:
        """Number of logits that a model must return."""

    @property
    @abstractmethod
    def score_name(self) -> str:
        """Name of the validation score where it is defined."""

    @abstractmethod
    def _targets(self, outcome: Any) -> Tensor: ...

    @abstractmethod
    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor: ...

    @abstractmethod
    def _predictions(self, logits: Tensor) -> Columns: ...

    @abstractmethod
    def _score(self, outcome: Any, predictions: Columns) -> float: ...

    def targets(self, outcome: Outcome) -> Tensor:
        """What :meth:`loss` takes, one row per sample.

        (n,) index of the class, (n, labels) 0 or 1, (n,) standardised number, or (n, 2) time bin and event.
        """
        if not isinstance(outcome, self.outcome_type):
            raise OptionError(f"the model predicts {self.kind}, the outcome is {outcome.kind}; choose other columns")
        return self._targets(outcome)

    def loss(self, logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Loss of raw logits (n, n_out): the "mean" over n samples, the "sum", or (n,) for "none"."""
        if reduction not in REDUCTIONS:
            raise one_of("reduction", reduction, REDUCTIONS)
        if logits.shape != (len(targets), self.n_out):
            shape = tuple(logits.shape)
            raise ShapeError(f"{len(targets)} samples need logits of shape ({len(targets)}, {self.n_out}), got {shape}")
        each = self._losses(logits, targets)
        return each if reduction == "none" else each.mean() if reduction == "mean" else each.sum()

    def class_indices(self, targets: Tensor) -> Tensor | None:
        """(n,) class of each sample, or its time bin, out of what :meth:`targets` gave; None where there are none."""
        return None

    def absent(self, targets: Tensor) -> Tensor | None:
        """(n, n_out) 1 where a sample lacks what an output stands for, out of what :meth:`targets` gave; None where
        outputs do not stand for anything that a sample has or lacks."""
        return None

    def predictions(self, logits: Logits) -> Columns:
        """Named columns of n numbers.

        Classes and labels: ``prob_<name>``. A number: ``value``, in its unit. Survival: ``risk`` = -sum_b S_b and
        ``survival_1`` to ``survival_B``, the probability S_b of having no event until the end of each time bin.
        """
        return self._predictions(_doubles(logits))

    def validation_score(self, outcome: Outcome, logits: Logits) -> tuple[str, float]:
        """Name and value of what early stopping maximises.

        AUC, macro AUC over the classes or labels for which it is defined, c-index, or minus the mean absolute error.
        Where the outcome defines none (one class only, no comparable pair), minus the loss: this depends on the outcome
        alone, so that all epochs are judged by the same measure. NaN for NaN logits and for no samples.
        """
        values, targets = _doubles(logits), self.targets(outcome)
        score = self._score(outcome, self._predictions(values))
        if math.isnan(score) and not values.isnan().any():
            return "-loss", -float(self.loss(values, targets))
        return self.score_name, score

    def validation_loss(self, outcome: Outcome, logits: Logits) -> float:
        """Mean loss, which tells epochs of equal score apart. NaN for no samples."""
        return float(self.loss(_doubles(logits), self.targets(outcome)))

    def sampling_weights(self, outcome: Outcome) -> list[float] | None:
        """Probability with which each training sample is to be drawn; None where all are equal.

        Each class is drawn equally often. A sample of several labels counts for the rarest of them.
        """
        if getattr(self, "balance", None) != "sampling":
            return None
        _, group = outcome.categories()
        weights = 1 / np.bincount(group)[group]
        return (weights / weights.sum()).tolist()

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and texts; the opposite of :meth:`from_json`."""
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]

    @staticmethod
    def from_json(state: dict[str, Any]) -> Task:
        kinds = {kind.kind: kind for kind in _kinds()}
        if state.get("kind") not in kinds:
            raise one_of("kind of task", state.get("kind"), kinds)
        return kinds[state["kind"]](**{name: _tuples(value) for name, value in state.items() if name != "kind"})


def untrainable(column: str, cause: str) -> DataError:
    """The error for a training part from which a task cannot be learned."""
    return DataError(
        f"column {column!r}", cause, "use a stratified split, fewer folds or more samples, or leave it out"
    )


def _kinds() -> tuple[type[Task], ...]:
    from psamil.training.class_tasks import ClassificationTask, MultiLabelTask  # which build on this module
    from psamil.training.regression_task import RegressionTask
    from psamil.training.survival_task import SurvivalTask

    return ClassificationTask, MultiLabelTask, RegressionTask, SurvivalTask


def _doubles(logits: Logits) -> Tensor:
    return torch.as_tensor(logits).detach().double().cpu()


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value
