"""What the diversity loss does when there are two distances to learn, as Figure 3 of the paper.

    python examples/two_ranges.py runs/two-ranges
    python examples/two_ranges.py runs/held --k-init 2.8 --k-max 8.2 --cohort-seed 2    # heads that labels leave there

A slide is positive if tiles of two kinds lie within 2 steps of each other, or tiles of two other kinds within 7: one of
the two, by the toss of a coin. Whoever sees one range alone is right about half of the positive slides (AUC 0.75). The
same PSA-MIL, 3 heads that begin at about 5 steps (``--k-init``; ``--published`` for the radii and tau of the published
configurations), is trained

- without the diversity loss;
- with it, at the paper's weight alpha = 0.001 and at 0.01;
- with the form of the authors' released code, which has next to no gradient at the initial radii of 3 heads (see
  benchmarks/diversity.py), at the same weights;
- if asked for (``--runs``), with both at 0.0001, or with the authors' form and neighbours ("legacy"), which takes
  several times as long.

OUT/figure-dynamics.png, .svg and .csv show the radius of every head and the similarity of heads after each epoch; a
table tells test AUC and final radii of each seed. A run that was stopped goes on.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from psamil.cli.progress import TrainingProgress
from psamil.cohort import Cohort, simulate, splits_from_columns
from psamil.evaluation.run import fit
from psamil.evaluation.run_comparison import FinishedRun, read_history
from psamil.files import read_json
from psamil.report.paper_figures.dynamics import draw_dynamics
from psamil.training.settings import TrainingSettings

RANGES_STEPS = (2.0, 7.0)
BANDS_STEPS = [(r, 1.5 * r + 0.5) for r in RANGES_STEPS]  # partners lie within the first, others beyond the second
PSA: dict[str, Any] = {"heads": 3, "head_dim": 32, "tau": 0.1, "k_max": 17.0, "k_init": 5.0}
"""The initial radii are at a quarter of the way from k_min to k_max, as in the published configurations."""
PUBLISHED: dict[str, Any] = {"tau": 1e-3, "k_max": 25.0, "k_init": 7.0}
RUNS: dict[str, dict[str, Any]] = {
    "no diversity loss": {"alpha": 0.0},
    "diversity loss, 0.0001": {"alpha": 0.0001},
    "diversity loss, 0.001": {"alpha": 0.001},
    "diversity loss, 0.01": {"alpha": 0.01},
    "authors' form, 0.0001": {"alpha": 0.0001, "diversity": "binning"},
    "authors' form, 0.001": {"alpha": 0.001, "diversity": "binning"},
    "authors' form, 0.01": {"alpha": 0.01, "diversity": "binning"},
    "legacy": {"preset": "legacy"},
}
SHOWN = [name for name in RUNS if not name.endswith("0.0001") and name != "legacy"]


def settings(options: dict[str, Any], epochs: int) -> TrainingSettings:
    common: dict[str, Any] = {"lr": 1e-3, "prior_lr_scale": 10.0, "patience": None}
    return TrainingSettings(model="psa", model_options=options, epochs=epochs, **common)


def train(
    out: Path, name: str, *, slides: int, cohort_seed: int = 0, seeds: int, epochs: int, psa: dict[str, Any]
) -> Path:
    """Simulates the slides unless they are there, and trains a model or goes on with its run."""
    folder = out / "cohort"
    if not (folder / "labels.csv").exists():
        first, second = RANGES_STEPS
        sizes: dict[str, Any] = {"slides": slides, "tiles": 400, "tile_spread": 0.1, "phenotype_share": 0.025}
        simulate(folder, range_steps=first, second_range_steps=second, seed=cohort_seed, **sizes)
    cohort = Cohort.open(folder, folder / "labels.csv", target="label")
    run = out / name.replace("'", "").replace(",", "").replace(" ", "-")
    print(name)
    with TrainingProgress(Console(), epochs) as shown:
        fit(
            folder,
            folder / "labels.csv",
            run,
            target="label",
            splits=splits_from_columns(cohort, ["part"]),
            seeds=seeds,
            training=settings({**psa, **RUNS[name]}, epochs),
            report=shown.report,
            on_step=shown.on_step,
        )
    return run


def tell(runs: dict[str, Path]) -> None:
    """Test AUC of each seed, and where its heads are at the end."""
    table = Table("run", "seed", "test AUC", "final radii K")
    for name, path in runs.items():
        for _, job in FinishedRun.load(path).jobs():
            (radii,) = read_history(job)[-1]["radii_steps"]
            auc = read_json(job / "metrics.json")["test"]["auc"]
            table.add_row(name, job.name.removeprefix("seed-"), f"{auc:.3f}", ", ".join(f"{k:.1f}" for k in radii))
    Console().print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the cohort, the runs and the figure")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=SHOWN)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--slides", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--published", action="store_true", help="radii and tau as in the published configurations")
    parser.add_argument("--k-init", type=float, help="radius at which heads begin, in tile steps")
    parser.add_argument("--k-max", type=float, help="largest radius, in tile steps")
    parser.add_argument("--cohort-seed", type=int, default=0, help="of the simulated slides")
    arguments = parser.parse_args()
    psa = PSA | (PUBLISHED if arguments.published else {})
    psa |= {} if arguments.k_init is None else {"k_init": arguments.k_init}
    psa |= {} if arguments.k_max is None else {"k_max": arguments.k_max}
    torch.set_num_threads(1)  # tensors this small are fastest on one thread
    sizes: dict[str, Any] = {"slides": arguments.slides, "seeds": arguments.seeds, "cohort_seed": arguments.cohort_seed}
    sizes |= {"epochs": arguments.epochs, "psa": psa}
    runs = {name: train(arguments.out, name, **sizes) for name in arguments.runs}
    tell(runs)
    print(*draw_dynamics(runs, arguments.out, planted_steps=BANDS_STEPS), sep="\n")
