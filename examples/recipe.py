"""The recipes of psamil against the paper's claim: that learned spatial context wins, and points at the lesion.

    python examples/recipe.py lesions runs/search --data data --seeds 31 32 33 34 35 --search --trainings 1
    python examples/recipe.py lesions runs/recipe --data data --seeds 41 42 43 44 45
    python examples/recipe.py plain-lesions runs/recipe --data data --seeds 41 42 43 44 45
    python examples/recipe.py crc runs/recipe --data data
    python examples/recipe.py tnbc runs/recipe --data data
    python examples/recipe.py msi runs/recipe --data data            # and brca, lung

- ``lesions``: outlines of real metastases filled with real embeddings of nuclei, among decoys; ``plain-lesions``:
  without. Each seed draws other slides: 200 for training and validation, 100 for testing. By the recipe "detection".
- ``crc``, ``tnbc``: cells of tissue spots (tnbc: of three coarse types), 5 repeats of 5 folds by patient; by "cells".
  A bag is a patient, of whom the label is (``--unit slide``: a spot). Of 35 patients none can be spared to choose an
  epoch: all that are not tested train, and the last epoch is kept (``--val 0.2`` for a validation part).
- ``msi``, ``brca``, ``lung``: TCGA slides without positions, their regions in a line in the order of rows, 5 folds or
  the 10 published ones; by "context".

Every model has the same recipe and about the same width; ``psa-shuffled`` is psa with tiles that exchange their places;
``psa-without-arrangement``, of cells, what the name says. ``--training-seed`` trains with other random numbers, into
another OUT.
``--ablate`` trains psa with one part of "detection" taken back at a time. ``--search`` trains every model with and
without dropped features, those of the trunk of PSA with attention that begins as a mean and at random as well, and
shows the AUC on the validation parts: what is higher there is in the recipe. A run that
was stopped goes on. The table has the mean over seeds and a 95% interval by Student's t; for one seed the mean over
folds, and an interval over patients.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from all_models import narrow_options
from convert_cells import convert as convert_cells
from convert_tcga_hipt4k import convert as convert_tcga
from real_cells import CLASSES, merge_types
from real_cells import MODELS as MODELS_OF_CELLS
from real_slides import COHORTS as TCGA
from real_slides import OUTCOMES
from rich.console import Console
from rich.table import Table
from scipy.stats import t as student

from psamil import fit, list_models
from psamil.cli.progress import TrainingProgress
from psamil.cohort import Cohort, k_fold, splits_from_columns, with_validation
from psamil.recipes import TRUNK_OF_PSA, settings_of_recipe

LESIONS = ("lesions", "plain-lesions")
CELLS = {"crc": "crc_codex_schurch2020", "tnbc": "tnbc_mibi_keren2018"}
SLIDES = ("msi", "brca", "lung")
METRICS = ("auc", "patch_auc", "froc_tile@6", "average_precision")
LINEAR = ("mean", "size")  # they learn little by the rates of the others
AS_ABMIL = {  # do not begin to learn by the rates of the others; but for abmil: AUC on the validation parts below 0.65
    "crc": ("abmil", "ibmil", "max"),
    "tnbc": ("abmil", "ibmil", "max", "sm_abmil"),
}
SEARCHED: dict[str, dict[str, Any]] = {
    "half of the features dropped": {"drop_features": 0.5},
    "no features dropped": {"drop_features": 0.0},
}
SEARCHED_OF_TRUNK: dict[str, dict[str, Any]] = {
    "attention first the mean": {"first_attention": "mean"},
    "attention first random": {"first_attention": "random"},
}
ABLATIONS: dict[str, dict[str, Any]] = {
    "psa": {},
    "psa, attention pooling": {"model_options": {"pooling": "linear"}},
    "psa, attention first random": {"model_options": {"first_attention": "random"}},
    "psa, scores of tiles alone": {"model_options": {"slide_share": 0.0}},
    "psa, one evidence": {"model_options": {"pooling": "evidence"}},
    "psa, tiles of normal slides not told": {"negative_tiles": 0.0},
    "psa, no features dropped": {"drop_features": 0.0},
    "psa, 3 x 96": {"model_options": {"head_dim": 96}},
    "psa, learning rates of the paper": {"lr": 1e-4, "prior_lr_scale": 100.0},
}


def lesions(out: Path, data: Path, which: str, seed: int) -> tuple[Path, dict[str, Any]]:
    """The cohort of a seed, and what is said of it to ``fit``."""
    folder = out / "cohorts" / f"{which}-{seed}"
    if not (folder / "splits.json").exists():
        script = [sys.executable, str(data / "semireal_camelyon.py"), str(folder), "--seed", str(seed)]
        sizes = ["--slides", "300", "--tiles", "900", "--min-lesion", "15"]
        subprocess.run([*script, *sizes, *(["--decoys"] if which == "lesions" else [])], check=True)
        cohort = Cohort.open(folder, folder / "labels.csv", target="label", classes=["normal", "tumor"])
        with_validation(splits_from_columns(cohort, ["part"]), cohort).save(folder / "splits.json")
    known = {"target": "label", "classes": ["normal", "tumor"], "tile_labels": folder / "tiles"}
    return folder, {**known, "splits": folder / "splits.json", "recipe": "detection"}


def cells(out: Path, data: Path, which: str, seed: int) -> tuple[Path, dict[str, Any]]:
    folder, source = out / "cohorts" / which, data / CELLS[which]
    if not (folder / "labels.csv").exists():
        convert_cells(source, folder)
        if which == "tnbc":
            merge_types(folder / "features", (source / "cell_types.txt").read_text().split())
    classes = CLASSES[CELLS[which]]
    return folder, {"target": "label", "classes": classes, "folds": 5, "split_seed": seed, "recipe": "cells"}


def slides(out: Path, data: Path, which: str, seed: int) -> tuple[Path, dict[str, Any]]:
    folder = out / "cohorts" / TCGA[which]
    if not (folder / "labels.csv").exists():
        convert_tcga(data / "tcga_hipt4k", folder, [TCGA[which]])
    known = {**OUTCOMES[which], "positions": "row order"}
    cohort = Cohort.open(folder, folder / "labels.csv", **OUTCOMES[which], reading={"positions": "row order"})
    if which == "msi":
        return folder, {**known, "splits": k_fold(cohort, 5, seed=seed)}
    columns = [f"fold{k}" for k in range(10)]
    return folder, {**known, "splits": splits_from_columns(cohort, columns, leaks="drop")}


def variants(which: str, names: list[str] | None, ablate: bool, search: bool = False) -> dict[str, dict[str, Any]]:
    """Settings of what is trained, by name."""
    if search:
        found = variants(which, names, ablate=False)
        searched = {f"{name}, {end}": {**found[name], **own} for name in found for end, own in SEARCHED.items()}
        return {
            f"{name}, {end}" if end else name: {**settings, "model_options": {**settings["model_options"], **own}}
            for name, settings in searched.items()
            for end, own in (SEARCHED_OF_TRUNK if settings["model"] in TRUNK_OF_PSA else {"": {}}).items()
        }
    if ablate:
        return {name: {"model": "psa", **ABLATIONS[name]} for name in names or ABLATIONS}
    narrow = narrow_options(48 if which in CELLS else 96)
    found: dict[str, dict[str, Any]] = {name: {"model": name, "model_options": narrow[name]} for name in list_models()}
    if which not in LESIONS:
        found["mean"]["model_options"] = {"hidden": 0}
        for name in (*LINEAR, *AS_ABMIL.get(which, ())):
            own = MODELS_OF_CELLS[name if name in LINEAR else "abmil"]
            found[name] |= {"epochs": own.epochs, "lr": own.lr, "patience": own.patience}
    if which not in SLIDES:
        found["psa-shuffled"] = {**found["psa"], "positions": "shuffled"}
    if which in CELLS:
        without = {**found["psa"]["model_options"], "arrangement": False}
        found["psa-without-arrangement"] = {**found["psa"], "model_options": without}
    return {name: found[name] for name in names or found}


def validation_auc(run: Path) -> float:
    """The mean over the folds and trainings of a run; NaN without validation parts."""
    folds = [json.loads(path.read_text()).get("val") for path in sorted(run.glob("folds/*/seed-*/metrics.json"))]
    return float(np.mean([metrics["auc"] if metrics else math.nan for metrics in folds]))


def table_of(runs: pd.DataFrame, metrics: tuple[str, ...] = METRICS) -> Table:
    """One row per variant, the best one first; of one seed, the interval of the AUC is that over patients."""
    shown = [name for name in metrics if name in runs]
    table = Table("model", *shown)
    for variant, of in sorted(runs.groupby("variant"), key=lambda group: -group[1][shown[0]].mean()):
        cells = []
        for metric in shown:
            values = of[metric].dropna()
            if len(values) > 1:
                half = student.ppf(0.975, len(values) - 1) * values.std() / math.sqrt(len(values))
                cells.append(f"{values.mean():.3f} ({values.mean() - half:.3f} to {values.mean() + half:.3f})")
            elif metric == "auc":
                cells.append(f"{values.mean():.3f} ({of['low'].iloc[0]:.3f} to {of['high'].iloc[0]:.3f})")
            else:
                cells.append(f"{values.mean():.3f}" if len(values) else "")
        table.add_row(f"{variant} ({len(of)})" if len(of) > 1 else variant, *cells)
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*LESIONS, *CELLS, *SLIDES])
    parser.add_argument("out", type=Path, help="folder of the cohorts and runs")
    parser.add_argument("--data", type=Path, required=True, help="folder of the real data")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="of the slides that are drawn, or of the folds"
    )
    parser.add_argument("--repeats", type=int, default=5, help="of cells: how often everything is split anew")
    parser.add_argument("--val", type=float, default=0.0, help="of cells: share of the patients that choose the epoch")
    parser.add_argument("--unit", choices=["patient", "slide"], default="patient", help="of cells: what a bag is")
    parser.add_argument(
        "--trainings", type=int, help="per fold, whose predictions are averaged; by default the recipe's"
    )
    parser.add_argument(
        "--training-seed", type=int, default=0, help="of a fold's first training; others take the next numbers"
    )
    parser.add_argument("--models", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--ablate", action="store_true", help="psa, one part of the recipe taken back at a time")
    parser.add_argument("--search", action="store_true", help="what differs between models, by validation")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small are fastest on one thread
    which = arguments.what
    if (arguments.ablate or arguments.search) and which not in LESIONS:
        parser.error("--ablate and --search are for lesions and plain-lesions")
    if arguments.ablate and arguments.search:
        parser.error("either --ablate or --search")
    suffix = "-ablated" * arguments.ablate + "-searched" * arguments.search
    table = f"{which}{suffix}-{'-'.join(map(str, arguments.seeds))}.csv"
    cohort_of = lesions if which in LESIONS else cells if which in CELLS else slides
    trained = variants(which, arguments.models, arguments.ablate, arguments.search)
    rows = []
    for seed in arguments.seeds:
        folder, about = cohort_of(arguments.out, arguments.data, which, seed)
        if which in CELLS:
            about |= {"repeats": arguments.repeats, "val": arguments.val, "unit": arguments.unit}
        for name, settings in trained.items():
            print(f"{which} {seed} {name}")
            of_recipe = settings_of_recipe(about.get("recipe", "context"), settings["model"])
            epochs = settings.get("epochs", of_recipe.epochs)
            with TrainingProgress(Console(), epochs) as shown:
                run_folder = arguments.out / f"{which}-{seed}" / name.replace(", ", "-").replace(" ", "_")
                calls = {"report": shown.report, "on_step": shown.on_step, "seeds": arguments.trainings}
                run = fit(
                    folder,
                    folder / "labels.csv",
                    run_folder,
                    **{**about, **settings},
                    seed=arguments.training_seed,
                    **calls,
                )
            metrics = run.table
            means = {metric: metrics.loc[metric, "mean"] for metric in METRICS if metric in metrics.index}
            means["validation_auc"] = validation_auc(run_folder)
            rows.append({"seed": seed, "variant": name, **means, **metrics.loc["auc", ["low", "high"]].to_dict()})
            pd.DataFrame(rows).to_csv(arguments.out / table, index=False)
    Console().print(table_of(pd.DataFrame(rows), ("validation_auc",) if arguments.search else METRICS))
