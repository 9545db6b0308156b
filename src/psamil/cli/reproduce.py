"""``psamil reproduce``: a table or figure of the paper, with our numbers beside the paper's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from psamil.cli.compare import STYLES
from psamil.cli.engine import chosen_engine
from psamil.cli.paper_data import differences, given_paths, needs, open_cohorts
from psamil.cli.study import Study
from psamil.errors import OptionError, one_of
from psamil.evaluation.run_comparison import RunComparison, compare_runs
from psamil.evaluation.run_folder import SUMMARY_FILE
from psamil.files import read_json
from psamil.recipes.paper_tables import PaperRecipe, read_recipe
from psamil.report.paper_table import PaperTable
from psamil.report.run_report import write_report
from psamil.report.tables import save_tables

MOST_COLUMNS = 5  # of a printed table
WIDTH = 140  # of what is printed into a file
ALL_COHORTS, ALL_MODELS = "study", "training"


def reproduce(
    what: str,
    *,
    features: list[str] | None = None,
    labels: list[str] | None = None,
    tile_labels: list[str] | None = None,
    out: Path | None = None,
    cohorts: list[str] | None = None,
    models: list[str] | None = None,
    options: list[str] | None = None,
    fold: int | None = None,
    engine: str = "local",
    address: str | None = None,
    cpus_per_job: int = 1,
    gpus_per_job: float = 0,
) -> Path | int:
    """Reproduces a table or figure of the PSA-MIL paper: trains every model of it and shows our numbers beside its own.

    Example: psamil reproduce table1 --features crc=features/crc --labels crc=crc.csv

    Without features it says what data are needed and where they are obtained. A run that was stopped is gone on with.
    Every cohort is a study in OUT/<cohort>; OUT/table.csv, table.tex and index.html are the table.

    Args:
        what: "table1" (subtyping), "table2" (spatial strategies), "table3" (CAMELYON16), "table4" (survival), or a
            figure: "figure-cost", ...
        features: folders of features, NAME=DIR for each cohort.
        labels: tables of labels, NAME=FILE for each cohort.
        tile_labels: folders of labels of single tiles, NAME=DIR, for table3.
        out: folder of runs and results; by default runs/WHAT.
        cohorts: of those that are given, only these.
        models: only these rows, by their name or that of the model.
        options: what differs from the recipe: COHORT.OPTION=VALUE (options of psamil train), study.OPTION=VALUE for all
            cohorts, training.SETTING=VALUE for all rows, ROW.SETTING=VALUE for one: crc.target=msi training.epochs=2.
            The output says so.
        fold: work on this fold alone, for instance in a job array. Whoever finishes the last one makes the table.
        engine: "local", or "ray": every model, fold and seed is a job, on a Ray cluster.
        address: of the Ray cluster; "auto" is that of this node. Without it, one is started on this computer.
        cpus_per_job: with Ray, the CPUs and threads of a job.
        gpus_per_job: with Ray, the graphics cards of a job; 0.5 lets two jobs share one.

    Returns:
        The table, or the figure.
    """
    recipe = read_recipe(what)
    folder = Path("runs") / what if out is None else out
    console = Console(stderr=True, highlight=False)
    given = given_paths(recipe, features=features, labels=labels, tile_labels=tile_labels)
    for name in cohorts or ():
        if name not in given:
            raise one_of("cohort among those given", name, given)
    given = {name: paths for name, paths in given.items() if not cohorts or name in cohorts}
    rows = _chosen_rows(recipe, models)
    files = {name: _study_file(recipe, name, paths, rows, options or ()) for name, paths in given.items()}
    if recipe.cohorts and not given:
        console.print("\n".join(needs(recipe)), markup=False, soft_wrap=True)
        return 2
    notes = [f"Not as in the recipe: {', '.join(options)}."] if options else []
    for name, cohort in open_cohorts(recipe, files).items():
        console.print(f"{name}: {cohort.headline}", markup=False)
        notes += differences(recipe.cohorts[name], cohort)
    studies = {name: Study.of(Path(f"{what}, {name}"), file) for name, file in files.items()}
    run_jobs = chosen_engine(engine, address, cpus_per_job, gpus_per_job, partial(console.print, markup=False))
    for name, study in studies.items():
        console.print(f"\n{recipe.cohorts[name].title}", markup=False, style="bold")
        study.run(folder / name, console, fold, run_jobs)
    unfinished = [name for name, study in studies.items() if not _is_finished(study, folder / name)]
    if unfinished:
        console.print(f"Not finished: {', '.join(unfinished)}. The table is made when all folds are.", markup=False)
        return 0
    comparisons = {name: _compared(recipe, study, folder / name) for name, study in studies.items()}
    written = _show(PaperTable(recipe, comparisons, notes), folder) if recipe.metrics else folder
    return written if what.startswith("table") else _draw(what, comparisons, folder)


def _chosen_rows(recipe: PaperRecipe, models: Sequence[str] | None) -> list[str]:
    """Names of rows that have one of these names, or whose model has; all without any."""
    if models is None:
        return list(recipe.models)
    known = {name: {name, row.settings.get("model", name)} for name, row in recipe.models.items()}
    for model in models:
        if not any(model in names for names in known.values()):
            raise one_of(f"model of {recipe.name}", model, set().union(*known.values()))
    return [name for name, names in known.items() if names & set(models)]


def _study_file(
    recipe: PaperRecipe, cohort: str, paths: Mapping[str, str], rows: Sequence[str], options: Sequence[str]
) -> dict[str, Any]:
    """What a study file of a cohort would hold, with what the user wants otherwise."""
    file = deepcopy({**recipe.study(cohort), **paths})
    file["models"] = {name: file["models"][name] for name in rows}
    places: dict[str, tuple[str, ...] | None] = {ALL_COHORTS: (), ALL_MODELS: (ALL_MODELS,)}
    places |= {name: () if name == cohort else None for name in recipe.cohorts}  # None: not of this study
    places |= {name: ("models", name) if name in rows else None for name in recipe.models}
    for option in options:
        key, equals, text = option.partition("=")
        scopes = [name for name in places if key.startswith(f"{name}.")]  # names may have dots
        if not equals or not scopes:
            known = ", ".join(places)
            raise OptionError(
                f"--options takes SCOPE.NAME=VALUE, such as training.epochs=2; scopes: {known}; got {option!r}"
            )
        scope = max(scopes, key=len)
        place = places[scope]
        if place is not None:
            _put(file, [*place, *key[len(scope) + 1 :].split(".")], text, option)
    return file


def _put(file: dict[str, Any], keys: Sequence[str], text: str, option: str) -> None:
    """Writes a value into mappings within mappings."""
    try:
        for key in keys[:-1]:
            file = file.setdefault(key, {})
        file[keys[-1]] = yaml.safe_load(text)
    except (yaml.YAMLError, AttributeError, TypeError) as error:  # of which the latter: within a plain value
        raise OptionError(f"--options cannot take {option!r}; write NAME=VALUE, the value as YAML") from error


def _is_finished(study: Study, folder: Path) -> bool:
    summaries = [read_json(folder / name / SUMMARY_FILE) for name in study.models]
    return all(len(summary["finished"]) == summary["folds"] for summary in summaries)


def _compared(recipe: PaperRecipe, study: Study, folder: Path) -> RunComparison:
    """All rows of a cohort, tested against each other and reported in its folder."""
    names = list(study.models)
    reference = recipe.reference if recipe.reference in names else "first"
    comparison = compare_runs([folder / name for name in names], names=names, reference=reference)
    save_tables(comparison, folder)
    write_report(comparison, folder / "index.html", title=f"{recipe.title}: {recipe.cohorts[folder.name].title}")
    return comparison


def _show(table: PaperTable, folder: Path) -> Path:
    """Prints the table, a few cohorts at a time, and writes it."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    console.print(Text(table.heading, style="bold"))
    for columns in _blocks(table):
        console.print(_printed(table, columns))
    for sentence in table.sentences:
        console.print(Text(sentence))
    return table.save(folder)


