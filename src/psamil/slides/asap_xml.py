"""Outlines as ASAP writes them, the format of the CAMELYON challenges: XML, in level-0 pixels as OpenSlide counts them.

Each ``Annotation`` belongs to a group (``PartOfGroup``), which is its class; ``None`` stands for no group. Dots, sets
of points and measures mark no area and are passed over; a spline is taken as the polygon of its points.

A file of a stranger: one with a document type is refused before anything in it is read, so that no entity can grow in
memory or pull in another file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn
from xml.etree import ElementTree

import numpy as np

from psamil.errors import DataError
from psamil.slides.annotations import Area

AREAS = ("polygon", "rectangle", "spline")
LEAST_POINTS = 3


class _DocumentTypeError(ValueError):
    """The file declares a document type."""


class _Builder(ElementTree.TreeBuilder):
    def doctype(self, name: str, public: str | None, system: str | None) -> NoReturn:
        raise _DocumentTypeError


def read_asap_xml(path: str | Path) -> list[Area]:
    """Its areas, with the names of their groups; perhaps none."""
    root = _parsed(path)
    if root.tag != "ASAP_Annotations":
        raise DataError(path, f"is XML with the root {root.tag!r}, not of ASAP", "export it from ASAP, or as GeoJSON")
    return [
        Area([_points(path, annotation)], _group(annotation))
        for annotation in root.iter("Annotation")
        if annotation.get("Type", "").lower() in AREAS and len(annotation.findall("./Coordinates/*")) >= LEAST_POINTS
    ]


def _parsed(path: str | Path) -> ElementTree.Element:
    try:
        parser = ElementTree.XMLParser(target=_Builder())
        return ElementTree.parse(path, parser).getroot()
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}", "check the path and its permissions") from error
    except _DocumentTypeError as error:
        raise DataError(path, "declares a document type, which ASAP never does", "do not trust this file") from error
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise DataError(path, f"is not valid XML: {error}", "export it from ASAP again") from error


def _group(annotation: ElementTree.Element) -> str:
    group = annotation.get("PartOfGroup", "")
    return "" if group == "None" else group


def _points(path: str | Path, annotation: ElementTree.Element) -> Any:
    """(n, 2) in their order."""
    corners = annotation.findall("./Coordinates/Coordinate")
    try:
        ordered = sorted(corners, key=lambda corner: float(corner.get("Order", "0")))
        points = np.array([[float(corner.attrib[axis]) for axis in ("X", "Y")] for corner in ordered])
    except (KeyError, ValueError) as error:
        name = annotation.get("Name", "")
        remedy = "export it again, with numbers that have a decimal point"
        raise DataError(path, f"has coordinates of {name!r} that are no numbers: {error}", remedy) from error
    if not np.isfinite(points).all():
        raise DataError(path, "has coordinates that are no numbers", "export it again")
    return points
