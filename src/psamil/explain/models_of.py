"""Which models of a run may speak about a slide: those that did not learn from it.

Heads of different models do not correspond to one another, so an explanation shows one model, never a mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from psamil.cohort import Splits
from psamil.errors import DataError
from psamil.evaluation.run_folder import SPLITS_FILE, data_of, is_finished, jobs_by_fold
from psamil.training.fold import MODEL_FILE

SEEN = "the model has learned from this slide: it was never in a test part of a finished fold"
UNKNOWN = "the run does not know this slide by its name, and any of its models may speak about it"
OF_PATIENTS = (
    "the run knows patients, not slides: the model may have learned from this slide, and takes it for all of them"
)


@dataclass(frozen=True)
class ModelOf:
    """A finished model of a run that may speak about a sample."""

    path: Path  # of its model.safetensors
    fold: int
    note: str = ""  # a reason for doubt

    @property
    def name(self) -> str:
        """For people: the fold and the seed."""
        return f"fold {self.fold}, {self.path.parent.name.replace('-', ' ')}"


def models_for(run: Path | str, sample_id: str) -> list[ModelOf]:
    """The finished models of the fold in whose test part a sample is, in order of their seeds; never empty.

    For a sample that the run does not know, all of its models. For one that was in no test part of a finished fold, all
    of them as well, but with a note: they have seen it, and say more about it than about a new slide.
    """
    run = Path(run)
    splits = Splits.load(run / SPLITS_FILE) if (run / SPLITS_FILE).is_file() else None
    jobs = {} if splits is None else jobs_by_fold(run, len(splits))
    finished = {fold: [job / MODEL_FILE for job in of_fold if is_finished(job)] for fold, of_fold in jobs.items()}
    if splits is None or not any(finished.values()):
        raise DataError(run, "has no finished model", "name a run directory, or go on with psamil train")
    tested = [fold for fold, paths in finished.items() if paths and sample_id in splits[fold].test]
    if tested:
        return [ModelOf(path, fold) for fold in tested for path in finished[fold]]
    unknown = OF_PATIENTS if data_of(run)["outcome"].get("unit") == "patient" else UNKNOWN
    note = SEEN if any(sample_id in split.ids for split in splits.folds) else unknown
    return [ModelOf(path, fold, note) for fold, paths in finished.items() for path in paths]
