"""The model card of exported models: README.md as the Hugging Face hub reads it.

It is written from ``config.json`` alone, so that it cannot tell more about patients and machines than that file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import yaml

Config = Mapping[str, Any]

TAGS = ("psamil", "pathology", "whole-slide-images", "multiple-instance-learning")
CLASS_KINDS = ("classification", "multilabel")
METRIC_TYPES = {"auc": "roc_auc", "brier": "brier_score"}  # where the hub has another name for it
CITATION = """```bibtex
@inproceedings{peled2026psamil,
  title     = {{PSA-MIL}: A Probabilistic Spatial Attention-Based Multiple Instance Learning for Whole Slide Image
               Classification},
  author    = {Peled, Sharon and Maruvka, Yosef E. and Freiman, Moti},
  booktitle = {Proceedings of the IEEE/CVF Winter Conference on Applications of Computer Vision (WACV)},
  year      = {2026},
  doi       = {10.48550/arXiv.2503.16284}
}
```"""


def model_card(config: Config, name: str, *, licence: str | None = None, repository: str | None = None) -> str:
    """The text of the card.

    Args:
        config: content of ``config.json``.
        name: of the model.
        licence: identifier as the hub writes it; without it, the card asks for one.
        repository: owner/name on the hub, if it goes there.
    """
    sections = {
        "What it predicts": _predicts(config),
        "How to use it": _usage(config, f"hf://{repository}" if repository else name),
        "Intended use and limits": _limits(config),
        "Data": _data(config),
        "Protocol": _protocol(config),
        "Results": _results(config),
        "Calibration and threshold": _fitted(config),
        "Learned radii": _radii(config),
        "Versions": _versions(config),
        "Licence": _licence(licence),
        "Citation": iter([CITATION]),
    }
    told = {heading: "\n".join(lines) for heading, lines in sections.items()}
    body = [f"## {heading}\n\n{text}" for heading, text in told.items() if text]
    return "\n\n".join([_front_matter(config, name, licence), f"# {_plain(name)}", *body]) + "\n"


def _front_matter(config: Config, name: str, licence: str | None) -> str:
    is_of_classes = config["task"]["kind"] in CLASS_KINDS
    pipeline = "image-classification" if is_of_classes else "other"
    matter: dict[str, Any] = {"library_name": "psamil", "pipeline_tag": pipeline}
    if licence:
        matter["license"] = licence
    matter["tags"] = [*TAGS, config["settings"]["model"]]
    measured = [
        {"type": METRIC_TYPES.get(metric, metric), "name": metric, "value": round(row["mean"], 4)}
        for metric, row in config["metrics"].items()
        if row["mean"] is not None
    ]
    if measured:
        dataset = {"name": config["cohort"]["headline"], "type": "cohort"}
        result = {"task": {"type": pipeline, "name": config["task"]["kind"]}, "dataset": dataset, "metrics": measured}
        matter["model-index"] = [{"name": name, "results": [result]}]
    text = yaml.safe_dump(matter, sort_keys=False, allow_unicode=True)
    asked = "" if licence else "# license: none yet; choose one before you share the model\n"
    return f"---\n{asked}{text}---"


def _predicts(config: Config) -> Iterator[str]:
    task, outcome = config["task"], config["outcome"]
    unit = outcome.get("unit") or "slide"
    one = "patient, from all of the patient's slides" if unit == "patient" else "slide"
    target = outcome.get("target")
    column = f" ({_plain(target)})" if isinstance(target, str) else ""
    what = {
        "classification": f"The class{column} of a {one}: {_listed(task.get('classes', ()))}.",
        "multilabel": f"Which labels apply to a {one}: {_listed(task.get('labels', ()))}.",
        "regression": f"A number{column} for a {one}.",
        "survival": f"The risk of an event in a {one}, and the probability to be without it over time.",
    }
    yield what[task["kind"]]
    yield ""
    options = json.dumps(config["settings"]["model_options"]).replace("`", "'")
    models = len(config["models"])
    mean = "one model" if models == 1 else f"the mean of {models} models (folds x seeds)"
    yield (
        f"Architecture `{config['settings']['model']}` of psamil with options "
        f"`{options}`; {mean}. It takes features of tiles with their positions, not pixels."
    )


def _usage(config: Config, where: str) -> Iterator[str]:
    where = re.sub(r"[^\w./:@-]", "_", where)
    yield "```python\nimport psamil"
    yield f'predictor = psamil.load("{where}")'
    yield 'prediction = predictor.predict(psamil.open_bag("slide.h5"))'
    yield "print(prediction.values, prediction.low, prediction.high)\n```\n"
    yield f"```sh\npsamil predict slides --run {where} --out predictions.csv\n```"


def _limits(config: Config) -> Iterator[str]:
    yield "For research only. **Not for diagnosis**, and not for any decision about a patient.\n"
    made, width = config["extraction"], config["in_dim"]
    if made:
        yield (
            f"- Features must come from the encoder **{_plain(made['encoder'])}** ({made['dim']} numbers, "
            f"{made['precision']}), on tiles of **{made['tile_px']} px at {made['mpp']:g} um per px** "
            f"({made['tile_um']:g} um), {made['overlap_px']} px overlap. `psamil extract` and `psamil predict` make "
            "them, and refuse features that they know to be others."
        )
    else:
        yield (
            f"- How its features were made is **not recorded**. They are {width} numbers per tile; features of another "
            "encoder, tile size or resolution give numbers without meaning."
        )
    if config["step_um"]:
        yield f"- Neighbouring tiles were {config['step_um']:g} um apart in training; learned distances depend on it."
    reading = {name: value for name, value in config["reading"].items() if value is not None}
    if reading:
        yield f"- Features were read with {_plain(', '.join(f'{k} = {v}' for k, v in reading.items()))}."
    yield "- Other scanners, stains, hospitals and populations: not known, unless someone has tested it there."
    yield "- It was trained on slides that have one of the outcomes above, and gives one to every other slide as well."
    yield "- The range between models (low, high) shows whether they agree. It is no confidence interval of the truth."


def _data(config: Config) -> Iterator[str]:
    yield f"{_plain(config['cohort']['headline'])}."
    yield "\nNames of patients and slides are not in this folder, so an overlap with other data cannot be checked."
    if config["task"]["kind"] == "survival":
        yield "Model files hold bounds of times; the outer ones are the shortest and the longest in training."


def _protocol(config: Config) -> Iterator[str]:
    protocol, settings = config["protocol"], config["settings"]
    parts = " / ".join(_range(protocol["samples"][part]) for part in ("train", "val", "test"))
    yield f"- splits: {_plain(protocol['splits'] or 'unnamed')}; by patient"
    yield f"- folds: {protocol['folds']}; here: {', '.join(map(str, protocol['exported']))}"
    yield f"- samples of a fold: {parts} (training / validation / test)"
    seeds = range(settings["seed"], settings["seed"] + config["seeds"])
    averaged = "; their predictions are averaged" if len(seeds) > 1 else ""
    yield f"- seeds of the trainings of a fold: {', '.join(map(str, seeds))}{averaged}"
    yield (
        f"- training: {settings['optimizer']}, learning rate {settings['lr']:g}, at most {settings['epochs']} epochs, "
        f"{settings['batch_samples']} samples per step"
    )
    if max(protocol["samples"]["val"]) > 0:
        chosen = ", temperature and threshold" if config["task"]["kind"] in CLASS_KINDS else ""
        yield f"- chosen on the validation part: the epoch, by {protocol['score']}{chosen}; nothing on the test part"
    else:
        yield "- without a validation part: the last epoch was kept, nothing was calibrated"


def _results(config: Config) -> Iterator[str]:
    if not config["metrics"]:
        yield "There was no test part: how well it predicts is not known."
        return
    one_fold = len(config["protocol"]["exported"]) == 1
    yield "| metric | test part | sd over folds | 95% interval |\n|---|---|---|---|"
    for name, row in config["metrics"].items():
        has_interval = row.get("low") is not None and row.get("high") is not None
        interval = f"{row['low']:.3f} to {row['high']:.3f}" if has_interval else "-"
        yield f"| {name} | {_number(row['mean'])} | {_number(row.get('sd'))} | {interval} |"
    yield ""
    if one_fold:
        yield (
            "By patient, in the test part of this fold; its models have not seen these patients. Intervals are "
            "bootstrap intervals over patients."
        )
        return
    yield (
        "By patient: the mean over folds, each tested on patients that its models have not seen. Intervals are "
        "bootstrap intervals over patients. The mean of all models, which this folder predicts with, has seen all "
        "patients in one fold or another; how well it does is only known from other cohorts."
    )


def _fitted(config: Config) -> Iterator[str]:
    if config["task"]["kind"] not in CLASS_KINDS:
        return
    classes = config["task"].get("classes", ())
    yield "| model | temperature | threshold | kept epoch |\n|---|---|---|---|"
    for model in config["models"]:
        kept = "-" if model["best_epoch"] is None else model["best_epoch"] + 1
        yield f"| {_title(model)} | {model['temperature']:.3f} | {model['threshold']:.3f} | {kept} |"
    yield "\nLogits are divided by the temperature; probabilities are then averaged over the models."
    mean = fmean(model["threshold"] for model in config["models"])
    if len(classes) == 2:
        yield f"{_plain(classes[1])} is predicted from a probability of {mean:.3f} on, the mean of the thresholds."


def _radii(config: Config) -> Iterator[str]:
    if not any(model["radii_steps"] for model in config["models"]):
        return
    step_um = config["step_um"]
    yield "| model | layer | radius of each head, in tile steps |" + (" in um |" if step_um else "")
    yield "|---|---|---|" + ("---|" if step_um else "")
    for model in config["models"]:
        for layer, radii in enumerate(model["radii_steps"], start=1):
            lengths = f" {', '.join(f'{radius * step_um:.0f}' for radius in radii)} |" if step_um else ""
            yield f"| {_title(model)} | {layer} | {', '.join(f'{radius:.2f}' for radius in radii)} |{lengths}"
    yield "\nTiles farther away than the radius are not seen by a head. Heads of two models do not correspond."


def _versions(config: Config) -> Iterator[str]:
    environment = config["environment"]
    packages = {"python": environment.get("python"), **environment.get("packages", {})}
    yield ", ".join(f"{name} {version}" for name, version in packages.items() if version)


def _licence(licence: str | None) -> Iterator[str]:
    if licence:
        yield f"{licence}. Encoders have licences of their own, which may restrict what is made of their features."
    else:
        yield (
            "**None yet.** Nobody may use the model until its owner chooses one: put it into the first lines of this "
            "file (`license: ...`). Mind the licence of the encoder, and the terms of the data."
        )


def _title(model: Mapping[str, Any]) -> str:
    return f"fold {model['fold']}, seed {model['seed']}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(_plain, names))


def _plain(text: str) -> str:
    """Text of others, without the signs that Markdown would act on."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(str(text).split()))
