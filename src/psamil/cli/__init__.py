"""The command line: every verb is a plain function whose signature is its options.

``--config file.yaml`` gives options by file; those on the command line win. Options may be written with dashes, a
yes/no option alone means yes, and an option of several values takes them one after the other: ``--classes MSS MSI``, or
as a list: ``--classes '[MSS, MSI]'``. ``--recipe`` gives settings of training that all others win over.
"""

from __future__ import annotations

import inspect as introspection
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from psamil.cli.compare import compare
from psamil.cli.demo import demo
from psamil.cli.evaluate import evaluate
from psamil.cli.explain import explain
from psamil.cli.export import export
from psamil.cli.extract import extract
from psamil.cli.inspect import inspect
from psamil.cli.predict import predict
from psamil.cli.report import report
from psamil.cli.reproduce import reproduce
from psamil.cli.serve import serve
from psamil.cli.train import train
from psamil.cli.tune import tune
from psamil.cohort.simulation import simulate
from psamil.errors import PsamilError
from psamil.recipes import DEFAULT_RECIPE, RECIPES, seeds_of_recipe, settings_of_recipe, with_own_options
from psamil.slides.procedural import draw_slides
from psamil.training.settings import TrainingSettings

PRINT_CONFIG = "--print_config"
VERBS: dict[str, Any] = {
    "extract": extract,
    "inspect": inspect,
    "simulate": simulate,
    "draw-slides": draw_slides,
    "train": train,
    "tune": tune,
    "evaluate": evaluate,
    "predict": predict,
    "explain": explain,
    "compare": compare,
    "report": report,
    "reproduce": reproduce,
    "serve": serve,
    "export": export,
    "demo": demo,
}


def main(args: Sequence[str] | None = None) -> None:
    """Runs a verb. A path that it returns is printed, a number is the exit code.

    What a user can mend ends in one line and exit code 2; a traceback is for our bugs.
    """
    logging.captureWarnings(True)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("psamil.readers").setLevel(logging.ERROR)  # verbs tell what readers have to say in their own way
    plain = list(_plain(sys.argv[1:] if args is None else args))
    try:
        verb, chosen = _chosen(plain)
        result = verb(**chosen)
    except PsamilError as error:
        print(f"psamil: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("psamil: stopped", file=sys.stderr)
        sys.exit(130)
    if isinstance(result, Path):
        print(f"wrote {result}")
    sys.exit(result if isinstance(result, int) else 0)


def _chosen(plain: Sequence[str]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The verb and its options. Settings of training that the user does not give are those of the recipe."""
    parser = _parser(settings_of_recipe(DEFAULT_RECIPE, TrainingSettings.model), seeds_of_recipe(DEFAULT_RECIPE))
    given = parser.parse_args([word for word in plain if not word.startswith(PRINT_CONFIG)], defaults=False)
    verb = VERBS[given.verb]
    taken = introspection.signature(verb).parameters
    own = given[given.verb]
    recipe = own.get("recipe") or DEFAULT_RECIPE
    if "training" in taken:
        of_recipe = settings_of_recipe(recipe, own.get("training.model") or TrainingSettings.model)
        parser = _parser(of_recipe, seeds_of_recipe(recipe))
    if any(word.startswith(PRINT_CONFIG) for word in plain):
        parser.parse_args(plain)  # prints, and ends
    chosen = vars(parser.instantiate(parser.parse_object(given))[given.verb])
    if "training" in taken:
        of_model = with_own_options(of_recipe.model_options, chosen["training"].model_options)
        chosen |= {"training": replace(chosen["training"], model_options=of_model), "recipe": recipe}
        if chosen["seeds"] is None:  # said so: --seeds null
            chosen["seeds"] = seeds_of_recipe(recipe)
    return verb, {name: value for name, value in chosen.items() if name in taken}


def _parser(training: TrainingSettings, seeds: int) -> Any:
    """With these settings of training, and so many trainings, as those that hold where the user gives none."""
    from jsonargparse import ArgumentParser

    import psamil

    parser = ArgumentParser(
        prog="psamil",
        version=psamil.__version__,
        description="Slide-level learning from whole-slide images with spatial context.",
    )
    verbs = parser.add_subcommands(dest="verb", metavar="VERB")
    for name, function in VERBS.items():
        text = introspection.getdoc(function) or ""
        summary = text.split("\n", 1)[0]
        example = next((line.strip() for line in text.splitlines() if line.startswith("Example:")), None)
        of_verb = ArgumentParser(description=summary, epilog=example)
        of_verb.add_argument("--config", action="config", help="YAML file of options")
        parameters = introspection.signature(function).parameters
        options: set[str | int] = {name for name, of in parameters.items() if of.kind is of.KEYWORD_ONLY}
        positional: set[str | int] = {name for name in parameters if name not in options}
        of_verb.add_function_arguments(function, as_group=False, as_positional=True, skip=options)
        of_verb.add_function_arguments(function, as_group=False, skip=positional)
        if "training" in parameters:
            recipes = " or ".join(f'"{recipe}"' for recipe in RECIPES)
            text = f"settings of training to begin with: {recipes}"
            if "recipe" not in parameters:
                of_verb.add_argument("--recipe", default=DEFAULT_RECIPE, help=text)
            # options of the model are merged later: a preset takes the place of the recipe's
            of_verb.set_defaults(training={**training.to_json(), "model_options": {}})
            if parameters["seeds"].default is None:
                of_verb.set_defaults(seeds=seeds)
        verbs.add_subcommand(name, of_verb, help=summary)
    return parser


def _plain(args: Sequence[str]) -> Iterator[str]:
    """Options as the parser wants them: underscores, a value for yes/no options, JSON for several values."""
    function = VERBS.get(args[0]) if args else None
    parameters = introspection.signature(function).parameters if function else {}
    several = str(next(iter(parameters.values())).annotation).startswith("list[Path]") if parameters else False
    paths: list[str] = []
    rest = list(args)
    is_value = True  # the verb, and what follows an option
    while rest:
        arg = rest.pop(0)
        name, equals, value = arg.partition("=")
        if not name.startswith("--"):
            if several and not is_value and not arg.startswith("-"):
                paths.append(arg)
            else:
                yield arg
            is_value = False
            continue
        is_value = not equals
        name = name[2:].replace("-", "_")
        parameter = parameters.get(name)
        alone = not equals and (not rest or rest[0] not in ("true", "false"))
        if parameter is not None and isinstance(parameter.default, bool) and alone:
            yield f"--{name}=true"
            is_value = False
        elif parameter is not None and str(parameter.annotation).startswith(("list[str]", "list[Path]")):
            values = [value] if equals else []
            while rest and not equals and not rest[0].startswith("--"):
                values.append(rest.pop(0))
            if str(parameter.annotation).startswith("list[Path]"):  # the verb's own paths, by name
                paths += _listed(values)
            else:
                yield f"--{name}={json.dumps(_listed(values))}"
            is_value = False
        else:
            yield f"--{name}{equals}{value}"
    if paths:
        name, first = next(iter(parameters.items()))
        listed = json.dumps(paths)
        yield listed if first.default is first.empty else f"--{name}={listed}"


def _listed(values: list[str]) -> list[str]:
    """Values one after the other, or as one list of YAML or JSON: ``[MSS, MSI]``."""
    if len(values) != 1 or not (values[0].startswith("[") and values[0].endswith("]")):
        return values
    try:
        items = yaml.load(values[0], Loader=yaml.BaseLoader)  # which makes texts alone
    except yaml.YAMLError:
        return values
    return items if all(isinstance(item, str) for item in items) else values
