"""``psamil report``: one page about finished runs, with heat maps of slides that they were right and wrong about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from psamil.errors import DataError, OptionError
from psamil.evaluation.run_comparison import compare_runs
from psamil.report.examination import examine
from psamil.report.run_report import write_report


def report(
    runs: list[Path],
    *,
    out: Path = Path("report.html"),
    features: Path | None = None,
    slides: Path | None = None,
    tile_labels: Path | None = None,
    cases: int = 3,
    names: list[str] | None = None,
    title: str = "",
) -> Path:
    """Writes one HTML file about runs on the same splits: results, heat maps of right and wrong slides, heads, cost.

    Example: psamil report run-psa run-abmil --slides slides --out report.html

    The file loads nothing from elsewhere. Of a run that is still going on, it shows the folds that are finished. What
    needs features that are not there is left out, and the page says so.

    Args:
        runs: run directories of psamil train.
        out: the HTML file.
        features: folder of the features; by default the one that a run was trained on.
        slides: folder of the slides, to see the tissue beside the heat maps.
        tile_labels: folder of labels of single tiles (<slide>.npy, 0 for normal), to outline on the heat maps.
        cases: how many slides to show that the first run was most certainly right about, and as many that it was wrong
            about; 0 for none.
        names: of the runs, in their order; by default the model and the settings in which runs differ.
        title: of the page.

    Returns:
        The file.
    """
    if cases < 0:
        raise OptionError(f"cases must be 0 or more, got {cases}")
    if out.is_dir():
        raise DataError(out, "is a folder", "name a file, such as report.html in it")
    comparison = compare_runs(runs, names=names)
    console = Console(stderr=True, highlight=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:

        def track(items: Sequence[Any], what: str) -> Iterable[Any]:
            return bar.track(items, description=what)

        seen = examine(
            comparison.runs, features=features, slides=slides, tile_labels=tile_labels, cases=cases, track=track
        )
    for sentence in seen.left_out:
        console.print(Text(sentence))
    write_report(comparison, out, title=title, examination=seen)
    return out
