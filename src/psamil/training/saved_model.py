"""A trained model as one file: weights as safetensors, everything else as JSON in its header. Loading runs no code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from psamil.errors import DataError, PsamilError
from psamil.models import create_model
from psamil.training.state import read_tensors, write_tensors
from psamil.training.tasks import Task

FORMAT = "psamil model 1"
REMEDY = "train it again, or name another file"


@dataclass(frozen=True, eq=False)
class SavedModel:
    """A model, what it predicts, and what is known about its training."""

    model: nn.Module
    task: Task
    about: dict[str, Any]  # settings, in_dim, step_um, epochs, best_epoch

    def save(self, path: Path) -> None:
        about = {"format": FORMAT, "task": self.task.to_json(), **self.about}
        write_tensors(path, self.model.state_dict(), about)

    @staticmethod
    def load(path: Path | str) -> SavedModel:
        path = Path(path)
        tensors, about = read_tensors(path, REMEDY)
        if about.pop("format", None) != FORMAT:
            raise DataError(path, "is no model of this version of psamil", REMEDY)
        try:
            task = Task.from_json(about.pop("task"))
            settings = about["settings"]
            model = create_model(settings["model"], about["in_dim"], task.n_out, **settings["model_options"])
            model.exclusive = task.exclusive  # type: ignore[assignment]
            model.load_state_dict(tensors)
        except (PsamilError, RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
            cause = " ".join(str(error).split())
            remedy = "import the code that registers its model, use the version it was made with, or train it again"
            raise DataError(path, f"does not fit this version of psamil ({cause})", remedy) from error
        return SavedModel(model.eval(), task, about)
