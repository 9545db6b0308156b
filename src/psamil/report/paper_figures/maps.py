"""Where models look, as Figure 4 of the paper: the tile scores of several runs on the same slides, lesions outlined."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from psamil.cohort.tile_labels import TileLabels
from psamil.errors import DataError
from psamil.evaluation.experiment import write_table
from psamil.evaluation.run_comparison import FinishedRun
from psamil.evaluation.run_folder import features_of
from psamil.readers import find_bags
from psamil.report.cases import Case, RunOnSlides, pictures_of
from psamil.report.heat_maps import ScoredPicture, save_heat_map
from psamil.report.paper_figures.figure_files import require_matplotlib

QUARTILES = {"median": 0.5, "small": 0.25, "large": 0.75}


def draw_maps(
    runs: Mapping[str, Path], out: Path, *, tile_labels: Path, features: Path | None = None, name: str = "figure-maps"
) -> list[Path]:
    """Writes figure-maps-median, -small and -large: a slide each, with a map for every run and the lesion outlined.

    Slides are not chosen by what models make of them: of the test slides with a lesion, those whose number of lesion
    tiles is at the quartiles. figure-maps.csv has the scores of all tiles that are shown.

    Args:
        runs: names and run directories, on the same splits.
        out: folder of the files.
        tile_labels: folder of labels of tiles (:mod:`psamil.cohort.tile_labels`).
        features: folder of the features; by default where they were in training.
        name: of the files.
    """
    require_matplotlib()
    tested = [
        RunOnSlides.of(FinishedRun.load(path, run), find_bags(features_of(path, features)).bags)
        for run, path in runs.items()
    ]
    labels = TileLabels.open(tile_labels)
    counts = lesion_tiles(tested[0], labels)
    if not counts:
        raise DataError(tile_labels, "labels no tile of a test slide of these runs as lesion", "name their tile labels")
    paths, rows = [], []
    chosen = {list(counts)[int(share * len(counts))]: size for size, share in reversed(QUARTILES.items())}
    for slide, size in reversed(chosen.items()):  # of few slides, one may be at two quartiles
        case = Case(slide, f"{counts[slide]} tiles of lesion, outlined")
        for i, picture in enumerate(pictures_of(case, tested, labels=labels)):  # one, if all runs have the same tiles
            for ending in ("png", "svg"):
                paths.append(out / f"{name}-{size}{f'-{i + 1}' if i else ''}.{ending}")
                save_heat_map(picture, paths[-1])
            rows += _tile_rows(size, slide, picture)
    write_table(out / f"{name}.csv", pd.DataFrame(rows))
    return [*paths, out / f"{name}.csv"]


def lesion_tiles(tested: RunOnSlides, labels: TileLabels) -> dict[str, int]:
    """How many tiles of lesion the test slides of a run have that have one, the fewest first."""
    counts = {slide: labels.count(slide) for slide in sorted(tested.refs) if slide in labels.files}
    return dict(sorted(((slide, n) for slide, n in counts.items() if n), key=lambda item: item[1]))


def _tile_rows(size: str, slide: str, picture: ScoredPicture) -> list[dict[str, Any]]:
    assert picture.labelled is not None
    return [
        {"run": run, "size": size, "slide": slide, "x": x, "y": y, "lesion": int(lesion), "score": float(score)}
        for run, scores in picture.scores.items()
        for (x, y), lesion, score in zip(picture.places.corners.tolist(), picture.labelled, scores, strict=True)
    ]
