"""What the page is told about a study and about a slide, as plain numbers and texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psamil.serve.explained import Explained
from psamil.serve.overlay import value_range
from psamil.serve.study import StudiedRun, StudiedSlide, Study


def describe_study(study: Study) -> dict[str, Any]:
    """Runs and slides. What is said of a slide without naming a model is what the first one predicts."""
    runs = list(study.runs.values())
    task = runs[0].predictions.task
    return {
        "title": runs[0].about["cohort"]["headline"],
        "task": {"kind": task.kind, "classes": list(getattr(task, "classes", getattr(task, "labels", ())))},
        "models": [{"id": run.id, "name": run.name, "model": run.about["settings"]["model"]} for run in runs],
        "slides": [_row(slide, runs) for slide in study.slides.values()],
    }


def _row(slide: StudiedSlide, runs: Sequence[StudiedRun]) -> dict[str, Any]:
    by_model = {run.id: run.predictions.of_slide(slide.name) for run in runs}
    return {
        "id": slide.id,
        "name": slide.name,
        **by_model[runs[0].id],
        "by_model": by_model,
        "has_image": slide.picture is not None,
        "has_labels": slide.has_labels,
    }


def describe_slide(slide: StudiedSlide, models: Sequence[tuple[StudiedRun, Explained]]) -> dict[str, Any]:
    """Where its tiles are, whether it has a picture, and what each model has to show."""
    _, first = models[0]
    places, pyramid = first.places, first.pyramid
    low, high = places.corners.min(0), places.corners.max(0) + places.size
    width, height = high.tolist() if pyramid is None else (pyramid.width, pyramid.height)
    return {
        "id": slide.id,
        "name": slide.name,
        "width": width,
        "height": height,
        "bounds": [*low.tolist(), *(high - low).tolist()],
        "tile_size": places.size,
        "step": first.step,
        "unit": places.unit,
        "mpp": places.um_per_unit,
        "n": first.n,
        "has_image": pyramid is not None,
        "image": None if pyramid is None else pyramid.to_json(),
        "image_note": first.picture_note,
        "labels": slide.has_labels,
        "models": [_model(run, explained) for run, explained in models],
    }


def _model(run: StudiedRun, explained: Explained) -> dict[str, Any]:
    ranges = {key: (label, *value_range(values)) for key, (label, values) in explained.layers.items()}
    return {
        "id": run.id,
        "name": run.name,
        "copy": explained.model_name,
        "note": explained.note,
        "values": dict(explained.explanation.values),
        "heads": explained.heads(),
        "layers": [{"key": k, "label": label, "low": low, "high": high} for k, (label, low, high) in ranges.items()],
    }
