"""External validation: the models of a run on another cohort.

Nothing is fitted to the other cohort: temperatures and thresholds are those of the run. Whoever was in the training
data does not belong into it, which is checked by the names of patients and samples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from psamil.bag import Bag
from psamil.cohort import BagCache, Cohort, Sample, Splits
from psamil.cohort.tables import quoted
from psamil.errors import DataError, OptionError, one_of
from psamil.evaluation.experiment import write_table
from psamil.evaluation.exported import read_config
from psamil.evaluation.fold_localisation import (
    EVIDENCE,
    SCORES,
    TILE_SCORES_FILE,
    ScoredPart,
    by_slide,
    knows_places,
    metrics_of_maps,
    threshold_of_tiles,
)
from psamil.evaluation.predictor import Member, Prediction, Predictor
from psamil.evaluation.run_folder import DATA, METRICS_FILE, PREDICTIONS_FILE, SPLITS_FILE, data_of
from psamil.evaluation.score_intervals import score_with_intervals
from psamil.evaluation.scores import by_patient, truth
from psamil.evaluation.tile_maps import evidence_for_second_class
from psamil.evaluation.tile_resamples import interval_over_folds
from psamil.files import without_nan, write_json

OVERLAPS = ("refuse", "leave out", "allow")
OUTCOME_COLUMNS = ("target", "time", "event", "censorship")


@dataclass(frozen=True)
class Overlap:
    """Samples of a cohort that the models have seen, themselves or another slide of the patient."""

    samples: tuple[str, ...] = ()
    patients: tuple[str, ...] = ()
    unknown: str = ""  # why it cannot be known, or not all of it

    def __str__(self) -> str:
        seen = f"{len(self.samples)} samples of {len(self.patients)} patients were in the training data of the run"
        return "; ".join(filter(None, [seen if self.samples else "", self.unknown]))


def open_like(
    predictor: Predictor,
    features: str | Path,
    labels: str | Path | pd.DataFrame,
    *,
    reading: Mapping[str, Any] | None = None,
    cache: str | Path | None = None,
    **options: Any,
) -> Cohort:
    """Another cohort, read as that of the run was. What is given here comes first.

    Args:
        predictor: of the run.
        features: folder of features.
        labels: table of labels.
        reading: options of :func:`psamil.open_bag`.
        cache: folder of the cache.
        options: of :meth:`psamil.Cohort.open`. One of ``target``, ``time``, ``event`` and ``censorship`` stands for all
            four; those that are None count as not given.
    """
    before = origin(predictor)
    given = {name: value for name, value in options.items() if value is not None}
    names_outcome = any(name in given for name in OUTCOME_COLUMNS)
    kept = {
        k: v for k, v in before["outcome"].items() if v is not None and not (names_outcome and k in OUTCOME_COLUMNS)
    }
    asked = {name: value for name, value in (reading or {}).items() if value is not None}
    kind = predictor.task.kind if predictor.task.kind in ("classification", "regression") else "auto"
    loader = BagCache(cache, **{**before["reading"], **asked})
    return Cohort.open(features, labels, **{"kind": kind, **kept, **given}, cache=loader)


def evaluate_run(
    predictor: Predictor,
    cohort: Cohort,
    out: str | Path,
    *,
    overlap: str = "refuse",
    annotations: Mapping[str, Any] | None = None,
    progress: Callable[[Sequence[Sample]], Iterable[Sample]] = lambda samples: samples,
) -> dict[str, Any]:
    """Metrics of a run on another cohort, with 95% bootstrap intervals over its patients.

    Args:
        predictor: all models of a run, or one.
        cohort: whose damaged slides are set aside already (:meth:`psamil.cohort.Cohort.checked`). If it has labels of
            tiles, localisation is tested as well.
        out: new folder for ``metrics.json`` and ``predictions.csv``; with labels of tiles, ``tile_scores.safetensors``.
        overlap: what to do with samples that the models were trained on: "refuse", "leave out" or "allow".
        annotations: what to record about where the labels of tiles come from.
        progress: wraps the samples as they are worked on.

    Returns:
        The content of ``metrics.json``.
    """
    out = Path(out)
    if overlap not in OVERLAPS:
        raise one_of("policy for overlaps", overlap, OVERLAPS)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(out, "is not an empty folder", "choose a new one")
    seen = find_overlap(predictor, cohort)
    if seen.samples and overlap == "refuse":
        cause = f"{seen}: {quoted(seen.samples)}"
        raise OptionError(f"{cause}; leave them out, or allow it, with the option overlap")
    if overlap == "leave out":
        cohort = cohort.select(set(cohort.ids) - set(seen.samples))
    if not len(cohort):
        raise OptionError("no sample is left to evaluate on: all were in the training data of the run")
    predictor.task.targets(cohort.outcome)  # refuses an outcome of another kind, and unknown classes
    predictions, maps = _predicted(predictor, cohort, progress)
    table = _table(predictions, cohort)
    intervals = score_with_intervals(by_patient(table), predictor.task, predictor.threshold)
    result = {
        "models": [str(member.path) for member in predictor.members],
        "temperatures": [member.temperature for member in predictor.members],
        "threshold": predictor.threshold,
        "cohort": {"headline": cohort.headline, "fingerprint": cohort.fingerprint()},
        "overlap": {"policy": overlap, **asdict(seen)},
        "notes": int((table["note"] != "").sum()),
        "metrics": {
            name: {"estimate": found.estimate, "low": found.low, "high": found.high}
            for name, found in intervals.items()
        },
    }
    if cohort.tile_labels is not None:
        origin_of_labels = {} if annotations is None else {"annotations": dict(annotations)}
        result["localisation"] = _localised(predictor, cohort, maps) | origin_of_labels
        maps[SCORES].save(out / TILE_SCORES_FILE)
    write_table(out / PREDICTIONS_FILE, table)
    result = without_nan(result)
    write_json(out / METRICS_FILE, result)
    return json.loads(json.dumps(result))  # as it reads back


def find_overlap(predictor: Predictor, cohort: Cohort) -> Overlap:
    """By patient, sample and slide. Training data are the training and validation parts of the models' folds."""
    samples: set[str] = set()
    patients: set[str] = set()
    strangers = without_patient = 0
    for path in {_fold_of(member) for member in predictor.members}:
        run = _run_of_fold(path)
        if run is None or not (run / SPLITS_FILE).exists():
            strangers += 1
            continue
        fold = Splits.load(run / SPLITS_FILE)[int(path.name)]
        patient_of = data_of(run)["patients"]
        samples.update(fold.train + fold.val)
        patients.update(patient_of[id] for id in fold.train + fold.val if id in patient_of)
        without_patient += sum(id not in patient_of for id in fold.train + fold.val)
    seen = [s for s in cohort.samples if _was_seen(s, samples, patients)]
    reasons = [
        "the training data of a model are not known, as it was exported or taken out of its run" if strangers else "",
        f"patients of {without_patient} training samples are not known" if without_patient else "",
    ]
    whose = sorted({sample.patient for sample in seen})
    return Overlap(tuple(sample.id for sample in seen), tuple(whose), "; ".join(filter(None, reasons)))


