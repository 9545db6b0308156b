"""Micrometres per pixel of level 0, as a file tells them. They are read, or given by the user; never guessed."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psamil.errors import DataError, OptionError

PLAUSIBLE_UM = (0.02, 20.0)  # beyond: 72 dpi and the like, which are about printing, and magnifications
LARGEST_ANISOTROPY = 0.02
GIVE_MPP = "give the micrometres per pixel of the scan, as in --mpp 0.5 or in a table with the mpp of each slide"
UNITS_UM = {"µm": 1.0, "um": 1.0, "micrometer": 1.0, "micron": 1.0, "nm": 1e-3, "mm": 1e3, "cm": 1e4, "m": 1e6}
TIFF_UNITS_UM = {2: 25400.0, 3: 10000.0}  # inch, centimetre


def mpp_of(facts: Mapping[str, str], path: Path) -> float:
    """The mean of both axes.

    Raises:
        DataError: where it is not known, is none of a microscope, or differs by more than 2% between the axes.
    """
    try:
        x, y = (float(facts[key]) for key in ("mpp-x", "mpp-y"))
    except (KeyError, ValueError):
        power = facts.get("objective-power")
        # A hint and not an answer: 40x is 0.23 to 0.28 um on usual scanners.
        hint = f" (its objective power is {power})" if power else ""
        raise DataError(path, f"does not say how large its pixels are{hint}", GIVE_MPP) from None
    if not all(is_plausible(side) for side in (x, y)):
        cause = f"says that its pixels are {x:g} x {y:g} um large, which no scanned slide has"
        raise DataError(path, cause, GIVE_MPP)
    if abs(x - y) > LARGEST_ANISOTROPY * min(x, y):
        cause = f"has pixels that are not square: {x:g} x {y:g} um"
        raise DataError(path, cause, "resample it to square pixels, or, if the file is wrong, " + GIVE_MPP)
    return (x + y) / 2


def is_plausible(mpp: float) -> bool:
    """Whether scanned slides have such pixels. NaN has not."""
    return PLAUSIBLE_UM[0] <= mpp <= PLAUSIBLE_UM[1]


def checked_mpp(mpp: float) -> float:
    """What a user says. OptionError for what no scanned slide has."""
    if not is_plausible(mpp):
        low, high = PLAUSIBLE_UM
        hint = "; a magnification is not a resolution: 40x is about 0.25, 20x about 0.5" if mpp > high else ""
        raise OptionError(f"mpp is in micrometres per pixel, between {low:g} and {high:g}, got {mpp:g}{hint}")
    return float(mpp)


def tiff_facts(file: Any) -> dict[str, str]:
    """From the OME-XML of an open TIFF file, else from its resolution tags, if they come with a unit."""
    if file.is_ome and (facts := _ome_facts(file.ome_metadata or "")):
        return facts
    tags = file.pages[0].tags
    unit = TIFF_UNITS_UM.get(int(tags["ResolutionUnit"].value)) if "ResolutionUnit" in tags else None
    if unit is None or "XResolution" not in tags or "YResolution" not in tags:
        return {}
    ratios = {"mpp-x": tags["XResolution"].value, "mpp-y": tags["YResolution"].value}
    return {key: str(unit * below / above) for key, (above, below) in ratios.items() if above}


def _ome_facts(text: str) -> dict[str, str]:
    try:
        pixels = next((node for node in ElementTree.fromstring(text).iter() if node.tag.endswith("}Pixels")), None)
    except ElementTree.ParseError:
        return {}
    if pixels is None:
        return {}
    facts = {}
    for axis in ("X", "Y"):
        size, unit = pixels.get(f"PhysicalSize{axis}"), pixels.get(f"PhysicalSize{axis}Unit", "µm")
        if size is None or unit not in UNITS_UM:
            return {}
        facts[f"mpp-{axis.lower()}"] = str(float(size) * UNITS_UM[unit])
    return facts
