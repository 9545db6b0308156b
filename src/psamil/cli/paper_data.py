"""The data that a table or figure of the paper needs: what a user has given, and what of it is missing or different."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

from psamil.cohort import Classification, Cohort
from psamil.errors import DataError, OptionError, PsamilError, one_of
from psamil.readers import describe_bag
from psamil.recipes.paper_tables import PaperCohort, PaperRecipe
from psamil.slides.encoders import list_encoders


def needs(recipe: PaperRecipe) -> Iterator[str]:
    """What each cohort of a recipe is, where it is obtained and how it is given."""
    yield f"{recipe.name}: {recipe.title} ({recipe.source}). Give one of these cohorts, or several:"
    for cohort in recipe.cohorts.values():
        paths = _paths(cohort)
        flags = [f"--{what.replace('_', '-')} {cohort.name}=PATH" for what in paths]
        yield f"\n{cohort.name}: {cohort.title}, {cohort.predicts}"
        for what, text in {"slides": cohort.slides, **paths, "options": " ".join(flags)}.items():
            yield f"  {what.replace('_', ' '):<12} {text}"
    yield "\nOther names of columns: --options NAME.target=COLUMN NAME.patient_column=COLUMN (as of psamil train)"


def _paths(cohort: PaperCohort) -> dict[str, str]:
    """What has to be given of a cohort, and where it comes from."""
    card = list_encoders(cohort.encoder)[0]
    extract = f"psamil extract SLIDES --out DIR --encoder {card.name} --target-mpp 0.5 --tile-px 512"
    paths = {"features": f"{extract} ({card.dim} wide; {card.source})", "labels": cohort.labels_from}
    return {**paths, "tile_labels": cohort.tile_labels_from} if cohort.tile_labels_from else paths


def given_paths(recipe: PaperRecipe, **given: Sequence[str] | None) -> dict[str, dict[str, str]]:
    """The paths of ``NAME=PATH`` of each option, by cohort in the order of the recipe."""
    found: dict[str, dict[str, str]] = {}
    for option, values in given.items():
        for value in values or ():
            name, equals, path = value.partition("=")
            if not equals:
                raise OptionError(f"--{option.replace('_', '-')} takes NAME=PATH, such as crc={value}, got {value!r}")
            if name not in recipe.cohorts:
                raise one_of(f"cohort of {recipe.name}", name, recipe.cohorts)
            found.setdefault(name, {})[option] = path
    return {name: found[name] for name in recipe.cohorts if name in found}


def open_cohorts(recipe: PaperRecipe, options: Mapping[str, Mapping[str, Any]]) -> dict[str, Cohort]:
    """Opens cohorts by their options of psamil train. No features are read.

    One DataError names everything that is missing or wrong.
    """
    missing: list[str] = []
    cohorts: dict[str, Cohort] = {}
    for name, given in options.items():
        lacking = {what: text for what, text in _paths(recipe.cohorts[name]).items() if given.get(what) is None}
        missing += [f"{name} has no {what.replace('_', ' ')}: {text}" for what, text in lacking.items()]
        if not lacking:
            try:
                cohorts[name] = _opened(given)
            except PsamilError as error:
                missing.append(f"{name}: {error}")
    if missing:
        raise DataError(recipe.name, "the data are not complete:" + "".join(f"\n- {text}" for text in missing))
    return cohorts


def _opened(options: Mapping[str, Any]) -> Cohort:
    known = signature(Cohort.open).parameters
    cohort = Cohort.open(**{name: value for name, value in options.items() if name in known and name != "cache"})
    tile_labels = options.get("tile_labels")
    return cohort if tile_labels is None else cohort.with_tile_labels(tile_labels)


def differences(paper: PaperCohort, cohort: Cohort) -> Iterator[str]:
    """How a cohort differs from that of the paper."""
    if paper.patients and isinstance(cohort.outcome, Classification):
        known = dict(zip(cohort.patients, (sample.outcome for sample in cohort.samples), strict=True))
        counts = {name: list(known.values()).count(name) for name in cohort.outcome.classes}
        if list(counts.values()) != list(paper.patients.values()):
            ours, theirs = (", ".join(f"{n} {name}" for name, n in of.items()) for of in (counts, paper.patients))
            yield f"{paper.title}: {ours} patients; the paper's are {theirs}."
    expected, width = list_encoders(paper.encoder)[0].dim, describe_bag(cohort.samples[0].bags[0]).dim
    if width != expected:
        yield f"{paper.title}: features are {width} wide; those of {paper.encoder} would be {expected}."
