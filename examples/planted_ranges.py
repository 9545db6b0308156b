"""Does the model learn how far to look? Simulated slides whose label is an interaction within 2, 5 or 9 tile steps.

    python examples/planted_ranges.py runs/ranges
    python examples/planted_ranges.py runs/ranges --range 5 --folds 5
    python examples/planted_ranges.py runs/ranges-300 --model psa-radii --seed 300 --fold 0

For each range, by cross-validation: PSA-MIL; ABMIL and mean pooling, which do not see positions and can only guess; and
PSA-MIL on the same slides with shuffled positions, which must guess as well. Then the learned radii K and the head that
is used most: the one without which the test logits change most (mean of the absolute change). ``psa-radii`` is PSA-MIL
whose radii cost something in the second half of training, so that they end no wider than the labels need. A run that
was stopped goes on; what is finished is not done again.
"""

import argparse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from psamil.bag import PackedBags
from psamil.cli.progress import TrainingProgress
from psamil.cohort import Cohort, Splits, simulate
from psamil.evaluation.run import Run, fit
from psamil.models.psa import PSAMIL
from psamil.training.saved_model import SavedModel
from psamil.training.settings import TrainingSettings

PSA = TrainingSettings(
    model="psa",
    model_options={"heads": 3, "head_dim": 32, "tau": 0.1, "alpha": 0.0},
    epochs=15,
    lr=1e-3,
    prior_lr_scale=10.0,
    patience=None,  # nothing seems to happen in the first epochs
)
RADII = replace(PSA, epochs=30, model_options={**PSA.model_options, "k_init": [3.0, 7.0, 15.0], "radius_weight": 0.03})
MODELS = {
    "psa": PSA,
    "psa-radii": RADII,
    "psa-shuffled": PSA,
    "abmil": TrainingSettings(model="abmil", model_options={"hidden": 96}, epochs=15, lr=1e-3, patience=None),
    "mean": TrainingSettings(model="mean", model_options={"hidden": 96}, epochs=15, lr=1e-3, patience=None),
}


def train(out: Path, range_steps: float, model: str, folds: int, fold: int | None, slides: int, seed: int) -> Run:
    """Simulates the slides unless they are there, and trains a model or goes on with its run."""
    cohort = out / "cohort"
    if not (cohort / "labels.csv").exists():
        simulate(cohort, slides=slides, tiles=1000, range_steps=range_steps, seed=seed + int(range_steps))
    print(f"{out.name} {model}")
    with TrainingProgress(Console(), MODELS[model].epochs) as shown:
        return fit(
            cohort,
            cohort / "labels.csv",
            out / model,
            target="label",
            folds=folds,
            fold=fold,
            positions="shuffled" if model == "psa-shuffled" else "file",
            training=MODELS[model],
            report=shown.report,
            on_step=shown.on_step,
        )


@contextmanager
def without_head(model: PSAMIL, head: int) -> Iterator[None]:
    """The head adds nothing to the tiles, in all layers."""

    def silence(module: torch.nn.Module, inputs: tuple[Tensor]) -> Tensor:
        heads = inputs[0].unflatten(1, (module.heads, -1)).clone()  # type: ignore[arg-type]
        heads[:, head] = 0
        return heads.flatten(1)

    handles = []
    for block in model.blocks:
        block.attention.proj.heads = block.attention.heads  # type: ignore[union-attr]
        handles.append(block.attention.proj.register_forward_pre_hook(silence))  # type: ignore[union-attr]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def heads_of(run: Run, cohort: Cohort, folds: Iterable[int]) -> dict[int, tuple[list[float], int]]:
    """Of each fold: the radius of each head in tile steps, and which head is used most."""
    found = {}
    splits = Splits.load(run.folder / "splits.json").folds
    for k in folds:
        (path,) = (run.folder / "folds" / f"{k}").glob("**/model.safetensors")
        model = SavedModel.load(path).model
        assert isinstance(model, PSAMIL)
        batch = PackedBags.of([cohort.load(sample) for sample in cohort.select(splits[k].test).samples])
        whole = model(batch).logits
        changes = []
        for head in range(model.blocks[0].attention.heads):  # type: ignore[union-attr, arg-type]
            with without_head(model, head):
                changes.append(float((model(batch).logits - whole).abs().mean()))
        found[k] = (model.priors[0].radius_steps.tolist(), changes.index(max(changes)))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of cohorts and runs")
    parser.add_argument("--range", nargs="+", type=float, default=[2.0, 5.0, 9.0], help="in tile steps")
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--fold", type=int, help="train this one alone")
    parser.add_argument("--slides", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the simulation; the range is added to it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small are fastest on one thread
    aucs = Table("planted range", "model", "test AUC", "sd over folds", "95% interval over patients")
    radii = Table("planted range", "model", "fold", "radii K of the heads", "K of the head used most")
    for range_steps in arguments.range:
        out = arguments.out / f"range-{range_steps:g}"
        for model in arguments.model:
            run = train(out, range_steps, model, arguments.folds, arguments.fold, arguments.slides, arguments.seed)
            auc = run.table.loc["auc"]
            interval = f"{auc['low']:.3f} to {auc['high']:.3f}"
            aucs.add_row(f"{range_steps:g}", model, f"{auc['mean']:.3f}", f"{auc['sd']:.3f}", interval)
            if model in ("psa", "psa-radii"):
                cohort = Cohort.open(out / "cohort", out / "cohort" / "labels.csv", target="label")
                folds = range(arguments.folds) if arguments.fold is None else [arguments.fold]
                for fold, (steps, most) in heads_of(run, cohort, folds).items():
                    texts = [f"{k:.1f}" for k in steps]
                    radii.add_row(f"{range_steps:g}", model, str(fold), " ".join(texts), texts[most])
    Console().print(aucs, radii)
