"""The table of a paper: one row per run, one column per metric, as CSV, LaTeX and HTML.

The CSV files hold all digits; the others show mean ± standard deviation over folds, and the interval over patients
where there is one. Names of runs come from folders and files, so every text is escaped for the format it goes into.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from psamil.evaluation.comparison import BOOTSTRAP
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
    "patch_auc": "patch AUC",
    "patch_auc_per_slide": "patch AUC per slide",
    "patch_f1": "patch F1",
    "froc_tile@6": "tile FROC",
    "aufroc_tile@8": "area under tile FROC",
    "froc_lesion": "lesion FROC",
    "evidence_patch_auc": "patch AUC by evidence",
    "evidence_patch_auc_per_slide": "patch AUC per slide by evidence",
    "evidence_froc_tile@6": "tile FROC by evidence",
    "evidence_froc_lesion": "lesion FROC by evidence",
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
LATEX_RANKS = {0: r"\textbf{%s}", 1: r"\underline{%s}", None: "%s"}
HTML_RANKS = {0: "<strong>%s</strong>", 1: "<u>%s</u>", None: "%s"}
SIGNIFICANT = (0.05, 0.01, 0.001)


def metric_title(name: str) -> str:
    """As it stands at the head of a column; an arrow says where less is better."""
    return METRIC_TITLES.get(name, name) + (" ↓" if name in LOWER_IS_BETTER else "")


def frame_of_results(comparison: RunComparison) -> pd.DataFrame:
    """One row per run with the numbers of its summary: ``<metric>_mean``, ``_sd``, ``_low``, ``_high``."""
    rows = []
    for run in comparison.runs:
        row: dict[str, Any] = {"run": run.name, "folder": str(run.path), "folds": len(run.summary["finished"])}
        for name in (*comparison.metric_names, *comparison.localisation_names):
            numbers = run.summary["metrics"].get(name, {})
            row |= {f"{name}_{key}": numbers[key] for key in ("mean", "sd", "low", "high") if key in numbers}
        rows.append(row)
    return pd.DataFrame(rows)


def frame_of_tests(comparison: RunComparison) -> pd.DataFrame:
    """One row per run and test."""
    return pd.DataFrame([comparison_row(tested) for tested in comparison.tests])


def cells_of_results(comparison: RunComparison, names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of these metrics as people read it.

    A second line in a cell is the interval over patients. Marks at the headline metric are those of the tests.
    """
    marks = marks_of_tests(comparison)
    head = ["run", *(metric_title(name) for name in names)]
    rows = []
    for run in comparison.runs:
        metrics = run.summary["metrics"]
        cells = [_cell(metrics.get(name), marks.get(run.name, "") if name == run.headline else "") for name in names]
        rows.append([run.name, *cells])
    return head, rows


def marks_of_tests(comparison: RunComparison) -> dict[str, str]:
    """For each run a star where it differs from the reference by Holm-adjusted p-values, two below 0.01, three 0.001.

    The test is that over patients which takes folds as they are, the paired bootstrap.
    """
    tests = {tested.run: tested.p_holm for tested in comparison.tests if tested.comparison.test == BOOTSTRAP}
    return {run: "*" * sum(p < limit for limit in SIGNIFICANT) for run, p in tests.items()}


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


def _cell(numbers: dict[str, Any] | None, marks: str) -> str:
    if not numbers or numbers.get("mean") is None:
        return "-"
    text = f"{numbers['mean']:.3f}"
    if numbers.get("sd") is not None:
        text += f" ± {numbers['sd']:.3f}"
    text += marks
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


def ranks(comparison: RunComparison, names: Sequence[str]) -> dict[tuple[int, str], int]:
    """0 for the best mean of a metric and 1 for the second best, by row and metric, where several runs have it.

    Runs that read the same in the table share a rank.
    """
    found: dict[tuple[int, str], int] = {}
    for name in names:
        means = [(run.summary["metrics"].get(name) or {}).get("mean") for run in comparison.runs]
        shown = {
            i: round(-mean if name in LOWER_IS_BETTER else mean, 3) for i, mean in enumerate(means) if mean is not None
        }
        found |= {(i, name): place for i, place in places(shown).items()}
    return found


def places(shown: Mapping[int, float]) -> dict[int, int]:
    """0 for the highest of several values and 1 for the second, by key; equal values share a place."""
    if len(shown) < 2:
        return {}
    best, *others = sorted(set(shown.values()), reverse=True)
    found = {i: 0 for i, value in shown.items() if value == best}
    if len(found) == 1:
        found |= {i: 1 for i, value in shown.items() if value == others[0]}
    return found


