"""What simple statistics of neighbouring cells know: the bar for a model that learns from positions.

    python examples/convert_cells.py data/crc_codex_schurch2020 cohorts/crc
    python examples/neighbourhoods.py cohorts/crc --classes DII CLR

Logistic regression by image, on

- size: log of the number of cells;
- composition: the share of each type of cells;
- neighbours: how often type b is among the k nearest cells of one of type a, for all pairs, as it is (share), and
  compared with what the composition alone would give (enrichment): log(share_ab) - log(share_a share_b);
- their covariance: share_ab - share_a share_b, the same comparison as a difference;
- the latter two with cells that exchange their positions, a control for what positions add.

5 repeats of 5 folds by patient, those of ``examples/recipe.py`` with the same seed; the training and the validation
part train, and choose the strength of the penalty by cross-validation by patient within them. AUC by patient: mean and
standard deviation over the test parts.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.spatial import cKDTree
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, StratifiedGroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from psamil.cohort import Cohort, Splits, k_fold

RARE = 1e-3  # added to shares before their logarithm
PENALTIES = {"logisticregression__C": [0.001, 0.01, 0.1, 1.0]}


def shares(types: np.ndarray, xy: np.ndarray, k: int) -> np.ndarray:
    """(types, types): share of the pairs of a cell of type a and one of type b among its k nearest; the sum is 1.

    Args:
        types: (cells, types), one-hot.
        xy: (cells, 2).
        k: neighbours of each cell; fewer where there are fewer cells.
    """
    k = min(k, len(xy) - 1)
    if k < 1:
        return np.zeros((types.shape[1], types.shape[1]))
    nearest = np.asarray(cKDTree(xy).query(xy, k=k + 1)[1])[:, 1:]
    return types.T @ types[nearest].mean(1) / len(xy)


def enrichment(pairs: np.ndarray, composition: np.ndarray) -> np.ndarray:
    """How much more often types meet than by their shares alone, as a logarithm."""
    return np.log(pairs + RARE) - np.log(np.outer(composition, composition) + RARE)


def statistics_of(cohort: Cohort, k: int, seed: int) -> dict[str, np.ndarray]:
    """(images, values) of each kind, in the order of the cohort."""
    found: dict[str, list[np.ndarray]] = {}
    generator = np.random.default_rng(seed)
    for sample in track(cohort.samples, description="images"):
        bag = cohort.load(sample)
        types, xy = np.asarray(bag.features, dtype=np.float64), np.asarray(bag.xy, dtype=np.float64)
        composition = types.mean(0)
        pairs = shares(types, xy, k)
        shuffled = shares(types, generator.permutation(xy), k)
        values = {
            "size": np.log([len(xy)]),
            "composition": composition,
            "composition and size": np.append(composition, np.log(len(xy))),
            "neighbours": pairs,
            "neighbours, enrichment": enrichment(pairs, composition),
            "neighbours, enrichment, shuffled": enrichment(shuffled, composition),
            "neighbours, covariance": pairs - np.outer(composition, composition),
            "neighbours, covariance, shuffled": shuffled - np.outer(composition, composition),
        }
        for name, value in values.items():
            found.setdefault(name, []).append(value.ravel())
    return {name: np.stack(values) for name, values in found.items()}


def parts_of(cohort: Cohort, splits: Splits) -> list[tuple[np.ndarray, np.ndarray]]:
    """Masks over the samples of a cohort, of each fold: training and validation, test."""
    return [(np.isin(cohort.ids, [*fold.train, *fold.val]), np.isin(cohort.ids, fold.test)) for fold in splits.folds]


def aucs_by_patient(
    x: np.ndarray, y: np.ndarray, patients: np.ndarray, parts: list[tuple[np.ndarray, np.ndarray]]
) -> list[float]:
    """Of each test part, after training on the part before it (masks over the rows of x)."""
    aucs = []
    for train, test in parts:
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=5000, class_weight="balanced"))
        inner = StratifiedGroupKFold(5, shuffle=True, random_state=0)
        search = GridSearchCV(model, PENALTIES, scoring="roc_auc", cv=inner)
        search.fit(x[train], y[train], groups=patients[train])
        scores = pd.DataFrame({"y": y[test], "score": search.predict_proba(x[test])[:, 1]})
        by_patient = scores.groupby(patients[test]).mean()
        aucs.append(float(roc_auc_score(by_patient["y"], by_patient["score"])))
    return aucs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cohort", type=Path, help="folder that convert_cells.py wrote")
    parser.add_argument("--classes", nargs=2, required=True, metavar="CLASS", help="the second one is the positive")
    parser.add_argument("--k", type=int, default=10, help="neighbours of a cell")
    parser.add_argument("--seed", type=int, default=0, help="of the folds, and of exchanged positions")
    parser.add_argument("--repeats", type=int, default=5, help="how often everything is split anew")
    arguments = parser.parse_args()
    cohort = Cohort.open(arguments.cohort, arguments.cohort / "labels.csv", target="label", classes=arguments.classes)
    splits = k_fold(cohort, 5, repeats=arguments.repeats, seed=arguments.seed)
    parts = parts_of(cohort, splits)
    y = np.array([sample.outcome == arguments.classes[1] for sample in cohort.samples])
    table = Table("statistic", "AUC", "sd over folds", "values")
    for name, x in statistics_of(cohort, arguments.k, arguments.seed).items():
        aucs = aucs_by_patient(x, y, np.array(cohort.patients), parts)
        table.add_row(name, f"{np.mean(aucs):.3f}", f"{np.std(aucs, ddof=1):.3f}", str(x.shape[1]))
    Console().print(table)
