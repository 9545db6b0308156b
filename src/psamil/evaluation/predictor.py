"""Predictions on new bags by the models of a run: calibrated, averaged, with their spread.

>>> predictor = load("run")  # all folds and seeds; or "run/folds/0", or one model.safetensors
>>> prediction = predictor.predict(bag)  # a list of bags gives a list
>>> prediction.probabilities, prediction.low, prediction.high, prediction.predicted

Nothing is fitted here. Temperature and threshold are those that each model got from its own validation part.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from psamil.bag import Bag, PackedBags
from psamil.errors import DataError, OptionError
from psamil.evaluation.exported import check_models, read_config
from psamil.evaluation.hub import local_folder
from psamil.evaluation.run_folder import METRICS_FILE, RUN_FILE
from psamil.evaluation.tile_maps import mean_evidence, mean_scores
from psamil.files import read_json
from psamil.spatial import Layout
from psamil.training.class_tasks import ClassificationTask, MultiLabelTask
from psamil.training.fold import MODEL_FILE
from psamil.training.saved_model import SavedModel
from psamil.training.survival_task import SurvivalTask
from psamil.training.tasks import Task

LARGEST_STEP_RATIO = (
    1.25  # between the tile steps of a bag and of training; beyond it, learned radii mean other lengths
)
PROBABILITY = "prob_"


@dataclass(frozen=True, eq=False)
class Member:
    """One model of an ensemble, with what was fitted to its validation part."""

    saved: SavedModel
    temperature: float
    threshold: float
    path: Path

    @staticmethod
    def load(path: Path) -> Member:
        saved = SavedModel.load(path)
        beside = path.with_name(METRICS_FILE)
        if not beside.exists():
            warnings.warn(f"{path}: without {METRICS_FILE} beside it, it is not calibrated", stacklevel=4)
            return Member(saved, 1.0, 0.5, path)
        found = read_json(beside)
        try:
            return Member(saved, float(found["temperature"]), float(found["threshold"]), path)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(beside, f"has no temperature and threshold ({error!r})", "train the model again") from error


@dataclass(frozen=True, eq=False)
class Prediction:
    """What an ensemble says about one bag.

    ``values`` are the columns of :meth:`psamil.training.Task.predictions`: ``prob_<class>``, calibrated; ``value``; or
    ``risk`` and, where all models share their time bins, ``survival_<bin>``. Each is the mean over the models.

    ``low`` and ``high`` are the lowest and the highest value of a single model, NaN for one model alone. They show
    whether the models agree. They are no confidence interval of the truth.
    """

    id: str
    tiles: int
    values: dict[str, float]
    low: dict[str, float]
    high: dict[str, float]
    predicted: str | None  # the class; names of the labels that apply; None for numbers and survival
    tile_scores: Tensor  # (tiles,) how much the prediction rests on each, raw, mean over the models
    models: int
    note: str = ""  # a reason for doubt
    tile_evidence: Tensor | None = None  # (tiles, n_out) for and against each output, on the scale of the logits

    @property
    def probabilities(self) -> dict[str, float]:
        """By class or label."""
        return {name.removeprefix(PROBABILITY): p for name, p in self.values.items() if name.startswith(PROBABILITY)}

    def row(self) -> dict[str, Any]:
        """For a table; without the tile scores."""
        spread = {
            f"{end}_{name}": of[name] for name in self.values for end, of in (("low", self.low), ("high", self.high))
        }
        chosen = {} if self.predicted is None else {"predicted": self.predicted}
        return {"sample": self.id, **chosen, **self.values, **spread, "tiles": self.tiles, "note": self.note}


class Predictor:
    """Models that predict the same: those of all folds and seeds of a run, or a single one. Made by :func:`load`."""

    def __init__(self, members: Sequence[Member], device: str | torch.device = "cpu") -> None:
        _refuse_mixture(members)
        self.members = tuple(members)
        try:
            self.device = torch.device(device)
            for member in self.members:
                member.saved.model.to(self.device)
        except (RuntimeError, AssertionError) as error:
            raise OptionError(f"device {str(device)!r} cannot be used: {str(error).splitlines()[0]}") from error
        self._needs_layout = any(getattr(member.saved.model, "needs_layout", False) for member in self.members)

    def __len__(self) -> int:
        """Number of models."""
        return len(self.members)

    def __repr__(self) -> str:
        return f"Predictor({len(self)} models, {self.task.kind}, features of width {self.in_dim})"

    @property
    def task(self) -> Task:
        """Of the first model; all predict the same classes, labels, number or event."""
        return self.members[0].saved.task

    @property
    def in_dim(self) -> int:
        return int(self.members[0].saved.about["in_dim"])

    @property
    def step_um(self) -> float | None:
        """Tile step of the training slides in micrometres, where it is known."""
        known = [about["step_um"] for about in (m.saved.about for m in self.members) if about.get("step_um")]
        return median(known) if known else None

    @property
    def threshold(self) -> float:
        """From which probability on the second of two classes is predicted: the mean over the models."""
        return fmean(member.threshold for member in self.members)

    def check(self, bag: Bag) -> None:
        """DataError if the bag cannot be predicted: features of another width, or NaN and infinite ones."""
        if bag.n and bag.features.shape[1] != self.in_dim:
            cause = f"features are {bag.features.shape[1]} wide, the model takes {self.in_dim}"
            raise DataError(f"bag {bag.id!r}", cause, "use features of the encoder that the model was trained on")
        bad = int((~bag.features.isfinite()).any(1).sum())
        if bad:
            cause = f"{bad} of {bag.n} tiles have NaN or infinite features"
            raise DataError(f"bag {bag.id!r}", cause, "extract the features again, or leave these tiles out")

    @overload
    def predict(self, bags: Bag) -> Prediction: ...

    @overload
    def predict(self, bags: Iterable[Bag]) -> list[Prediction]: ...

    def predict(self, bags: Bag | Iterable[Bag]) -> Prediction | list[Prediction]:
        """The prediction for a bag, or those for several, which are taken one by one and may come from a generator.

        Bags of any number of tiles can be predicted, those without tiles as well. A warning is given once if the tile
        step of bags differs from that of training by more than a quarter.
        """
        predictions = [self._predict(bag) for bag in ([bags] if isinstance(bags, Bag) else bags)]
        doubtful = [prediction for prediction in predictions if prediction.note]
        if doubtful:
            more = f" (and {len(doubtful) - 1} more bags)" if len(doubtful) > 1 else ""
            warnings.warn(f"bag {doubtful[0].id!r}{more}: {doubtful[0].note}", stacklevel=2)
        return predictions[0] if isinstance(bags, Bag) else predictions

    @torch.no_grad()
    def _predict(self, bag: Bag) -> Prediction:
        self.check(bag)
        if bag.n == 0:  # it may not know how wide features are
            bag = replace(bag, features=torch.empty(0, self.in_dim))
        layout = Layout.of(bag.xy, bag.slides) if self._needs_layout else None
        batch = PackedBags.of(bag, layout).to(self.device)
        outputs = [member.saved.model(batch) for member in self.members]
        columns = self._columns([output.logits.double().cpu().numpy() for output in outputs])
        values = {name: float(of_models.mean()) for name, of_models in columns.items()}
        alone = len(self) == 1
        return Prediction(
            id=bag.id,
            tiles=bag.n,
            values=values,
            low={name: np.nan if alone else float(of_models.min()) for name, of_models in columns.items()},
            high={name: np.nan if alone else float(of_models.max()) for name, of_models in columns.items()},
            predicted=self._choice(values),
            tile_scores=mean_scores(outputs),
            tile_evidence=mean_evidence(outputs),
            models=len(self),
            note=self._note(bag),
        )

    def _columns(self, logits: Sequence[NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
        """Calibrated predictions of every model, (models,) each, from their logits (1, n_out)."""
        of_members = [m.saved.task.predictions(x / m.temperature) for m, x in zip(self.members, logits, strict=True)]
        names = list(of_members[0])
        if len({_edges(member.saved.task) for member in self.members}) > 1:
            names = ["risk"]  # survival at the end of a bin is another time in another model
        return {name: np.concatenate([of_member[name] for of_member in of_members]) for name in names}

    def _choice(self, values: dict[str, float]) -> str | None:
        task = self.task
        if isinstance(task, MultiLabelTask):
            return ", ".join(name for name in task.labels if values[PROBABILITY + name] >= self.threshold)
        if not isinstance(task, ClassificationTask):
            return None
        if task.n_out == 1:
            return task.classes[int(values[PROBABILITY + task.classes[1]] >= self.threshold)]
        return max(task.classes, key=lambda name: values[PROBABILITY + name])

    def _note(self, bag: Bag) -> str:
        trained = self.step_um
        if bag.n < 2 or not bag.step_um or not trained:
            return ""
        ratio = max(bag.step_um, trained) / min(bag.step_um, trained)
        if ratio <= LARGEST_STEP_RATIO:
            return ""
        return f"one tile step is {bag.step_um:.4g} um, but was {trained:.4g} um in training; radii mean other lengths"


def load(path: str | Path, *, device: str = "cpu") -> Predictor:
    """The models of a run directory, of one of its folds (``run/folds/0``), or of one file ``model.safetensors``.

    Of a run that is not finished, the models that are. Loading runs no code of the files. Exported models are taken in
    the same way, and refused if they are not as they were written.

    Args:
        path: of the run, the fold or the file; ``hf://owner/name`` for exported models on the Hugging Face hub.
        device: where to compute, as torch names it.
    """
    files = _model_files(local_folder(path))
    check_models(files)
    return Predictor([Member.load(file) for file in files], device)


def _model_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.exists():
        raise DataError(path, "does not exist", "name a run directory or a model.safetensors")
    if (path / MODEL_FILE).exists():
        return [path / MODEL_FILE]
    jobs = [file.parent for pattern in ("seed-*", "folds/*/seed-*") for file in path.glob(f"{pattern}/{METRICS_FILE}")]
    if not jobs:
        raise DataError(path, "has no finished model", "name a run directory, or go on with psamil train")
    if (path / "folds").is_dir() and not (path / RUN_FILE).is_file() and read_config(path) is None:
        cause = "has models, but neither the run.json of a run nor the config.json of exported models"
        raise DataError(path, cause, "copy the whole folder again, or name a single model.safetensors")
    return [job / MODEL_FILE for job in sorted(jobs)]


def _refuse_mixture(members: Sequence[Member]) -> None:
    if not members:
        raise OptionError("an ensemble needs at least one model")
    first = members[0]
    for member in members[1:]:
        if _predicts(member.saved) != _predicts(first.saved):
            cause = f"predicts something else, or from other features, than {first.path}"
            raise DataError(member.path, cause, "name a run directory as psamil train leaves it")


def _predicts(saved: SavedModel) -> tuple[Any, ...]:
    task = saved.task
    return task.kind, getattr(task, "classes", None), getattr(task, "labels", None), saved.about["in_dim"]


def _edges(task: Task) -> tuple[float, ...]:
    return task.edges if isinstance(task, SurvivalTask) else ()
