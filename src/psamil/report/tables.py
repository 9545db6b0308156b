"""The table of a paper: one row per run, one column per metric, as CSV, LaTeX and HTML.

The CSV files hold all digits; the others show mean ± standard deviation over folds, and the interval over patients
where there is one. Names of runs come from folders and files, so every text is escaped for the format it goes into.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from psamil.evaluation.experiment import write_table
from psamil.evaluation.run_comparison import LOWER_IS_BETTER, RunComparison, comparison_row
from psamil.files import atomic_write

METRIC_TITLES = {
    "auc": "AUC",
    "macro_auc": "macro AUC",
    "average_precision": "average precision",
    "macro_average_precision": "macro average precision",
    "f1": "F1",
    "macro_f1": "macro F1",
    "balanced_accuracy": "balanced accuracy",
    "accuracy": "accuracy",
    "brier": "Brier score",
    "ece": "calibration error",
    "c_index": "c-index",
    "mae": "mean absolute error",
    "r2": "R²",
}
LATEX_SIGNS = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "−": r"$-$",
    "²": r"\textsuperscript{2}",
    "↓": r"$\downarrow$",
    **{sign: rf"\{sign}" for sign in "&%$#_{}"},
}


def metric_title(name: str) -> str:
    """As it stands at the head of a column; an arrow says where less is better."""
    return METRIC_TITLES.get(name, name) + (" ↓" if name in LOWER_IS_BETTER else "")


def frame_of_results(comparison: RunComparison) -> pd.DataFrame:
    """One row per run with the numbers of its summary: ``<metric>_mean``, ``_sd``, ``_low``, ``_high``."""
    rows = []
    for run in comparison.runs:
        row: dict[str, Any] = {"run": run.name, "folder": str(run.path), "folds": len(run.summary["finished"])}
        for name in comparison.metric_names:
            numbers = run.summary["metrics"].get(name, {})
            row |= {f"{name}_{key}": numbers[key] for key in ("mean", "sd", "low", "high") if key in numbers}
        rows.append(row)
    return pd.DataFrame(rows)


def frame_of_tests(comparison: RunComparison) -> pd.DataFrame:
    """One row per run and test."""
    return pd.DataFrame([comparison_row(tested) for tested in comparison.tests])


def cells_of_results(comparison: RunComparison) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table as people read it. A second line in a cell is the interval over patients."""
    names = comparison.metric_names
    head = ["run", *(metric_title(name) for name in names)]
    rows = [[run.name, *(_cell(run.summary["metrics"].get(name)) for name in names)] for run in comparison.runs]
    return head, rows