def latex_table(comparison: RunComparison) -> str:
    """For ``\\usepackage{booktabs}``: a row per run, the best mean in bold, the second underlined; then the tests."""
    tables = [_latex_results(comparison, comparison.metric_names)]
    if comparison.localisation_names:
        tables.append(_latex_results(comparison, comparison.localisation_names))
    if comparison.tests:
        head, rows = cells_of_tests(comparison)
        tables.append(_latex_tabular("llcccc", [_latex_row(head), r"\midrule", *map(_latex_row, rows)]))
    return "% needs \\usepackage{booktabs}\n" + "\n".join(tables)


def _latex_results(comparison: RunComparison, names: Sequence[str]) -> str:
    return latex_cells(*cells_of_results(comparison, names), rank=_rank_of_columns(comparison, names))


def latex_cells(head: Sequence[str], rows: Sequence[Sequence[str]], *, rank: Mapping[tuple[int, int], int]) -> str:
    """A tabular of cells of one line, or two, the second in small print; ``rank`` as in :func:`html_table`.

    A row of one cell is a heading of those below it.
    """
    lines = [_latex_row(head), r"\midrule"]
    for i, (run, *cells) in enumerate(rows):
        if not cells:
            lines.append(rf"\multicolumn{{{len(head)}}}{{l}}{{\textit{{{escape_latex(run)}}}}} \\")
            continue
        values, intervals = zip(*((cell + "\n").split("\n")[:2] for cell in cells), strict=True)
        shown = [LATEX_RANKS[rank.get((i, j))] % escape_latex(text) for j, text in enumerate(values, start=1)]
        lines.append(" & ".join([escape_latex(run), *shown]) + r" \\")
        if any(intervals):
            small = [rf"{{\footnotesize {escape_latex(text)}}}" if text else "" for text in intervals]
            lines.append(" & ".join(["", *small]) + r" \\")
    return _latex_tabular("l" + "c" * (len(head) - 1), lines)


def _latex_tabular(columns: str, lines: Sequence[str]) -> str:
    body = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *lines, r"\bottomrule", r"\end{tabular}"]
    return "\n".join(body) + "\n"


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(map(escape_latex, cells)) + r" \\"


def escape_latex(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return "".join(LATEX_SIGNS.get(sign, sign) for sign in " ".join(text.split()))


def html_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, rank: Mapping[tuple[int, int], int] | None = None
) -> str:
    """A table element; ``rank`` says which cells (row, column) are the best (0) and the second best (1).

    A row of one cell is a heading of those below it.
    """
    return "\n".join(_html_lines(head, rows, rank or {}))


def _html_lines(
    head: Sequence[str], rows: Sequence[Sequence[str]], rank: Mapping[tuple[int, int], int]
) -> Iterator[str]:
    yield '<div class="table"><table>'
    yield "<thead><tr>" + "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head) + "</tr></thead>"
    yield "<tbody>"
    for i, (name, *cells) in enumerate(rows):
        if not cells:
            yield f'<tr><th scope="rowgroup" colspan="{len(head)}"><em>{html.escape(name)}</em></th></tr>'
            continue
        shown = [_html_cell(cell, rank.get((i, j))) for j, cell in enumerate(cells, start=1)]
        yield f'<tr><th scope="row">{html.escape(name)}</th>' + "".join(shown) + "</tr>"
    yield "</tbody></table></div>"


def _html_cell(cell: str, rank: int | None) -> str:
    first, _, second = cell.partition("\n")
    text = HTML_RANKS[rank] % html.escape(first)
    return f"<td>{text}" + (f"<br><small>{html.escape(second)}</small>" if second else "") + "</td>"


def html_results(comparison: RunComparison, names: Sequence[str]) -> str:
    """The table of these metrics, the best mean of each in bold and the second underlined."""
    return html_table(*cells_of_results(comparison, names), rank=_rank_of_columns(comparison, names))


def _rank_of_columns(comparison: RunComparison, names: Sequence[str]) -> dict[tuple[int, int], int]:
    column = {name: j for j, name in enumerate(names, start=1)}
    return {(i, column[name]): place for (i, name), place in ranks(comparison, names).items()}


def html_tests(comparison: RunComparison) -> str:
    return html_table(*cells_of_tests(comparison))


def save_tables(comparison: RunComparison, folder: Path) -> None:
    """Writes ``table.csv``, ``tests.csv`` and ``table.tex``."""
    write_table(folder / "table.csv", frame_of_results(comparison))
    if comparison.tests:
        write_table(folder / "tests.csv", frame_of_tests(comparison))
    else:  # of an earlier comparison in this folder
        (folder / "tests.csv").unlink(missing_ok=True)
    with atomic_write(folder / "table.tex") as temporary:
        temporary.write_text(latex_table(comparison), encoding="utf-8")
