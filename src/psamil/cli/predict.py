"""``psamil predict``: what the models of a run say about new slides or patients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from psamil.bag import Bag
from psamil.cli.extract import chosen_device
from psamil.cli.slide_features import extract_like, slides_of, write_heat_map
from psamil.cohort.cohort import UNITS, join_slides
from psamil.cohort.matching import PATIENT_COLUMNS, find_column, link_rows, match_bags, slide_name
from psamil.cohort.tables import quoted, read_table
from psamil.errors import DataError, OptionError, one_of
from psamil.evaluation.experiment import write_table
from psamil.evaluation.external import origin
from psamil.evaluation.predictor import Prediction, Predictor, load
from psamil.readers import BagRef, Found, SetAside, find_bags, open_bag, slide_id
from psamil.readers.extraction_settings import differences, extraction_settings


def predict(
    input: Path,
    *,
    run: Path,
    out: Path = Path("predictions.csv"),
    unit: str | None = None,
    patients: Path | None = None,
    slide_column: str | None = None,
    patient_column: str | None = None,
    format: str | None = None,
    member: str | None = None,
    um_per_step: float | None = None,
    non_finite: str | None = None,
    positions: str | None = None,
    mpp: float | None = None,
    encoder_weights: Path | None = None,
    trust_encoder: bool = False,
    workers: int | None = None,
    device: str = "auto",
) -> int:
    """Predicts new slides with the models of a run: calibrated, averaged, with the range over the models.

    Example: psamil predict slide.svs --run run --out predictions.csv

    From raw slides, features are made as those of the run were, if these came from psamil extract; they stay in
    predictions-features, and predictions-heat-maps gets a picture of each slide. From features, they are taken as they
    are, unless it is known that they were made in another way.

    One row per slide; or per patient, if the models were trained on patients with all of their slides. Slides that
    cannot be read or do not fit the models are left out and listed, and a patient some of whose slides are missing is
    predicted from the others, with a note; the exit code is then 1. Columns low_ and high_ are the lowest and the
    highest value of a single model.

    Args:
        input: a slide, a folder of slides, or features of any known format: a folder or a single file.
        run: run directory, one of its folds (run/folds/0), or one model.safetensors.
        out: the table to write.
        unit: what is predicted: "slide" or "patient"; by default as in training.
        patients: table of slides and their patients, needed to predict patients.
        slide_column: its column of slide names, where its name does not tell.
        patient_column: its column of patients, where its name does not tell.
        format: name of the format; by default each file tells.
        member: which features, in stores that hold those of several encoders.
        um_per_step: gives physical positions: one step is this many micrometres; by default as in training.
        non_finite: what to do with tiles that have NaN or infinite features: "error", "drop" or "zero"; by default as
            in training.
        positions: "file", or "row order" for files without coordinates; by default as in training.
        mpp: micrometres per pixel of raw slides, whatever they say themselves.
        encoder_weights: file of the weights of the encoder, where it cannot be found by its name.
        trust_encoder: run the encoder of a run even if it is a Python function that the run names.
        workers: processes that read raw slides; by default a quarter of the cores.
        device: where to compute, as torch names it: "cpu", "cuda"; "auto" is the graphics card, where there is one.
    """
    device = chosen_device(device)
    predictor = load(run, device=device)
    _refuse_to_overwrite(out, run)
    asked = {"um_per_step": um_per_step, "non_finite": non_finite, "positions": positions}
    before = origin(predictor)
    reading = {**before["reading"], **{name: value for name, value in asked.items() if value is not None}}
    unit = _unit(unit, before["outcome"].get("unit") or "slide", patients)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    slides, failed, features = slides_of(input), list[SetAside](), input
    if slides:
        features = out.with_name(f"{out.stem}-features")
        of_slides: dict[str, Any] = {"mpp": mpp, "weights": encoder_weights, "trust": trust_encoder}
        of_slides |= {"workers": workers, "device": device}
        failed = extract_like(before["extraction"], slides, features, run=run, **of_slides, console=console)
    else:
        _refuse_other_features(input, before["extraction"])
    found = find_bags(features, format=format, member=member)
    if slides:  # others of an earlier call may lie there as well
        names = {slide_id(path) for path in slides}
        found = replace(found, bags=tuple(ref for ref in found.bags if ref.id in names), set_aside=tuple(failed))
    elif not found.bags and not found.set_aside:
        cause = "holds neither slides nor features of a known format"
        raise DataError(input, cause, "look into it with psamil inspect")
    set_aside = list(found.set_aside)
    wanted = {ref.id: _Wanted([ref], 1) for ref in found.bags}
    if patients is not None:
        wanted, unknown = _by_patient(found, patients, slide_column, patient_column)
        set_aside += [SetAside(ref.path, f"is not in {patients}") for ref in unknown]
    bags = _readable(predictor, wanted, reading, set_aside, console)
    predictions = [_with_note(prediction, wanted[prediction.id]) for prediction in predictor.predict(bags)]
    for entry in set_aside:
        console.print(Text(f"set aside: {entry.path}: {entry.reason}"))
    if not predictions:
        console.print(f"No {unit} could be predicted; nothing was written.")
        return 1
    write_table(out, pd.DataFrame([prediction.row() for prediction in predictions]))
    partly = [prediction.id for prediction in predictions if wanted[prediction.id].is_incomplete]
    if partly:
        console.print(Text(f"predicted without some of their slides (see the column note): {quoted(partly)}"))
    if slides and unit == "slide":
        _write_heat_maps(predictions, found, slides, out.with_name(f"{out.stem}-heat-maps"), mpp, console)
    counts = f"{unit}s: {len(predictions)}; models: {len(predictor)}; set aside: {len(set_aside)}"
    Console(highlight=False, soft_wrap=True).print(f"{counts}\nwrote {out}", markup=False)
    return int(bool(set_aside or partly))


@dataclass
class _Wanted:
    """The slides of a patient, or one slide."""

    bags: list[BagRef] = field(default_factory=list)
    slides: int = 0  # that the table names, with a bag or without
    used: int = 0

    @property
    def is_incomplete(self) -> bool:
        return self.used < self.slides


def _with_note(prediction: Prediction, wanted: _Wanted) -> Prediction:
    """A prediction from a part of the slides is no less certain by its own numbers; somebody has to say it."""
    part = f"predicted from {wanted.used} of {wanted.slides} slides" if wanted.is_incomplete else ""
    return replace(prediction, note="; ".join(filter(None, (part, prediction.note))))


def _unit(asked: str | None, trained: str, patients: Path | None) -> str:
    """What is predicted. A bag of one slide is not what a model of patients was trained on."""
    unit = asked or trained
    if unit not in UNITS:
        raise one_of("unit", unit, UNITS)
    if unit == "patient" and patients is None:
        why = "" if asked else "the models were trained on patients with all of their slides; "
        raise OptionError(
            f"{why}name a table of slides and patients with --patients, or predict slides with --unit slide"
        )
    if unit == "slide" and patients is not None:
        raise OptionError("a table of patients is given, but slides are to be predicted; add --unit patient")
    return unit


def _by_patient(
    found: Found, table: Path, slide_column: str | None, patient_column: str | None
) -> tuple[dict[str, _Wanted], list[BagRef]]:
    """The slides of each patient, and the slides of which the table does not speak."""
    rows = read_table(table)
    if find_column(rows, patient_column, PATIENT_COLUMNS, "patient_column") is None:
        raise DataError(table, "no column is known to name patients", "name it with --patient-column")
    aside = {slide_id(entry.path) for entry in found.set_aside}
    links, _ = link_rows(rows, found.bags, set_aside=aside, slide_column=slide_column, patient_column=patient_column)
    matches, _ = match_bags(links, found.bags, aside)
    wanted: dict[str, _Wanted] = defaultdict(_Wanted)
    for bag, patient in sorted({(match.bag, match.patient) for match in matches}):
        wanted[patient].bags.append(bag)
    for _, patient in {(slide_name(link.slide).casefold(), link.patient) for link in links if link.patient in wanted}:
        wanted[patient].slides += 1
    known = {match.bag for match in matches}
    return dict(sorted(wanted.items())), [ref for ref in found.bags if ref not in known]


def _readable(
    predictor: Predictor,
    wanted: dict[str, _Wanted],
    reading: dict[str, Any],
    set_aside: list[SetAside],
    console: Console,
) -> Iterator[Bag]:
    """A bag of each slide or patient, one after the other; slides that the models cannot predict are set aside."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for id, of_one in bar.track(wanted.items(), description="predicting"):
            bags = []
            for ref in of_one.bags:
                try:
                    bag = open_bag(ref, **reading)
                    predictor.check(bag)
                except DataError as error:
                    set_aside.append(SetAside(ref.path, "; ".join(filter(None, (error.cause, error.remedy)))))
                else:
                    bags.append(bag)
            of_one.used = len(bags)
            if bags:
                yield join_slides(bags, id)


