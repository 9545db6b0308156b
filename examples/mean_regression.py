"""What the mean of a slide's regions knows: the bar for a model of TCGA slides without positions.

    python examples/mean_regression.py runs/recipe --data data

Logistic regression on the mean of the features, on the slides and folds of ``examples/recipe.py`` (``msi``, ``brca``
and ``lung``, in the same folder). The training and the validation part train, and choose the strength of the penalty by
cross-validation by patient within them. AUC by patient: mean and standard deviation over the test parts.
"""

import argparse
from pathlib import Path

import numpy as np
from neighbourhoods import aucs_by_patient, parts_of
from real_slides import OUTCOMES
from recipe import SLIDES, slides
from rich.console import Console
from rich.progress import track
from rich.table import Table

from psamil.cohort import Cohort

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of examples/recipe.py, or a new one")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder that holds tcga_hipt4k")
    arguments = parser.parse_args()
    table = Table("slides", "AUC", "sd over folds", "folds")
    for which in SLIDES:
        folder, known = slides(arguments.out, arguments.data, which, seed=0)
        cohort = Cohort.open(folder, folder / "labels.csv", **OUTCOMES[which], reading={"positions": "row order"})
        bags = (cohort.load(sample) for sample in track(cohort.samples, description=which))
        x = np.stack([np.asarray(bag.features, dtype=np.float64).mean(0) for bag in bags])
        y = np.array([sample.outcome == OUTCOMES[which]["classes"][1] for sample in cohort.samples])
        aucs = aucs_by_patient(x, y, np.array(cohort.patients), parts_of(cohort, known["splits"]))
        table.add_row(which, f"{np.mean(aucs):.3f}", f"{np.std(aucs, ddof=1):.3f}", str(len(aucs)))
    Console().print(table)
