"""Trains one model on one fold, and can be stopped at any moment.

After every epoch the whole state is written to one file. A run that was killed goes on from there and ends with the
same bits as one that was not: everything random is seeded by the epoch and the step, and nothing depends on the clock,
which is read for ``timing.jsonl`` alone.
The test part is only looked at when training is over; validation alone decides which epoch is kept.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from psamil.cohort import Cohort, Split
from psamil.errors import DataError, OptionError
from psamil.files import atomic_write
from psamil.models import create_model
from psamil.models.head_similarity import watched_heads
from psamil.training.batches import epoch_order
from psamil.training.devices import new_fabric
from psamil.training.objective import Objective, Pass
from psamil.training.optimisation import Schedule, new_optimizer
from psamil.training.prediction import loader_for, predict_logits
from psamil.training.ranks import Ranks, run_on_ranks
from psamil.training.regularisation import drop_features
from psamil.training.saved_model import SavedModel
from psamil.training.settings import TrainingSettings
from psamil.training.state import (
    optimizer_tensors,
    read_tensors,
    restore_optimizer,
    with_prefix,
    without_prefix,
    write_tensors,
)
from psamil.training.tasks import Task
from psamil.training.timing import Stopwatch

STATE_FILE, HISTORY_FILE, MODEL_FILE = "state.safetensors", "history.jsonl", "model.safetensors"
STATE_FORMAT = "psamil state 1"
STATE_REMEDY = "delete it; training then begins anew"

Item = TypeVar("Item")


@dataclass
class Progress:
    """Where training stands; what is not tensors."""

    epoch: int = 0  # finished
    best_epoch: int = -1  # the one that is kept
    best: list[float] | None = None  # its validation score and minus its loss there, compared in this order
    improved_epoch: int = -1  # the first one of the best score, from which patience counts
    step_um: float | None = None
    history: list[dict[str, Any]] = field(default_factory=list)


def train_fold(
    cohort: Cohort,
    split: Split,
    settings: TrainingSettings,
    folder: Path,
    report: Callable[[dict[str, Any]], None] = lambda record: None,
    on_step: Callable[[dict[str, Any]], None] = lambda step: None,
) -> SavedModel:
    """Trains on the training part, or goes on where an earlier call in the same folder was stopped.

    With several ``devices``, this process only waits and reports: each device is worked by a process of its own.

    Args:
        cohort: of all samples; only those of the training and the validation part are read.
        split: ids of the parts.
        settings: of the model and its training.
        folder: where ``state.safetensors``, ``history.jsonl``, ``timing.jsonl`` and ``model.safetensors`` are kept.
        report: called after every epoch with its line of the history.
        on_step: called after every step of the optimiser with "epoch" and "step", both from 0, the number of "steps"
            of an epoch, and the "loss".
    """
    finished = folder / MODEL_FILE
    if not finished.exists():
        work, calls = partial(_train, cohort, split, settings, folder), {"epoch": report, "step": on_step}
        if settings.devices == 1:
            work(Ranks(), lambda kind, record: calls[kind](record))
        else:
            run_on_ranks(settings.devices, work, calls)
    model = SavedModel.load(finished)  # always from the file: whoever goes on later gets the same numbers
    if model.about.get("settings") != settings.to_json():
        raise DataError(finished, "was trained with other settings", "choose another folder")
    (folder / STATE_FILE).unlink(missing_ok=True)
    return model


def _train(
    cohort: Cohort,
    split: Split,
    settings: TrainingSettings,
    folder: Path,
    ranks: Ranks,
    tell: Callable[[str, dict[str, Any]], None],
) -> None:
    """What each of the ranks does: all train, the first one writes and tells."""
    training = _Training(cohort, split, settings, folder, ranks, tell)
    training.run()
    if ranks.is_first:
        training.saved_model().save(folder / MODEL_FILE)


def new_model(settings: TrainingSettings, in_dim: int, n_out: int) -> nn.Module:
    """With initial weights that the seed decides. OptionError for options that the model does not take."""
    torch.manual_seed(settings.seed)
    try:
        return create_model(settings.model, in_dim, n_out, **settings.model_options)
    except TypeError as error:
        raise OptionError(f"model {settings.model!r} cannot be made with {settings.model_options}: {error}") from error


def width_of_features(cohort: Cohort) -> int:
    """Of the first sample that has tiles."""
    for sample in cohort.samples:
        bag = cohort.load(sample)
        if bag.n:
            return bag.features.shape[1]
    raise OptionError("no training sample has any tiles")


class _Training:
    """The objects of one training run."""

    def __init__(
        self,
        cohort: Cohort,
        split: Split,
        settings: TrainingSettings,
        folder: Path,
        ranks: Ranks,
        tell: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self.settings, self.folder, self.ranks, self.tell = settings, folder, ranks, tell
        self.fabric = new_fabric(settings, ranks.rank)
        self.train, self.val = cohort.select(split.train), cohort.select(split.val)
        self.task = Task.fit(self.train.outcome, **asdict(settings.task))
        self.targets = self.task.targets(self.train.outcome)
        in_dim = width_of_features(self.train)
        self.model = new_model(settings, in_dim, self.task.n_out)
        self.model.exclusive = self.task.exclusive  # type: ignore[assignment]
        objective = Objective(self.model, self.task, settings.negative_tiles)
        self.objective, self.optimizer = self.fabric.setup(objective, new_optimizer(self.model, settings))
        self.loader = loader_for(self.model, cohort, in_dim, self.fabric.device)
        self.progress = Progress()
        self.best = _copy(self.model)
        steps_per_epoch = math.ceil(len(self.train) / settings.batch_samples)
        self.schedule = Schedule(self.optimizer, settings, steps_per_epoch)
        self._restore()
        self.stopwatch = Stopwatch(folder, self.fabric.device, self.progress.epoch)

    def run(self) -> None:
        patience = self.settings.patience
        while self.progress.epoch < self.settings.epochs:
            epoch = self.progress.epoch
            waited = epoch - self.progress.improved_epoch
            is_stuck = patience is not None and len(self.val) > 0 and waited > patience
            if is_stuck and epoch >= self.settings.least_epochs:
                break
            self.stopwatch.start()
            self._start_epoch(epoch)
            record = {"epoch": epoch, "loss": self._train_epoch(epoch), "lr": self.optimizer.param_groups[0]["lr"]}
            record |= {**self._validate(), **_radii(self.model)}
            self.progress.history.append(record)
            self.progress.epoch += 1
            if self.ranks.is_first:
                self.stopwatch.write(epoch)
                self._write()
                self.tell("epoch", record)

    def saved_model(self) -> SavedModel:
        self.model.load_state_dict(self.best)
        return SavedModel(
            self.model.cpu().eval(),
            self.task,
            {
                "settings": self.settings.to_json(),
                "in_dim": self.loader.in_dim,
                "step_um": self.progress.step_um,
                "epochs": self.progress.epoch,
                "best_epoch": self.progress.best_epoch if len(self.val) else self.progress.epoch - 1,
            },
        )

    @torch.no_grad()
    def _start_epoch(self, epoch: int) -> None:
        """Lets a model look at the training bags that wants to."""
        start = getattr(self.model, "start_epoch", None)
        if start is None:
            return
        _seed_everything(self.settings.seed, epoch, step=-1)
        self.model.eval()
        bags = list(_chunks(self.train.samples, self.settings.samples_per_pass or self.settings.batch_samples))
        start(epoch, self.settings.epochs, lambda: self.loader.batches(iter(bags)))

    def _train_epoch(self, epoch: int) -> float:
        """Mean loss of the samples."""
        settings, samples = self.settings, self.train.samples
        weights = self.task.sampling_weights(self.train.outcome)
        order = epoch_order(len(samples), seed=settings.seed, epoch=epoch, weights=weights)
        per_pass = settings.samples_per_pass or settings.batch_samples
        steps = list(_chunks(order, settings.batch_samples))
        parts = [list(_chunks(self.ranks.share(batch), per_pass)) for batch in steps]  # none, if there are more ranks
        batches = self.loader.batches(
            ([samples[i] for i in part] for of_step in parts for part in of_step),
            max_tiles=settings.max_tiles,
            seed=settings.seed,
            epoch=epoch,
        )
        self.model.train()
        total = 0.0
        with contextlib.closing(batches):
            for step, batch in enumerate(steps):
                _seed_everything(settings.seed, epoch, step, self.ranks.rank)
                self.schedule.set_lr(epoch, step, self.progress.history)
                self.optimizer.zero_grad()
                loss_sum = 0.0
                for part in parts[step]:
                    tiles = drop_features(next(batches), settings.drop_features)
                    loss = self.objective(Pass(tiles, self.targets[part].to(self.fabric.device)))
                    self.fabric.backward(loss * (len(part) / len(batch)))
                    loss_sum += float(loss.detach()) * len(part)
                loss_sum = sum(self.ranks.gather(loss_sum))
                total += loss_sum
                _refuse_divergence("loss", total, epoch)
                self.ranks.sum_gradients(self.model)
                self._update(epoch)
                if self.ranks.is_first:
                    done = {"epoch": epoch, "step": step, "steps": len(steps), "loss": loss_sum / len(batch)}
                    self.tell("step", done)
        self.ranks.take_tensors_of_first(self.model.buffers())
        if epoch == 0:
            steps_um = {name: length for of in self.ranks.gather(self.loader.steps_um) for name, length in of.items()}
            known = [length for length in steps_um.values() if length is not None]
            self.progress.step_um = median(known) if known else None
        _refuse_divergence("sum of all weights", float(sum(w.detach().sum() for w in self.model.parameters())), epoch)
        return total / len(order)

    def _update(self, epoch: int) -> None:
        """One step of the optimiser with the gradients so far."""
        limit = math.inf if self.settings.gradient_clip is None else self.settings.gradient_clip
        norm = self.fabric.clip_gradients(self.objective, self.optimizer, max_norm=limit, error_if_nonfinite=False)
        if not self._precision_state():  # float16 tries large scales and skips the steps in which they overflow
            _refuse_divergence("norm of the gradient", float(norm), epoch)  # type: ignore[arg-type]
        self.optimizer.step()

    def _validate(self) -> dict[str, Any]:
        """Keeps the weights if they are the best so far, or if there is nothing to choose by.

        Of equal scores, which are common where the validation part is small, the lower loss is better: its
        probabilities are. What a model costs by itself is part of it. Patience counts from the first of them.
        """
        progress, preliminary = self.progress, getattr(self.model, "preliminary", False)
        if not len(self.val):
            self.best = _copy(self.model)
            return {"head_similarity": None}
        logits, similarity = self._validation_logits()
        name, score = self.task.validation_score(self.val.outcome, logits)
        _refuse_divergence("validation score", score, progress.epoch)
        loss = self.task.validation_loss(self.val.outcome, logits)
        _refuse_divergence("validation loss", loss, progress.epoch)
        if progress.best is None or score > progress.best[0]:
            progress.improved_epoch = progress.epoch
        cost = float(getattr(self.model, "cost", 0.0))
        if progress.best is None or [score, -loss - cost] > progress.best:
            progress.best, progress.best_epoch = [score, -loss - cost], progress.epoch
            self.best = _copy(self.model)
        if preliminary:
            progress.best = None  # whatever comes next is better
        return {f"validation {name}": score, "validation loss": loss, "head_similarity": similarity}

    def _validation_logits(self) -> tuple[NDArray[np.float64], float | None]:
        """And how alike heads are, on average. Each rank predicts its share; samples go one by one, so that the numbers
        are those of one process."""
        with watched_heads(self.model) as watched:
            mine = predict_logits(self.model, self.loader, self.ranks.share(self.val.samples), fabric=self.fabric)
        logits = np.empty((len(self.val), self.task.n_out))
        similarities: list[float] = []
        for rank, (share, of_share) in enumerate(self.ranks.gather((mine, watched))):
            logits[rank :: self.ranks.size] = share.reshape(-1, self.task.n_out)  # a share may be empty
            similarities += filter(math.isfinite, of_share)  # a sample may have no tiles
        return logits, math.fsum(similarities) / len(similarities) if similarities else None

    def _precision_state(self) -> dict[str, Any]:
        """Of the scale of losses in float16; nothing in other precisions."""
        return self.fabric.strategy.precision.state_dict()

    def _write(self) -> None:
        """History first: the state says that the epoch is over, so that nothing of it may be missing then."""
        with atomic_write(self.folder / HISTORY_FILE) as temporary:
            temporary.write_text("".join(json.dumps(record) + "\n" for record in self.progress.history))
        tensors = {
            **with_prefix("model", self.model.state_dict()),
            **with_prefix("best", self.best),
            **with_prefix("optimizer", optimizer_tensors(self.optimizer)),
        }
        about = {
            "format": STATE_FORMAT,
            "settings": self.settings.to_json(),
            "progress": asdict(self.progress),
            "precision": self._precision_state(),
        }
        write_tensors(self.folder / STATE_FILE, tensors, about)

    def _restore(self) -> None:
        path = self.folder / STATE_FILE
        if not path.exists():
            return
        tensors, about = read_tensors(path, STATE_REMEDY)
        if about.get("format") != STATE_FORMAT or about.get("settings") != self.settings.to_json():
            raise DataError(path, "is no state of a training with these settings", STATE_REMEDY)
        try:
            self.progress = Progress(**about["progress"])
            self.model.load_state_dict(without_prefix("model", tensors))
            self.best = without_prefix("best", tensors)
            restore_optimizer(self.optimizer, without_prefix("optimizer", tensors))
            self.fabric.strategy.precision.load_state_dict(about["precision"])
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            cause = " ".join(str(error).split())
            raise DataError(path, f"does not fit this training ({cause})", STATE_REMEDY) from error


def _seed_everything(seed: int, epoch: int, step: int, rank: int = 0) -> None:
    """Models may draw from any of these; ranks draw different numbers."""
    drawn = int(np.random.SeedSequence([seed, epoch, step + 1, rank]).generate_state(1)[0])
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


def _refuse_divergence(what: str, value: float, epoch: int) -> None:
    if not math.isfinite(value):
        raise OptionError(f"the {what} became {value} in epoch {epoch + 1}; try a lower lr, or look for odd features")