def _refuse_other_features(features: Path, trained: dict[str, Any]) -> None:
    """What psamil extract made in another way than the features of the run."""
    made = extraction_settings(features)
    other = differences(made, trained) if made and trained else []
    if other:
        cause = f"has other features than the models were trained on: {'; '.join(other)}"
        raise DataError(features, cause, "extract them as before, or let psamil predict do it: name the slides")


def _write_heat_maps(
    predictions: list[Prediction], found: Found, slides: list[Path], out: Path, mpp: float | None, console: Console
) -> None:
    path_of, bag_of = {slide_id(path): path for path in slides}, {ref.id: ref for ref in found.bags}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for prediction in bar.track(predictions, description="drawing heat maps"):
            if prediction.tiles:
                says = prediction.predicted or ", ".join(f"{k} {v:.3g}" for k, v in prediction.values.items())
                name = prediction.id
                picture = out / f"{name}.png"
                write_heat_map(
                    path_of[name], bag_of[name].path, prediction.tile_scores, f"{name}: {says}", picture, mpp
                )
    console.print(Text(f"heat maps: {out}"))


def _refuse_to_overwrite(out: Path, run: Path) -> None:
    """Known before the work begins: a folder, or a file that belongs to the run."""
    if out.is_dir():
        raise DataError(out, "is a folder", "name a file, such as predictions.csv in it")
    if out.exists() and run.is_dir() and out.resolve().is_relative_to(run.resolve()):
        raise DataError(out, "belongs to the run", "choose another name")
