"""Run directories with finished folds, made without training: what `psamil compare` reads."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

from psamil.cohort import Split, Splits
from psamil.evaluation.experiment import summarise, write_table
from psamil.files import write_json
from psamil.models import create_model
from psamil.training.class_tasks import ClassificationTask
from psamil.training.saved_model import SavedModel
from psamil.training.settings import TrainingSettings
from psamil.training.survival_task import SurvivalTask

CLASSES = ("negative", "positive")


def make_splits(patients: int = 60, folds: int = 3, seed: int = 0) -> Splits:
    order = np.random.default_rng(seed).permutation(patients)
    parts = [[f"p{i:03d}" for i in part] for part in np.array_split(order, folds)]
    made = []
    for k in range(folds):
        others = [name for part in parts[:k] + parts[k + 1 :] for name in part]
        made.append(Split.of({"train": others[10:], "val": others[:10], "test": parts[k]}, f"fold {k}"))
    return Splits(tuple(made), "made")


def make_run(
    folder: Path,
    splits: Splits,
    *,
    signal: float,
    survival: bool = False,
    settings: TrainingSettings | None = None,
    radii: bool = False,
    headline: str = "60 slides",
    seed: int = 0,
) -> Path:
    """A run whose scores are ``signal`` times the truth plus noise of its own."""
    settings = settings or TrainingSettings(model="mean", model_options={"hidden": 4})
    task = (
        SurvivalTask((0.0, 5.0, 60.0), "nll", 1.0) if survival else ClassificationTask(CLASSES, (1.0, 1.0), "weights")
    )
    splits.save(folder / "splits.json")
    write_json(
        folder / "run.json",
        {
            "settings": asdict(settings),
            "seeds": 1,
            "cohort": {"headline": headline, "fingerprint": "f" * 64},
            "splits": splits.hash,
            "environment": {"python": "3.11", "platform": "here", "packages": {"psamil": "0"}},
        },
    )
    noise = np.random.default_rng(seed)
    for k, fold in enumerate(splits.folds):
        job = folder / "folds" / str(k) / "seed-0"
        parts = [
            _predictions(ids, part, signal, survival, noise) for part, ids in (("val", fold.val), ("test", fold.test))
        ]
        write_table(job / "predictions.csv", pd.concat(parts))
        about = {"settings": asdict(settings), "in_dim": 2, "step_um": 128.0, "best_epoch": 1, "epochs": 3}
        model = create_model(settings.model, 2, task.n_out, **settings.model_options)
        SavedModel(model, task, about).save(job / "model.safetensors")
        score = "validation c_index" if survival else "validation auc"
        lines = [
            f'{{"epoch": {e}, "loss": {1 / (e + 1)}, "{score}": {0.5 + e / 10}'
            + (f', "radii_steps": [[{7 - e}, {7 + e}]]' if radii else "")
            + "}\n"
            for e in range(3)
        ]
        (job / "history.jsonl").write_text("".join(lines))
        write_json(job / "metrics.json", {"temperature": 1.0, "threshold": 0.5, "best_epoch": 1})
    summarise(folder)
    return folder


def _predictions(ids, part: str, signal: float, survival: bool, noise: np.random.Generator) -> pd.DataFrame:
    number = np.array([int(name[1:]) for name in ids])
    positive = number % 2
    score = signal * positive + noise.standard_normal(len(ids))
    table = pd.DataFrame({"sample": ids, "patient": ids, "part": part})
    if survival:
        times = np.random.default_rng(1).exponential(40, 1000)[number] / (1 + 3 * positive)
        return table.assign(time=times, event=(number % 3 > 0).astype(int), risk=score, survival_1=0.5, survival_2=0.4)
    p = 1 / (1 + np.exp(-score))
    truth = [CLASSES[i] for i in positive]
    return table.assign(truth=truth, logit_0=score, prob_negative=1 - p, prob_positive=p)
