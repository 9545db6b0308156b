"""Recipes: settings of training to begin with, one file for each.

- ``common``: the conditions in which the PSA-MIL paper trained all models it compares.
- ``authors``: of each model, those of its own paper or code. What our settings cannot express is said in the file.

A recipe names every setting that decides how a model is optimised; those of the user win over it.

>>> fit("features", "labels.csv", "run", target="subtype", model="abmil", recipe="authors", epochs=5)
"""

from __future__ import annotations

from pathlib import Path

import yaml

from psamil.errors import OptionError, one_of
from psamil.models import list_models
from psamil.training.settings import TrainingSettings
from psamil.training.tasks import TaskOptions

RECIPES = ("common", "authors")
FOLDER = Path(__file__).parent
SAME_AUTHORS = {
    "clam_mb": "clam_sb",
    "longmil": "clam_sb",  # made for CLAM's training
    "sm_transformer": "sm_abmil",
}
TRUNK_OF_PSA = ("psa", "local", "msa", "ppeg", "rope", "rpe")


def settings_of_recipe(recipe: str, model: str) -> TrainingSettings:
    """Settings of a model by a recipe: "common" or "authors"."""
    if recipe not in RECIPES:
        raise one_of("recipe", recipe, RECIPES)
    if model not in list_models():
        raise one_of("model", model, list_models())
    found = yaml.safe_load(_file(recipe, model).read_text(encoding="utf-8"))
    return TrainingSettings(model=model, task=TaskOptions(**found.pop("task")), **found)


def _file(recipe: str, model: str) -> Path:
    if recipe == "common" or model in TRUNK_OF_PSA:  # of whose paper the common recipe is
        return FOLDER / "common.yaml"
    file = FOLDER / "authors" / f"{SAME_AUTHORS.get(model, model)}.yaml"
    if not file.exists():
        raise OptionError(f"there is no recipe of the authors of model {model!r}; take the recipe 'common'")
    return file