def origin(predictor: Predictor) -> dict[str, dict[str, Any]]:
    """What the run directory, or the exported folder, of the models says; nothing for a model that was moved."""
    run = _run_of_fold(_fold_of(predictor.members[0]))
    return {name: {} for name in DATA} if run is None else data_of(run)


def _fold_of(member: Member) -> Path:
    """Its folder. A file may be a link to a model of a run, or, in the cache of the hub, to a file without a place."""
    beside, linked = member.path.parent.resolve().parent, member.path.resolve().parent.parent
    return linked if _run_of_fold(beside) is None else beside


def _run_of_fold(folder: Path) -> Path | None:
    run = folder.parent.parent
    is_run = (run / SPLITS_FILE).exists() or read_config(run) is not None
    return run if folder.parent.name == "folds" and is_run else None


def _was_seen(sample: Sample, samples: set[str], patients: set[str]) -> bool:
    return sample.patient in patients or sample.id in samples or any(ref.id in samples for ref in sample.bags)


def _predicted(
    predictor: Predictor, cohort: Cohort, progress: Callable[[Sequence[Sample]], Iterable[Sample]]
) -> tuple[list[Prediction], dict[str, ScoredPart]]:
    """Of each sample; and maps of the tiles of all slides, the mean over the models."""
    places: list[tuple[Tensor, Tensor]] = []

    def bags() -> Iterator[Bag]:
        for sample in progress(cohort.samples):
            bag = cohort.load(sample)
            places.append((bag.xy, bag.slides))
            yield bag

    predictions = predictor.predict(bags())
    kinds: dict[str, list[Tensor | None]] = {
        SCORES: [prediction.tile_scores for prediction in predictions],
        EVIDENCE: [evidence_for_second_class(prediction.tile_evidence) for prediction in predictions],
    }
    return predictions, {
        kind: ScoredPart.of(
            scored
            for sample, (xy, slides), values in zip(cohort.samples, places, of_samples, strict=True)
            if values is not None
            for scored in by_slide(cohort, sample, xy, slides, values)
        )
        for kind, of_samples in kinds.items()
        if kind == SCORES or not any(values is None for values in of_samples)
    }


def _localised(predictor: Predictor, cohort: Cohort, maps: Mapping[str, ScoredPart]) -> dict[str, Any]:
    """Metrics of localisation. The threshold of the patch F1 is the mean of those of the folds, if all have one."""
    thresholds = [threshold_of_tiles(member.path.parent) for member in predictor.members]
    threshold = float(np.mean(thresholds))  # NaN if one is
    metrics = metrics_of_maps(maps, threshold, with_lesions=knows_places(cohort))
    intervals = {name: interval_over_folds([of]) for name, of in maps[SCORES].resampled(cohort).items()}
    ends = {name: {"low": low, "high": high} for name, (low, high) in intervals.items()}
    return {
        "slides": len(maps[SCORES].scores),
        "labelled_slides": len(maps[SCORES].labelled),
        "threshold": threshold,
        "metrics": {name: {"estimate": value, **ends.get(name, {})} for name, value in metrics.items()},
    }


def _table(predictions: Sequence[Prediction], cohort: Cohort) -> pd.DataFrame:
    rows = pd.DataFrame([prediction.row() for prediction in predictions])
    known = {"patient": cohort.patients, **truth(cohort.outcome)}
    return pd.concat([rows[["sample"]], pd.DataFrame(known), rows.drop(columns="sample")], axis=1)
