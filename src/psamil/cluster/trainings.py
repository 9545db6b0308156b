"""Trainings of a run as jobs: models x folds x seeds."""

from __future__ import annotations

from collections.abc import Sequence

from psamil.cluster.engine import Job
from psamil.cohort import Cohort
from psamil.evaluation.experiment import Training
from psamil.evaluation.run_folder import is_finished


def training_jobs(cohort: Cohort, trainings: Sequence[Training], model: str = "") -> list[Job]:
    """Those that are not finished; with labels of tiles all of them, since labels may be new.

    Args:
        cohort: of the trainings; it travels once.
        trainings: as :func:`psamil.evaluation.experiment.cross_validate` gives them to an engine.
        model: its name, if there are several.
    """
    wanted = [of for of in trainings if cohort.tile_labels is not None or not is_finished(of.folder)]
    return [Job(f"{model}, {of.name}" if model else of.name, of, cohort) for of in wanted]
