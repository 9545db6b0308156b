"""Feature files of the field, each opened as what it is.

>>> found = find_bags("features")  # whichever tool wrote them
>>> bag = open_bag(found.bags[0])  # features as they are, positions in tile steps
"""

from typing import TYPE_CHECKING

from psamil.lazy import importing
from psamil.readers.ids import slide_id

if TYPE_CHECKING:
    from psamil.readers.finding import Found, SetAside, find_bags
    from psamil.readers.formats import READERS
    from psamil.readers.opening import BagSummary, describe_bag, open_bag
    from psamil.readers.places import TilePlaces, tile_places
    from psamil.readers.tiles import BagRef, Tiles

__all__ = [
    "READERS",
    "BagRef",
    "BagSummary",
    "Found",
    "SetAside",
    "TilePlaces",
    "Tiles",
    "describe_bag",
    "find_bags",
    "open_bag",
    "slide_id",
    "tile_places",
]

__getattr__ = importing(
    __name__,
    {
        "psamil.readers.finding": ("Found", "SetAside", "find_bags"),
        "psamil.readers.formats": ("READERS",),
        "psamil.readers.opening": ("BagSummary", "describe_bag", "open_bag"),
        "psamil.readers.places": ("TilePlaces", "tile_places"),
        "psamil.readers.tiles": ("BagRef", "Tiles"),
    },
)
