"""Where a model looked, against labels of tiles: scores of tiles kept in a file, metrics of localisation beside them.

Tiles are scored by ``ModelOutput.tile_scores``, which no label of a tile has touched; the scores of a fold are the mean
over its seeds, as its predictions are. A model of two classes that also says what each tile speaks for
(``ModelOutput.tile_evidence``, for the second class) is tested on that as well, by the metrics named ``evidence_...``.

Slides without labels are left out; those without a lesion count, for their false positives. Lesions are those of the
label files, or groups of touching labelled tiles of any size where these number none; where positions are not those of
the files, nobody knows which tiles touch, and ``froc_lesion`` is NaN. The threshold of the patch F1 is that of the
highest F1 on the validation part. The patch AUC and the FROC of tiles are kept for bootstrap resamples of the slides as
well, from which their intervals come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psamil.cohort import Cohort, Sample, Split
from psamil.evaluation.localisation import ScoredSlide, lesion_froc, patch_auc, patch_f1, tile_froc
from psamil.evaluation.tile_maps import evidence_for_second_class, mean_evidence, mean_scores
from psamil.evaluation.tile_resamples import interval_over_folds, resampled_metrics
from psamil.files import read_json, without_nan, write_json
from psamil.training.fold import MODEL_FILE
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
    "evidence_patch_auc",
    "evidence_patch_auc_per_slide",
    "evidence_froc_tile@6",
    "evidence_froc_lesion",
)
SCORES, EVIDENCE = "scores", "evidence"  # kinds of maps
RESAMPLED = "resampled"


@dataclass(frozen=True, eq=False)
class ScoredPart:
    """Tile scores of all slides of a part, and the slides that have labels."""

    scores: dict[str, Tensor]  # by slide
    labelled: tuple[ScoredSlide, ...]
    names: tuple[str, ...]  # of the slides with labels

    @staticmethod
    def of(slides: Iterable[tuple[str, Tensor, ScoredSlide | None]]) -> ScoredPart:
        """From what :func:`by_slide` gives."""
        found = list(slides)
        return ScoredPart(
            {slide: scores for slide, scores, _ in found},
            tuple(known for *_, known in found if known is not None),
            tuple(slide for slide, _, known in found if known is not None),
        )

    def save(self, path: Path) -> None:
        """As safetensors, one tensor per slide, in the order of its tiles."""
        write_tensors(path, self.scores, {"format": TILE_SCORES_FORMAT})

    def resampled(self, cohort: Cohort) -> dict[str, list[float]]:
        """Metrics of bootstrap resamples; patients are those of the cohort."""
        patient = {ref.id: sample.patient for sample in cohort.samples for ref in sample.bags}
        return resampled_metrics(self.labelled, [patient[name] for name in self.names])

    def best_threshold(self) -> float:
        """Of the highest F1 of tiles; NaN without labelled tiles."""
        if not self.labelled:
            return np.nan
        positive, scores = (
            np.concatenate([getattr(s, name) for s in self.labelled]) for name in ("positive", "scores")
        )
        return threshold_of_best_f1(positive, scores)


def localise_fold(cohort: Cohort, split: Split, jobs: Sequence[Path], folder: Path) -> None:
    """Writes the scores of the tiles of the test part, and its metrics.

    Does nothing where that was done with the same labels.

    Args:
        cohort: with labels of tiles.
        split: of the fold.
        jobs: folders of the models of the fold, one for each seed.
        folder: of the fold.
    """
    assert cohort.tile_labels is not None
    parts = {name: cohort.select(ids) for name, ids in (("val", split.val), ("test", split.test))}
    labels = cohort.tile_labels.fingerprint(r.id for part in parts.values() for s in part.samples for r in s.bags)
    written = folder / LOCALISATION_FILE
    if written.exists() and (before := read_json(written)).get("labels") == labels and RESAMPLED in before:
        return
    models = [SavedModel.load(job / MODEL_FILE) for job in jobs]
    maps = {name: _scored(part, models) for name, part in parts.items()}
    scored = {name: of_part[SCORES] for name, of_part in maps.items()}
    scored["test"].save(folder / TILE_SCORES_FILE)
    threshold = scored["val"].best_threshold()
    about = {
        "labels": labels,
        "threshold": threshold,
        "slides": {name: len(part.scores) for name, part in scored.items()},
        "labelled_slides": {name: len(part.labelled) for name, part in scored.items()},
        "test": metrics_of_maps(maps["test"], threshold, with_lesions=knows_places(cohort)),
        RESAMPLED: scored["test"].resampled(parts["test"]),
    }
    write_json(written, without_nan(about))


@torch.no_grad()
def _scored(cohort: Cohort, models: Sequence[SavedModel]) -> dict[str, ScoredPart]:
    """Maps of every kind that the models have, of all slides; the mean over the models."""
    found: dict[str, list[tuple[str, Tensor, ScoredSlide | None]]] = {SCORES: []}
    loader = loader_for(models[0].model, cohort, models[0].about["in_dim"])
    batches = loader.batches([sample] for sample in cohort.samples)
    for sample, batch in zip(cohort.samples, batches, strict=True):
        outputs = [model.model(batch) for model in models]
        evidence = evidence_for_second_class(mean_evidence(outputs))
        for kind, values in ((SCORES, mean_scores(outputs)), (EVIDENCE, evidence)):
            if values is not None:
                found.setdefault(kind, []).extend(by_slide(cohort, sample, batch.xy, batch.slides, values))
    return {kind: ScoredPart.of(slides) for kind, slides in found.items()}


def by_slide(
    cohort: Cohort, sample: Sample, xy: Tensor, slides: Tensor, scores: Tensor
) -> Iterator[tuple[str, Tensor, ScoredSlide | None]]:
    """Name, tile scores and, where there are labels, the scored slide, of each slide of a sample."""
    for ref, (first, end) in zip(sample.bags, pairwise(slides.tolist()), strict=True):
        of_slide = scores[first:end].contiguous()
        labels = cohort.lesions_of_tiles(ref, end - first)
        if labels is None:
            yield ref.id, of_slide, None
        else:
            places = xy[first:end].double().cpu().numpy()
            known = labels.positive, labels.lesions, labels.lesion_lengths_um
            yield ref.id, of_slide, ScoredSlide(places, of_slide.double().numpy(), *known)


def knows_places(cohort: Cohort) -> bool:
    """Whether positions are those of the tiles, not of a control or of files without coordinates."""
    return cohort.reading_options.get("positions", "file") == "file"


def localisation_metrics(
    slides: Sequence[ScoredSlide], threshold: float, *, with_lesions: bool = True
) -> dict[str, float]:
    """Those of one map, defined in :mod:`psamil.evaluation.localisation`; nothing without slides.

    Args:
        slides: with labels.
        threshold: for the patch F1, from other slides; NaN where it is not known.
        with_lesions: whether it is known which tiles touch.
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
        lesion_froc(slides).score() if with_lesions else np.nan,
    )
    return dict(zip(LOCALISATION_METRICS[: len(values)], values, strict=True))


