"""Real slides: molecular and histological subtypes and survival from the TCGA region embeddings of HIPT.

    python examples/real_slides.py data/tcga_hipt4k runs/tcga
    python examples/real_slides.py data/tcga_hipt4k runs/tcga --task msi --model mean psa

| task     | slides   | question                    | folds                                                           |
|----------|----------|-----------------------------|-----------------------------------------------------------------|
| msi      | COADREAD | MSI against MSS             | 5 by patient                                                    |
| brca     | BRCA     | lobular against ductal      | the 10 published ones                                           |
| lung     | LUNG     | LUSC against LUAD           | the 10 published ones                                           |
| survival | COADREAD | overall survival            | 5 by patient                                                    |

The published folds split slides: all of them have patients in two parts. Here such slides leave the training and the
validation part; the test part stays as it was published. Positions were never published: regions lie in a line, in the
order of the file, a raster column by column. A run that was stopped goes on; what is finished is not done again.
"""

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from convert_tcga_hipt4k import convert
from rich.console import Console
from rich.table import Table

from psamil.cli.progress import TrainingProgress
from psamil.cohort import Cohort, k_fold, splits_from_columns
from psamil.evaluation.run import Run, fit
from psamil.training.settings import TrainingSettings

COHORTS = {"msi": "COADREAD", "brca": "BRCA", "lung": "LUNG", "survival": "COADREAD"}
OUTCOMES: dict[str, dict[str, Any]] = {
    "msi": {"target": "msi_status", "classes": ["MSS", "MSI"]},
    "brca": {"target": "oncotree", "classes": ["IDC", "ILC"]},
    "lung": {"target": "oncotree", "classes": ["LUAD", "LUSC"]},
    "survival": {"time": "survival_months", "censorship": "censorship"},
}
SMALL = {"heads": 3, "head_dim": 32}
MODELS = {
    "mean": TrainingSettings(model="mean", model_options={"hidden": 0}, epochs=30, lr=1e-2, patience=10),
    "abmil": TrainingSettings(model="abmil", model_options={"hidden": 128, "dropout": 0.25}, epochs=30, lr=3e-4),
    "psa": TrainingSettings(model="psa", model_options=SMALL, epochs=30, lr=3e-4),
    "clam_sb": TrainingSettings(
        model="clam_sb", model_options={"hidden": 128, "attention_dim": 64}, epochs=30, lr=3e-4
    ),
    "clam_mb": TrainingSettings(
        model="clam_mb", model_options={"hidden": 128, "attention_dim": 64}, epochs=30, lr=3e-4
    ),
    "dtfd": TrainingSettings(model="dtfd", model_options={"hidden": 128}, epochs=30, lr=3e-4),
}
PUBLISHED = {"mil_192": "HIPT authors, ABMIL", "hipt_gp_192": "HIPT authors, HIPT"}


def train(data: Path, out: Path, task: str, model: str) -> Run:
    """Trains a model on the folds of a task; goes on with a run that is there."""
    folder = out / COHORTS[task]
    if not (folder / "labels.csv").exists():
        convert(data, folder, [COHORTS[task]])
    outcome, positions = OUTCOMES[task], "row order"
    cohort = Cohort.open(folder, folder / "labels.csv", **outcome, reading={"positions": positions})
    published = task in ("brca", "lung")
    columns = [f"fold{k}" for k in range(10)]
    splits = splits_from_columns(cohort, columns, leaks="drop") if published else k_fold(cohort, 5)
    print(f"{task} {model}")
    with TrainingProgress(Console(), MODELS[model].epochs) as shown:
        return fit(
            folder,
            folder / "labels.csv",
            out / task / model,
            **outcome,
            splits=splits,
            positions=positions,
            training=MODELS[model],
            report=shown.report,
            on_step=shown.on_step,
        )


def published_aucs(data: Path, task: str) -> dict[str, pd.Series]:
    """Test AUC of each published fold, with all training slides."""
    if task not in ("brca", "lung"):
        return {}
    table = pd.read_csv(data / "published_reference_hipt_issue25.csv")
    table = table[(table["task"] == task) & (table["train_fraction"] == 1)]
    return {name: table[table["model"] == model]["test_auc"] for model, name in PUBLISHED.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of features_fp16.npz and slides.csv.gz")
    parser.add_argument("out", type=Path, help="folder of the runs")
    parser.add_argument("--task", nargs="+", choices=list(COHORTS), default=list(COHORTS))
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small are fastest on one thread
    results = Table("task", "model", "metric", "mean", "sd over folds", "95% interval over patients")
    for task in arguments.task:
        for model in arguments.model:
            run = train(arguments.data, arguments.out, task, model)
            for metric, row in run.table.iterrows():
                if metric in ("auc", "average_precision", "balanced_accuracy", "c_index"):
                    interval = f"{row['low']:.3f} to {row['high']:.3f}" if pd.notna(row["low"]) else ""
                    results.add_row(task, model, str(metric), f"{row['mean']:.3f}", f"{row['sd']:.3f}", interval)
        for name, aucs in published_aucs(arguments.data, task).items():
            results.add_row(task, name, "auc", f"{aucs.mean():.3f}", f"{aucs.std():.3f}", "as published")
    Console().print(results)
