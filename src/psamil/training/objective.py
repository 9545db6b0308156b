"""What training makes small: the loss of a pass through the model."""

from __future__ import annotations

from torch import Tensor, nn

from psamil.bag import PackedBags
from psamil.training.tasks import Task


class Pass:
    """What goes through the objective at once. Not a dataclass: fabric would try to take it apart."""

    def __init__(self, batch: PackedBags, targets: Tensor) -> None:
        self.batch, self.targets = batch, targets


class Objective(nn.Module):
    """Loss of the task and auxiliary losses."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, part: Pass) -> Tensor:
        if getattr(self.model, "wants_classes", False):
            output = self.model(part.batch, self.task.class_indices(part.targets))
        else:
            output = self.model(part.batch)
        loss: Tensor = self.task.loss(output.logits, part.targets)
        for extra in output.extra_predictions.values():
            loss = loss + extra.weight * self.task.loss(extra.logits, part.targets[extra.bag])
        for auxiliary in output.auxiliary_losses.values():
            loss = loss + auxiliary
        return loss
