"""Where a model looked, against labels of tiles: scores of tiles kept in a file, metrics of localisation beside them.

Tiles are scored by ``ModelOutput.tile_scores``, which no label of a tile has touched. Slides without labels are left
out; those without a lesion count, for their false positives. Lesions are groups of touching labelled tiles of any size.
The threshold of the patch F1 is that of the highest F1 on the validation part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from psamil.cohort import Cohort, Sample, Split
from psamil.evaluation.localisation import ScoredSlide, lesion_froc, patch_auc, patch_f1, tile_froc
from psamil.files import read_json, write_json
from psamil.training.metrics import threshold_of_best_f1
from psamil.training.prediction import loader_for
from psamil.training.saved_model import SavedModel
from psamil.training.state import write_tensors

TILE_SCORES_FILE, LOCALISATION_FILE = "tile_scores.safetensors", "localisation.json"
TILE_SCORES_FORMAT = "psamil tile scores 1"
LOCALISATION_METRICS = (
    "patch_auc",
    "patch_auc_per_slide",
    "patch_f1",
    "froc_tile@6",
    "aufroc_tile@8",
    "froc_lesion",
)


@dataclass(frozen=True, eq=False)
class ScoredPart:
    """Tile scores of all slides of a part, and the slides that have labels."""

    scores: dict[str, Tensor]  # by slide
    labelled: tuple[ScoredSlide, ...]

    @staticmethod
    def of(slides: Iterable[tuple[str, Tensor, ScoredSlide | None]]) -> ScoredPart:
        """From what :func:`by_slide` gives."""
        found = list(slides)
        return ScoredPart(
            {slide: scores for slide, scores, _ in found}, tuple(known for *_, known in found if known is not None)
        )

    def save(self, path: Path) -> None:
        """As safetensors, one tensor per slide, in the order of its tiles."""
        write_tensors(path, self.scores, {"format": TILE_SCORES_FORMAT})

    @property
    def threshold(self) -> float:
        """Of the highest F1 of tiles; NaN without labelled tiles."""
        if not self.labelled:
            return np.nan
        positive, scores = (
            np.concatenate([getattr(s, name) for s in self.labelled]) for name in ("positive", "scores")
        )
        return threshold_of_best_f1(positive, scores)


def localise_fold(cohort: Cohort, split: Split, model: SavedModel, folder: Path) -> None:
    """Writes the scores of the tiles of the test part, and its metrics.

    Does nothing where that was done with the same labels.
    """
    assert cohort.tile_labels is not None
    parts = {name: cohort.select(ids) for name, ids in (("val", split.val), ("test", split.test))}
    labels = cohort.tile_labels.fingerprint(r.id for part in parts.values() for s in part.samples for r in s.bags)
    written = folder / LOCALISATION_FILE
    if written.exists() and read_json(written).get("labels") == labels:
        return
    scored = {name: ScoredPart.of(_scored(part, model)) for name, part in parts.items()}
    scored["test"].save(folder / TILE_SCORES_FILE)
    metrics = localisation_metrics(scored["test"].labelled, scored["val"].threshold)
    about = {
        "labels": labels,
        "threshold": finite(scored["val"].threshold),
        "labelled_slides": {name: len(part.labelled) for name, part in scored.items()},
    }
    write_json(written, {**about, "test": {name: finite(value) for name, value in metrics.items()}})


@torch.no_grad()
def _scored(cohort: Cohort, model: SavedModel) -> Iterator[tuple[str, Tensor, ScoredSlide | None]]:
    loader = loader_for(model.model, cohort, model.about["in_dim"])
    batches = loader.batches([sample] for sample in cohort.samples)
    for sample, batch in zip(cohort.samples, batches, strict=True):
        yield from by_slide(cohort, sample, batch.xy, batch.slides, model.model(batch).tile_scores.float().cpu())


def by_slide(
    cohort: Cohort, sample: Sample, xy: Tensor, slides: Tensor, scores: Tensor
) -> Iterator[tuple[str, Tensor, ScoredSlide | None]]:
    """Name, tile scores and, where there are labels, the scored slide, of each slide of a sample."""
    for ref, (first, end) in zip(sample.bags, pairwise(slides.tolist()), strict=True):
        of_slide = scores[first:end].contiguous()
        positive = cohort.labels_of_tiles(ref, end - first)
        if positive is None:
            yield ref.id, of_slide, None
        else:
            places = xy[first:end].double().cpu().numpy()
            yield ref.id, of_slide, ScoredSlide(places, of_slide.double().numpy(), positive)


def localisation_metrics(slides: Sequence[ScoredSlide], threshold: float) -> dict[str, float]:
    """All of ``LOCALISATION_METRICS``, defined in :mod:`psamil.evaluation.localisation`; nothing without slides.

    Args:
        slides: with labels.
        threshold: for the patch F1, from other slides; NaN where it is not known.
    """
    if not slides:
        return {}
    tiles = tile_froc(slides)
    values = (
        patch_auc(slides),
        patch_auc(slides, "per slide"),
        patch_f1(slides, threshold) if np.isfinite(threshold) else np.nan,
        tiles.score(),
        tiles.area(),
        lesion_froc(slides).score(),
    )
    return dict(zip(LOCALISATION_METRICS, values, strict=True))


def localisation_of(jobs: Sequence[Path]) -> dict[str, float]:
    """Of a fold: each metric is the mean over its models. Nothing unless all of them were localised."""
    files = [job / LOCALISATION_FILE for job in jobs]
    if not all(file.exists() for file in files):
        return {}
    found = [read_json(file)["test"] for file in files]
    return {name: float(np.mean([np.nan if of[name] is None else of[name] for of in found])) for name in found[0]}


def threshold_of_tiles(job: Path) -> float:
    """Of the patch F1, as it was chosen for a model; NaN where it was not."""
    found = read_json(job / LOCALISATION_FILE)["threshold"] if (job / LOCALISATION_FILE).exists() else None
    return np.nan if found is None else float(found)


def finite(value: float) -> float | None:
    """For JSON, which has no NaN."""
    return value if np.isfinite(value) else None
