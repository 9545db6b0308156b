"""A table of the paper with our numbers beside the paper's: every row of the paper, whatever of it was trained.

Numbers are percent, ours above, the paper's below. Of ours, the best is bold and the second underlined; the constant
classifier takes no part in that. A star is a difference from the reference row by the paired t-test over folds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from psamil.evaluation.comparison import PAIRED_T_TEST
from psamil.evaluation.constant_classifier import constant_metrics
from psamil.evaluation.experiment import write_table
from psamil.evaluation.run_comparison import LOWER_IS_BETTER, RunComparison
from psamil.files import atomic_write
from psamil.recipes.paper_tables import PaperNumber, PaperRecipe
from psamil.report.run_report import html_page
from psamil.report.tables import SIGNIFICANT, html_table, latex_cells, metric_title, places

CONSTANT = "constant classifier"
PROTOCOL = (
    "Numbers are percent: ours first, as mean ± sd over folds, the paper's below.",
    "Ours: the epoch, and the thresholds of accuracy and F1, are chosen on a validation part outside of the test fold. "
    "The authors' code has no validation part, keeps the last epoch, and chooses the threshold of F1 on the test fold, "
    "which flatters it.",
    "The paper's folds are not published; ours are others, by patient.",
)
IS_CONSTANT = (
    "The constant classifier says the commonest class of every patient (of survival: the same risk). A model that does "
    "not beat it has learned nothing that the metric can see."
)


@dataclass(frozen=True)
class Entry:
    """One row and metric on one cohort."""

    cohort: str
    group: str
    method: str
    row: str  # name of the run
    metric: str
    ours: Mapping[str, Any] = field(default_factory=dict)  # mean, sd, low, high, as in a summary
    missing: str = ""  # why there are none
    paper: PaperNumber | None = None
    p_value: float | None = None  # of the paired t-test against the reference

    @property
    def cell(self) -> str:
        """As people read it, in two lines."""
        own = self.missing or "-"
        if self.ours.get("mean") is not None:
            own = _percent(100 * self.ours["mean"], None if self.ours.get("sd") is None else 100 * self.ours["sd"])
            own += "*" if self.p_value is not None and self.p_value < SIGNIFICANT[0] else ""
        if self.paper is None:
            return own
        return f"{own}\npaper {_percent(self.paper.value, self.paper.sd)}{self.paper.mark}"

    @property
    def record(self) -> dict[str, Any]:
        """As a row of a table, all digits, percent as the paper's."""
        ours = {key: self.ours.get(key) for key in ("mean", "sd", "low", "high")}
        paper = self.paper
        return {
            **{"cohort": self.cohort, "group": self.group, "method": self.method, "run": self.row},
            "metric": self.metric,
            **{key: None if value is None else 100 * value for key, value in ours.items()},
            "paired_t_test_p": self.p_value,
            "missing": self.missing,
            "paper": paper and paper.value,
            "paper_sd": paper and paper.sd,
            "paper_mark": paper and paper.mark,
        }


def _percent(value: float, sd: float | None) -> str:
    return f"{value:.2f}" + ("" if sd is None else f" ± {sd:.2f}")


