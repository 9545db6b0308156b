"""Trains one model on one fold, and can be stopped at any moment.

After every epoch the whole state is written to one file. A run that was killed goes on from there and ends with the
same bits as one that was not: everything random is seeded by the epoch and the step, and nothing depends on the clock.
The test part is only looked at when training is over; validation alone decides which epoch is kept.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from psamil.bag import PackedBags
from psamil.cohort import Cohort, Split
from psamil.errors import OptionError
from psamil.files import atomic_write
from psamil.models import create_model
from psamil.spatial import parameter_groups
from psamil.training.batches import epoch_order
from psamil.training.prediction import loader_for, predict_logits
from psamil.training.saved_model import SavedModel
from psamil.training.settings import TrainingSettings, lr_factor
from psamil.training.state import (
    optimizer_tensors,
    read_tensors,
    restore_optimizer,
    with_prefix,
    without_prefix,
    write_tensors,
)
from psamil.training.tasks import Task

STATE_FILE, HISTORY_FILE, MODEL_FILE = "state.safetensors", "history.jsonl", "model.safetensors"

Item = TypeVar("Item")


@dataclass
class Progress:
    """Where training stands; what is not tensors."""

    epoch: int = 0  # finished
    best_epoch: int = -1
    best_score: float = -math.inf
    step_um: float | None = None
    history: list[dict[str, Any]] = field(default_factory=list)


def train_fold(
    cohort: Cohort,
    split: Split,
    settings: TrainingSettings,
    folder: Path,
    report: Callable[[dict[str, Any]], None] = lambda record: None,
) -> SavedModel:
    """Trains on the training part, or goes on where an earlier call in the same folder was stopped.

    Args:
        cohort: of all samples; only those of the training and the validation part are read.
        split: ids of the parts.
        settings: of the model and its training.
        folder: where ``state.safetensors``, ``history.jsonl`` and ``model.safetensors`` are kept.
        report: called after every epoch with its line of the history.
    """
    finished = folder / MODEL_FILE
    if finished.exists():
        return SavedModel.load(finished)
    training = _Training(cohort, split, settings, folder)
    training.run(report)
    model = training.saved_model()
    model.save(finished)
    (folder / STATE_FILE).unlink(missing_ok=True)
    return model


class _Training:
    """The objects of one training run."""

    def __init__(self, cohort: Cohort, split: Split, settings: TrainingSettings, folder: Path) -> None:
        from lightning_fabric import Fabric

        self.settings, self.folder = settings, folder
        self.fabric = Fabric(accelerator=settings.accelerator, devices=1, precision=settings.precision)  # type: ignore[arg-type]
        self.train, self.val = cohort.select(split.train), cohort.select(split.val)
        if not len(self.train):
            raise OptionError(f"split {split.name!r} has no training samples")
        self.task = Task.fit(self.train.outcome, **asdict(settings.task))
        self.targets = self.task.targets(self.train.outcome)
        in_dim = _width_of_features(self.train)
        torch.manual_seed(settings.seed)
        self.model = create_model(settings.model, in_dim, self.task.n_out, **settings.model_options)
        groups = parameter_groups(self.model, settings.lr, settings.weight_decay, settings.prior_lr_scale)
        kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
        self.base_lrs = [float(group["lr"]) for group in groups]  # type: ignore[arg-type]
        self.objective, self.optimizer = self.fabric.setup(_Objective(self.model, self.task), kind(groups))
        self.loader = loader_for(self.model, cohort, in_dim, self.fabric.device)
        self.progress = Progress()
        self.best = _copy(self.model)
        self.steps_per_epoch = math.ceil(len(self.train) / settings.batch_samples)
        self._restore()

    def run(self, report: Callable[[dict[str, Any]], None]) -> None:
        patience = self.settings.patience
        while self.progress.epoch < self.settings.epochs:
            epoch = self.progress.epoch
            if patience is not None and len(self.val) and epoch - self.progress.best_epoch > patience:
                break
            record = {"epoch": epoch, "loss": self._train_epoch(epoch), **self._validate(), **_radii(self.model)}
            self.progress.history.append(record)
            self.progress.epoch += 1
            self._write()
            report(record)

    def saved_model(self) -> SavedModel:
        self.model.load_state_dict(self.best)
        return SavedModel(
            self.model.cpu().eval(),
            self.task,
            {
                "settings": asdict(self.settings),
                "in_dim": self.loader.in_dim,
                "step_um": self.progress.step_um,
                "epochs": self.progress.epoch,
                "best_epoch": self.progress.best_epoch if len(self.val) else self.progress.epoch - 1,
            },
        )

    def _train_epoch(self, epoch: int) -> float:
        """Mean loss of the samples."""
        settings, samples = self.settings, self.train.samples
        weights = self.task.sampling_weights(self.train.outcome)
        order = epoch_order(len(samples), seed=settings.seed, epoch=epoch, weights=weights)
        passes = [
            (step, part, len(batch))
            for step, batch in enumerate(_chunks(order, settings.batch_samples))
            for part in _chunks(batch, settings.samples_per_pass or settings.batch_samples)
        ]
        bags = self.loader.batches(
            ([samples[i] for i in part] for _, part, _ in passes),
            max_tiles=settings.max_tiles,
            seed=settings.seed,
            epoch=epoch,
        )
        self.model.train()
        total = 0.0
        for k, ((step, part, batch_size), bag_batch) in enumerate(zip(passes, bags, strict=True)):
            if k == 0 or passes[k - 1][0] != step:
                _seed_everything(settings.seed, epoch, step)
                self._set_lr(epoch * self.steps_per_epoch + step)
                self.optimizer.zero_grad()
            targets = self.targets[part].to(self.fabric.device)
            loss = self.objective(_Pass(bag_batch, targets)) * (len(part) / batch_size)
            self.fabric.backward(loss)
            total += float(loss.detach()) * batch_size
            if not math.isfinite(total):
                raise OptionError(f"the loss became {total} in epoch {epoch}; try a lower lr, or look for odd features")
            if k + 1 == len(passes) or passes[k + 1][0] != step:
                if settings.gradient_clip is not None:
                    self.fabric.clip_gradients(self.objective, self.optimizer, max_norm=settings.gradient_clip)
                self.optimizer.step()
        if epoch == 0:
            known = [length for length in self.loader.steps_um.values() if length is not None]
            self.progress.step_um = median(known) if known else None
        return total / len(order)

    def _validate(self) -> dict[str, Any]:
        """Keeps the weights if they are the best so far, or if there is nothing to choose by."""
        if not len(self.val):
            self.best = _copy(self.model)
            return {}
        logits = predict_logits(self.model, self.loader, self.val.samples, fabric=self.fabric)
        name, score = self.task.validation_score(self.val.outcome, logits)
        if score > self.progress.best_score:
            self.progress.best_score, self.progress.best_epoch = score, self.progress.epoch
            self.best = _copy(self.model)
        return {f"validation {name}": score}

    def _set_lr(self, step: int) -> None:
        factor = lr_factor(step, self.settings.epochs * self.steps_per_epoch, self.settings)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * factor

    def _write(self) -> None:
        tensors = {
            **with_prefix("model", self.model.state_dict()),
            **with_prefix("best", self.best),
            **with_prefix("optimizer", optimizer_tensors(self.optimizer)),
        }
        write_tensors(self.folder / STATE_FILE, tensors, asdict(self.progress))
        with atomic_write(self.folder / HISTORY_FILE) as temporary:
            temporary.write_text("".join(json.dumps(record) + "\n" for record in self.progress.history))

    def _restore(self) -> None:
        if not (self.folder / STATE_FILE).exists():
            return
        tensors, progress = read_tensors(self.folder / STATE_FILE)
        self.progress = Progress(**progress)
        self.model.load_state_dict(without_prefix("model", tensors))
        self.best = without_prefix("best", tensors)
        restore_optimizer(self.optimizer, without_prefix("optimizer", tensors))


class _Pass:
    """What goes through the objective at once. Not a dataclass: fabric would try to take it apart."""

    def __init__(self, batch: PackedBags, targets: Tensor) -> None:
        self.batch, self.targets = batch, targets


class _Objective(nn.Module):
    """Loss of the task and auxiliary losses."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, part: _Pass) -> Tensor:
        output = self.model(part.batch)
        loss: Tensor = self.task.loss(output.logits, part.targets)
        for auxiliary in output.auxiliary_losses.values():
            loss = loss + auxiliary
        return loss


def _seed_everything(seed: int, epoch: int, step: int) -> None:
    """Models may draw from any of these."""
    drawn = int(np.random.SeedSequence([seed, epoch, step]).generate_state(1)[0])
    random.seed(drawn)
    np.random.seed(drawn)
    torch.manual_seed(drawn)


def _chunks(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    return (items[first : first + size] for first in range(0, len(items), size))


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def _radii(model: nn.Module) -> dict[str, Any]:
    priors = getattr(model, "priors", None)
    return {"radii_steps": [prior.radius_steps.tolist() for prior in priors]} if priors else {}


def _width_of_features(cohort: Cohort) -> int:
    for sample in cohort.samples:
        bag = cohort.load(sample)
        if bag.n:
            return bag.features.shape[1]
    raise OptionError("no training sample has any tiles")
