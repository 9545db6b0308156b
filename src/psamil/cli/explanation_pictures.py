"""The pictures of ``psamil explain``: an explanation drawn over its slide, or over the bare tiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from psamil.bag import Bag
from psamil.evaluation.predictor import Prediction
from psamil.explain import Explanation
from psamil.readers import TilePlaces
from psamil.report.head_figures import MARGIN_STEPS, Surroundings, save_posterior, save_priors
from psamil.report.heat_maps import ScoredPicture, save_heat_map
from psamil.report.overviews import Overview
from psamil.report.tile_gallery import save_tiles
from psamil.slides.slide import Slide
from psamil.training.class_tasks import ClassificationTask

GALLERY_TILES = 12
TILE_PX, SURROUNDINGS_PX = 224, 500


def draw(
    explanation: Explanation,
    prediction: Prediction,
    places: TilePlaces,
    slide: Slide | None,
    tile: int,
    out: Path,
) -> None:
    """Writes the pictures into a folder; ``tile`` is the one whose posterior is drawn."""
    if places.unit not in ("px0", "um"):
        slide = None  # nobody knows where on it the tiles are
    overview = None if slide is None else Overview.of(slide.path, slide.mpp_px0)
    title = f"{prediction.id}: {_says(prediction)}"
    maps = {name: (values, note) for name, values, note in _maps(explanation, prediction)}
    scores, notes = ({name: both[i] for name, both in maps.items()} for i in (0, 1))
    picture = ScoredPicture(title, places, scores, overview, notes=notes)  # type: ignore[arg-type]
    for ending in ("png", "svg"):
        save_heat_map(picture, out / f"heat-map.{ending}", scale="percentile")
    if slide is not None:
        best = explanation.top_tiles(GALLERY_TILES)
        pictures = [(_tile_pixels(slide, places, i), _caption(explanation, i)) for i in best]
        save_tiles(pictures, f"{prediction.id}: tiles with the highest scores", out / "top-tiles.png")
    if explanation.heads:
        save_priors(explanation, out / "heads.png")
        farthest = max(head.radius_steps for head in explanation.heads) + MARGIN_STEPS
        around = None
        if slide is not None and _lie_as_on_slide(places, explanation.bag, tile):
            around = _surroundings(slide, places, explanation.bag, tile, farthest)
        where = f"{prediction.id}: where tile {tile} looks (score at percentile {explanation.percentiles[tile]:.0f})"
        save_posterior(explanation, tile, out / "posterior.png", around, where)


def _maps(explanation: Explanation, prediction: Prediction) -> Iterator[tuple[str, NDArray[np.floating], str]]:
    """Name, values and a note for each map."""
    shares = explanation.shares
    note = "" if shares is None else f"highest tile: {shares.max():.0%} of the pooling"
    yield "tile score", explanation.tile_scores.numpy(), note
    task, evidence = explanation.saved.task, explanation.evidence
    if evidence is not None and isinstance(task, ClassificationTask) and prediction.predicted is not None:
        chosen = task.classes.index(prediction.predicted)
        speaks = evidence[:, chosen] if task.n_out > 1 else evidence[:, 0] * (1 if chosen else -1)
        note = f"logit of a tile alone, {speaks.min():.1f} to {speaks.max():.1f}".replace("-", "−")
        yield f"evidence for {prediction.predicted}", speaks.numpy(), note
    for head in explanation.heads:
        radius_um = head.radius_um(explanation.bag.step_um)
        length = f"{head.radius_steps:.1f} steps" + ("" if radius_um is None else f" = {radius_um:.0f} µm")
        yield f"{head.name}: attention received", head.received.numpy(), f"radius {length}"


def _says(prediction: Prediction) -> str:
    """The prediction in a line. The risk stands for the survival curve, which explanation.json has."""
    shown = {name: value for name, value in prediction.values.items() if not name.startswith("survival_")}
    values = ", ".join(f"{name.removeprefix('prob_')} {value:.2f}" for name, value in shown.items()).replace("-", "−")
    return values if prediction.predicted is None else f"{prediction.predicted or 'no label'} ({values})"


def _caption(explanation: Explanation, tile: int) -> str:
    score = f"tile {tile}\nscore {explanation.tile_scores[tile]:.2f}".replace("-", "−")
    return score if explanation.shares is None else f"{score}, share {explanation.shares[tile]:.1%}"


def _tile_pixels(slide: Slide, places: TilePlaces, tile: int) -> NDArray[np.uint8]:
    to_px0 = _px0_per_unit(slide, places)
    x, y = (places.corners[tile] * to_px0).tolist()
    return slide.read(x, y, TILE_PX, places.size * to_px0 * slide.mpp_px0 / TILE_PX)


def _lie_as_on_slide(places: TilePlaces, bag: Bag, tile: int) -> bool:
    """Whether neighbours of the model are neighbours on the slide: not with positions in row order, or shuffled."""
    on_slide = (places.corners - places.corners[tile]) / _step_length(places, bag)
    return bool(np.abs(on_slide - (bag.xy - bag.xy[tile]).numpy()).max() < 0.5)


def _surroundings(slide: Slide, places: TilePlaces, bag: Bag, tile: int, half_side_steps: float) -> Surroundings:
    """The slide around a tile."""
    to_px0 = _px0_per_unit(slide, places)
    x, y = ((places.corners[tile] + places.size / 2) * to_px0).tolist()
    half_px0 = half_side_steps * _step_length(places, bag) * to_px0
    mpp = 2 * half_px0 * slide.mpp_px0 / SURROUNDINGS_PX
    return Surroundings(slide.read(x - half_px0, y - half_px0, SURROUNDINGS_PX, mpp), half_side_steps)


def _px0_per_unit(slide: Slide, places: TilePlaces) -> float:
    return 1.0 if places.unit == "px0" else 1 / slide.mpp_px0


def _step_length(places: TilePlaces, bag: Bag) -> float:
    """Of a tile step, in the unit of the places."""
    if bag.step is not None and bag.step.unit == places.unit:
        return bag.step.length
    if bag.step_um is not None and places.um_per_unit is not None:
        return bag.step_um / places.um_per_unit
    return places.size
