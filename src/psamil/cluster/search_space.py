"""What a search tries: a file of settings with their values, and the trials that are drawn from it.

lr: {low: 1e-5, high: 1e-3, log: true}      # from a range; log: every order of magnitude is as likely
weight_decay: {low: 0, high: 0.01}
batch_samples: {low: 4, high: 16}           # whole numbers, where the setting is one
model_options.heads: [1, 2, 4]              # one of a list
model_options.tau: {low: 0.05, high: 0.2}   # of a model: whole numbers, where both ends are
model_options.decay: [exponential, gaussian]
task.balance: [weights, sampling]

Names are those of the settings of training, with a dot before what is inside of one.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

import yaml

from psamil.errors import DataError, OptionError
from psamil.recipes import for_model
from psamil.training.settings import TrainingSettings
from psamil.training.tasks import TaskOptions

REMEDY = "correct the file; psamil tune --help has an example"
DIGITS = 4  # of numbers drawn from a range: more would not matter, and would make tables hard to read
REDRAWS = 1000  # of a trial that was drawn before, until the space is taken to hold no other


@dataclass(frozen=True)
class Range:
    """Numbers from low to high; whole ones, where both ends are of type int."""

    low: float
    high: float
    log: bool = False

    def at(self, u: float) -> float:
        """The number at a share u of the way, from 0 to 1: low + u (high - low), or low (high / low)^u."""
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        low, high = (self.low - 0.5, self.high + 0.5) if whole else (self.low, self.high)
        value = low * (high / low) ** u if self.log else low + u * (high - low)
        if whole:
            return min(max(round(value), int(self.low)), int(self.high))
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)


@dataclass(frozen=True)
class Choice:
    """One of these values, each as likely."""

    values: tuple[Any, ...]

    def at(self, u: float) -> Any:
        return self.values[min(int(u * len(self.values)), len(self.values) - 1)]


Space: TypeAlias = dict[str, Range | Choice]


@dataclass(frozen=True)
class Trial:
    """The values of one draw by the names of the space."""

    number: int
    values: dict[str, Any]

    def settings(self, training: TrainingSettings, recipe: str | None = None) -> TrainingSettings:
        """Those of training with these values in their places. OptionError for values that do not fit together.

        What the recipe with which ``training`` began has for its model gives way to what it has for that of the trial,
        or to a preset.
        """
        if recipe is not None:
            options = {
                name.partition(".")[2]: of for name, of in self.values.items() if name.startswith("model_options.")
            }
            training = for_model(training, recipe, self.values.get("model", training.model), options)
        plain = training.to_json()
        for name, value in self.values.items():
            outer, _, inner = name.partition(".")
            plain[outer] = {**plain[outer], inner: value} if inner else value
        return TrainingSettings(**{**plain, "task": TaskOptions(**plain["task"])})

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.values.items())


def read_space(path: Path) -> Space:
    """DataError names the setting that is unknown or whose values cannot be drawn from."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}", "check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(path, f"is not valid YAML: {' '.join(str(error).split())}", REMEDY) from error
    if not isinstance(found, dict) or not found:
        raise DataError(path, "names no settings with their values", REMEDY)
    return {str(name): _values(path, str(name), values) for name, values in found.items()}


def draw_trials(space: Mapping[str, Range | Choice], count: int, seed: int = 0) -> list[Trial]:
    """So many different ones, or all that a small space of choices holds. Other seeds draw others.

    The first trials are the same, however many are drawn.
    """
    if count < 1:
        raise OptionError(f"trials must be at least 1, got {count}")
    generator = random.Random(seed)
    drawn: list[dict[str, Any]] = []
    for _ in range(count):
        for _ in range(REDRAWS):
            values = {name: of.at(generator.random()) for name, of in space.items()}
            if values not in drawn:
                drawn.append(values)
                break
    return [Trial(number, values) for number, values in enumerate(drawn)]


def _values(path: Path, name: str, found: Any) -> Range | Choice:
    wanted = _type_of(path, name)
    if isinstance(found, list) and found:
        return Choice(tuple(_typed(path, name, value, wanted) for value in found))
    if isinstance(found, dict) and {"low", "high"} <= found.keys() <= {"low", "high", "log"}:
        low, high = (_typed(path, name, found[end], wanted) for end in ("low", "high"))
        return _range(path, name, low, high, found.get("log", False))
    raise DataError(path, f"{name!r} is neither a list of values nor {{low, high}} or {{low, high, log}}", REMEDY)


def _range(path: Path, name: str, low: Any, high: Any, log: Any) -> Range:
    for end in (low, high):
        if isinstance(end, bool) or not isinstance(end, int | float) or not math.isfinite(end):
            raise DataError(path, f"{name!r}: the ends of a range are numbers, not {end!r}", REMEDY)
    if not low < high:
        raise DataError(path, f"{name!r}: low = {low} is not below high = {high}", REMEDY)
    if not isinstance(log, bool):
        raise DataError(path, f"{name!r}: log is true or false, not {log!r}", REMEDY)
    if log and low <= 0:
        raise DataError(path, f"{name!r}: a range by orders of magnitude begins above 0, not at {low}", REMEDY)
    return Range(low, high, log)


def _type_of(path: Path, name: str) -> Any:
    """Of a setting. Which options a model has, and of what type, is known when it is made."""
    types = get_type_hints(TrainingSettings)
    del types["model_options"], types["task"]
    types |= {f"task.{option}": wanted for option, wanted in get_type_hints(TaskOptions).items()}
    if re.fullmatch(r"model_options\.\w+", name):
        return object
    if name not in types:
        raise DataError(path, f"unknown setting {name!r}", f"known: {', '.join(types)}, model_options.<option>")
    return types[name]


def _typed(path: Path, name: str, value: Any, wanted: Any) -> Any:
    """A value in the type of the setting: 1e-4, which YAML takes for a text, becomes a number, and 1 becomes 1.0."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    if type(value) is int and not isinstance(value, wanted) and isinstance(0.0, wanted):
        value = float(value)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not object):  # True is an int, too
        kind = wanted.__name__ if isinstance(wanted, type) else wanted
        raise DataError(path, f"{name!r} cannot be {value!r}: it is of type {kind}", REMEDY)
    return value
