"""Public names that are imported when they are first asked for: processes that only read slides do without torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def importing(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package; ``homes`` says which module each of its names comes from."""

    def find(name: str) -> Any:
        for home, names in homes.items():
            if name in names:
                found = getattr(import_module(home), name)
                setattr(sys.modules[package], name, found)
                return found
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
