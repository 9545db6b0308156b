"""Recipes: settings of training to begin with, one file for each.

- ``context``: the default; what we found to learn best from 50 to 300 slides, see ``docs/recipe.md``.
- ``detection``: much the same where the first class means that something is nowhere in the slide, such as a metastasis.
- ``cells``: the same for single cells whose types are known, of some dozens of patients.
- ``paper``, also called ``common``: the conditions in which the PSA-MIL paper trained all models it compares.
- ``authors``: of each model, those of its own paper or code. What our settings cannot express is said in the file.

A recipe names every setting that decides how a model is optimised, and may have others for some models. Settings of the
user win over it, one by one; options of the model too, but a preset of options takes the place of all. It also says how
many trainings a fold has, the same for all models.

>>> fit("features", "labels.csv", "run", target="subtype", model="abmil", recipe="authors", epochs=5)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from psamil.errors import OptionError, one_of
from psamil.models import list_models
from psamil.training.settings import TrainingSettings
from psamil.training.tasks import TaskOptions

OURS = ("context", "detection", "cells")
RECIPES = (*OURS, "paper", "common", "authors")
DEFAULT_RECIPE = "context"
FOLDER = Path(__file__).parent
SAME_AUTHORS = {
    "clam_mb": "clam_sb",
    "longmil": "clam_sb",  # made for CLAM's training
    "sm_transformer": "sm_abmil",
}
TRUNK_OF_PSA = ("psa", "local", "msa", "ppeg", "rope", "rpe")


def settings_of_recipe(recipe: str, model: str) -> TrainingSettings:
    """Settings of a model by a recipe, one of ``RECIPES``."""
    if recipe not in RECIPES:
        raise one_of("recipe", recipe, RECIPES)
    if model not in list_models():
        raise one_of("model", model, list_models())
    found = yaml.safe_load(_file(recipe, model).read_text(encoding="utf-8"))
    if recipe in OURS:
        found.pop("seeds", None)  # see seeds_of_recipe
    of_model = (found.pop("models", None) or {}).get(model, {})
    return TrainingSettings(model=model, task=TaskOptions(**found.pop("task")), **{**found, **of_model})


def seeds_of_recipe(recipe: str) -> int:
    """How many trainings of a fold are averaged by a recipe, one of ``RECIPES``."""
    if recipe not in RECIPES:
        raise one_of("recipe", recipe, RECIPES)
    if recipe not in OURS:
        return 1
    found = yaml.safe_load((FOLDER / f"{recipe}.yaml").read_text(encoding="utf-8"))
    return int(found.get("seeds", 1))


def with_own_options(of_recipe: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a model: those of the user and, unless they name a preset, what else the recipe says."""
    return dict(own) if "preset" in own else {**of_recipe, **own}


def for_model(training: TrainingSettings, recipe: str, model: str, options: Mapping[str, Any]) -> TrainingSettings:
    """Settings of a model, maybe another one, by the recipe with which ``training`` began: with everything in which
    that differs from the recipe, and with these options."""
    was, now = settings_of_recipe(recipe, training.model), settings_of_recipe(recipe, model)
    own = {of.name: getattr(training, of.name) for of in fields(training)}
    own = {name: value for name, value in own.items() if value != getattr(was, name)}
    known = was.model_options
    changed = {name: of for name, of in training.model_options.items() if name not in known or known[name] != of}
    of_model = with_own_options(now.model_options, {**changed, **options})
    return replace(now, **{**own, "model": model, "model_options": of_model})


def _file(recipe: str, model: str) -> Path:
    if recipe in OURS:
        return FOLDER / f"{recipe}.yaml"
    if recipe != "authors" or model in TRUNK_OF_PSA:  # of whose paper the common recipe is
        return FOLDER / "common.yaml"
    file = FOLDER / "authors" / f"{SAME_AUTHORS.get(model, model)}.yaml"
    if not file.exists():
        raise OptionError(f"there is no recipe of the authors of model {model!r}; take the recipe 'common'")
    return file
