"""``psamil explain``: why a model of a run says what it says about slides."""

from __future__ import annotations

import functools
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from psamil.bag import Bag
from psamil.cli.explanation_pictures import draw
from psamil.cli.extract import chosen_device
from psamil.cohort.tables import quoted
from psamil.errors import DataError, OptionError, PsamilError
from psamil.evaluation.experiment import write_table
from psamil.evaluation.predictor import Member, Prediction, Predictor
from psamil.evaluation.run_folder import data_of
from psamil.explain import Explanation, ModelOf, OcclusionCurve, explain_bag, models_for, occlude
from psamil.explain.qupath import regions_geojson, tiles_geojson, write_geojson
from psamil.files import without_nan, write_json
from psamil.readers import BagRef, Found, TilePlaces, find_bags, open_bag, slide_id, tile_places
from psamil.report.overlays import write_overlay
from psamil.slides.slide import Slide, find_slides, open_slide
from psamil.training.class_tasks import ClassificationTask, MultiLabelTask

TOP_TILES = 20
HIGH_PERCENTILE = 90.0  # from which on tiles are merged into regions


def explain(
    features: Path,
    *,
    run: Path,
    out: Path,
    slide: list[str] | None = None,
    slides: Path | None = None,
    tile: int | None = None,
    occlusion: bool = True,
    geojson: bool = True,
    overlay: bool = False,
    format: str | None = None,
    member: str | None = None,
    mpp: float | None = None,
    device: str = "auto",
) -> int:
    """Shows what a model of a run looks at: heat maps, heads with their radii, the most attended tiles.

    Example: psamil explain features --run run --out explained --slides slides --slide slide_007

    A slide gets a folder: explanation.json, tiles.csv, heat-map.png and .svg; with --slides top-tiles.png; of models
    with posterior attention heads.png and posterior.png; for QuPath tiles.geojson and regions.geojson, which holds the
    tenth of the tiles with the highest scores. A slide is explained by a model of the fold that had it in its test
    part: explanation.json says which.

    Slides that cannot be explained are listed; the exit code is then 1.

    Args:
        features: of any known format: a folder or a single file.
        run: run directory.
        out: folder to write into.
        slide: names of slides; by default all.
        slides: folder of the slides themselves, to draw over them; without it, tiles are drawn on white.
        tile: index of the tile, from 0 as in tiles.csv, whose posterior is drawn; by default the one of highest score.
        occlusion: test whether the scores are faithful, which runs the model about 40 times.
        geojson: write files for QuPath.
        overlay: write the slide with the colours on it as a pyramidal TIFF, overlay.tiff; needs slides.
        format: name of the format; by default each file tells.
        member: which features, in stores that hold those of several encoders.
        mpp: micrometres per pixel of the slides, whatever they say themselves; by default as the features say.
        device: where to compute, as torch names it: "cpu", "cuda"; "auto" is the graphics card, where there is one.
    """
    if overlay and slides is None:
        raise OptionError("an overlay is drawn over the slide: name the folder of the slides with --slides")
    reading = data_of(run)["reading"]
    found = find_bags(features, format=format, member=member)
    chosen = _chosen(found, features, slide)
    path_of = {} if slides is None else {slide_id(path): path for path in find_slides(slides)}
    explainer = _Explainer(run, chosen_device(device), tile, occlusion, geojson, overlay, mpp)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    failed = {} if slide else {str(entry.path): entry.reason for entry in found.set_aside}
    done = 0
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for ref in bar.track(chosen, description="explaining"):
            try:
                notes = explainer.write(ref, open_bag(ref, **reading), path_of.get(ref.id), out / ref.id)
            except PsamilError as error:
                failed[ref.id] = str(error)
                continue
            done += 1
            for note in notes:
                console.print(Text(f"{ref.id}: {note}"))
    for name, reason in failed.items():
        console.print(Text(f"not explained: {name}: {reason}"))
    counts = f"slides explained: {done}; not explained: {len(failed)}"
    Console(highlight=False, soft_wrap=True).print(f"{counts}\nwrote {out}", markup=False)
    return int(bool(failed))


