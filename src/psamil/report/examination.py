"""What can be said about finished runs with the features of their test slides at hand.

Cases as heat maps; how alike the heads of a model are; whether its tile scores are faithful; what it costs. Models are
asked about slides of the test parts of their own fold alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from psamil.bag import Bag, PackedBags
from psamil.cohort.tile_labels import TileLabels
from psamil.errors import PsamilError
from psamil.evaluation.run_comparison import FinishedRun
from psamil.evaluation.run_folder import features_of
from psamil.explain import OcclusionCurve, explain_bag, occlude
from psamil.readers import find_bags, open_bag, slide_id
from psamil.report.cases import RunOnSlides, choose_cases, pictures_of
from psamil.report.heat_maps import ScoredPicture
from psamil.report.overviews import Overview
from psamil.slides.slide import find_slides
from psamil.spatial import Layout
from psamil.training.saved_model import SavedModel
from psamil.training.timing import read_timing

SLIDES_PER_FOLD = 3  # that models are run on again and again
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)  # of the tiles that are taken away
DRAWS = 3

Track = Callable[[Sequence[Any], str], Iterable[Any]]  # shows progress


@dataclass(frozen=True)
class SlideCost:
    """One prediction of one slide, from features in memory."""

    tiles: int
    flops: int  # of products and attention, by psamil.report.paper_figures.flop_counter
    seconds: float


@dataclass(eq=False)
class RunExamination:
    """What was seen of a run."""

    name: str
    parameters: int
    similarity: dict[int, Tensor] = field(default_factory=dict)  # by fold: (layers, heads, heads), mean over slides
    occlusions: list[OcclusionCurve] = field(default_factory=list)  # of slides
    costs: list[SlideCost] = field(default_factory=list)  # of slides
    timing: list[dict[str, Any]] = field(default_factory=list)  # of the epochs of all its trainings, as far as known


@dataclass(eq=False)
class Examination:
    """What was seen of runs, and what was not."""

    runs: list[RunExamination] = field(default_factory=list)
    pictures: list[ScoredPicture] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # whole sentences


def examine(
    runs: Sequence[FinishedRun],
    *,
    features: Path | None = None,
    slides: Path | None = None,
    tile_labels: Path | None = None,
    cases: int = 3,
    track: Track = lambda items, what: items,
) -> Examination:
    """Runs the models of finished runs on some of their test slides.

    Args:
        runs: on the same splits. The errors of the first one choose the cases.
        features: folder of their features; by default where they were in training.
        slides: folder of the slides, for pictures under the maps.
        tile_labels: folder of labels of tiles, to outline.
        cases: how many slides are shown that were right, and as many that were wrong.
        track: wraps what is worked on, with a word for it.
    """
    seen = Examination()
    tested = []
    for run in runs:
        try:
            on_slides = RunOnSlides.of(run, find_bags(features_of(run.path, features)).bags)
        except PsamilError as error:
            seen.left_out.append(f"{run.name}: no heat maps, heads, faithfulness and cost, because {error}.")
            continue
        if on_slides.refs:
            tested.append(on_slides)
        else:
            cause = "no feature file has the name of one of its test slides"
            seen.left_out.append(f"{run.name}: no heat maps, heads, faithfulness and cost, because {cause}.")
    for one in tested:
        seen.runs.append(_examine_run(one, track, seen.left_out))
    if tested and cases:
        _add_pictures(seen, tested, slides, tile_labels, cases, track)
    return seen


def _add_pictures(
    seen: Examination,
    tested: Sequence[RunOnSlides],
    slides: Path | None,
    tile_labels: Path | None,
    cases: int,
    track: Track,
) -> None:
    files = {} if slides is None else {slide_id(path): path for path in find_slides(slides)}
    labels = None if tile_labels is None else TileLabels.open(tile_labels)
    shown = choose_cases(tested[0], cases)
    for case in track(shown, "drawing heat maps"):
        overview = None
        try:
            overview = Overview.of(files[case.slide]) if case.slide in files else None
        except PsamilError as error:
            seen.left_out.append(f"No tissue beside the heat map of {case.slide}: {error}.")
        try:
            seen.pictures += pictures_of(case, tested, overview=overview, labels=labels)
        except PsamilError as error:
            seen.left_out.append(f"No heat map of {case.slide}: {error}.")
    if shown and not any(case.why.endswith("wrong") or case.why.startswith("largest") for case in shown):
        seen.left_out.append(
            f"{tested[0].run.name} was wrong about none of the test slides that there are features of."
        )
    missing = [case.slide for case in shown if case.slide not in files]
    if slides is None:
        seen.left_out.append("Heat maps stand alone: name the folder of the slides with --slides to see the tissue.")
    elif missing:
        seen.left_out.append(f"{slides} has no slide of the name {', '.join(missing)}.")
    if labels is None:
        seen.left_out.append("No annotations are outlined: name a folder of labels of tiles with --tile-labels.")


def _examine_run(tested: RunOnSlides, track: Track, left_out: list[str]) -> RunExamination:
    by_fold: dict[int, list[str]] = {}
    for slide in sorted(tested.refs):
        by_fold.setdefault(tested.predictions.of_slide(slide)["fold"], []).append(slide)
    chosen = [(fold, slide) for fold, names in sorted(by_fold.items()) for slide in names[:SLIDES_PER_FOLD]]
    saved = SavedModel.load(tested.models(chosen[0][1])[0])
    seen = RunExamination(tested.run.name, sum(weights.numel() for weights in saved.model.parameters()))
    seen.timing = [record for _, job in tested.run.jobs() for record in read_timing(job)]
    similarity: dict[int, list[Tensor]] = {}
    for fold, slide in track(chosen, f"examining {tested.run.name}"):
        try:
            saved = SavedModel.load(tested.models(slide)[0])
            bag = open_bag(tested.refs[slide], **tested.reading)
            explanation = explain_bag(saved, bag)
            if bag.n > 1:
                seen.occlusions.append(occlude(saved, bag, explanation.tile_scores, SHARES, draws=DRAWS))
            seen.costs.append(cost_of(saved.model, bag))
        except PsamilError as error:
            left_out.append(f"{tested.run.name} was not examined on {slide}: {error}.")
            continue
        if explanation.similarity is not None and explanation.similarity.shape[1] > 1:
            similarity.setdefault(fold, []).append(explanation.similarity)
    seen.similarity = {fold: torch.stack(of_slides).mean(0) for fold, of_slides in similarity.items()}
    return seen


@torch.no_grad()
def cost_of(model: torch.nn.Module, bag: Bag) -> SlideCost:
    """FLOPs and seconds of one prediction; the seconds are those of the second time, when all is warm."""
    from psamil.report.paper_figures.flop_counter import flop_counter

    def predict() -> None:
        layout = Layout.of(bag.xy, bag.slides) if getattr(model, "needs_layout", False) else None
        model(PackedBags.of(bag, layout).to(next(model.parameters()).device))

    with flop_counter() as counter:
        predict()
    begin = time.perf_counter()
    predict()
    return SlideCost(bag.n, counter.get_total_flops(), time.perf_counter() - begin)
