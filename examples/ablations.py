"""Ablations of PSA-MIL: how much the weight alpha of the diversity loss and the pruning threshold tau matter.

    python examples/ablations.py camelyon runs/ablations --data data
    python examples/ablations.py codex runs/ablations --data data
    python examples/ablations.py camelyon runs/ablations --data data --options k_max heads

The cohorts, settings and splits are those of all_models.py: metastases among decoys (``camelyon``, seed 11, the mean of
3 trainings per setting) and cells of colorectal cancer (``codex``, 5 folds by patient, the mean of 2). One option is
changed at a time; intervals are over patients. A CPU needs about 25 minutes for alpha and tau of either cohort.

Each is a study file for ``psamil compare --study``; the runs lie in OUT/<cohort>, and so do figure-ablations.png, .svg
and .csv. A study that was stopped goes on.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import yaml
from all_models import COHORTS

from psamil.cli.compare import compare
from psamil.report.paper_figures.ablations import draw_ablations

COHORT_SEEDS = {"camelyon": 11, "codex": 0, "simulated": 0}
TRAININGS = {"camelyon": 3, "codex": 2, "simulated": 2}  # per fold and setting
GRID: dict[str, tuple[float, ...]] = {
    "alpha": (0.0, 1e-3, 1e-1),
    "tau": (1e-4, 1e-3, 1e-2, 1e-1),
    "k_max": (10.0, 15.0, 25.0),
    "heads": (1, 2, 3, 6),
}
BASE = {"alpha": 1e-3, "tau": 1e-3}


def variants(base: dict[str, Any], options: list[str]) -> dict[str, dict[str, Any]]:
    """Options of psa for each run: the base, and the base with one option changed."""
    defaults = {"k_max": 25.0, **base}
    found = {"base": base}
    for option in options:
        for value in GRID[option]:
            if value != defaults[option]:
                found[f"{option}-{value:g}"] = {**base, option: value}
    return found


def study(cohort: str, folder: Path, data: Path | None, options: list[str]) -> dict[str, Any]:
    """The study of all_models.py with variants of psa in place of the models."""
    content = COHORTS[cohort](folder, data, COHORT_SEEDS[cohort])
    base = {**content["models"]["psa"]["model_options"], **BASE}
    content["models"] = {name: {"model": "psa", "model_options": of} for name, of in variants(base, options).items()}
    return {**content, "seeds": TRAININGS[cohort]}


def main(cohort: str, out: Path, data: Path | None, options: list[str], epochs: int | None) -> None:
    """Trains what is missing, compares all and draws the figure."""
    out = out / cohort
    content = study(cohort, out / "cohort", data, options)
    if epochs is not None:
        content["training"]["epochs"] = epochs
    path = out / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    print(compare(study=path, out=out / "comparison", title=f"Ablations of PSA-MIL: {cohort}"))
    runs = {name: out / "comparison" / name for name in content["models"]}
    print(*draw_ablations(runs, out), sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cohort", choices=list(COHORT_SEEDS))
    parser.add_argument("out", type=Path, help="folder of the cohorts and runs")
    parser.add_argument("--data", type=Path, help="folder of the real data")
    parser.add_argument("--options", nargs="+", choices=list(GRID), default=["alpha", "tau"])
    parser.add_argument("--epochs", type=int, help="fewer, to try it out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small are fastest on one thread
    main(arguments.cohort, arguments.out, arguments.data, arguments.options, arguments.epochs)
