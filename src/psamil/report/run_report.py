"""One HTML file about one or several runs: results, curves, data and protocol, versions. It loads nothing else."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from psamil.errors import MissingExtraError
from psamil.evaluation.run_comparison import LOWER_IS_BETTER, FinishedRun, RunComparison
from psamil.files import atomic_write
from psamil.report.cases import figure_of_cases
from psamil.report.drawing import Figure
from psamil.report.examination import Examination
from psamil.report.examination_figures import cost_rows, examination_figures, faithfulness_rows
from psamil.report.run_figures import figures_of
from psamil.report.tables import html_results, html_table, html_tests, marks_of_tests, metric_title
from psamil.training.class_tasks import ClassificationTask

MOST_NAMED = 6  # runs in the heading
MARKED = "paired bootstrap over patients, adjusted by Holm’s method"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
CSS = """
:root { --ink: #20242b; --soft: #5b616b; --line: #d9dce2; --accent: #0b6e99; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 66rem; padding: 2.5rem 1.5rem 4rem; color: var(--ink); background: #fff;
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .8rem; padding-bottom: .3rem; border-bottom: 2px solid var(--accent); }
h3 { font-size: 1rem; margin: 0 0 .4rem; }
p { margin: .4rem 0 .8rem; max-width: 46rem; }
.lead, figcaption, .note { color: var(--soft); }
.note, figcaption { font-size: .87rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .87rem; margin: .4rem 0 .8rem; }
thead th { border-top: 1.5px solid var(--ink); border-bottom: 1px solid var(--ink); vertical-align: bottom; }
tbody tr:last-child > * { border-bottom: 1.5px solid var(--ink); }
th, td { padding: .35rem .5rem; text-align: center; }
td { white-space: nowrap; }
thead th:first-child, tbody th { text-align: left; padding-left: .2rem; }
tbody th { font-weight: 600; overflow-wrap: anywhere; min-width: 6rem; }
tbody th, .tests td:nth-child(2), .tests th:nth-child(2) { text-align: left; }
td small { color: var(--soft); }
.facts th, .facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.facts tbody th { min-width: 10rem; }
.figures { display: flex; flex-wrap: wrap; gap: 1.5rem; }
figure { margin: 0; flex: 0 1 auto; max-width: 100%; }
figure svg, figure img { max-width: 100%; height: auto; display: block; }
figcaption { width: 0; min-width: 100%; margin-top: .3rem; } /* as wide as the picture, not wider */
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  h2, h3 { break-after: avoid; }
  table, figure img { break-inside: avoid; }
  .figures { display: block; } /* flex lines do not break well over pages */
  figure { display: inline-block; vertical-align: top; margin: 0 1rem 1rem 0; }
  figure:has(img) { display: block; }
  figure img { max-height: 74mm; width: auto; } /* three to a page */
  .table { overflow: visible; }
  table { font-size: 7.5pt; }
  th, td { padding: .2rem .35rem; }
  @page { margin: 18mm; }
}
"""


def write_report(
    comparison: RunComparison,
    path: Path,
    *,
    title: str = "",
    notes: Sequence[str] = (),
    planted_steps: tuple[float, float] | None = None,
    pictures: Sequence[Figure] = (),
    examination: Examination | None = None,
) -> None:
    """Writes the page. Without matplotlib it has no figures, and says so.

    Args:
        comparison: of one or several runs.
        path: of the HTML file.
        title: heading; by default the names of the runs, or how many there are.
        notes: sentences that stand under the heading.
        planted_steps: see :func:`psamil.report.run_figures.figures_of`.
        pictures: of slides, from :func:`psamil.report.heat_maps.heat_maps`.
        examination: what was seen with features at hand, from :func:`psamil.report.examination.examine`.
    """
    seen = examination or Examination()
    of_heads: list[Figure] = []
    missing = ""
    try:
        figures = figures_of(comparison.runs, planted_steps=planted_steps)
        if seen.pictures:
            pictures = [*pictures, figure_of_cases(seen.pictures, comparison.runs[0].name)]
        of_heads = examination_figures(seen.runs)
    except MissingExtraError as error:
        figures, missing = [], str(error)
    names = [run.name for run in comparison.runs]
    heading = title or (" · ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} runs")
    body = [
        *_results(comparison),
        *_section("Slides", pictures),
        *_notes(seen.left_out),
        *_notes([missing] if missing else []),
        *_section("Curves", figures),
        *_section("Heads and tile scores", of_heads),
        *_faithfulness(seen),
        *_cost(seen),
        *_protocols(comparison),
    ]
    text = "\n".join(html_page(heading, notes, body)) + "\n"
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def html_page(heading: str, notes: Sequence[str], body: Sequence[str]) -> Iterator[str]:
    """Lines of a page that loads nothing; ``body`` is HTML already."""
    title = html.escape(heading)
    yield "<!doctype html>"
    yield f'<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>'
    yield f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<style>{CSS}</style>\n</head>\n<body>\n<h1>{title}</h1>"
    for note in notes:
        yield f'<p class="lead">{html.escape(note)}</p>'
    yield from body
    yield "</body>\n</html>"


def _results(comparison: RunComparison) -> Iterator[str]:
    yield "<h2>Results</h2>"
    yield html_results(comparison, comparison.metric_names)
    yield from _notes([_how_to_read(comparison)])
    yield from _tests(comparison)
    yield from _localisation(comparison)


def _protocols(comparison: RunComparison) -> Iterator[str]:
    yield "<h2>Data and protocol</h2>"
    yield _facts(_protocol(comparison))
    yield "<h2>Settings</h2>"
    yield _settings(comparison.runs)
    yield "<h2>Versions</h2>"
    yield _versions(comparison.runs)


def _notes(sentences: Sequence[str]) -> Iterator[str]:
    for sentence in sentences:
        yield f'<p class="note">{html.escape(sentence)}</p>'


def _faithfulness(seen: Examination) -> Iterator[str]:
    head, rows = faithfulness_rows(seen.runs)
    if not rows:
        return
    yield html_table(head, rows)
    yield from _notes(
        [
            "Area between the curves of random tiles and of the highest scores, up to 40% of the tiles: mean over test "
            "slides (smallest to largest). Near 0, a map tells no more than chance what the prediction rests on. It "
            "says nothing about whether the prediction is right."
        ]
    )


def _cost(seen: Examination) -> Iterator[str]:
    head, rows = cost_rows(seen.runs)
    if not rows:
        return
    yield "<h2>Cost</h2>"
    yield html_table(head, rows)
    yield from _notes(
        [
            "One prediction from features in memory, on some test slides of each fold. FLOPs are those of "
            "products, sums over neighbours and attention: a multiplication and an addition are two. Posterior "
            "attention counts pairs of tiles within its radius, and computes more in blocks. Times are of single "
            f"predictions on the machine that wrote this page, with {torch.get_num_threads()} of its threads, and "
            "change with what else it does: they are no benchmark. Seconds per epoch, the median, and peak memory are "
            "those of training, where it took place: memory of tensors on a GPU; on a CPU, of the whole process, which "
            "may have trained other models before."
        ]
    )


def _section(heading: str, figures: Sequence[Figure]) -> Iterator[str]:
    if not figures:
        return
    yield f'<h2>{heading}</h2>\n<div class="figures">'
    for figure in figures:
        yield f"<figure><h3>{html.escape(figure.title)}</h3>\n{figure.element}"
        yield f"<figcaption>{html.escape(figure.caption)}</figcaption></figure>"
    yield "</div>"


def _how_to_read(comparison: RunComparison) -> str:
    first = comparison.runs[0]
    told = [
        "Test parts, by patient: mean ± standard deviation over folds; in brackets the 95% bootstrap interval over "
        "patients."
    ]
    if len(comparison.runs) > 1:
        told.append("Bold: the best mean; underlined: the second best.")
    if any(marks_of_tests(comparison).values()):
        told.append(
            f"Stars: differs from {comparison.reference.name}, * p < 0.05, ** p < 0.01, *** p < 0.001 ({MARKED})."
        )
    if any(name in LOWER_IS_BETTER for name in comparison.metric_names):
        told.append("↓ less is better.")
    told += comparison.caveats
    if all(fold.val for fold in first.splits.folds):
        chosen = ", thresholds and temperatures" if isinstance(first.task, ClassificationTask) else ""
        told.append(f"Epochs{chosen} were chosen on validation parts, epochs by {metric_title(first.headline)}.")
    intervals = [run.summary["metrics"].get(first.headline, {}) for run in comparison.runs]
    if any(found.get("low") is not None and found["low"] == found.get("high") for found in intervals):
        told.append("An interval without width, as of a perfect AUC, is not certainty.")
    return " ".join(told)


def _tests(comparison: RunComparison) -> Iterator[str]:
    if not comparison.tests:
        return
    metric, reference = metric_title(comparison.runs[0].headline), comparison.reference.name
    yield f"<h2>{html.escape(f'Differences in {metric} from {reference}')}</h2>"
    yield f'<div class="tests">{html_tests(comparison)}</div>'
    yield (
        '<p class="note">Run minus reference; two-sided. Folds share training data, which the paired t-test ignores '
        "and the corrected one accounts for. Tests over patients take the trained models as given. Holm’s method "
        "adjusts each test for the number of runs.</p>"
    )


def _localisation(comparison: RunComparison) -> Iterator[str]:
    if not comparison.localisation_names:
        return
    yield "<h2>Localisation</h2>"
    yield html_results(comparison, comparison.localisation_names)
    yield (
        '<p class="note">Tile scores against labels of tiles, which no training has seen. Patch AUC: tiles of all '
        "test slides pooled, or the mean over slides with labelled tiles. Patch F1: at the threshold of the highest F1 "
        "on the validation part. Tile FROC: mean sensitivity of labelled tiles at 1/4, 1/2, 1, 2, 4 and 8 "
        "false-positive tiles per slide; area under it up to 8. Lesion FROC: the same for groups of touching labelled "
        "tiles, found by local maxima of the score.</p>"
    )
    yield from _notes(comparison.unlabelled)


def _protocol(comparison: RunComparison) -> list[tuple[str, str]]:
    first = comparison.runs[0]
    splits, finished = first.splits, first.summary["finished"]
    sizes = [
        " / ".join(_range([len(getattr(fold, part)) for fold in splits.folds]) for part in ("train", "val", "test"))
    ]
    trainings = {run.name: run.trainings for run in comparison.runs}
    same = len(set(trainings.values())) == 1
    text = str(first.trainings) if same else ", ".join(f"{name}: {n}" for name, n in trainings.items())
    return [
        *_cohorts(comparison.runs),
        ("splits", f"{splits.name or 'unnamed'}; hash {splits.hash[:16]}"),
        ("folds", f"{len(finished)} of {len(splits)} finished"),
        ("samples per part", f"{sizes[0]} (train / validation / test)"),
        ("trainings per fold", text),
    ]


def _cohorts(runs: Sequence[FinishedRun]) -> list[tuple[str, str]]:
    """One line where all runs used the same data."""
    told = {
        run.name: f"{run.about['cohort']['headline']}; fingerprint {run.about['cohort']['fingerprint'][:16]}"
        for run in runs
    }
    if len(set(told.values())) == 1:
        return [("cohort", next(iter(told.values())))]
    return [(f"cohort of {name}", text) for name, text in told.items()]


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _settings(runs: Sequence[FinishedRun]) -> str:
    """All settings, one column per run."""
    names = dict.fromkeys(name for run in runs for name in run.about["settings"])
    rows = [[name, *(_value(run.about["settings"].get(name)) for run in runs)] for name in names]
    return '<div class="facts">' + html_table(["setting", *(run.name for run in runs)], rows) + "</div>"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_value(item)}" for key, item in value.items()) or "-"
    return value if isinstance(value, str) else json.dumps(value)


def _versions(runs: Sequence[FinishedRun]) -> str:
    told = []
    for run in runs:
        environment = run.about.get("environment", {})
        packages = environment.get("packages", {})
        told.append(
            {**packages, "Python": environment.get("python", "-"), "platform": environment.get("platform", "-")}
        )
    names = dict.fromkeys(name for versions in told for name in versions)
    if all(versions == told[0] for versions in told):
        return _facts([(name, str(told[0][name])) for name in names])
    rows = [[name, *(str(versions.get(name, "-")) for versions in told)] for name in names]
    return '<div class="facts">' + html_table(["", *(run.name for run in runs)], rows) + "</div>"


def _facts(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td>{html.escape(text)}</td></tr>' for name, text in rows
    )
    return f'<div class="facts"><table><tbody>{cells}</tbody></table></div>'
