"""The optimiser, and its learning rate over a training."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from psamil.spatial import parameter_groups
from psamil.training.settings import TrainingSettings


def new_optimizer(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """By the settings, with the highest learning rates; radii have their own, and no weight decay."""
    groups: Any = parameter_groups(model, settings.lr, settings.weight_decay, settings.prior_lr_scale)
    first, second = settings.betas
    if settings.optimizer == "adam":
        return torch.optim.Adam(groups, betas=(first, second))
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, betas=(first, second))
    return torch.optim.RAdam(groups, betas=(first, second), decoupled_weight_decay=True)


class Schedule:
    """Sets the learning rates of an optimiser, step by step.

    Args:
        optimizer: with the highest learning rates.
        settings: of the training.
        steps_per_epoch: optimisation steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: TrainingSettings, steps_per_epoch: int) -> None:
        self.optimizer, self.settings, self.steps_per_epoch = optimizer, settings, steps_per_epoch
        self.highest = [float(group["lr"]) for group in optimizer.param_groups]

    def set_lr(self, epoch: int, step: int, history: Sequence[Mapping[str, Any]]) -> None:
        """Of a step of an epoch, after the epochs whose records are in the history."""
        settings = self.settings
        losses = [record["validation loss"] for record in history if "validation loss" in record]
        at, steps = epoch * self.steps_per_epoch + step, settings.epochs * self.steps_per_epoch
        factor = lr_factor(at, steps, settings) * settings.drop_factor ** lr_drops(epoch, losses, settings)
        for group, highest in zip(self.optimizer.param_groups, self.highest, strict=True):
            group["lr"] = highest * factor


def lr_factor(step: int, steps: int, settings: TrainingSettings) -> float:
    """Learning rate of a step over the highest one: a linear rise, a plateau, a fall along a line or a cosine.

    Of ``steps`` in all, the first ``warm_up`` share rises from first_lr; of the others, the first ``constant`` share
    stays at lr and the rest falls to first_lr. The value is that of the middle of the step, so that the mean over a run
    is right for any number of steps, even one.
    """
    low = settings.first_lr / settings.lr
    rise = settings.warm_up * steps
    fall_begins = rise + settings.constant * (steps - rise)
    at = step + 0.5
    if at < rise:
        return low + (1 - low) * at / rise
    if at <= fall_begins:
        return 1.0
    left = (steps - at) / (steps - fall_begins)
    return low + (1 - low) * (left if settings.fall == "line" else (1 - math.cos(math.pi * left)) / 2)


def lr_drops(epoch: int, validation_losses: Sequence[float], settings: TrainingSettings) -> int:
    """How often the learning rate has dropped by an epoch, from the losses after those before it.

    At ``drop_epochs``, and whenever ``plateau_epochs`` have passed without a loss below all before; then they count
    anew.
    """
    drops = sum(epoch >= at for at in settings.drop_epochs)
    lowest, waited = math.inf, 0
    for loss in validation_losses:
        waited = 0 if loss < lowest else waited + 1
        lowest = min(loss, lowest)
        if waited == settings.plateau_epochs:
            drops, waited = drops + 1, 0
    return drops
