"""Real cells with positions: two cohorts in which the arrangement of cells is the question.

    python examples/real_cells.py data/crc_codex_schurch2020 runs/crc
    python examples/real_cells.py data/tnbc_mibi_keren2018 runs/tnbc --coarse

CODEX of colorectal cancer (140 spots of 35 patients): Crohn's-like reaction against diffuse inflammatory infiltration.
MIBI of triple-negative breast cancer (33 patients): mixed against compartmentalised tumours. Cells carry their type
one-hot; ``--coarse`` merges the types into tumour, immune cells and others. 5 repeats of 5 folds by patient:

- mean, abmil: without positions;
- psa-gaussian, psa-exponential, psa-cauchy: the model of the paper with its three decays;
- size: the number of cells alone, a control for its confounding with the label;
- psa-shuffled: the cells of each image exchange their positions, a control for what positions add.

A run that was stopped goes on; what is finished is not done again.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from convert_cells import convert
from rich.console import Console
from rich.progress import track
from rich.table import Table

from psamil.cli.progress import TrainingProgress
from psamil.evaluation.run import Run, fit
from psamil.training.settings import TrainingSettings

CLASSES = {"crc_codex_schurch2020": ["DII", "CLR"], "tnbc_mibi_keren2018": ["mixed", "compartmentalised"]}
COARSE = ("tumour", "immune", "other")
TUMOUR = {"Tumor", "tumor_cells"}
OTHER = {"Other", "Others", "Endothelial", "Mesenchymal", "smooth_muscle", "stroma", "vasculature"}


def psa(decay: str) -> TrainingSettings:
    options = {"heads": 3, "head_dim": 16, "adapter_layers": 1, "decay": decay, "k_init": 4.0, "k_max": 10.0}
    return TrainingSettings(model="psa", model_options=options, epochs=12, lr=1e-3, prior_lr_scale=10.0, patience=5)


MODELS = {
    "mean": TrainingSettings(model="mean", model_options={"hidden": 0}, epochs=40, lr=0.05, patience=15),
    "abmil": TrainingSettings(model="abmil", model_options={"hidden": 48}, epochs=40, lr=5e-3, patience=20),
    "psa-gaussian": psa("gaussian"),
    "psa-exponential": psa("exponential"),
    "psa-cauchy": psa("cauchy"),
    "size": TrainingSettings(model="size", epochs=40, lr=0.05, patience=15),
    "psa-shuffled": psa("gaussian"),
}


def merge_types(folder: Path, types: list[str]) -> None:
    """Three features instead of one per type and marker: tumour, immune cells, others."""
    coarse = ["tumour" if name in TUMOUR else "other" if name in OTHER else "immune" for name in types]
    groups = np.array([[name == group for group in COARSE] for name in coarse], dtype=np.uint8)
    for path in track(sorted(folder.glob("*.npz")), description="merging types"):
        with np.load(path, allow_pickle=False) as archive:
            content = {name: archive[name] for name in archive.files}
        content |= {"features": content["features"][:, : len(types)] @ groups, "feature_names": np.array(COARSE)}
        np.savez_compressed(path, **content)


def train(cohort: Path, out: Path, classes: list[str], model: str, repeats: int) -> Run:
    """Trains a model; goes on with a run that is there."""
    print(model)
    with TrainingProgress(Console(), MODELS[model].epochs) as shown:
        return fit(
            cohort,
            cohort / "labels.csv",
            out / model,
            target="label",
            classes=classes,
            folds=5,
            repeats=repeats,
            positions="shuffled" if model.endswith("shuffled") else "file",
            training=MODELS[model],
            report=shown.report,
            on_step=shown.on_step,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of cells.npz and bags.csv")
    parser.add_argument("out", type=Path, help="folder of the runs")
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=5, help="how often everything is split anew")
    parser.add_argument("--coarse", action="store_true", help="three types of cells: tumour, immune cells, others")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small are fastest on one thread
    cohort = arguments.out / "cohort"
    if not (cohort / "labels.csv").exists():
        convert(arguments.data, cohort)
        if arguments.coarse:
            merge_types(cohort / "features", (arguments.data / "cell_types.txt").read_text().split())
    results = Table("model", "AUC", "sd over folds", "95% interval over patients", "average precision")
    for model in arguments.model:
        metrics = train(cohort, arguments.out, CLASSES[arguments.data.name], model, arguments.repeats).table
        auc, precision = metrics.loc["auc"], metrics.loc["average_precision", "mean"]
        interval = f"{auc['low']:.3f} to {auc['high']:.3f}" if pd.notna(auc["low"]) else ""
        results.add_row(model, f"{auc['mean']:.3f}", f"{auc['sd']:.3f}", interval, f"{precision:.3f}")
    Console().print(results)
