"""Models by name: one function per model, the function's name is the model's name."""

import fnmatch
from collections.abc import Callable
from typing import Any

from torch import nn

from psamil.errors import one_of

_BUILDERS: dict[str, Callable[..., nn.Module]] = {}


def register_model(builder: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Decorator: makes ``builder(in_dim, n_out, **options)`` available under its own name."""
    _BUILDERS[builder.__name__] = builder
    return builder


def create_model(name: str, in_dim: int, n_out: int, **options: Any) -> nn.Module:
    """A new model.

    Args:
        name: one of :func:`list_models`.
        in_dim: width of the tile features.
        n_out: number of raw outputs: 1 for two classes, C for C classes, B for survival in B time bins.
        options: of the model; see the documentation of its class.
    """
    if name not in _BUILDERS:
        raise one_of("model", name, _BUILDERS)
    return _BUILDERS[name](in_dim, n_out, **options)


def list_models(pattern: str = "*") -> list[str]:
    """Names of the registered models that match a shell pattern, in alphabetical order."""
    return sorted(fnmatch.filter(_BUILDERS, pattern))
