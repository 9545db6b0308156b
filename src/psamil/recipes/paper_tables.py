r"""The tables and figures of the PSA-MIL paper as recipes: what data they need, what is trained, what the paper found.

A recipe is a YAML file in ``tables`` or ``figures``::

    title: Subtyping                       # of the table or figure
    source: Table 1, WACV 2026             # where the paper's numbers stand
    cohorts: [crc, stad]                   # names of paper_cohorts.yaml; empty: no data needed
    metrics: {auc: AUC, f1: F1 Score}      # ours: the paper's name, in the order of its columns
    more_metrics: [balanced_accuracy]      # which the paper does not have
    reference: psa-gaussian                # the row that others are tested against; may be left out
    notes: [...]                           # sentences on what differs from the paper
    training: {epochs: 15}                 # settings of all rows; may be left out
    models:                                # rows in the order of the paper; names are those of the run folders
      psa-gaussian:
        title: PSA-MIL [Gau]               # as the paper writes it
        group: Contextual                  # heading above the first row that has it; may be left out
        settings: {model: psa, model_options: {decay: gaussian}}  # as of a model in a study file
        paper:                             # percent, "mean ± sd*" where the paper says so; * is its mark
          crc: {auc: 88.97 ± 1.01, f1: 66.27 ± 1.99}

Every cohort is one study of all rows on the same splits (:meth:`PaperRecipe.study`), with the recipe "common", the
authors' settings for the cohort, and for models of PSA's trunk the preset of their sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from psamil.errors import one_of
from psamil.recipes import FOLDER, TRUNK_OF_PSA

COHORTS_FILE = FOLDER / "paper_cohorts.yaml"
PAPER_NUMBER = re.compile(r"(\d+\.\d+)(?: ± (\d+\.\d+))?(\*?)")


@dataclass(frozen=True)
class PaperNumber:
    """What the paper says, in percent, with the digits that it prints."""

    value: str
    sd: str | None = None
    mark: str = ""  # of its test

    @staticmethod
    def of(text: str) -> PaperNumber:
        """From ``88.97``, ``88.97 ± 1.01`` or ``88.97*``."""
        found = PAPER_NUMBER.fullmatch(text)
        if not found:
            raise ValueError(f"a number of the paper must look like 88.97 ± 1.01*, got {text!r}")
        return PaperNumber(*found.groups())

    def __str__(self) -> str:
        return self.value + (f" ± {self.sd}" if self.sd else "") + self.mark


@dataclass(frozen=True)
class PaperCohort:
    """A cohort of the paper with the authors' settings for it."""

    name: str
    title: str
    predicts: str
    slides: str  # what they are and where they are obtained
    labels_from: str  # columns of the table, and where it is obtained
    encoder: str  # one of psamil.slides.encoders
    preset: str  # sizes of models of PSA's trunk
    study: dict[str, Any]  # options of psamil train
    training: dict[str, Any] = field(default_factory=dict)  # settings of all models
    patients: dict[str, int] = field(default_factory=dict)  # of each class, in the authors' label file
    tile_labels_from: str = ""  # where they are obtained; empty: not needed


@dataclass(frozen=True)
class PaperRow:
    """A model of the paper."""

    name: str
    title: str
    group: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    paper: dict[str, dict[str, PaperNumber]] = field(default_factory=dict)  # by cohort and metric


@dataclass(frozen=True)
class PaperRecipe:
    """A table or figure of the paper. See the module."""

    name: str
    title: str
    source: str
    cohorts: dict[str, PaperCohort]
    models: dict[str, PaperRow]
    metrics: dict[str, str] = field(default_factory=dict)
    more_metrics: tuple[str, ...] = ()
    reference: str | None = None
    notes: tuple[str, ...] = ()
    training: dict[str, Any] = field(default_factory=dict)

    def study(self, cohort: str) -> dict[str, Any]:
        """Everything of a study file (:mod:`psamil.cli.study`) but where the data are."""
        of = self.cohorts[cohort]
        return {
            **of.study,
            "recipe": "common",
            "training": {**of.training, **self.training},
            "models": {name: _with_preset(row, of) for name, row in self.models.items()},
        }


def _with_preset(row: PaperRow, cohort: PaperCohort) -> dict[str, Any]:
    settings = {"model": row.name, **row.settings}
    if settings["model"] not in TRUNK_OF_PSA:
        return settings
    return {**settings, "model_options": {"preset": cohort.preset, **settings.get("model_options", {})}}


def list_recipes() -> list[str]:
    """Names of all tables and figures."""
    return sorted(file.stem for file in _files())


def read_recipe(name: str) -> PaperRecipe:
    """The recipe of a table or figure: ``table1``, ``figure-cost``, ..."""
    files = {file.stem: file for file in _files()}
    if name not in files:
        raise one_of("table or figure", name, sorted(files))
    found, texts = _yaml(files[name]), _yaml(files[name], yaml.BaseLoader)  # in which 86.00 stays so
    cohorts = paper_cohorts()
    return PaperRecipe(
        name=name,
        **{
            **found,
            "cohorts": {cohort: cohorts[cohort] for cohort in found.get("cohorts") or []},
            "models": {
                row: _row(row, of or {}, texts["models"][row]) for row, of in (found.get("models") or {}).items()
            },
            "more_metrics": tuple(found.get("more_metrics", ())),
            "notes": tuple(found.get("notes", ())),
        },
    )


@cache
def paper_cohorts() -> dict[str, PaperCohort]:
    """The cohorts of the paper by name."""
    return {name: PaperCohort(name=name, **of) for name, of in _yaml(COHORTS_FILE).items()}


def _row(name: str, of: Mapping[str, Any], texts: Mapping[str, Any]) -> PaperRow:
    numbers = {
        cohort: {metric: PaperNumber.of(text) for metric, text in row.items()}
        for cohort, row in (texts.get("paper", {}) if of else {}).items()
    }
    return PaperRow(name=name, **{"title": name, **of, "paper": numbers})


def _files() -> list[Path]:
    return [*FOLDER.glob("tables/*.yaml"), *FOLDER.glob("figures/*.yaml")]


def _yaml(path: Path, loader: Any = yaml.SafeLoader) -> dict[str, Any]:
    found: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    return found
