"""Every model of the registry on the same splits, with the same optimiser, batches and class weights.

    python examples/all_models.py simulated runs/all
    python examples/all_models.py camelyon runs/all --data data --seed 11
    python examples/all_models.py codex runs/all --data data
    python examples/all_models.py msi runs/all --data data

- ``simulated``: 240 slides whose label is an interaction of tiles within 3 steps; 3 folds.
- ``camelyon``: outlines of real metastases filled with real embeddings of nuclei, with decoys: tiles of the same kind
  scattered over every slide, so that their number says nothing and their clustering all; labels of tiles tell how well
  a model localises. 200 slides for training and validation, 100 for testing; another ``--seed`` draws other slides.
- ``codex``: cells of 140 spots of 35 patients with colorectal cancer; 5 folds by patient.
- ``msi``: microsatellite instability from regions of TCGA colorectal slides without positions, for the models that need
  none; 5 folds by patient.

Each is a study file, written to OUT/<cohort>/study.yaml, for ``psamil compare --study``. All models are narrow, about
100 numbers per tile (48 for cells), and are otherwise as they are by default: a CPU trains them all in about an hour.
The settings are the same for all, fixed beforehand and not searched. A study that was stopped goes on.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from convert_cells import convert as convert_cells
from convert_tcga_hipt4k import convert as convert_tcga

from psamil.cli.compare import compare
from psamil.cohort import Cohort, k_fold, simulate, splits_from_columns, with_validation
from psamil.models import list_models

WITHOUT_POSITIONS = ("abmil", "clam_mb", "clam_sb", "dtfd", "ibmil", "max", "mean", "msa", "size", "transmil")
TRUNKS = ("psa", "msa", "local", "ppeg", "rpe", "rope")


def narrow_options(width: int) -> dict[str, dict[str, Any]]:
    """Options of each model with about ``width`` numbers per tile."""
    half, head_dim = width // 2, width // 3
    same = {name: {"hidden": width} for name in ("abmil", "dtfd", "max", "mean", "sm_abmil")}
    trunks = {name: {"heads": 3, "head_dim": head_dim} for name in TRUNKS}
    gated = {name: {"hidden": width, "attention_dim": half} for name in ("bayes_mil", "clam_mb", "clam_sb")}
    camil = {"hidden": width, "heads": 3, "head_dim": head_dim, "neighbour_dim": half, "attention_dim": half}
    return {
        **same,
        **trunks,
        **gated,
        "camil": {**camil, "landmarks": 64},
        "das_mil": {"hidden": width, "query_dim": half},
        "gtp": {},
        "h2_mil": {"hidden": width, "head_dim": half},
        "ibmil": {},
        "longmil": {"width": width, "heads": 3},
        "setmil": {"map_side": 32, "token_width": 32, "branch_width": 32, "depth": 2, "heads": 4},
        "psa_evidence": {},
        "size": {},
        "sm_transformer": {"hidden": width, "heads": 3},
        "transmil": {"width": width, "heads": 3},
    }


def simulated(folder: Path, data: Path | None, seed: int) -> dict[str, Any]:
    if not (folder / "labels.csv").exists():
        simulate(folder, slides=240, tiles=400, range_steps=3.0, phenotype_share=0.04, seed=seed)
    training = {"epochs": 12, "lr": 1e-3, "patience": None, "prior_lr_scale": 10.0}
    psa = {"tau": 0.1, "alpha": 0.0}  # as in the demo
    return study(folder, "label", training, models=list_models(), width=96, psa=psa, folds=3)


def camelyon(folder: Path, data: Path | None, seed: int) -> dict[str, Any]:
    if not (folder / "splits.json").exists():
        script = [sys.executable, str(needed(data) / "semireal_camelyon.py"), str(folder), "--seed", str(seed)]
        subprocess.run([*script, "--slides", "300", "--decoys", "--tiles", "900", "--min-lesion", "15"], check=True)
        cohort = Cohort.open(folder, folder / "labels.csv", target="label", classes=["normal", "tumor"])
        with_validation(splits_from_columns(cohort, ["part"]), cohort).save(folder / "splits.json")
    training = {"epochs": 15, "lr": 1e-3, "patience": 5, "prior_lr_scale": 10.0}
    options = {"classes": ["normal", "tumor"], "splits": f"{folder}/splits.json", "tile_labels": f"{folder}/tiles"}
    return study(folder, "label", training, models=list_models(), width=96, psa={}, **options)


def codex(folder: Path, data: Path | None, seed: int) -> dict[str, Any]:
    if not (folder / "labels.csv").exists():
        convert_cells(needed(data) / "crc_codex_schurch2020", folder)
    training = {"epochs": 12, "lr": 1e-3, "patience": 5, "prior_lr_scale": 10.0}
    psa = {"k_init": 4.0, "k_max": 10.0}
    return study(folder, "label", training, list_models(), 48, psa, classes=["DII", "CLR"], folds=5, split_seed=seed)


def msi(folder: Path, data: Path | None, seed: int) -> dict[str, Any]:
    if not (folder / "labels.csv").exists():
        convert_tcga(needed(data) / "tcga_hipt4k", folder, ["COADREAD"])
    classes = ["MSS", "MSI"]
    cohort = Cohort.open(folder, folder / "labels.csv", target="msi_status", classes=classes)
    k_fold(cohort, 5, seed=seed).save(folder / "splits.json")
    training = {"epochs": 30, "lr": 3e-4, "patience": 10}
    options = {"classes": classes, "splits": f"{folder}/splits.json", "positions": "row order"}
    return study(folder, "msi_status", training, WITHOUT_POSITIONS, 96, {}, **options)


def study(
    folder: Path,
    target: str,
    training: dict[str, Any],
    models: list[str] | tuple[str, ...],
    width: int,
    psa: dict[str, Any],
    **options: Any,
) -> dict[str, Any]:
    """The content of a study file."""
    narrow = narrow_options(width)
    narrow["psa"] |= psa
    ordered = sorted(models, key=lambda name: (name != "psa", name))  # the first is the one others are tested against
    return {
        **{"features": str(folder), "labels": f"{folder}/labels.csv", "target": target, **options},
        "recipe": "common",
        "training": {"gradient_clip": 5.0, **training},
        "models": {name: {"model_options": narrow[name]} for name in ordered},
    }


def needed(data: Path | None) -> Path:
    if data is None:
        raise SystemExit("this cohort is made from data that are not part of psamil: name their folder with --data")
    return data


COHORTS = {"simulated": simulated, "camelyon": camelyon, "codex": codex, "msi": msi}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cohort", choices=list(COHORTS))
    parser.add_argument("out", type=Path, help="folder of the cohorts and runs")
    parser.add_argument("--data", type=Path, help="folder of the real data")
    parser.add_argument("--seed", type=int, default=0, help="of the simulation, or of the folds")
    parser.add_argument("--models", nargs="+", choices=list_models(), metavar="MODEL", help="these alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small are fastest on one thread
    out = arguments.out / f"{arguments.cohort}-{arguments.seed}"
    content = COHORTS[arguments.cohort](out / "cohort", arguments.data, arguments.seed)
    if arguments.models:
        content["models"] = {name: of for name, of in content["models"].items() if name in arguments.models}
    path = out / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    print(compare(study=path, out=out / "comparison"))
