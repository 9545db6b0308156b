"""``psamil reproduce``: a table or figure of the paper, with our numbers beside the paper's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from psamil.cli.compare import STYLES
from psamil.cli.engine import chosen_engine
from psamil.cli.paper_data import differences, given_paths, needs, open_studies
from psamil.cli.paper_options import study_file
from psamil.errors import one_of
from psamil.evaluation.run_comparison import RunComparison, compare_runs
from psamil.evaluation.run_folder import SUMMARY_FILE
from psamil.files import read_json
from psamil.recipes.paper_tables import PaperRecipe, read_recipe
from psamil.report.paper_table import PaperTable
from psamil.report.run_report import write_report
from psamil.report.tables import save_tables

MOST_COLUMNS = 5  # of a printed table
WIDTH = 140  # of what is printed into a file


def reproduce(
    what: str,
    *,
    features: list[str] | None = None,
    labels: list[str] | None = None,
    tile_labels: list[str] | None = None,
    out: Path = Path("runs/paper"),
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
    Runs are in OUT/<cohort>/<row>, where other tables and figures find them; OUT/WHAT/index.html, table.csv and
    table.tex are the table. A row that fails is told, the others are shown, and the exit code is 2.

    Args:
        what: "table1" (subtyping), "table2" (spatial strategies), "table3" (CAMELYON16), "table4" (survival), or a
            figure: "figure-cost", ...
        features: folders of features, NAME=DIR for each cohort.
        labels: tables of labels, NAME=FILE for each cohort.
        tile_labels: folders of labels of single tiles, NAME=DIR, for table3 and figure-maps.
        out: folder of runs and results.
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
    console = Console(stderr=True, highlight=False)
    say = partial(console.print, markup=False)
    for name in cohorts or ():
        if name not in recipe.cohorts:
            raise one_of(f"cohort of {what}", name, recipe.cohorts)
    given = given_paths(recipe, features=features, labels=labels, tile_labels=tile_labels)
    rows = _chosen_rows(recipe, models)
    if recipe.cohorts and not given:
        say("\n".join(needs(recipe, cohorts or recipe.cohorts)), soft_wrap=True)
        return 2
    for name in cohorts or ():
        if name not in given:
            raise one_of("cohort among those given", name, given)
    if what.startswith("figure"):
        from psamil.report.paper_figures.figure_files import require_matplotlib

        require_matplotlib()  # before anything is trained
    chosen = {name: paths for name, paths in given.items() if not cohorts or name in cohorts}
    files = {name: study_file(recipe, name, paths, rows, options or ()) for name, paths in chosen.items()}
    studies, opened = open_studies(recipe, files)
    run_jobs = chosen_engine(engine, address, cpus_per_job, gpus_per_job, say)
    notes = [f"Not as in the recipe: {', '.join(options)}."] if options else []
    for name, cohort in opened.items():
        say(f"{name}: {cohort.headline}")
        notes += differences(recipe.cohorts[name], cohort)
        studies[name].check(cohort, here=run_jobs is None)
    failed: dict[str, dict[str, str]] = {}
    for name, study in studies.items():
        say(f"\n{recipe.cohorts[name].title}", style="bold")
        _, reasons = study.run(out / name, console, fold, run_jobs)
        failed |= {name: reasons} if reasons else {}
    trained = {name: [row for row in rows if row not in failed.get(name, {})] for name in studies}
    unfinished = [name for name, of in trained.items() if not all(_is_finished(out / name / row) for row in of)]
    if unfinished:
        say(f"Not finished: {', '.join(unfinished)}. The table is made when all folds are.")
        return 2 if failed else 0
    comparisons = {name: _compared(recipe, name, of, out) for name, of in trained.items() if of}
    written = _shown(PaperTable(recipe, comparisons, notes, failed), out / what, files)
    if failed:
        print(f"wrote {written}")
        return 2
    return written


def _chosen_rows(recipe: PaperRecipe, models: Sequence[str] | None) -> list[str]:
    """Names of rows that have one of these names, or whose model has; all without any."""
    if models is None:
        return list(recipe.models)
    known = {name: {name, row.settings.get("model", name)} for name, row in recipe.models.items()}
    for model in models:
        if not any(model in names for names in known.values()):
            raise one_of(f"model of {recipe.name}", model, set().union(*known.values()))
    return [name for name, names in known.items() if names & set(models)]


def _is_finished(run: Path) -> bool:
    """Now: another process may have finished the last fold meanwhile."""
    summary = read_json(run / SUMMARY_FILE)
    return len(summary["finished"]) == int(summary["folds"])


def _compared(recipe: PaperRecipe, cohort: str, rows: list[str], out: Path) -> RunComparison:
    """These rows of a cohort, tested against each other and reported in OUT/<recipe>/<cohort>."""
    reference = recipe.reference if recipe.reference in rows else "first"
    comparison = compare_runs([out / cohort / row for row in rows], names=rows, reference=reference)
    report = out / recipe.name / cohort
    save_tables(comparison, report)
    write_report(comparison, report / "index.html", title=f"{recipe.title}: {recipe.cohorts[cohort].title}")
    return comparison


def _shown(table: PaperTable, folder: Path, files: Mapping[str, Mapping[str, Any]]) -> Path:
    """Prints and writes the table and draws the figure, whichever the recipe has; the last that was written."""
    if table.recipe.metrics:
        _print(table)
    if not table.recipe.name.startswith("figure") or (table.recipe.cohorts and not table.comparisons):
        return table.save(folder)
    pictures = _drawn(table, folder, files)
    if table.recipe.metrics:
        table.save(folder, pictures)
    return next(iter(pictures.values()))


def _print(table: PaperTable) -> None:
    """A few cohorts at a time."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    console.print(Text(table.heading, style="bold"))
    for columns in _blocks(table):
        console.print(_printed(table, columns))
    for sentence in table.sentences:
        console.print(Text(sentence))


