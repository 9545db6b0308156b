"""``--options`` of ``psamil reproduce``: what a user wants otherwise than the recipe of a table or figure says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import yaml

from psamil.cohort.tables import quoted
from psamil.errors import OptionError
from psamil.recipes.paper_tables import PaperRecipe

ALL_COHORTS, ALL_MODELS = "study", "training"
PRESET = ["model_options", "preset"]


def study_file(
    recipe: PaperRecipe, cohort: str, paths: Mapping[str, str], rows: Sequence[str], options: Sequence[str]
) -> dict[str, Any]:
    """What a study file of a cohort would hold, with what the user wants otherwise."""
    file = deepcopy({**recipe.study(cohort), **paths})
    file["models"] = {name: file["models"][name] for name in rows}
    by_recipe = deepcopy(file["models"])
    places: dict[str, tuple[str, ...] | None] = {ALL_COHORTS: (), ALL_MODELS: (ALL_MODELS,)}
    places |= {name: () if name == cohort else None for name in recipe.cohorts}  # None: not of this study
    places |= {name: ("models", name) if name in rows else None for name in recipe.models}
    for option in options:
        key, equals, _ = option.partition("=")
        scopes = [name for name in places if key.startswith(f"{name}.")]  # names may have dots
        if not equals or not scopes:
            known = ", ".join(places)
            raise OptionError(
                f"--options takes SCOPE.NAME=VALUE, such as training.epochs=2; scopes: {known}; got {option!r}"
            )
        scope = max(scopes, key=len)
        place, keys = places[scope], key[len(scope) + 1 :].split(".")
        if scope == ALL_MODELS and keys == PRESET:
            _refuse_ineffective(option, keys, {name: recipe.models[name].settings for name in rows})
            for name in rows:
                if "preset" in by_recipe[name].get("model_options", {}):  # that of the cohort
                    _put(file, ["models", name, *keys], option)
        elif place is not None:
            if scope == ALL_MODELS:
                _refuse_ineffective(option, keys, by_recipe)
            _put(file, [*place, *keys], option)
    if file.get("censorship") and file.get("event") == recipe.cohorts[cohort].study.get("event"):
        del file["event"]  # the column of the recipe, which the user's table has not
    return file


def _put(file: dict[str, Any], keys: Sequence[str], option: str) -> None:
    """Writes the value of an option into mappings within mappings."""
    try:
        for key in keys[:-1]:
            file = file.setdefault(key, {})
        file[keys[-1]] = yaml.safe_load(option.partition("=")[2])
    except (yaml.YAMLError, AttributeError, TypeError) as error:  # of which the latter: within a plain value
        raise OptionError(f"--options cannot take {option!r}; write NAME=VALUE, the value as YAML") from error


def _refuse_ineffective(option: str, keys: Sequence[str], rows: Mapping[str, Mapping[str, Any]]) -> None:
    """A setting for all rows does not change those that have their own."""
    wanted: dict[str, Any] = {}
    _put(wanted, keys, option)
    own = [name for name, settings in rows.items() if _overlap(settings, wanted)]
    if own:
        setting = ".".join(keys)
        cause = f"--options {option!r} has no effect on {quoted(own)}, which set that themselves"
        raise OptionError(f"{cause}; give it of rows, as in {own[0]}.{setting}=VALUE, or choose others with --models")


def _overlap(one: Any, other: Any) -> bool:
    """Whether two settings, or mappings of them, say something about the same."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return True
    return any(_overlap(one[key], other[key]) for key in one if key in other)
