"""Which models of a run may speak about a slide: those that did not learn from it.

Heads of different models do not correspond to one another, so an explanation shows one model, never a mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from psamil.cohort import Splits
from psamil.errors import DataError
from psamil.evaluation.run_folder import SPLITS_FILE, data_of, is_finished, jobs_by_fold, sample_of_slide
from psamil.training.fold import MODEL_FILE

SEEN = "the model has learned from this slide: it was never in a test part of a finished fold"
UNKNOWN = "the run does not know this slide by its name, and any of its models may speak about it"
OF_PATIENTS = (
    "the run knows patients, and not whose this slide is: the model may have learned from it, and sees this slide alone"
)
ALONE = "the run predicts patients from all of their slides; here its model sees this slide alone"


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


def models_for(run: Path | str, name: str) -> list[ModelOf]:
    """The finished models of the fold in whose test part a slide is, in order of their seeds; never empty.

    For a slide that the run does not know, all of its models. For one that was in no test part of a finished fold, all
    of them as well, but with a note: they have seen it, and say more about it than about a new slide.

    Args:
        run: run directory.
        name: of a slide, or of a patient in a run of patients.
    """
    run = Path(run)
    splits = Splits.load(run / SPLITS_FILE) if (run / SPLITS_FILE).is_file() else None
    jobs = {} if splits is None else jobs_by_fold(run, len(splits))
    finished = {fold: [job / MODEL_FILE for job in of_fold if is_finished(job)] for fold, of_fold in jobs.items()}
    if splits is None or not any(finished.values()):
        raise DataError(run, "has no finished model", "name a run directory, or go on with psamil train")
    data = data_of(run)
    sample = sample_of_slide(data, {id for split in splits.folds for id in split.ids}, name)
    if sample is None:
        note = OF_PATIENTS if data["outcome"].get("unit") == "patient" else UNKNOWN
        return [ModelOf(path, fold, note) for fold, paths in finished.items() for path in paths]
    slides = list(data["slides"].values()).count(sample)  # 0: the run does not say
    is_whole = slides == 1 or (name == sample and name not in data["slides"])
    alone = "" if is_whole else ALONE
    tested = {fold: paths for fold, paths in finished.items() if sample in splits[fold].test and paths}
    note = alone if tested else "; ".join(filter(None, (SEEN, alone)))
    return [ModelOf(path, fold, note) for fold, paths in (tested or finished).items() for path in paths]
