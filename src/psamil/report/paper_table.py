"""A table of the paper with our numbers beside the paper's: every row of the paper, whatever of it was trained.

Numbers are percent, ours above, the paper's below. Of ours, the best is bold and the second underlined; the constant
classifier takes no part in that. A star is a difference from the reference row by the paired t-test over folds. Under a
table stands what one has to know of its own columns and rows, not of others.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby
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
NEED_THRESHOLD = ("accuracy", "f1", "balanced_accuracy", "patch_f1")


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
        return own if self.paper is None else f"{own}\npaper {self.paper}"

    @property
    def record(self) -> dict[str, Any]:
        """As a row of a table, percent: ours with all digits, the paper's with those that it prints."""
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


def _listed(names: Sequence[str]) -> str:
    """A, B and C."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _html_picture(title: str, png: Path) -> str:
    """Within the page, which loads nothing."""
    data = base64.b64encode(png.read_bytes()).decode("ascii")
    title = html.escape(title)
    return f'<figure><h3>{title}</h3>\n<img alt="{title}" src="data:image/png;base64,{data}"></figure>'


def _percent(value: float, sd: float | None) -> str:
    return f"{value:.2f}" + ("" if sd is None else f" ± {sd:.2f}")


@dataclass(frozen=True, eq=False)
class PaperTable:
    """Our results in the form of the paper's table.

    Args:
        recipe: of the table.
        comparisons: finished runs of each cohort that was given; runs have the names of the recipe's rows.
        notes: more sentences under the table.
        failed: of each cohort, the rows whose training failed, and why.
    """

    recipe: PaperRecipe
    comparisons: Mapping[str, RunComparison]
    notes: Sequence[str] = ()
    failed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

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

    @cached_property
    def lines(self) -> list[str | list[Entry]]:
        """As they are shown: the name of a group, then its rows."""
        groups = groupby(self.rows, key=lambda row: row[0].group)
        return [line for group, rows in groups for line in (*filter(None, [group]), *rows)]

    def _entry(self, row: str, cohort: str, metric: str) -> Entry:
        of, comparison = self.recipe.models[row], self.comparisons.get(cohort)
        who = cohort, of.group, of.title, row, metric
        paper = of.paper.get(cohort, {}).get(metric)
        if row in self.failed.get(cohort, {}):
            return Entry(*who, missing="failed", paper=paper)
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
        if cohort in self.comparisons:
            return Entry(cohort, "", CONSTANT, "", metric, ours=self._constants[cohort].get(metric, {}))
        return Entry(cohort, "", CONSTANT, "", metric, missing="" if cohort in self.failed else "not given")

    @cached_property
    def _constants(self) -> dict[str, dict[str, Any]]:
        return {cohort: constant_metrics(comparison.runs[0]) for cohort, comparison in self.comparisons.items()}

    def cells(self, columns: Sequence[tuple[str, str]]) -> tuple[list[str], list[list[str]]]:
        """Head and rows of these columns; the head names the cohort where there are several.

        A row of one cell is the heading of a group.
        """
        chosen = [self.columns.index(column) for column in columns]
        several = len({cohort for cohort, _ in columns}) > 1
        cohorts = [f"{self.recipe.cohorts[cohort].title} " if several else "" for cohort, _ in columns]
        titles = [self._title(metric) for _, metric in columns]
        head = ["method", *(cohort + title for cohort, title in zip(cohorts, titles, strict=True))]
        shown = (
            [row] if isinstance(row, str) else [row[0].method, *(row[j].cell for j in chosen)] for row in self.lines
        )
        return head, list(shown)

    def _title(self, metric: str) -> str:
        return self.recipe.metrics.get(metric) or metric_title(metric)

    def ranks(self, columns: Sequence[tuple[str, str]]) -> dict[tuple[int, int], int]:
        """The best (0) and the second best (1) of ours in each of these columns, by row and column of :meth:`cells`."""
        found: dict[tuple[int, int], int] = {}
        for j, column in enumerate(columns, start=1):
            sign = -1 if column[1] in LOWER_IS_BETTER else 1
            place_of = self.columns.index(column)
            entries = {i: row[place_of] for i, row in enumerate(self.lines[:-1]) if not isinstance(row, str)}
            means = {i: entry.ours.get("mean") for i, entry in entries.items()}
            shown = {i: round(sign * 100 * mean, 2) for i, mean in means.items() if mean is not None}
            found |= {(i, j): place for i, place in places(shown).items()}
        return found

    @property
    def sentences(self) -> list[str]:
        """What one has to know to read the table."""
        return [*self._protocol(), *self._marks(), *self.recipe.notes, *self._gaps(), *self.notes]

    def _protocol(self) -> Iterator[str]:
        has_paper = any(entry.paper for row in self.rows for entry in row)
        order = "ours first, as mean ± sd over folds, the paper's below" if has_paper else "mean ± sd over folds"
        yield f"Numbers are percent: {order}."
        titles = [self._title(name) for name in self.metrics if name in NEED_THRESHOLD]
        thresholds = f", and the thresholds of {_listed(titles)}, are" if titles else " is"
        yield f"Ours: the epoch{thresholds} chosen on a validation part outside of the test fold."
        if has_paper:
            flattered = "and chooses the threshold of F1 on the test fold, which flatters it"
            kept = f", keeps the last epoch, {flattered}" if "f1" in self.metrics else " and keeps the last epoch"
            yield f"The authors' code has no validation part{kept}."
            yield "The paper's folds are not published; ours are others, by patient."
        said = "the same risk" if "c_index" in self.metrics else "the commonest class"
        yield (
            f"The constant classifier says {said} of every patient. A model that does not beat it has learned nothing "
            "that the metric can see."
        )

    def _marks(self) -> Iterator[str]:
        tested = {entry.metric: entry for row in self.rows for entry in row if entry.p_value is not None}
        if tested and self.recipe.reference:
            against = self.recipe.models[self.recipe.reference].title
            titles = _listed([self._title(name) for name in tested])
            yield f"* {titles} differs from that of {against}: {PAIRED_T_TEST}, p < {SIGNIFICANT[0]}, not adjusted."

    def _gaps(self) -> Iterator[str]:
        """Why there are no numbers of ours."""
        titles = {name: cohort.title for name, cohort in self.recipe.cohorts.items()}
        absent = [title for name, title in titles.items() if name not in {*self.comparisons, *self.failed}]
        if absent:
            yield f"Not given, so without numbers of ours: {'; '.join(absent)}."
        for cohort, rows in self.failed.items():
            for row, reason in rows.items():
                yield f"{self.recipe.models[row].title} on {titles[cohort]} ({row}) failed: {reason}"

    @property
    def heading(self) -> str:
        return f"{self.recipe.title} ({self.recipe.source})"

    def save(self, folder: Path, pictures: Mapping[str, Path] | None = None) -> Path:
        """Writes ``table.csv`` (a row for each number), ``table.tex`` and ``index.html``, and returns the last.

        Args:
            folder: of these files.
            pictures: PNG files that the page shall show above the table, by their titles.
        """
        write_table(folder / "table.csv", pd.DataFrame([entry.record for entry in chain.from_iterable(self.rows)]))
        cells, rank = self.cells(self.columns), self.ranks(self.columns)
        notes = "\n".join(f"% {text}" for text in (self.heading, *self.sentences))
        with atomic_write(folder / "table.tex") as temporary:
            temporary.write_text(
                f"{notes}\n% needs \\usepackage{{booktabs}}\n{latex_cells(*cells, rank=rank)}", "utf-8"
            )
        images = [_html_picture(title, file) for title, file in (pictures or {}).items()]
        page = html_page(self.heading, self.sentences, [*images, html_table(*cells, rank=rank)])
        with atomic_write(folder / "index.html") as temporary:
            temporary.write_text("\n".join(page) + "\n", encoding="utf-8")
        return folder / "index.html"
