"""A study file: several models on the same data and splits, as ``psamil compare --study`` takes it.

features: cohort              # options of psamil train
labels: cohort/labels.csv
target: label
folds: 3
recipe: authors               # settings to begin with, where a model may name another one, and trainings per fold
training: {epochs: 10}        # settings of all models
models:                       # a run for each name; its settings come first
  psa: {model_options: {heads: 3}}
  narrow: {model: psa, model_options: {heads: 1}}
  abmil: {}                   # without "model", the name says it

Paths are seen from where the command is called, not from the file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from psamil.cli.engine import ENGINE_OPTIONS, RunJobs
from psamil.cli.progress import TrainingProgress
from psamil.cli.train import train
from psamil.cluster.engine import Job, JobsError
from psamil.cluster.trainings import training_jobs
from psamil.cohort import Cohort
from psamil.errors import BusyError, DataError, OptionError, PsamilError
from psamil.evaluation.experiment import Training, summarise, train_here
from psamil.evaluation.run import Run, fit
from psamil.evaluation.run_folder import SUMMARY_FILE
from psamil.files import read_json
from psamil.models import list_models
from psamil.readers import describe_bag
from psamil.recipes import DEFAULT_RECIPE, seeds_of_recipe, settings_of_recipe, with_own_options
from psamil.training.devices import new_fabric
from psamil.training.fold import new_model
from psamil.training.settings import TrainingSettings

# Of the options of psamil train: a folder for each model, and words on the command line.
NOT_COMMON = ("out", "fold", *ENGINE_OPTIONS)
REMEDY = "correct the study file; its options are those of psamil train --help"


@dataclass(frozen=True)
class Study:
    """What a study file says."""

    options: dict[str, Any]  # of :func:`psamil.fit`
    models: dict[str, TrainingSettings]

    @staticmethod
    def read(path: Path) -> Study:
        """DataError names the key or value that is wrong, and the one that was probably meant."""
        return Study.of(path, _mapping(path, "the file", _yaml(path)))

    @staticmethod
    def of(path: Path, found: dict[str, Any]) -> Study:
        """From what such a file holds; the path is named where something is wrong."""
        found = dict(found)
        common = [name for name in signature(train).parameters if name not in NOT_COMMON]
        _refuse_unknown(path, "option", found, [*common, "recipe", "models"])
        for name in ("features", "labels", "models"):
            if name not in found:
                raise DataError(path, f"has no {name!r}", REMEDY)
        models = _mapping(path, "'models'", found.pop("models"))
        training = _mapping(path, "'training'", found.pop("training", {}))
        _refuse_unknown(path, "setting", training, _settings())
        recipe = found.pop("recipe", None) or DEFAULT_RECIPE
        if not models:
            raise DataError(path, "names no model", REMEDY)
        if found.get("seeds") is None:
            found["seeds"] = seeds_of_recipe(str(recipe))
        return Study(
            _typed_options(path, found),
            {str(name): _model(path, name, of, training, recipe) for name, of in models.items()},
        )

    def cohort(self) -> Cohort:
        """Opened, without any features being read."""
        known = signature(Cohort.open).parameters
        chosen = {name: value for name, value in self.options.items() if name in known and name != "cache"}
        tile_labels = self.options.get("tile_labels")
        cohort = Cohort.open(**chosen)
        return cohort if tile_labels is None else cohort.with_tile_labels(tile_labels)

    def check(self, cohort: Cohort, *, here: bool) -> None:
        """OptionError for a model that cannot be made, or trained here, before another one is trained."""
        dim = describe_bag(cohort.samples[0].bags[0]).dim
        for name, training in self.models.items():
            try:
                if here:
                    new_fabric(training)
                new_model(training, dim, 1)
            except OptionError as error:
                raise OptionError(f"{name}: {error}") from error

    def run(
        self, out: Path, console: Console, fold: int | None = None, run_jobs: RunJobs | None = None
    ) -> tuple[list[Run], dict[str, str]]:
        """Trains every model, or goes on with it, in a folder of its name; here, or as jobs.

        A model whose training fails does not stop the others. What holds for all of them, in options or data, does.

        Returns:
            The runs of all models, and the reasons of those that failed. Summaries are read at the end: other processes
            may have finished folds of the first models meanwhile.
        """
        if run_jobs is not None:
            return self._run_as_jobs(self.jobs(out, console, fold), out, run_jobs)
        runs: list[Run] = []
        failed: dict[str, str] = {}
        tell = partial(console.print, markup=False)
        for name, training in self.models.items():
            console.print(f"\n{name}", markup=False, style="bold")
            with TrainingProgress(console, training.epochs) as progress:
                here = partial(_train_row, name, failed, progress)
                options: dict[str, Any] = {**self.options, "training": training, "fold": fold}
                runs.append(fit(**options, out=out / name, tell=tell, engine=here))
            if name in failed:
                tell(f"{name} failed: {failed[name]}")
        return [replace(run, summary=read_json(run.folder / SUMMARY_FILE)) for run in runs], failed

    def _run_as_jobs(self, jobs: Sequence[Job], out: Path, run_jobs: RunJobs) -> tuple[list[Run], dict[str, str]]:
        failed: dict[str, str] = {}
        try:
            run_jobs(jobs)
        except JobsError as error:
            for job, reason in error.failures.items():
                name, _, fold = job.partition(", ")  # names of models have no commas
                failed[name] = "; ".join(filter(None, (failed.get(name), f"{fold}: {reason}")))
        finally:  # summaries are those of before the jobs: what is trained would look untrained
            runs = self.runs(out)
        return runs, failed

    def jobs(self, out: Path, console: Console, fold: int | None = None) -> list[Job]:
        """Makes the run directories of all models, and gives what is to be trained: models x folds x seeds."""
        jobs: list[Job] = []
        for name, training in self.models.items():
            console.print(f"\n{name}", markup=False, style="bold")

            def collect(cohort: Cohort, trainings: Sequence[Training], name: str = name) -> None:
                jobs.extend(training_jobs(cohort, trainings, name))

            tell = partial(console.print, markup=False)
            fit(**self.options, out=out / name, training=training, fold=fold, tell=tell, engine=collect)
        return jobs

    def runs(self, out: Path) -> list[Run]:
        """Of all models, summarised as far as they are finished."""
        return [Run(out / name, summarise(out / name)) for name in self.models]


def _train_row(
    name: str, failed: dict[str, str], progress: TrainingProgress, cohort: Cohort, trainings: Sequence[Training]
) -> None:
    """Options and data are checked by now: an error is of this model, and noted."""
    try:
        train_here(cohort, trainings, progress.report, progress.on_step)
    except BusyError:
        raise
    except PsamilError as error:
        failed[name] = str(error)


def _yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}", "check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(path, f"is not valid YAML: {' '.join(str(error).split())}", "correct it") from error


def _model(path: Path, name: Any, own: Any, training: Mapping[str, Any], recipe: Any) -> TrainingSettings:
    where = f"model {name!r}"
    if not re.fullmatch(r"\w[\w .+-]*", str(name)):
        raise DataError(path, f"{where} cannot be the name of a folder", "use letters, digits and . + - _")
    settings = _merged(training, _mapping(path, where, own))
    recipe = settings.pop("recipe", None) or recipe
    _refuse_unknown(path, f"setting of {where}", settings, _settings())
    if "model" not in settings:
        _refuse_unknown(path, f"model (name it, as in {name}: {{model: psa}})", [str(name)], list_models())
        settings["model"] = str(name)
    return _typed_settings(path, where, settings, recipe)


def _merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Own settings come first, one by one: a model with some options of its own keeps the common ones beside them."""
    both = [name for name in own if isinstance(own[name], dict) and isinstance(common.get(name), dict)]
    return {**common, **own, **{name: _merged(common[name], own[name]) for name in both}}