def _chosen(found: Found, features: Path, names: list[str] | None) -> list[BagRef]:
    if not found.bags and not found.set_aside:
        raise DataError(features, "holds no features of a known format", "look into it with psamil inspect")
    if names is None:
        return list(found.bags)
    known = {ref.id: ref for ref in found.bags}
    missing = [name for name in names if name not in known]
    if missing:
        cause = f"has no slide {quoted(missing)}"
        raise DataError(features, cause, f"its slides are {quoted(list(known))}")
    return [known[name] for name in dict.fromkeys(names)]


@dataclass(frozen=True)
class _Explainer:
    """Explains one slide after the other; models are loaded once."""

    run: Path
    device: str
    tile: int | None
    occlusion: bool
    geojson: bool
    overlay: bool
    mpp: float | None

    def write(self, ref: BagRef, bag: Bag, slide_path: Path | None, out: Path) -> list[str]:
        """Writes the folder of a slide. Returns what people should know."""
        model = models_for(self.run, ref.id)[0]
        predictor = _predictor(model.path, self.device)
        predictor.check(bag)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its note is told below
            prediction = predictor.predict(bag)
        saved = predictor.members[0].saved
        explanation = explain_bag(saved, bag, temperature=predictor.members[0].temperature)
        shown = self._tile(explanation)
        curve = self._occlusion(explanation, prediction) if self.occlusion and bag.n > 1 else None
        places = tile_places(ref, bag)
        table = _table(explanation, places)
        with ExitStack() as stack:
            mpp = self.mpp or places.mpp  # what the features were made with, for slides that do not tell
            slide = None if slide_path is None else stack.enter_context(open_slide(slide_path, mpp))
            write_json(out / "explanation.json", without_nan(_summary(explanation, prediction, model, table, curve)))
            write_table(out / "tiles.csv", table)
            draw(explanation, prediction, places, slide, shown, out)
            notes = [note for note in (model.note, prediction.note) if note]
            if self.geojson:
                notes += _write_geojson(table, places, slide, ref.id, out)
            if self.overlay and slide is not None:
                write_overlay(out / "overlay.tiff", slide, places, explanation.percentiles.numpy())
            elif self.overlay:
                notes.append("no overlay: its slide was not found")
        return notes

    def _tile(self, explanation: Explanation) -> int:
        """Whose posterior is drawn."""
        n = explanation.bag.n
        if self.tile is not None and not 0 <= self.tile < n:
            raise OptionError(f"it has no tile {self.tile}: name one from 0 to {n - 1} with --tile")
        return explanation.top_tiles(1)[0] if self.tile is None else self.tile

    def _occlusion(self, explanation: Explanation, prediction: Prediction) -> OcclusionCurve:
        is_class = isinstance(explanation.saved.task, ClassificationTask)
        watch = prediction.predicted if is_class else None
        return occlude(explanation.saved, explanation.bag, explanation.tile_scores, watch=watch)


@functools.lru_cache(maxsize=8)
def _predictor(path: Path, device: str) -> Predictor:
    return Predictor([Member.load(path)], device)


def _table(explanation: Explanation, places: TilePlaces) -> pd.DataFrame:
    """One row for each tile; x and y are its upper left corner, with the unit in their names."""
    columns: dict[str, Any] = {
        "tile": np.arange(explanation.bag.n),
        f"x_{places.unit}": places.corners[:, 0],
        f"y_{places.unit}": places.corners[:, 1],
        "score": explanation.tile_scores.numpy(),
        "percentile": explanation.percentiles.numpy(),
    }
    if explanation.shares is not None:
        columns["share"] = explanation.shares.numpy()
    if explanation.evidence is not None:
        for name, evidence in zip(_outputs(explanation), explanation.evidence.T.numpy(), strict=True):
            columns[f"evidence {name}"] = evidence
    for head in explanation.heads:
        columns[f"{head.name} received"] = head.received.numpy()
        columns[f"{head.name} neighbourhood"] = head.neighbourhood.numpy()
    if len(explanation.bag.slide_ids) > 1:
        columns["slide"] = np.repeat(explanation.bag.slide_ids, explanation.bag.slides.diff().numpy())
    return pd.DataFrame(columns)


