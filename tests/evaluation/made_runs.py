"""Run directories with finished folds, made without training: what `psamil compare` reads."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from psamil.cohort import Split, Splits
from psamil.evaluation.experiment import summarise, write_table
from psamil.files import write_json
from psamil.models import create_model
from psamil.training.class_tasks import ClassificationTask
from psamil.training.regression_task import RegressionTask
from psamil.training.saved_model import SavedModel
from psamil.training.settings import TrainingSettings
from psamil.training.survival_task import SurvivalTask

TASKS = {
    "binary": ClassificationTask(("negative", "positive"), (1.0, 1.0), "weights"),
    "three": ClassificationTask(("0", "1", "NA"), (1.0, 1.0, 1.0), "weights"),
    "survival": SurvivalTask((0.0, 5.0, 60.0), "nll", 1.0),
    "regression": RegressionTask(3.0, 1.0),
}


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
    kind: str = "binary",
    settings: TrainingSettings | None = None,
    radii: bool = False,
    headline: str = "60 slides",
    seed: int = 0,
    seeds: int = 1,
) -> Path:
    """A run whose scores are ``signal`` times the truth plus noise of its own."""
    settings = settings or TrainingSettings(model="mean", model_options={"hidden": 4})
    task = TASKS[kind]
    splits.save(folder / "splits.json")
    write_json(
        folder / "run.json",
        {
            "settings": asdict(settings),
            "seeds": seeds,
            "cohort": {"headline": headline, "fingerprint": "f" * 64},
            "splits": splits.hash,
            "environment": {"python": "3.11", "platform": "here", "packages": {"psamil": "0"}},
        },
    )
    noise = np.random.default_rng(seed)
    for (k, fold), i in product(enumerate(splits.folds), range(seeds)):
        job = folder / "folds" / str(k) / f"seed-{i}"
        parts = [_predictions(ids, part, signal, kind, noise) for part, ids in (("val", fold.val), ("test", fold.test))]
        write_table(job / "predictions.csv", pd.concat(parts))
        about = {"settings": asdict(settings), "in_dim": 2, "step_um": 128.0, "best_epoch": 1, "epochs": 3}
        model = create_model(settings.model, 2, task.n_out, **settings.model_options)
        SavedModel(model, task, about).save(job / "model.safetensors")
        score = f"validation {task.score_name}"
        lines = [
            f'{{"epoch": {e}, "loss": {1 / (e + 1)}, "{score}": {0.5 + e / 10}'
            + (f', "head_similarity": {2.5 - e}, "radii_steps": [[{7 - e}, {7 + e}]]' if radii else "")
            + "}\n"
            for e in range(3)
        ]
        (job / "history.jsonl").write_text("".join(lines))
        write_json(job / "metrics.json", {"temperature": 1.0, "threshold": 0.5, "best_epoch": 1})
    summarise(folder)
    return folder


def _predictions(ids, part: str, signal: float, kind: str, noise: np.random.Generator) -> pd.DataFrame:
    number = np.array([int(name[1:]) for name in ids])
    truth = number % 3 if kind == "three" else number % 2
    score = signal * truth + noise.standard_normal(len(ids))
    table = pd.DataFrame({"sample": ids, "patient": ids, "part": part})
    if kind == "survival":
        times = np.random.default_rng(1).exponential(40, 1000)[number] / (1 + 3 * truth)
        return table.assign(time=times, event=(number % 3 > 0).astype(int), risk=score, survival_1=0.5, survival_2=0.4)
    if kind == "regression":
        return table.assign(truth=number / 10, value=number / 10 + noise.standard_normal(len(ids)) / signal)
    table["truth"] = [TASKS[kind].classes[i] for i in truth]
    if kind == "binary":
        p = 1 / (1 + np.exp(-score))
        return table.assign(logit_0=score, prob_negative=1 - p, prob_positive=p)
    logits = signal * np.eye(3)[truth] + noise.standard_normal((len(ids), 3))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return table.assign(**{f"prob_{name}": p[:, i] for i, name in enumerate(TASKS[kind].classes)})
