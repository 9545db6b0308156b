"""``psamil predict``: what the models of a run say about new slides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from psamil.bag import Bag
from psamil.errors import DataError
from psamil.evaluation.experiment import write_table
from psamil.evaluation.external import origin
from psamil.evaluation.predictor import Predictor, load
from psamil.readers import BagRef, SetAside, find_bags, open_bag


def predict(
    run: Path,
    features: Path,
    *,
    out: Path = Path("predictions.csv"),
    format: str | None = None,
    member: str | None = None,
    um_per_step: float | None = None,
    non_finite: str | None = None,
    positions: str | None = None,
    device: str = "cpu",
) -> int:
    """Predicts new slides with the models of a run: calibrated, averaged, with the range over the models.

    Example: psamil predict run new-features --out predictions.csv

    One row per slide. Slides that cannot be read or do not fit the models are left out and listed, and the exit code
    is then 1. Columns low_ and high_ are the lowest and the highest value of a single model.

    Args:
        run: run directory, one of its folds (run/folds/0), or one model.safetensors.
        features: folder of features of any known format, or a single file.
        out: the table to write.
        format: name of the format; by default each file tells.
        member: which features, in stores that hold those of several encoders.
        um_per_step: gives physical positions: one step is this many micrometres; by default as in training.
        non_finite: what to do with tiles that have NaN or infinite features: "error", "drop" or "zero"; by default as
            in training.
        positions: "file", or "row order" for files without coordinates; by default as in training.
        device: where to compute, as torch names it: "cpu", "cuda".
    """
    predictor = load(run, device=device)
    _refuse_to_overwrite(out, run)
    asked = {"um_per_step": um_per_step, "non_finite": non_finite, "positions": positions}
    before = origin(predictor)
    reading = {**before["reading"], **{name: value for name, value in asked.items() if value is not None}}
    found = find_bags(features, format=format, member=member)
    if not found.bags and not found.set_aside:
        raise DataError(features, "holds no features of a known format", "look into it with psamil inspect")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if before["outcome"].get("unit") == "patient":
        console.print("The models were trained on patients with all of their slides; these are slides one by one.")
    set_aside = list(found.set_aside)
    bags = _readable(predictor, found.bags, reading, set_aside, console)
    predictions = predictor.predict(bags)
    for entry in set_aside:
        console.print(Text(f"set aside: {entry.path}: {entry.reason}"))
    if not predictions:
        console.print("No slide could be predicted; nothing was written.")
        return 1
    write_table(out, pd.DataFrame([prediction.row() for prediction in predictions]))
    counts = f"slides: {len(predictions)}; models: {len(predictor)}; set aside: {len(set_aside)}"
    Console(highlight=False, soft_wrap=True).print(f"{counts}\nwrote {out}", markup=False)
    return int(bool(set_aside))


def _readable(
    predictor: Predictor, refs: tuple[BagRef, ...], reading: dict[str, Any], set_aside: list[SetAside], console: Console
) -> Iterator[Bag]:
    """The bags that the models can predict, one after the other; the others are set aside."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for ref in bar.track(refs, description="slides"):
            try:
                bag = open_bag(ref, **reading)
                predictor.check(bag)
            except DataError as error:
                set_aside.append(SetAside(ref.path, "; ".join(filter(None, (error.cause, error.remedy)))))
                continue
            yield bag


def _refuse_to_overwrite(out: Path, run: Path) -> None:
    """Known before the work begins: a folder, or a file that belongs to the run."""
    if out.is_dir():
        raise DataError(out, "is a folder", "name a file, such as predictions.csv in it")
    if out.exists() and run.is_dir() and out.resolve().is_relative_to(run.resolve()):
        raise DataError(out, "belongs to the run", "choose another name")
