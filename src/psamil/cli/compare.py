"""``psamil compare``: finished runs on the same splits in one table, tested against each other, with a report."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from psamil.evaluation.run_comparison import RunComparison, compare_runs
from psamil.report.run_report import write_report
from psamil.report.tables import best_rows, cells_of_results, cells_of_tests, metric_title, save_tables


def compare(
    runs: list[Path],
    *,
    out: Path = Path("comparison"),
    names: list[str] | None = None,
    reference: str = "first",
    title: str = "",
) -> Path:
    """Compares finished runs on the same splits: one table, tests, and a report in one HTML file.

    Example: psamil compare run-psa run-abmil --out comparison

    OUT/table.csv and OUT/tests.csv hold all digits, OUT/table.tex is for booktabs, OUT/index.html is the report.

    Args:
        runs: run directories of psamil train; one alone is reported without tests.
        out: folder of the tables and the report.
        names: of the runs, in their order; by default the model and the settings in which runs differ.
        reference: the run that others are tested against: "first" or "best".
        title: of the report.

    Returns:
        The report.
    """
    comparison = compare_runs(runs, names=names, reference=reference)
    tell(comparison, Console(highlight=False))
    save_tables(comparison, out)
    write_report(comparison, out / "index.html", title=title)
    return out / "index.html"


def tell(comparison: RunComparison, console: Console) -> None:
    """Prints both tables. Metrics are rows here: a terminal is narrow."""
    head, rows = cells_of_results(comparison)
    best = best_rows(comparison)
    folds = len(comparison.runs[0].summary["finished"])
    table = Table(title=f"Test parts of {folds} folds, by patient: mean ± sd over folds (95% interval over patients)")
    table.title_justify = "left"
    table.add_column("metric")
    for run in comparison.runs:
        table.add_column(Text(run.name))
    for j, name in enumerate(comparison.metric_names, start=1):
        cells = [Text(row[j], style="bold" if best.get(name) == i else "") for i, row in enumerate(rows)]
        table.add_row(head[j], *cells)
    console.print(table)
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
