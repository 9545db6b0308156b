"""A run from Python: the same as ``psamil train``, with its results at hand.

>>> run = fit("features", "labels.csv", "run", target="subtype", model="abmil", epochs=20)
>>> print(run)  # metrics with their uncertainty
>>> run.predict(bag).probabilities
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import pandas as pd
import torch

from psamil.bag import Bag
from psamil.cohort import BagCache, Cohort, Splits, k_fold, read_splits
from psamil.cohort.split_files import fit_to_cohort
from psamil.errors import DataError, OptionError, one_of
from psamil.evaluation.experiment import Engine, OnStep, Report, cross_validate
from psamil.evaluation.fold_localisation import labelled_slides
from psamil.evaluation.predictor import Prediction, Predictor, load
from psamil.evaluation.run_folder import PREDICTIONS_FILE, RUN_FILE, data_of, finished_folds, read_run
from psamil.evaluation.scores import read_predictions
from psamil.readers.extraction_settings import extraction_settings
from psamil.recipes import DEFAULT_RECIPE, seeds_of_recipe, settings_of_recipe, with_own_options
from psamil.training.settings import TrainingSettings

Tell = Callable[[str], None]
FEW_PATIENTS = 10  # in a validation part: worth a word


@dataclass
class Run:
    """A run directory."""

    folder: Path
    summary: dict[str, Any]

    def __str__(self) -> str:
        head = f"{len(self.summary['finished'])} of {self.summary['folds']} folds; test part, by patient"
        table = self.table.to_string(float_format="%.3f", na_rep="")
        return "\n".join(filter(None, (head, table, labelled_slides(self.summary))))

    @property
    def table(self) -> pd.DataFrame:
        """One row per metric: mean and standard deviation over folds; where taken, the 95% interval over patients."""
        columns = ["mean", "sd", "low", "high"]
        rows = {name: [row.get(column) for column in columns] for name, row in self.summary["metrics"].items()}
        return pd.DataFrame.from_dict(rows, orient="index", columns=columns, dtype=float)

    @property
    def predictions(self) -> pd.DataFrame:
        """Of each sample, by the models of the fold in whose test part it is."""
        return read_predictions(self.folder / PREDICTIONS_FILE)

    @cached_property
    def predictor(self) -> Predictor:
        """All models of the run."""
        return load(self.folder)

    @overload
    def predict(self, bags: Bag) -> Prediction: ...

    @overload
    def predict(self, bags: Iterable[Bag]) -> list[Prediction]: ...

    def predict(self, bags: Bag | Iterable[Bag]) -> Prediction | list[Prediction]:
        """What all models of the run say about new bags; see :meth:`psamil.evaluation.predictor.Predictor.predict`."""
        return self.predictor.predict(bags)


def fit(
    features: str | Path,
    labels: str | Path | pd.DataFrame,
    out: str | Path,
    *,
    target: str | Sequence[str] | None = None,
    kind: str = "auto",
    classes: Sequence[str] | None = None,
    time: str | None = None,
    event: str | None = None,
    censorship: str | None = None,
    unit: str = "slide",
    slide_table: str | Path | pd.DataFrame | None = None,
    slide_column: str | None = None,
    patient_column: str | None = None,
    site_column: str | None = None,
    folds: int = 5,
    val: float = 0.2,
    repeats: int = 1,
    split_seed: int = 0,
    by_site: bool = False,
    splits: str | Path | Splits | None = None,
    fold: int | None = None,
    seeds: int | None = None,
    training: TrainingSettings | None = None,
    recipe: str | None = None,
    um_per_step: float | None = None,
    non_finite: str = "error",
    positions: str = "file",
    damaged: str = "set aside",
    tile_labels: str | Path | None = None,
    cache: str | Path | None = None,
    loggers: Sequence[str] | None = None,
    tell: Tell = lambda text: None,
    report: Report = lambda job, record: None,
    on_step: OnStep = lambda job, jobs_left, step: None,
    engine: Engine | None = None,
    **settings: Any,
) -> Run:
    """Trains a model by cross-validation, and goes on where an earlier run in the same folder was stopped.

    Args:
        features: folder of features of any known format.
        labels: table of labels: CSV, TSV, XLSX or Parquet, or a data frame.
        out: the run directory; one that exists is gone on with.
        target, kind, classes, time, event, censorship: what is predicted; see :meth:`psamil.Cohort.open`.
        unit, slide_table, slide_column, patient_column, site_column: how tables and slides belong together; see there.
        folds, val, repeats, split_seed, by_site: of the splits; see :func:`psamil.cohort.k_fold`.
        splits: splits, or a file or folder of them, instead of new ones.
        fold: work on this fold alone.
        seeds: trainings per fold, whose predictions are averaged; by default as the recipe says, and 1 without one.
        training: settings of the model and its training, all of them, instead of a recipe.
        recipe: settings to begin with, "context" by default; see :mod:`psamil.recipes`.
        um_per_step, non_finite, positions: how features are read; see :func:`psamil.open_bag`.
        damaged: slides that cannot be read: "set aside" or "refuse".
        tile_labels: folder of labels of single tiles (``<slide>.npy``, 0 for normal), to test where the models look.
        cache: folder of the cache; by default in the user's cache folder.
        loggers: other programs that shall show the history: "tensorboard", "mlflow".
        tell: called with what a user should know about the data; ``print`` for instance.
        report: called with the name of the job and its line of the history after each epoch; ``print`` for instance.
        on_step: called after each step of the optimiser; see :func:`psamil.evaluation.experiment.cross_validate`.
        engine: does the trainings in its own way, for instance on a cluster; see there.
        settings: single settings, which win over ``training`` and ``recipe``: ``model="abmil", epochs=20``. Of
            ``model_options``, those that are not given are the recipe's.
    """
    if seeds is None:
        seeds = 1 if training is not None else seeds_of_recipe(recipe or DEFAULT_RECIPE)
    out, training = Path(out), _with_settings(training, recipe, settings)
    outcome: dict[str, Any] = {
        "target": target,
        "classes": classes,
        "time": time,
        "event": event,
        "censorship": censorship,
    }
    reading: dict[str, Any] = {"um_per_step": um_per_step, "non_finite": non_finite, "positions": positions}
    _refuse_other_reading(out, reading)
    cohort = Cohort.open(
        features,
        labels,
        **outcome,
        kind=kind,
        unit=unit,
        slide_table=slide_table,
        slide_column=slide_column,
        patient_column=patient_column,
        site_column=site_column,
        cache=BagCache(cache, **reading),
    )
    tell("reading every slide once")
    cohort = cohort.checked(damaged)
    if tile_labels is not None:
        cohort = cohort.with_tile_labels(tile_labels)
    tell(str(cohort))
    if splits is None:
        chosen = k_fold(cohort, folds, val=val, repeats=repeats, seed=split_seed, by_site=by_site)
        _tell_few_choose(chosen, cohort, out, tell)
    else:
        chosen = _fitted(splits, cohort, tell)
    _tell_other_threads(out, len(chosen), tell)
    about = {  # so that other cohorts can be read, and other slides be made features of, in the same way
        "outcome": {**outcome, "unit": unit},
        "extraction": extraction_settings(features),
        "features": str(Path(features).resolve()),
    }
    summary = cross_validate(
        cohort,
        chosen,
        training,
        out,
        seeds=seeds,
        fold=fold,
        about=about,
        loggers=loggers or (),
        report=report,
        on_step=on_step,
        engine=engine,
    )
    return Run(out, summary)


def _with_settings(training: TrainingSettings | None, recipe: str | None, settings: dict[str, Any]) -> TrainingSettings:
    known = TrainingSettings.__dataclass_fields__
    for name in settings:
        if name not in known:
            raise one_of("setting of training", name, known)
    if training is not None:
        if recipe is not None:
            raise OptionError("give training or a recipe; single settings, as in model='abmil', win over a recipe")
        return replace(training, **settings)
    of_recipe = settings_of_recipe(recipe or DEFAULT_RECIPE, settings.get("model", TrainingSettings.model))
    options = with_own_options(of_recipe.model_options, settings.get("model_options", {}))
    return replace(of_recipe, **{**settings, "model_options": options})


def _fitted(splits: str | Path | Splits, cohort: Cohort, tell: Tell) -> Splits:
    fitted = fit_to_cohort(splits if isinstance(splits, Splits) else read_splits(splits), cohort)
    tell(f"{len(fitted.unknown)} names of the splits are unknown, {len(fitted.unused)} samples unused")
    return fitted.splits


def _tell_few_choose(splits: Splits, cohort: Cohort, out: Path, tell: Tell) -> None:
    """A score of a handful of patients takes few values, and is soon the highest."""
    if _is_finished(out, len(splits)):
        return
    patient_of = dict(zip(cohort.ids, cohort.patients, strict=True))
    fewest = min(len({patient_of[sample] for sample in fold.val}) for fold in splits.folds)
    if 0 < fewest < FEW_PATIENTS:
        tell(
            f"Only {fewest} patients choose the epoch in the smallest validation part. With val = 0 all train, and the "
            "last epoch is kept; threshold and calibration are then left as they are"
        )


def _refuse_other_reading(out: Path, reading: dict[str, Any]) -> None:
    """Before every slide is read in a way that the run would refuse."""
    if not (out / RUN_FILE).exists():
        return
    before = data_of(out)["reading"]
    for name, value in reading.items():
        if before.get(name) != value:
            cause = f"is a run with {name} = {before.get(name)!r}, not {value!r}"
            raise DataError(out, cause, "choose a new folder, or read the features as before")


def _is_finished(out: Path, folds: int) -> bool:
    return (out / RUN_FILE).exists() and len(finished_folds(out, folds)) == folds


def _tell_other_threads(out: Path, folds: int, tell: Tell) -> None:
    """Other threads add numbers in another order, and round them in another way."""
    if not (out / RUN_FILE).exists() or _is_finished(out, folds):
        return
    before, now = read_run(out)["threads"], torch.get_num_threads()
    if before != now:
        tell(
            f"The run was begun with {before} threads and goes on with {now}: results may differ in their last bits "
            f"from those of an unbroken run (OMP_NUM_THREADS={before} avoids that)"
        )
