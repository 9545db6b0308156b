"""``psamil compare``: runs on the same splits in one table, tested against each other, with a report."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from psamil.cli.engine import chosen_engine
from psamil.cli.study import Study
from psamil.errors import OptionError, one_of
from psamil.evaluation.run_comparison import REFERENCES, RunComparison, compare_runs
from psamil.report.run_report import MARKED, write_report
from psamil.report.tables import cells_of_results, cells_of_tests, marks_of_tests, metric_title, ranks, save_tables

SIDE_BY_SIDE = 3  # runs
STYLES: dict[int | None, str] = {0: "bold", 1: "underline"}


def compare(
    runs: list[Path] | None = None,
    *,
    study: Path | None = None,
    out: Path = Path("comparison"),
    names: list[str] | None = None,
    reference: str = "first",
    title: str = "",
    fold: int | None = None,
    engine: str = "local",
    address: str | None = None,
    cpus_per_job: int = 1,
    gpus_per_job: float = 0,
) -> Path | int:
    """Compares runs on the same splits, finished ones or those of a study: one table, tests, a report in one HTML file.

    Example: psamil compare run-psa run-abmil --out comparison

    OUT/table.csv and OUT/tests.csv hold all digits, OUT/table.tex is for booktabs, OUT/index.html is the report.

    Args:
        runs: run directories of psamil train; one alone is reported without tests.
        study: YAML file with options of psamil train and "models", a name and settings for each, such as {features:
            cohort, labels: cohort/labels.csv, target: label, training: {epochs: 20}, models: {psa: {}, abmil: {lr:
            0.001}}}. Every model is trained in OUT/<name>, or gone on with, before they are compared. One that fails is
            told and left out; the exit code is 2 then.
        out: folder of the tables and the report.
        names: of the runs, in their order; by default the model and the settings in which runs differ.
        reference: the run that others are tested against: "first", "best", or its name.
        title: of the report.
        fold: of a study, work on this fold alone, for instance in a job array. Whoever finishes the last one compares.
        engine: "local", or "ray": of a study, every model, fold and seed is a job, on a Ray cluster.
        address: of the Ray cluster; "auto" is that of this node. Without it, one is started on this computer.
        cpus_per_job: with Ray, the CPUs and threads of a job.
        gpus_per_job: with Ray, the graphics cards of a job; 0.5 lets two jobs share one.

    Returns:
        The report.
    """
    if (study is None) == (not runs):
        raise OptionError("name run directories, or a study file with --study")
    failed: dict[str, str] = {}
    if study is not None:
        if names is not None:
            raise OptionError("runs of a study have the names that the study file gives them")
        chosen = Study.read(study)
        if reference not in (*REFERENCES, *chosen.models):
            raise one_of("reference", reference, (*REFERENCES, *chosen.models))
        console = Console(stderr=True, highlight=False)
        say = partial(console.print, markup=False)
        run_jobs = chosen_engine(engine, address, cpus_per_job, gpus_per_job, say)
        chosen.check(chosen.cohort(), here=run_jobs is None)
        trained, failed = chosen.run(out, console, fold, run_jobs)
        done = [run for run in trained if run.folder.name not in failed]
        if not done or any(len(run.summary["finished"]) < run.summary["folds"] for run in done):
            states = [f"{run.folder.name} {len(run.summary['finished'])} of {run.summary['folds']}" for run in trained]
            say(f"Finished folds: {', '.join(states)}. They are compared when all are.")
            return 2 if failed else 0
        runs, names = [run.folder for run in done], [run.folder.name for run in done]
        reference = "first" if reference in failed else reference
    elif fold is not None:
        raise OptionError("fold is for a study; finished runs are compared in all their folds")
    elif engine != "local":
        raise OptionError("engine is for a study; finished runs are compared here")
    comparison = compare_runs(runs or [], names=names, reference=reference)
    tell(comparison, Console(highlight=False))
    notes = [f"{name} failed: {reason}" for name, reason in failed.items()]
    for note in notes:
        Console(highlight=False).print(Text(note))
    save_tables(comparison, out)
    write_report(comparison, out / "index.html", title=title, notes=notes)
    if failed:
        print(f"wrote {out / 'index.html'}")
        return 2
    return out / "index.html"


def tell(comparison: RunComparison, console: Console) -> None:
    """Prints the tables."""
    folds = len(comparison.runs[0].summary["finished"])
    how = "mean ± sd over folds (95% interval over patients)"
    console.print(_table(comparison, comparison.metric_names, f"Test parts of {folds} folds, by patient: {how}"))
    if comparison.localisation_names:
        console.print(_table(comparison, comparison.localisation_names, "Localisation: mean ± sd over folds"))
        for sentence in comparison.unlabelled:
            console.print(Text(sentence))
    if any(marks_of_tests(comparison).values()):
        console.print(Text(f"* p < 0.05, ** p < 0.01, *** p < 0.001 against {comparison.reference.name} ({MARKED})"))
    for sentence in comparison.caveats:
        console.print(Text(sentence))
    if not comparison.tests:
        return
    head, rows = cells_of_tests(comparison)
    metric = metric_title(comparison.runs[0].headline)
    tests = Table(title=Text(f"Difference in {metric} from {comparison.reference.name}"), title_justify="left")
    for name in head:
        tests.add_column(name)
    for row in rows:
        tests.add_row(*map(Text, row))
    console.print(tests)


def _table(comparison: RunComparison, names: Sequence[str], title: str) -> Table:
    """One row per run; few runs stand side by side instead, because a terminal is narrow."""
    head, rows = cells_of_results(comparison, names)
    rank = ranks(comparison, names)
    cells = [
        [Text(text, style=STYLES.get(rank.get((i, name)), "")) for name, text in zip(names, row[1:], strict=True)]
        for i, row in enumerate(rows)
    ]
    runs = [Text(row[0]) for row in rows]
    table = Table(title=title, title_justify="left")
    if len(runs) <= SIDE_BY_SIDE:
        for column in (Text("metric"), *runs):
            table.add_column(column)
        for j, metric in enumerate(head[1:]):
            table.add_row(metric, *(of_run[j] for of_run in cells))
    else:
        for text in head:
            table.add_column(text)
        for run, of_run in zip(runs, cells, strict=True):
            table.add_row(run, *of_run)
    return table