@dataclass(frozen=True, eq=False)
class PaperTable:
    """Our results in the form of the paper's table.

    Args:
        recipe: of the table.
        comparisons: finished runs of each cohort that was given; runs have the names of the recipe's rows.
        notes: more sentences under the table.
    """

    recipe: PaperRecipe
    comparisons: Mapping[str, RunComparison]
    notes: Sequence[str] = ()

    @property
    def metrics(self) -> list[str]:
        return [*self.recipe.metrics, *self.recipe.more_metrics]

    @property
    def columns(self) -> list[tuple[str, str]]:
        """Cohort and metric of each."""
        return [(cohort, metric) for cohort in self.recipe.cohorts for metric in self.metrics]

    @cached_property
    def rows(self) -> list[list[Entry]]:
        """Those of the paper in its order, then the constant classifier."""
        return [[self._entry(row, *column) for column in self.columns] for row in self.recipe.models] + [
            [self._constant(*column) for column in self.columns]
        ]

    def _entry(self, row: str, cohort: str, metric: str) -> Entry:
        of, comparison = self.recipe.models[row], self.comparisons.get(cohort)
        who = cohort, of.group, of.title, row, metric
        paper = of.paper.get(cohort, {}).get(metric)
        if comparison is None:
            return Entry(*who, missing="not given", paper=paper)
        run = next((run for run in comparison.runs if run.name == row), None)
        if run is None:
            return Entry(*who, missing="left out", paper=paper)
        p_value = self._p_value(comparison, row, metric)
        return Entry(*who, ours=run.summary["metrics"].get(metric, {}), paper=paper, p_value=p_value)

    def _p_value(self, comparison: RunComparison, row: str, metric: str) -> float | None:
        """Of the headline metric alone, which is the one that is tested."""
        if comparison.reference.name != self.recipe.reference:
            return None
        for tested in comparison.tests:
            if (tested.run, tested.metric, tested.comparison.test) == (row, metric, PAIRED_T_TEST):
                return tested.comparison.p_value
        return None

    def _constant(self, cohort: str, metric: str) -> Entry:
        if cohort not in self.comparisons:
            return Entry(cohort, "", CONSTANT, "", metric, missing="not given")
        return Entry(cohort, "", CONSTANT, "", metric, ours=self._constants[cohort].get(metric, {}))

    @cached_property
    def _constants(self) -> dict[str, dict[str, Any]]:
        return {cohort: constant_metrics(comparison.runs[0]) for cohort, comparison in self.comparisons.items()}

    def cells(self, columns: Sequence[tuple[str, str]]) -> tuple[list[str], list[list[str]]]:
        """Head and rows of these columns; the head names the cohort where there are several."""
        chosen = [self.columns.index(column) for column in columns]
        several = len({cohort for cohort, _ in columns}) > 1
        cohorts = [f"{self.recipe.cohorts[cohort].title} " if several else "" for cohort, _ in columns]
        titles = [self._title(metric) for _, metric in columns]
        head = ["method", *(cohort + title for cohort, title in zip(cohorts, titles, strict=True))]
        return head, [[row[0].method, *(row[j].cell for j in chosen)] for row in self.rows]

    def _title(self, metric: str) -> str:
        return self.recipe.metrics.get(metric) or metric_title(metric)

    def ranks(self, columns: Sequence[tuple[str, str]]) -> dict[tuple[int, int], int]:
        """The best (0) and the second best (1) of ours in each of these columns, by row and column of :meth:`cells`."""
        found: dict[tuple[int, int], int] = {}
        for j, column in enumerate(columns, start=1):
            sign = -1 if column[1] in LOWER_IS_BETTER else 1
            means = [row[self.columns.index(column)].ours.get("mean") for row in self.rows[:-1]]
            shown = {i: round(sign * 100 * mean, 2) for i, mean in enumerate(means) if mean is not None}
            found |= {(i, j): place for i, place in places(shown).items()}
        return found

    @property
    def sentences(self) -> list[str]:
        """What one has to know to read the table."""
        recipe = self.recipe
        marks = []
        if recipe.reference:
            against = recipe.models[recipe.reference].title
            headline = {comparison.runs[0].headline for comparison in self.comparisons.values()}
            titles = " and ".join(self._title(name) for name in sorted(headline)) or "the first metric"
            marks = [f"* {titles} differs from that of {against}: {PAIRED_T_TEST}, p < {SIGNIFICANT[0]}, not adjusted."]
        absent = [cohort.title for name, cohort in recipe.cohorts.items() if name not in self.comparisons]
        not_given = [f"Not given, so without numbers of ours: {'; '.join(absent)}."] if absent else []
        return [*PROTOCOL, IS_CONSTANT, *marks, *recipe.notes, *not_given, *self.notes]

    @property
    def heading(self) -> str:
        return f"{self.recipe.title} ({self.recipe.source})"

    def save(self, folder: Path) -> Path:
        """Writes ``table.csv`` (a row for each number), ``table.tex`` and ``index.html``, and returns the last."""
        write_table(folder / "table.csv", pd.DataFrame([entry.record for entry in chain.from_iterable(self.rows)]))
        cells, rank = self.cells(self.columns), self.ranks(self.columns)
        notes = "\n".join(f"% {text}" for text in (self.heading, *self.sentences))
        with atomic_write(folder / "table.tex") as temporary:
            temporary.write_text(
                f"{notes}\n% needs \\usepackage{{booktabs}}\n{latex_cells(*cells, rank=rank)}", "utf-8"
            )
        page = html_page(self.heading, self.sentences, [html_table(*cells, rank=rank)])
        with atomic_write(folder / "index.html") as temporary:
            temporary.write_text("\n".join(page) + "\n", encoding="utf-8")
        return folder / "index.html"