def cells_of_tests(comparison: RunComparison) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the tests."""
    head = ["run", "test", "difference", "95% interval", "p", "p (Holm)"]
    rows = []
    for tested in comparison.tests:
        found = tested.comparison
        interval = f"{signed(found.low)} to {signed(found.high)}" if math.isfinite(found.low) else "-"
        numbers = [signed(found.difference), interval, p_text(found.p_value), p_text(tested.p_holm)]
        rows.append([tested.run, found.test, *numbers])
    return head, rows


def _cell(numbers: dict[str, Any] | None) -> str:
    if not numbers or numbers.get("mean") is None:
        return "-"
    text = f"{numbers['mean']:.3f}"
    if numbers.get("sd") is not None:
        text += f" ± {numbers['sd']:.3f}"
    if numbers.get("low") is not None and numbers.get("high") is not None:
        text += f"\n({numbers['low']:.3f} to {numbers['high']:.3f})"
    return text


def signed(value: float) -> str:
    """A difference, with a real minus sign."""
    return f"{value:+.3f}".replace("-", "−") if math.isfinite(value) else "-"


def p_text(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def best_rows(comparison: RunComparison) -> dict[str, int]:
    """For each metric the row with the best mean, where more than one run has it."""
    best = {}
    for name in comparison.metric_names:
        means = [(run.summary["metrics"].get(name) or {}).get("mean") for run in comparison.runs]
        known = {i: -mean if name in LOWER_IS_BETTER else mean for i, mean in enumerate(means) if mean is not None}
        if len(known) > 1:
            best[name] = max(known, key=lambda i: known[i])
    return best


def latex_table(comparison: RunComparison) -> str:
    """For ``\\usepackage{booktabs}``: metrics as columns, the best mean in bold, then the tests."""
    head, rows = cells_of_results(comparison)
    best = best_rows(comparison)
    lines = [_latex_row(head), r"\midrule"]
    for i, (name, *cells) in enumerate(rows):
        values, intervals = zip(*((cell + "\n").split("\n")[:2] for cell in cells), strict=True)
        shown = [escape_latex(value) for value in values]
        marked = [
            rf"\textbf{{{text}}}" if best.get(metric) == i else text
            for metric, text in zip(comparison.metric_names, shown, strict=True)
        ]
        lines.append(" & ".join([escape_latex(name), *marked]) + r" \\")
        if any(intervals):
            small = [rf"{{\footnotesize {escape_latex(text)}}}" if text else "" for text in intervals]
            lines.append(" & ".join(["", *small]) + r" \\")
    tables = [_latex_tabular("l" + "c" * (len(head) - 1), lines)]
    if comparison.tests:
        head, rows = cells_of_tests(comparison)
        tables.append(_latex_tabular("llcccc", [_latex_row(head), r"\midrule", *map(_latex_row, rows)]))
    return "% needs \\usepackage{booktabs}\n" + "\n".join(tables)


def _latex_tabular(columns: str, lines: Sequence[str]) -> str:
    body = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *lines, r"\bottomrule", r"\end{tabular}"]
    return "\n".join(body) + "\n"


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(map(escape_latex, cells)) + r" \\"


def escape_latex(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return "".join(LATEX_SIGNS.get(sign, sign) for sign in " ".join(text.split()))


def html_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, strong: set[tuple[int, int]] | None = None
) -> str:
    """A table element; the cells (row, column) in ``strong`` are emphasised."""
    return "\n".join(_html_lines(head, rows, strong or set()))


def _html_lines(head: Sequence[str], rows: Sequence[Sequence[str]], strong: set[tuple[int, int]]) -> Iterator[str]:
    yield '<div class="table"><table>'
    yield "<thead><tr>" + "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head) + "</tr></thead>"
    yield "<tbody>"
    for i, (name, *cells) in enumerate(rows):
        shown = [_html_cell(cell, (i, j) in strong) for j, cell in enumerate(cells, start=1)]
        yield f'<tr><th scope="row">{html.escape(name)}</th>' + "".join(shown) + "</tr>"
    yield "</tbody></table></div>"


def _html_cell(cell: str, strong: bool) -> str:
    first, _, second = cell.partition("\n")
    text = f"<strong>{html.escape(first)}</strong>" if strong else html.escape(first)
    return f"<td>{text}" + (f"<br><small>{html.escape(second)}</small>" if second else "") + "</td>"


def html_results(comparison: RunComparison) -> str:
    """The table of results, the best mean of each metric emphasised."""
    best = best_rows(comparison)
    strong = {(best[name], j) for j, name in enumerate(comparison.metric_names, start=1) if name in best}
    return html_table(*cells_of_results(comparison), strong=strong)


def html_tests(comparison: RunComparison) -> str:
    return html_table(*cells_of_tests(comparison))


def save_tables(comparison: RunComparison, folder: Path) -> None:
    """Writes ``table.csv``, ``tests.csv`` and ``table.tex``."""
    write_table(folder / "table.csv", frame_of_results(comparison))
    if comparison.tests:
        write_table(folder / "tests.csv", frame_of_tests(comparison))
    with atomic_write(folder / "table.tex") as temporary:
        temporary.write_text(latex_table(comparison), encoding="utf-8")