def _settings() -> list[str]:
    return [field.name for field in fields(TrainingSettings)]


def _mapping(path: Path, what: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataError(path, f"{what} is not a list of names with their values", REMEDY)
    return dict(value)


def _refuse_unknown(path: Path, what: str, names: Iterable[Any], known: Iterable[str]) -> None:
    allowed = list(known)
    for name in map(str, names):
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(allowed))}"
            raise DataError(path, f"unknown {what} {name!r}", remedy)


def _typed_options(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_function_arguments(train, skip={*NOT_COMMON, "training"})
    return _parsed(path, parser, values)


def _typed_settings(path: Path, where: str, values: dict[str, Any], recipe: Any) -> TrainingSettings:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--training", type=TrainingSettings)
    of_recipe = settings_of_recipe(str(recipe), values["model"])
    parser.set_defaults(training=of_recipe.to_json())
    own = values.get("model_options") or {}
    if isinstance(own, dict):  # what else it is, the parser tells
        values = {**values, "model_options": with_own_options(of_recipe.model_options, own)}
    settings = _parsed(path, parser, {"training": values}, f"{where}: ")["training"]
    assert isinstance(settings, TrainingSettings)
    return settings


def _parsed(path: Path, parser: Any, values: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Values in the types of the options: a path, and 1e-4, which YAML takes for a text, a number."""
    from argparse import ArgumentError

    try:
        return dict(vars(parser.instantiate(parser.parse_object(values))))
    except ArgumentError as error:
        raise DataError(path, f"{where}{' '.join(str(error).split())}", REMEDY) from error