def _blocks(table: PaperTable) -> Iterator[list[tuple[str, str]]]:
    """Columns of as many cohorts as fit beside each other."""
    at_once = max(1, MOST_COLUMNS // len(table.metrics))
    names = list(table.recipe.cohorts)
    for first in range(0, len(names), at_once):
        shown = names[first : first + at_once]
        if any(name in table.comparisons or name in table.failed for name in shown):
            yield [column for column in table.columns if column[0] in shown]


def _printed(table: PaperTable, columns: Sequence[tuple[str, str]]) -> Table:
    head, rows = table.cells(columns)
    rank = table.ranks(columns)
    only = {table.recipe.cohorts[cohort].title for cohort, _ in columns}
    printed = Table(title=Text(only.pop()) if len(only) == 1 else None, title_justify="left")
    for name in head:
        printed.add_column(name)
    for i, (row, *cells) in enumerate(rows):
        if not cells:  # the heading of a group
            printed.add_section()
        texts = [_two_lines(cell, rank.get((i, j))) for j, cell in enumerate(cells, start=1)]
        printed.add_row(Text(row, style="" if cells else "italic"), *texts)
        if i + 2 == len(rows):  # the constant classifier stands apart
            printed.add_section()
    return printed


def _two_lines(cell: str, rank: int | None) -> Text:
    own, newline, paper = cell.partition("\n")
    return Text.assemble((own, STYLES.get(rank, "")), newline, (paper, "dim"))


def _drawn(table: PaperTable, folder: Path, files: Mapping[str, Mapping[str, Any]]) -> dict[str, Path]:
    """The pictures of each cohort as PNG, by the title of the cohort; or one that needs none.

    Args:
        table: with the runs.
        folder: of what is drawn.
        files: what study files of the cohorts would hold.
    """
    from psamil.report.paper_figures import FIGURES

    recipe, draw = table.recipe, FIGURES[table.recipe.name]
    if not recipe.cohorts:
        return {recipe.title: draw({}, folder)[0]}
    drawn = {}
    for name, comparison in table.comparisons.items():
        titled = {recipe.models[run.name].title: run.path for run in comparison.runs}
        data = {}
        if recipe.name == "figure-maps":  # which shows slides
            data = {option: Path(files[name][option]) for option in ("features", "tile_labels")}
        for file in draw(titled, folder / name, **data):
            if file.suffix == ".png":
                part = file.stem.removeprefix(recipe.name).replace("-", " ")
                drawn[recipe.cohorts[name].title + (f",{part}" if part else "")] = file
    return drawn
