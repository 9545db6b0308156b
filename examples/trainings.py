"""What is gained by several trainings of a fold, whose predictions are averaged: on validation and on test parts.

    python examples/recipe.py msi runs/recipe --data data --models psa abmil
    python examples/trainings.py runs/recipe/msi-0/psa runs/recipe/msi-0/abmil --out trainings.csv

Of runs of two classes with several trainings per fold, their finished folds. AUC by patient of a training alone (mean
over them) and of their mean, over all folds; the gain with a 95% interval (t-test over folds, corrected for training
parts that overlap); on how many folds there is one. The epochs of trainings were chosen on the validation parts.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import track
from rich.table import Table

from psamil.cohort import Splits
from psamil.errors import DataError
from psamil.evaluation.comparison import corrected_t_test
from psamil.evaluation.run_folder import finished_folds
from psamil.evaluation.scores import by_patient, mean_over_seeds
from psamil.training.metrics import roc_auc


def auc_of(jobs: list[Path], part: str) -> float:
    """By patient, of the mean of these trainings of a fold, for the second class."""
    table = mean_over_seeds(jobs)
    table = by_patient(table[table["part"] == part].reset_index(drop=True))
    positive = [name for name in table if name.startswith("prob_")][1]
    return roc_auc(table["truth"] == positive.removeprefix("prob_"), table[positive])


def gains(run: Path) -> list[dict[str, Any]]:
    """A row for the validation parts and one for the test parts."""
    splits = Splits.load(run / "splits.json").folds
    folds = finished_folds(run, len(splits))
    if not folds:
        raise DataError(run, "has no finished fold", "finish it, or name another run")
    shares = {
        "val": np.mean([len(split.val) / len(split.train) for split in splits]),
        "test": np.mean([len(split.test) / len(split.train) for split in splits]),
    }
    rows = []
    for part, share in shares.items():
        if not share:
            continue  # trained without a validation part
        alone = [float(np.mean([auc_of([job], part) for job in jobs])) for jobs in folds.values()]
        mean = [auc_of(jobs, part) for jobs in folds.values()]
        tested = corrected_t_test(mean, alone, test_to_train=share)
        rows.append(
            {
                "run": f"{run.parent.name}/{run.name}",
                "part": part,
                "trainings": len(next(iter(folds.values()))),
                "alone": np.mean(alone),
                "mean": np.mean(mean),
                "gain": tested.difference,
                "low": tested.low,
                "high": tested.high,
                "folds": len(folds),
                "folds with a gain": int(np.sum(np.array(mean) > np.array(alone))),
            }
        )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run directories")
    parser.add_argument("--out", type=Path, help="CSV file")
    arguments = parser.parse_args()
    found = pd.DataFrame([row for run in track(arguments.runs, description="runs") for row in gains(run)]).round(6)
    if arguments.out:
        found.to_csv(arguments.out, index=False)
    table = Table("run", "part", "AUC of one", "AUC of the mean", "gain", "on folds")
    for row in found.to_dict("records"):
        gain = f"{row['gain']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        of_folds = f"{row['folds with a gain']} of {row['folds']}"
        table.add_row(row["run"], row["part"], f"{row['alone']:.3f}", f"{row['mean']:.3f}", gain, of_folds)
    Console().print(table)
