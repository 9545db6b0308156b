"""The task of predicting the time to an event, in discrete time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from psamil.cohort.outcomes import Floats, Survival
from psamil.training import losses, metrics
from psamil.training.tasks import Columns, Task, TaskOptions, untrainable


@dataclass(frozen=True)
class SurvivalTask(Task):
    """Time to an event in B bins; B logits are those of the hazards.

    ``edges`` are B + 1 times: the first and the last of the training part, and the bounds between bins. A bin holds its
    lower bound. Times beyond the ends belong to the outer bins.
    """

    kind: ClassVar[str] = "survival"
    outcome_type: ClassVar[type] = Survival

    edges: tuple[float, ...]
    survival_loss: str
    event_weight: float

    @classmethod
    def of(cls, training: Survival, options: TaskOptions) -> SurvivalTask:
        if not training.events.any():
            cause = f"the training part has no event ({training.describe()})"
            raise untrainable(training.event_column, cause)
        inner = bounds_between_bins(training.times[training.events], options.bins)
        edges = (float(training.times.min()), *inner.tolist(), float(training.times.max()))
        return cls(edges, options.survival_loss, options.event_weight)

    @property
    def score_name(self) -> str:
        return "c_index"

    @property
    def n_out(self) -> int:
        return len(self.edges) - 1

    def _targets(self, outcome: Survival) -> Tensor:
        bins = np.searchsorted(self.edges[1:-1], outcome.times, side="right")
        return torch.tensor(np.stack((bins, outcome.events), axis=1), dtype=torch.long)

    def class_indices(self, targets: Tensor) -> Tensor:
        return targets[:, 0]

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = losses.survival_nll if self.survival_loss == "nll" else losses.survival_cross_entropy
        return loss(logits, targets[:, 0], targets[:, 1], self.event_weight)

    def _predictions(self, logits: Tensor) -> Columns:
        survival = losses.survival_log_probabilities(logits)[1].exp()  # (n, B)
        curve = {f"survival_{b + 1}": column.numpy() for b, column in enumerate(survival.unbind(1))}
        return {"risk": -survival.sum(1).numpy(), **curve}

    def _score(self, outcome: Survival, predictions: Columns) -> float:
        return metrics.concordance_index(outcome.times, outcome.events, predictions["risk"])


def bounds_between_bins(event_times: Floats, bins: int) -> Floats:
    """Quantiles 1/B, ..., (B-1)/B of the event times; bins that would hold no event are merged with a neighbour.

    Equal bounds merge for the same reason. At least one bin remains, without any bound.
    """
    quantiles = np.quantile(event_times, np.arange(1, bins) / bins)
    events_before = np.searchsorted(np.sort(event_times), quantiles, side="left")
    distinct, first = np.unique(events_before, return_index=True)
    return quantiles[first[distinct > 0]]  # the last bin holds the last event: no quantile lies beyond it
