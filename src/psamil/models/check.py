"""Whether a model, yours or one of psamil, does what every model must do.

>>> print(check_model("abmil"))
>>> check_model(MyModel)  # or any function (in_dim, n_out, **options) -> nn.Module

A model that cannot keep a promise by its definition declares it, with the name of the check and the reason:
``exceptions: ClassVar[dict[str, str]] = {"permutation": "tiles are a sequence"}``. A declared exception whose check
passes all the same is an error too: declarations say what is true of the code as it stands.

Everything is seeded, and the state of torch's generator is left as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from psamil.errors import OptionError, PsamilError, one_of
from psamil.models.behaviours import CHECKS, check_shapes, error_text, example_bags
from psamil.models.registry import create_model


class ModelCheckError(PsamilError, AssertionError):
    """A model breaks what models promise. The message lists every failed check."""


@dataclass(frozen=True)
class CheckedModel:
    """The outcome of :func:`check_model`."""

    name: str
    passed: tuple[str, ...]
    exceptions: dict[str, str]  # check -> the reason that the model declares

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.passed)} checks passed ({', '.join(self.passed)})"]
        return "\n".join(lines + [f"  not {check}: {reason}" for check, reason in self.exceptions.items()])


def check_model(
    model: str | Callable[..., nn.Module], in_dim: int = 32, n_out: int | Sequence[int] = (1, 4), **options: Any
) -> CheckedModel:
    """Tries every check on a model; raises :class:`ModelCheckError` that lists what fails.

    Args:
        model: name of a registered model, or what builds one: a class or function ``(in_dim, n_out, **options)``.
        in_dim: width of the tile features.
        n_out: number of raw outputs, or several to try.
        options: of the model.
    """
    if isinstance(model, nn.Module) or not (isinstance(model, str) or callable(model)):
        raise OptionError(
            f"check_model takes the name of a model or what builds one, got {type(model).__name__}; "
            "pass its class or a function (in_dim, n_out) that returns it"
        )
    name = model if isinstance(model, str) else getattr(model, "__name__", type(model).__name__)
    sizes = [n_out] if isinstance(n_out, int) else list(n_out)
    failures: dict[str, list[tuple[str, Exception]]] = {check: [] for check in ("shapes", *CHECKS)}
    declared: dict[str, str] = {}
    bags = example_bags(in_dim)

    for size in sizes:

        def build(size: int = size) -> nn.Module:
            return (
                create_model(model, in_dim, size, **options)
                if isinstance(model, str)
                else model(in_dim, size, **options)
            )

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            declared.update(getattr(build(), "exceptions", {}))
            try:
                check_shapes(build, bags, size)
            except Exception as error:  # of any kind: this is someone's model
                failures["shapes"].append((f"n_out={size}", error))
                continue  # the other checks would say the same again
            for check, function in CHECKS.items():
                try:
                    function(build, bags)
                except Exception as error:
                    failures[check].append((f"n_out={size}", error))

    for check in declared:
        if check not in CHECKS:
            raise one_of(f"check in the exceptions of model {name!r}:", check, CHECKS)
    wrong = [
        f"{check} ({case}): {error_text(error)}"
        for check, found in failures.items()
        if check not in declared
        for case, error in found
    ]
    if not failures["shapes"]:
        wrong += [f"{check}: declared as an exception, but it holds" for check in declared if not failures[check]]
    if wrong:
        first = next((error for check in failures if check not in declared for _, error in failures[check]), None)
        raise ModelCheckError(f"model {name!r} fails:\n" + "\n".join(f"  {line}" for line in wrong)) from first
    return CheckedModel(name, tuple(check for check in failures if check not in declared), declared)
