"""How features were made: the file that ``psamil extract`` leaves beside them.

Features of two encoders, or of tiles of two sizes, look alike in a file. What a model was trained on is therefore
written into its run, and features that were made in another way are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from psamil.files import read_json

SETTINGS_FILE = "extraction.json"
MAX_DEPTH = 3  # of features below the folder that was given to extract
DESCRIPTIVE = ("psamil_version", "masks", "reference")  # features that differ in these alone are comparable


def extraction_settings(features: str | Path) -> dict[str, Any] | None:
    """Of a folder of features, one inside of it, or a file; None if ``psamil extract`` did not make them."""
    place = Path(features).resolve()
    for folder in (place, *list(place.parents)[:MAX_DEPTH]):
        if (folder / SETTINGS_FILE).is_file():
            found: dict[str, Any] = read_json(folder / SETTINGS_FILE)
            return found
    return None


def differences(made: dict[str, Any], trained: dict[str, Any]) -> list[str]:
    """What of the making of features matters and is not as it was for those that a model was trained on."""
    names = [name for name in trained if name not in DESCRIPTIVE]
    return [f"{name} {made.get(name)!r}, not {trained[name]!r}" for name in names if made.get(name) != trained[name]]
