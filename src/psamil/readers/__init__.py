"""Feature files of the field, each opened as what it is.

>>> found = find_bags("features")  # whichever tool wrote them
>>> bag = open_bag(found.bags[0])  # features as they are, positions in tile steps
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from psamil.readers.ids import slide_id

if TYPE_CHECKING:
    from psamil.readers.finding import Found, SetAside, find_bags
    from psamil.readers.formats import READERS
    from psamil.readers.opening import BagSummary, describe_bag, open_bag
    from psamil.readers.tiles import BagRef, Tiles

__all__ = [
    "READERS",
    "BagRef",
    "BagSummary",
    "Found",
    "SetAside",
    "Tiles",
    "describe_bag",
    "find_bags",
    "open_bag",
    "slide_id",
]

_HOMES = {
    "psamil.readers.finding": ("Found", "SetAside", "find_bags"),
    "psamil.readers.formats": ("READERS",),
    "psamil.readers.opening": ("BagSummary", "describe_bag", "open_bag"),
    "psamil.readers.tiles": ("BagRef", "Tiles"),
}


def __getattr__(name: str) -> Any:
    """Imports a name when it is first asked for, as ``psamil`` does."""
    for home, names in _HOMES.items():
        if name in names:
            globals()[name] = getattr(import_module(home), name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