def _blocks(table: PaperTable) -> Iterator[list[tuple[str, str]]]:
    """Columns of as many cohorts as fit beside each other."""
    at_once = max(1, MOST_COLUMNS // len(table.metrics))
    names = list(table.recipe.cohorts)
    for first in range(0, len(names), at_once):
        shown = names[first : first + at_once]
        if any(name in table.comparisons for name in shown):
            yield [column for column in table.columns if column[0] in shown]


def _printed(table: PaperTable, columns: Sequence[tuple[str, str]]) -> Table:
    head, rows = table.cells(columns)
    rank = table.ranks(columns)
    only = {table.recipe.cohorts[cohort].title for cohort, _ in columns}
    printed = Table(title=Text(only.pop()) if len(only) == 1 else None, title_justify="left")
    for name in head:
        printed.add_column(name)
    for i, (row, *cells) in enumerate(rows):
        last_of_group = i + 1 == len(rows) or table.rows[i][0].group != table.rows[i + 1][0].group
        texts = [_two_lines(cell, rank.get((i, j))) for j, cell in enumerate(cells, start=1)]
        printed.add_row(Text(row), *texts, end_section=last_of_group)
    return printed


def _two_lines(cell: str, rank: int | None) -> Text:
    own, newline, paper = cell.partition("\n")
    return Text.assemble((own, STYLES.get(rank, "")), newline, (paper, "dim"))


def _draw(what: str, comparisons: Mapping[str, RunComparison], folder: Path) -> Path:
    """The figure of each cohort beside its runs, or one that needs none; the first file is returned."""
    from psamil.report.paper_figures import FIGURES

    runs = {folder / name: {run.name: run.path for run in of.runs} for name, of in comparisons.items()}
    files = [FIGURES[what](of_cohort, place) for place, of_cohort in (runs or {folder: {}}).items()]
    return files[0][0]