def _outputs(explanation: Explanation) -> list[str]:
    """What each logit speaks for; those of survival for the event in an interval of time."""
    task = explanation.saved.task
    if isinstance(task, ClassificationTask):
        return list(task.classes[1:] if task.n_out == 1 else task.classes)
    if isinstance(task, MultiLabelTask):
        return list(task.labels)
    return ["value"] if task.n_out == 1 else [f"interval {i + 1}" for i in range(task.n_out)]


def _summary(
    explanation: Explanation,
    prediction: Prediction,
    model: ModelOf,
    table: pd.DataFrame,
    curve: OcclusionCurve | None,
) -> dict[str, Any]:
    """What explanation.json says."""
    step_um = explanation.bag.step_um
    heads = [
        {
            "name": head.name,
            "decay": head.decay.name,
            "theta": head.theta,
            "tau": head.tau,
            "radius_steps": head.radius_steps,
            "radius_um": head.radius_um(step_um),
            "median_neighbourhood_tiles": float(head.neighbourhood.median()),
            "most_attended_tiles": head.received.argsort(descending=True, stable=True)[:TOP_TILES].tolist(),
        }
        for head in explanation.heads
    ]
    best = table.iloc[explanation.top_tiles(TOP_TILES)]
    return {
        "slide": prediction.id,
        "tiles": prediction.tiles,
        "tile_step_um": step_um,
        "model": {
            "name": explanation.model,
            "file": f"folds/{model.fold}/{model.path.parent.name}/{model.path.name}",
            "fold": model.fold,
            "note": model.note,
        },
        "prediction": {"predicted": prediction.predicted, **prediction.values, "note": prediction.note},
        "top_tiles": best.to_dict("records"),
        "heads": heads,
        "head_similarity": None if explanation.similarity is None else explanation.similarity.tolist(),
        "occlusion": None if curve is None else _of_curve(curve),
    }


def _of_curve(curve: OcclusionCurve) -> dict[str, Any]:
    return {
        "watched": curve.watched,
        "whole": curve.whole,
        "area": curve.area,
        "area_spread": curve.area_spread,
        "share_of_tiles_gone": curve.shares.tolist(),
        "without_top": curve.top.tolist(),
        "without_lowest": curve.lowest.tolist(),
        "without_random_mean": curve.random.mean(0).tolist(),
        "without_random_spread": curve.random.std(0, ddof=1).tolist(),
    }


def _write_geojson(table: pd.DataFrame, places: TilePlaces, slide: Slide | None, name: str, out: Path) -> list[str]:
    """For QuPath, which counts from the corner of the scanned area. Returns what people should know."""
    if places.unit != "px0":
        return [f"no GeoJSON: its tiles are in {places.unit}, and QuPath needs level-0 pixels"]
    offset = (0, 0) if slide is None else slide.bounds_px0[:2]
    measured: dict[str, NDArray[Any]] = {str(key): table[key].to_numpy() for key in table.columns[3:] if key != "slide"}
    of_tiles = tiles_geojson(places, measured, offset_px0=offset, slide=name)
    write_geojson(out / "tiles.geojson", of_tiles)
    high = table["percentile"].to_numpy() >= HIGH_PERCENTILE
    regions = regions_geojson(
        places, high, name="high score", measurements={"score": measured["score"]}, offset_px0=offset, slide=name
    )
    write_geojson(out / "regions.geojson", regions)
    return []
