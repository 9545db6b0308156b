"""Single slides in a report: where models looked when they were right, and when they were wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psamil.cohort.tile_labels import TileLabels
from psamil.evaluation.predictor import Member, Predictor
from psamil.evaluation.run_comparison import FinishedRun
from psamil.evaluation.sample_predictions import RunPredictions
from psamil.explain import models_for
from psamil.readers import BagRef, open_bag, tile_places
from psamil.report.drawing import Figure
from psamil.report.heat_maps import ScoredPicture, heat_maps
from psamil.report.overviews import Overview


@dataclass(frozen=True, eq=False)
class RunOnSlides:
    """A run with its feature files, by slide, of the slides that it was tested on."""

    run: FinishedRun
    refs: Mapping[str, BagRef]
    predictions: RunPredictions

    @staticmethod
    def of(run: FinishedRun, refs: Sequence[BagRef]) -> RunOnSlides:
        predictions = RunPredictions.of(run.path)
        tested = {ref.id: ref for ref in refs if predictions.of_slide(ref.id)["fold"] is not None}
        return RunOnSlides(run, tested, predictions)

    @property
    def reading(self) -> dict[str, Any]:
        """Options of :func:`psamil.open_bag`, as in training."""
        return dict(self.run.about.get("reading") or {})

    def models(self, slide: str) -> list[Path]:
        """Of the seeds of the fold that had the slide in its test part; of repeated folds, the first."""
        found = models_for(self.run.path, slide)
        return [model.path for model in found if model.fold == found[0].fold]


@dataclass(frozen=True)
class Case:
    """A slide that is shown, and why."""

    slide: str
    why: str


def choose_cases(tested: RunOnSlides, count: int) -> list[Case]:
    """The slides that a run was most certainly right about, then those that it was most certainly wrong about.

    Where nothing is right or wrong (numbers, survival), those of the smallest and of the largest error. At most
    ``count`` of either kind. Of a patient with several slides, the first.
    """
    first: dict[str | None, str] = {}
    for slide in sorted(tested.refs):
        first.setdefault(tested.predictions.sample_of(slide), slide)
    rows = {slide: tested.predictions.of_slide(slide) for slide in first.values()}
    rows = {slide: row for slide, row in rows.items() if row["error"] is not None}
    rising = sorted(rows, key=lambda slide: rows[slide]["error"])
    if any(row["wrong"] is not None for row in rows.values()):
        right = [Case(slide, "most certainly right") for slide in rising if not rows[slide]["wrong"]]
        wrong = [Case(slide, "most certainly wrong") for slide in reversed(rising) if rows[slide]["wrong"]]
        return right[:count] + wrong[:count]
    low = [Case(slide, "smallest error") for slide in rising[: min(count, -(-len(rising) // 2))]]
    return low + [Case(slide, "largest error") for slide in reversed(rising[len(low) :][-count:])]


def pictures_of(
    case: Case, runs: Sequence[RunOnSlides], *, overview: Overview | None = None, labels: TileLabels | None = None
) -> list[ScoredPicture]:
    """A case with a map for each run: scores of tiles, mean over the models of the fold that did not learn from it.

    Runs whose features have other tiles get a picture of their own.

    Args:
        case: the slide.
        runs: those that know it are shown.
        overview: its picture.
        labels: of tiles, to outline.
    """
    pictures: dict[bytes, dict[str, Any]] = {}
    for tested in runs:
        if case.slide not in tested.refs:
            continue
        ref = tested.refs[case.slide]
        bag = open_bag(ref, **tested.reading)
        if not bag.n:
            continue
        row = tested.predictions.of_slide(case.slide)
        places = tile_places(ref, bag)
        scores = Predictor([Member.load(path) for path in tested.models(case.slide)]).predict(bag).tile_scores
        same = pictures.setdefault(places.corners.tobytes(), {"scores": {}, "notes": {}})
        same["scores"][tested.run.name], same["notes"][tested.run.name] = scores.numpy(), _said(row)
        same |= {"places": places, "title": _title(case, row["truth"])}
        same["overview"] = overview if overview is not None and overview.has_place_in(places.unit) else None
        if labels is not None:
            same["labelled"] = labels.of_slide(ref, bag.n, dropped=tested.reading.get("non_finite") == "drop")
    return [ScoredPicture(**same) for same in pictures.values()]


def _title(case: Case, truth: Any) -> str:
    if truth is None:
        return f"{case.slide} ({case.why})"
    return f"{case.slide}: {truth if isinstance(truth, str) else format(truth, '.3g')} ({case.why})"


def _said(row: Mapping[str, Any]) -> str:
    """What a run predicted, in a line."""
    if row["predicted"] is not None:
        how = "" if row["wrong"] is None else ", wrong" if row["wrong"] else ", right"
        return f"{row['predicted'] or 'nothing'}, p = {row['confidence']:.2f}{how}"
    shown = {name: value for name, value in row["values"].items() if name in ("value", "risk") and value is not None}
    return ", ".join(f"{name} {value:.3g}" for name, value in shown.items())


def figure_of_cases(pictures: Sequence[ScoredPicture], chosen_by: str) -> Figure:
    """All cases, with what can be seen in them."""
    caption = (
        f"Test slides by the errors of {chosen_by}. Colours are scores of tiles by the models of the fold that did not "
        "learn from the slide: they say how much a prediction rests on a tile. Colours of a run mean the same scores "
        "in all of its pictures; runs have scales of their own, and models of different folds may."
    )
    if any(picture.labelled is not None for picture in pictures):
        caption += " Red: annotated tiles."
    return heat_maps(pictures, caption, title="Right and wrong")
