"""What a model says about a slide, computed when somebody looks at it, and kept for a while.

Everything here runs in one thread: a model is not asked two things at once, and who asks for the same slide as another
finds it done.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from psamil.bag import Bag
from psamil.errors import DataError
from psamil.evaluation.predictor import Member
from psamil.explain.explaining import explain_bag, percentiles
from psamil.explain.explanation import Explanation, Head
from psamil.explain.models_of import models_for
from psamil.explain.qupath import geojson_bytes, regions_geojson, tiles_geojson
from psamil.readers import TilePlaces, open_bag, tile_places
from psamil.serve.byte_cache import ByteCache
from psamil.serve.pictures import Pictures, Pyramid
from psamil.serve.study import StudiedRun, StudiedSlide, Study
from psamil.spatial import PosteriorRow
from psamil.training.class_tasks import ClassificationTask, MultiLabelTask
from psamil.training.tasks import Task

CACHE_BYTES = 1 << 30  # features of tiles, above all
MODELS = 16  # that are kept in memory
MOST_NEIGHBOURS = 512  # of a tile that are told one by one


@dataclass(frozen=True, eq=False)
class Explained:
    """An explanation, the places of the tiles on the slide, and whose it is."""

    explanation: Explanation
    places: TilePlaces  # in the pixels of the picture, where there is one
    pyramid: Pyramid | None  # of the picture
    picture_note: str  # why there is no picture
    model_name: str  # which model of the run
    note: str  # a reason for doubt

    @property
    def n(self) -> int:
        return self.explanation.bag.n

    @property
    def step(self) -> float | None:
        """A tile step in the unit of the places: what radii are multiples of. None where it is not known."""
        step, step_um, um_per_unit = self.explanation.bag.step, self.explanation.bag.step_um, self.places.um_per_unit
        if self.places.unit == "steps":
            return 1.0
        if step is not None and step.unit == self.places.unit:
            return step.length
        return step_um / um_per_unit if step_um and um_per_unit else None

    @cached_property
    def layers(self) -> dict[str, tuple[str, NDArray[np.float64]]]:
        """By key: a name for people, and a number for each tile."""
        explanation = self.explanation
        layers = {"scores": ("tile score", explanation.tile_scores)}
        if explanation.evidence is not None:
            names = output_names(explanation.saved.task)
            for i, name in enumerate(names):
                key = "evidence" if len(names) == 1 else f"evidence-{i}"
                layers[key] = (f"evidence for {name}", explanation.evidence[:, i])
        for i, head in enumerate(explanation.heads):
            layers[f"head-{i}"] = (f"{head.name}: attention received", head.received)
        return {key: (label, values.double().numpy()) for key, (label, values) in layers.items()}

    def heads(self) -> list[dict[str, Any]]:
        return [head_facts(head, self.explanation.bag.step_um) for head in self.explanation.heads]

    def tile(self, index: int) -> dict[str, Any]:
        """One tile: where it is, its numbers, and what each head looks at from there."""
        x, y = self.places.corners[index].tolist()
        rows = self.explanation.rows(index)
        return {
            "index": index,
            "x": x,
            "y": y,
            "size": self.places.size,
            "scores": {key: float(values[index]) for key, (_, values) in self.layers.items()},
            "heads": [facts | _strongest(row) for facts, row in zip(self.heads(), rows, strict=True)],
        }

    def geojson(self, slide: str, key: str, least_percentile: float | None) -> bytes:
        """For QuPath: all tiles with their numbers; or, from a percentile of a layer on, tiles merged into regions."""
        numbers = dict(self.layers.values())
        label, values = self.layers[key]
        offset = (0, 0) if self.pyramid is None else self.pyramid.bounds[:2]
        if least_percentile is None:
            return geojson_bytes(tiles_geojson(self.places, numbers, offset_px0=offset, slide=slide))
        high = percentiles(torch.from_numpy(values)).numpy() >= least_percentile
        collection = regions_geojson(
            self.places, high, name=label, measurements={label: values}, offset_px0=offset, slide=slide
        )
        return geojson_bytes(collection)


def output_names(task: Task) -> list[str]:
    """What each output of a model speaks for."""
    if isinstance(task, ClassificationTask):
        return [task.classes[1]] if task.n_out == 1 else list(task.classes)
    if isinstance(task, MultiLabelTask):
        return list(task.labels)
    return ["a higher value"] if task.n_out == 1 else [f"an event in time bin {i + 1}" for i in range(task.n_out)]


def head_facts(head: Head, step_um: float | None) -> dict[str, Any]:
    return {
        "name": head.name,
        "radius_steps": head.radius_steps,
        "radius_um": head.radius_um(step_um),
        "decay": head.decay.name,
        "tau": head.tau,
        "theta": head.theta,
    }


def _strongest(row: PosteriorRow) -> dict[str, Any]:
    """The neighbours with the largest posterior, and their share of all of it."""
    kept = row.posterior.argsort(descending=True, stable=True)[:MOST_NEIGHBOURS]
    return {
        "perplexity": row.perplexity,
        "neighbour_count": len(row.neighbours),
        "shown_share": float(row.posterior[kept].sum()),
        "neighbours": row.neighbours[kept].tolist(),
        "posterior": row.posterior[kept].tolist(),
        "prior": row.prior[kept].tolist(),
        "likelihood": row.likelihood[kept].tolist(),
    }


class Explainer:
    """Explains slides of a study."""

    def __init__(self, study: Study, pictures: Pictures) -> None:
        self._study, self._pictures = study, pictures
        self._kept: ByteCache[Explained] = ByteCache(CACHE_BYTES, _size_bytes)
        self._member = lru_cache(MODELS)(Member.load)
        self._placed_bag = lru_cache(1)(self._read)  # models of the same slide share its features

    def explain(self, slide: StudiedSlide, run: StudiedRun) -> Explained:
        return self._kept.get((slide.id, run.id), lambda: self._explain(slide, run))

    def labels(self, slide: StudiedSlide, run: StudiedRun) -> NDArray[np.bool_] | None:
        """(n,) of the tiles of a slide as the run reads it; None for a slide without."""
        if self._study.labels is None or not slide.has_labels:
            return None
        dropped = run.reading.get("non_finite") == "drop"
        return self._study.labels.of_slide(slide.ref, self.explain(slide, run).n, dropped=dropped)

    def _explain(self, slide: StudiedSlide, run: StudiedRun) -> Explained:
        bag, places, pyramid, picture_note = self._placed_bag(slide, tuple(sorted(run.reading.items())))
        chosen = models_for(run.folder, slide.name)[0]
        member = self._member(chosen.path)
        explanation = explain_bag(member.saved, bag, temperature=member.temperature)
        return Explained(explanation, places, pyramid, picture_note, chosen.name, chosen.note)

    def _read(
        self, slide: StudiedSlide, reading: tuple[tuple[str, Any], ...]
    ) -> tuple[Bag, TilePlaces, Pyramid | None, str]:
        bag = open_bag(slide.ref, **dict(reading))
        return bag, *self._on_picture(slide, tile_places(slide.ref, bag))

    def _on_picture(self, slide: StudiedSlide, places: TilePlaces) -> tuple[TilePlaces, Pyramid | None, str]:
        """Places in the pixels of the picture; or as they are, and why there is none."""
        if slide.picture is None:
            return places, None, ""
        try:
            pyramid = self._pictures.pyramid(slide.picture)
        except DataError as error:
            return places, None, f"the picture {error.cause}"
        mpp = places.mpp or pyramid.mpp
        if places.unit == "px0":
            return replace(places, mpp=mpp), pyramid, ""
        if places.unit == "um" and mpp is not None:
            return TilePlaces(places.corners / mpp, places.size / mpp, "px0", mpp), pyramid, ""
        return places, None, "the features do not say where on the slide their tiles are"


def _size_bytes(explained: Explained) -> int:
    bag: Bag = explained.explanation.bag
    return bag.features.nbytes + bag.xy.nbytes + bag.n * 16 * (1 + len(explained.explanation.heads))
