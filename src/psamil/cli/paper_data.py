"""The data that a table or figure of the paper needs: what a user has given, and what of it is missing or different."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from psamil.cli.study import Study
from psamil.cohort import Classification, Cohort
from psamil.errors import DataError, OptionError, PsamilError, one_of
from psamil.readers import describe_bag
from psamil.recipes.paper_tables import PaperCohort, PaperRecipe
from psamil.slides.encoders import list_encoders

STEP_UM = 256.0  # between tiles of the paper: 512 px at 0.5 um/px


def needs(recipe: PaperRecipe, cohorts: Iterable[str]) -> Iterator[str]:
    """What these cohorts of a recipe are, where they are obtained and how they are given."""
    yield f"{recipe.name}: {recipe.title} ({recipe.source}). Give one of these cohorts, or several:"
    shown = [recipe.cohorts[name] for name in cohorts]
    for cohort in shown:
        paths = _paths(cohort)
        flags = [f"--{what.replace('_', '-')} {cohort.name}=PATH" for what in paths]
        yield f"\n{cohort.name}: {cohort.title}, {cohort.predicts}"
        for what, text in {"slides": cohort.slides, **paths, "options": " ".join(flags)}.items():
            yield f"  {what.replace('_', ' '):<12} {text}"
    survival = any("time" in cohort.study for cohort in shown)
    outcome = "NAME.time=COLUMN NAME.event=COLUMN (or NAME.censorship=COLUMN)" if survival else "NAME.target=COLUMN"
    yield f"\nOther names of columns: --options {outcome} NAME.patient_column=COLUMN (as of psamil train)"


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
            if not recipe.cohorts:
                raise OptionError(f"{recipe.name} needs no data, got {value!r}")
            name, equals, path = value.partition("=")
            if not equals:
                example = f"{next(iter(recipe.cohorts))}=PATH"
                raise OptionError(f"--{option.replace('_', '-')} takes NAME=PATH, such as {example}, got {value!r}")
            if name not in recipe.cohorts:
                raise one_of(f"cohort of {recipe.name}", name, recipe.cohorts)
            found.setdefault(name, {})[option] = path
    return {name: found[name] for name in recipe.cohorts if name in found}


def open_studies(
    recipe: PaperRecipe, files: Mapping[str, dict[str, Any]]
) -> tuple[dict[str, Study], dict[str, Cohort]]:
    """The studies of what study files would hold, by cohort, and the cohorts, opened. No features are read.

    One DataError names all data that are missing or wrong. A mistake in a study comes first: data that are read with it
    would seem wrong.
    """
    lacking = {name: list(_lacking(recipe.cohorts[name], file)) for name, file in files.items()}
    complete = {name: file for name, file in files.items() if not lacking[name]}
    studies = {name: Study.of(Path(f"{recipe.name}, {name}"), file) for name, file in complete.items()}
    cohorts: dict[str, Cohort] = {}
    for name, study in studies.items():
        try:
            cohorts[name] = study.cohort()
        except PsamilError as error:
            lacking[name].append(f"{name}: {error}")
    missing = [f"\n- {text}" for texts in lacking.values() for text in texts]
    if missing:
        raise DataError(recipe.name, f"the data are not complete:{''.join(missing)}")
    return studies, cohorts


def _lacking(cohort: PaperCohort, file: Mapping[str, Any]) -> Iterator[str]:
    """What was not given of a cohort or is not there, and where it comes from."""
    for what, text in _paths(cohort).items():
        named, path = what.replace("_", " "), file.get(what)
        if not path:
            yield f"{cohort.name} has no {named}: {text}"
        elif not Path(path).exists():
            yield f"{cohort.name} has no {named} at {path}, which does not exist: {text}"


def differences(paper: PaperCohort, cohort: Cohort) -> Iterator[str]:
    """How a cohort differs from that of the paper."""
    if paper.patients and isinstance(cohort.outcome, Classification):
        known = dict(zip(cohort.patients, (sample.outcome for sample in cohort.samples), strict=True))
        counts = {name: list(known.values()).count(name) for name in cohort.outcome.classes}
        if list(counts.values()) != list(paper.patients.values()):
            ours, theirs = (", ".join(f"{n} {name}" for name, n in of.items()) for of in (counts, paper.patients))
            yield f"{paper.title}: {ours} patients; the paper's are {theirs}."
    expected, first = list_encoders(paper.encoder)[0].dim, describe_bag(cohort.samples[0].bags[0])
    if first.dim != expected:
        yield f"{paper.title}: features are {first.dim} wide; those of {paper.encoder} would be {expected}."
    step_um = None if first.step is None else first.step.um
    if step_um is not None and not math.isclose(step_um, STEP_UM, rel_tol=0.02):
        yield (
            f"{paper.title}: tiles are {step_um:.4g} um apart, the paper's are {STEP_UM:g} um (512 px at 0.5 um/px): "
            "radii, which are in steps between tiles, are other distances."
        )
