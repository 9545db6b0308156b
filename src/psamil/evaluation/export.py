"""Finished models of a run as a folder to share: card, weights, what was fitted on validation. See ``exported``.

What goes into it is listed here by name. Samples, patients, paths and the machine are not among it, nor are sums over
them, by which a guess could be confirmed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from psamil.errors import DataError, OptionError
from psamil.evaluation.exported import CARD_FILE, CONFIG_FILE, FORMAT, FORMAT_VERSION, read_config
from psamil.evaluation.fold_localisation import LOCALISATION_FILE, localisation_intervals, threshold_of_tiles
from psamil.evaluation.model_card import model_card
from psamil.evaluation.predictor import Member
from psamil.evaluation.run_comparison import FinishedRun
from psamil.evaluation.run_folder import METRICS_FILE, PREDICTIONS_FILE, job_folder
from psamil.evaluation.score_intervals import score_with_intervals
from psamil.evaluation.scores import by_fold_and_patient, read_predictions, threshold_of
from psamil.files import atomic_write, content_hash, files_below, read_json, unwritable, without_nan, write_json
from psamil.training.fold import MODEL_FILE
from psamil.training.saved_model import SavedModel

OF_RUN = ("settings", "seeds", "threads")
OF_OUTCOME = ("target", "classes", "time", "event", "censorship", "unit")
OF_MODEL = ("settings", "in_dim", "step_um", "epochs", "best_epoch")
LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]*")
PATH = re.compile(r"(^|[\s:=\"'])(/[^/\s]|~[/\\]|[A-Za-z]:[\\/](?!/)|\\\\)")  # of a machine, somewhere in a text

Job = tuple[int, Path]
Progress = Callable[[Sequence[Job]], Iterable[Job]]


def export_run(
    run: str | Path,
    to: str | Path,
    *,
    fold: int | None = None,
    licence: str | None = None,
    repository: str | None = None,
    progress: Progress = lambda jobs: jobs,
) -> Path:
    """Writes the models of all folds and seeds, or those of one fold, into a new folder that names no patient.

    Args:
        run: a finished run directory.
        to: the new folder; it appears when it is complete.
        fold: export the models of this fold alone.
        licence: identifier for the card, as the Hugging Face hub writes it: "apache-2.0".
        repository: owner/name on the hub, for the card.
        progress: wraps the models as they are worked on.

    Returns:
        The folder.
    """
    run, to = Path(run), Path(to)
    licence = _checked_licence(licence)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise DataError(to, "is not an empty folder", "choose a new one")
    if read_config(run) is not None:
        raise DataError(run, "is exported already", "copy the folder, or export the run it came from")
    finished = FinishedRun.load(run)
    jobs = _jobs(finished, fold)
    name = repository.partition("/")[2] if repository else to.resolve().name
    with _new_folder(to) as folder:
        models = [_export_model(job, folder, k) for k, job in progress(jobs)]
        config = _config(finished, [k for k, _ in jobs], models)
        listed = {file.relative_to(folder).as_posix(): content_hash(file) for file in files_below(folder)}
        write_json(folder / CONFIG_FILE, {**config, "files": listed})
        with atomic_write(folder / CARD_FILE) as temporary:
            temporary.write_text(model_card(config, name, licence=licence, repository=repository), encoding="utf-8")
    return to


def _jobs(run: FinishedRun, fold: int | None) -> list[Job]:
    """Fold and folder of each model. Fewer than all folds would be another ensemble than the summary is of."""
    folds = range(len(run.splits))
    if fold is not None and fold not in folds:
        raise OptionError(f"fold must be from 0 to {len(folds) - 1}, got {fold}")
    wanted = folds if fold is None else [fold]
    missing = [k for k in wanted if k not in run.summary["finished"]]
    if missing:
        whole = "go on with psamil train" if fold is not None else "go on with psamil train, or export one fold: --fold"
        raise DataError(run.path, f"has not finished fold {missing[0]}", whole)
    return [(k, job) for k, job in run.jobs() if k in wanted]


def _export_model(job: Path, folder: Path, fold: int) -> dict[str, Any]:
    """Writes one model and what was fitted on its validation part; returns what the card says of it."""
    member = Member.load(job / MODEL_FILE)
    saved, seed = member.saved, int(job.name.removeprefix("seed-"))
    about = {name: saved.about.get(name) for name in OF_MODEL}
    _refuse_paths(about, job / MODEL_FILE)
    to = job_folder(folder, fold, seed)
    SavedModel(saved.model, saved.task, about).save(to / MODEL_FILE)
    best_epoch = read_json(job / METRICS_FILE).get("best_epoch")
    fitted = {"temperature": member.temperature, "threshold": member.threshold, "best_epoch": best_epoch}
    write_json(to / METRICS_FILE, fitted)
    of_tiles = without_nan(threshold_of_tiles(job))
    if of_tiles is not None:
        write_json(to.parent / LOCALISATION_FILE, {"threshold": of_tiles})
    radii = [prior.radius_steps.tolist() for prior in getattr(saved.model, "priors", None) or ()]
    return {"fold": fold, "seed": seed, **fitted, "radii_steps": radii, "in_dim": about["in_dim"]}


def _config(run: FinishedRun, jobs_folds: Sequence[int], models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    about, task, exported = run.about, run.task, sorted(set(jobs_folds))
    patients = about.get("patients") or {}
    environment = about.get("environment") or {}
    outcome, extraction = about.get("outcome") or {}, dict(about.get("extraction") or {})
    if PATH.search(extraction.get("reference") or ""):
        extraction["reference"] = None  # a folder of this machine; features of it are still known by their fingerprint
    of_task = {name: list(getattr(task, name)) for name in ("classes", "labels") if hasattr(task, name)}
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **{name: about[name] for name in OF_RUN if name in about},
        "task": {"kind": task.kind, **of_task},
        "in_dim": models[0]["in_dim"],
        "step_um": run.step_um,
        "outcome": {name: outcome.get(name) for name in OF_OUTCOME},
        "reading": about.get("reading") or {},
        "extraction": extraction,
        "cohort": {
            "headline": about["cohort"]["headline"],
            "samples": len(patients) or None,
            "patients": len(set(patients.values())) or None,
        },
        "protocol": {
            "splits": run.splits.name,
            "folds": len(run.splits),
            "exported": exported,
            "samples": {
                part: [len(getattr(run.splits[k], part)) for k in exported] for part in ("train", "val", "test")
            },
            "score": run.headline,
        },
        "metrics": _metrics(run, exported),
        "models": [{name: value for name, value in model.items() if name != "in_dim"} for model in models],
        "environment": {name: environment[name] for name in ("python", "packages") if name in environment},
    }
    _refuse_paths(config, run.path)
    sound: dict[str, Any] = without_nan(config)
    return sound


def _metrics(run: FinishedRun, exported: Sequence[int]) -> dict[str, Any]:
    """Those of the summary, or of one fold of several its own, which have no spread; with intervals over patients."""
    found: dict[str, dict[str, Any]] = run.summary["metrics"]
    if not found:
        return {}
    rows: dict[str, dict[str, Any]]
    if len(exported) == len(run.splits):
        kept = ("mean", "sd", "low", "high")
        rows = {name: {key: row[key] for key in kept if key in row} for name, row in found.items()}
    else:
        tested = [k for k in run.summary["finished"] if run.splits[k].test]
        if exported[0] not in tested:
            return {}
        rows = {name: {"mean": row["per_fold"][tested.index(exported[0])]} for name, row in found.items()}
    predictions = read_predictions(run.path / PREDICTIONS_FILE)
    patients = by_fold_and_patient(predictions[predictions["fold"].isin(exported)])
    thresholds = {float(k): threshold_of(run.validation(k), run.task) for k in exported}
    intervals = score_with_intervals(patients, run.task, thresholds)
    bounds = {name: (interval.low, interval.high) for name, interval in intervals.items()}
    bounds |= localisation_intervals([[job for k, job in run.jobs() if k == fold] for fold in exported])
    for name, (low, high) in bounds.items():
        if name in rows:
            rows[name] = {"low": low, "high": high} | rows[name]
    return rows


def _checked_licence(licence: str | None) -> str | None:
    if licence is None:
        return None
    identifier = licence.lower()
    if not LICENCE.fullmatch(identifier):
        known = "an identifier as the Hugging Face hub writes it, such as apache-2.0 or other"
        raise OptionError(f"licence must be {known}, got {licence!r}")
    return identifier


def _refuse_paths(content: Mapping[str, Any], source: Path) -> None:
    """Options of a model are anything; a file name among them is of no use elsewhere and tells about this machine."""
    for text in _texts(content):
        if PATH.search(text):
            cause = f"would export {text!r}, which looks like a path of this machine"
            raise DataError(source, cause, "train a model whose options and names hold no paths")


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping):
        for name, value in content.items():
            yield str(name)
            yield from _texts(value)
    elif isinstance(content, list | tuple):
        for value in content:
            yield from _texts(value)


@contextlib.contextmanager
def _new_folder(to: Path) -> Iterator[Path]:
    """A temporary folder beside it that takes its name when all is written, and is gone after an error."""
    place = to.resolve()
    temporary = place.with_name(f".{place.name}.{secrets.token_hex(6)}.tmp")
    try:
        try:
            temporary.mkdir(parents=True)
        except OSError as error:
            raise unwritable(to, error) from error
        yield temporary
        try:
            if place.exists():
                place.rmdir()  # it is empty; not every system renames onto a folder
            os.rename(temporary, place)
        except OSError as error:
            raise unwritable(to, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
