"""What lies where in a run directory, and what is finished of it.

RUN/
  run.json                     settings, data, where its features are, their fingerprint, hash of the splits, versions
  splits.json
  folds/<fold>/seed-<seed>/    history.jsonl, model.safetensors, predictions.csv, metrics.json (written last);
                               timing.jsonl, the only file that is not the same when a training is done again
  folds/<fold>/                with labels of tiles: tile_scores.safetensors of the test part, localisation.json
  predictions.csv              test predictions of all finished folds, mean over seeds
  summary.json                 metrics: mean and standard deviation over folds, intervals over patients
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from psamil.errors import DataError
from psamil.evaluation.exported import read_config
from psamil.files import read_json

RUN_FILE, SPLITS_FILE, SUMMARY_FILE = "run.json", "splits.json", "summary.json"
DATA = ("outcome", "reading", "patients", "slides", "extraction")  # what run.json says of them
METRICS_FILE, PREDICTIONS_FILE = "metrics.json", "predictions.csv"


def job_folder(run: Path, fold: int, seed: int) -> Path:
    """Where the model of a fold and a seed is kept."""
    return run / "folds" / str(fold) / f"seed-{seed}"


def read_run(run: Path) -> dict[str, Any]:
    """What ``run.json`` says, or ``config.json`` of exported models. DataError for a folder that is no run."""
    if not (run / RUN_FILE).is_file():
        exported = read_config(run)
        if exported is not None:
            return exported
        raise DataError(run, "is no run directory (it has no run.json)", "give one that psamil train has written")
    about: dict[str, Any] = read_json(run / RUN_FILE)
    return about


def jobs_by_fold(run: Path, folds: int) -> dict[int, list[Path]]:
    """The folder of each seed of every fold, finished or not."""
    about = read_run(run)
    seeds = range(about["settings"]["seed"], about["settings"]["seed"] + about["seeds"])
    return {k: [job_folder(run, k, seed) for seed in seeds] for k in range(folds)}


def is_finished(job: Path) -> bool:
    return (job / METRICS_FILE).exists()


def finished_folds(run: Path, folds: int) -> dict[int, list[Path]]:
    """Folders of the folds of which every seed is done: an ensemble of fewer does not compare with the others."""
    return {k: jobs for k, jobs in jobs_by_fold(run, folds).items() if all(map(is_finished, jobs))}


def data_of(run: Path) -> dict[str, dict[str, Any]]:
    """How the outcome and the features of a run were read, whose its samples and slides are, and how they were made."""
    about = read_run(run)
    return {name: about.get(name) or {} for name in DATA}


def sample_of_slide(data: Mapping[str, Mapping[str, Any]], samples: Container[str], slide: str) -> str | None:
    """The sample that a slide belongs to: itself, or its patient. None for a slide that the run does not know.

    Args:
        data: as :func:`data_of` gives it. Of runs that do not say which slides a patient has, a slide belongs to the
            patient whose name it begins with.
        samples: of the run.
        slide: name of the slide.
    """
    if slide in data["slides"]:
        return str(data["slides"][slide])
    if slide in samples:
        return slide
    if data["slides"] or data["outcome"].get("unit") != "patient":
        return None
    ends = [end for end, sign in enumerate(slide) if not sign.isalnum()]
    return next((slide[:end] for end in reversed(ends) if slide[:end] in samples), None)


def features_of(run: Path, given: Path | None = None) -> Path:
    """The folder of the features of a run: the given one, or where they were when it was trained."""
    about = read_run(run)
    if given is not None:
        return given
    if not about.get("features"):
        raise DataError(run, "does not say where its features are", "name their folder with --features")
    features = Path(about["features"])
    if not features.exists():
        raise DataError(features, f"is not there any more; {run} was trained on it", "name its folder with --features")
    return features