def metrics_of_maps(maps: Mapping[str, ScoredPart], threshold: float, *, with_lesions: bool) -> dict[str, float]:
    """All of ``LOCALISATION_METRICS`` that the maps allow. The threshold is for the patch F1 of the scores."""
    found = localisation_metrics(maps[SCORES].labelled, threshold, with_lesions=with_lesions)
    if EVIDENCE in maps:
        of_evidence = localisation_metrics(maps[EVIDENCE].labelled, np.nan, with_lesions=with_lesions)
        named = {f"{EVIDENCE}_{name}": value for name, value in of_evidence.items()}
        found |= {name: value for name, value in named.items() if name in LOCALISATION_METRICS}
    return found


def localisation_of(jobs: Sequence[Path]) -> dict[str, Any] | None:
    """What :func:`localise_fold` has written about the fold of these jobs; None where it has not."""
    written = jobs[0].parent / LOCALISATION_FILE
    return read_json(written) if written.exists() else None


def localisation_intervals(folds: Sequence[Sequence[Path]]) -> dict[str, tuple[float, float]]:
    """Of the metrics that were resampled, over the folds that have them."""
    of_folds = [of_fold for jobs in folds if (of_fold := (localisation_of(jobs) or {}).get(RESAMPLED))]
    names = dict.fromkeys(name for of_fold in of_folds for name in of_fold)
    resamples = {name: [of_fold[name] for of_fold in of_folds if name in of_fold] for name in names}
    return {name: interval_over_folds([_numbers(one) for one in of]) for name, of in resamples.items()}


def _numbers(values: Sequence[float | None]) -> list[float]:
    """With NaN for what JSON has no number for."""
    return [np.nan if value is None else value for value in values]


def localisation_scores(jobs: Sequence[Path]) -> dict[str, float]:
    """The metrics of a fold; nothing where it was not localised."""
    found = localisation_of(jobs) or {"test": {}}
    return {name: np.nan if value is None else value for name, value in found["test"].items()}


def labelled_slides(summary: dict[str, Any]) -> str:
    """A sentence about localisation where not all test slides have tile labels; else nothing."""
    counts = summary.get("localisation", {"slides": 0, "labelled_slides": 0})
    if counts["labelled_slides"] == counts["slides"]:
        return ""
    return (
        f"Localisation is of the {counts['labelled_slides']} of {counts['slides']} test slides that have tile labels."
    )


def threshold_of_tiles(job: Path) -> float:
    """Of the patch F1, as it was chosen for the fold of a model; NaN where it was not."""
    found = (localisation_of([job]) or {}).get("threshold")
    return np.nan if found is None else float(found)
