"""The folder of exported models: what lies where in it, and whether it is whole.

DIR/
  README.md                    the model card
  config.json                  format, SHA-256 of the files below, and what run.json says that names nobody
  folds/<fold>/seed-<seed>/    model.safetensors, metrics.json (what was fitted on validation)
  folds/<fold>/                with labels of tiles: localisation.json (the threshold of tiles)

Models lie where they do in a run directory, and are loaded in the same way. The sums find damage and models that do not
belong here; who wrote the folder could have written the sums, so they do not tell whether to trust it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from psamil.errors import DataError
from psamil.files import content_hash, read_json

CONFIG_FILE, CARD_FILE = "config.json", "README.md"
FORMAT, FORMAT_VERSION = "psamil exported models", 1
FILE_NAME = re.compile(r"folds/\d+/(localisation\.json|seed-\d+/(metrics\.json|model\.safetensors))")
MAPPINGS = ("files", "settings", "outcome", "reading", "extraction")
REMEDY = "export or download it again"


def read_config(folder: Path) -> dict[str, Any] | None:
    """What ``config.json`` of exported models says; None for a folder of something else."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return None
    config = read_json(path)
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        return None
    version = config.get("format_version")
    if not isinstance(version, int) or version < 1:
        raise DataError(path, f"is damaged: format_version is {version!r}", REMEDY)
    if version > FORMAT_VERSION:
        cause = f"has format version {version}, this psamil reads up to {FORMAT_VERSION}"
        raise DataError(path, cause, "install a newer psamil")
    damaged = [name for name in MAPPINGS if not isinstance(config.get(name), dict)]
    if damaged:
        raise DataError(path, f"is damaged: {damaged[0]} is no mapping", REMEDY)
    return config


def check_models(files: Sequence[Path]) -> None:
    """DataError if these models lie in an exported folder that is not as it was written. Others are left alone."""
    above = files[0].absolute().parents  # not resolved: the cache of the hub is made of links
    config = read_config(above[3]) if len(above) > 3 else None
    if config is None:
        return
    folder = above[3]
    listed: dict[str, Any] = config["files"]
    for name, written in listed.items():
        if not FILE_NAME.fullmatch(name):
            raise DataError(folder / CONFIG_FILE, f"is damaged: it lists {name!r}", REMEDY)
        if not (folder / name).is_file():
            raise DataError(folder / name, "is missing", REMEDY)
        if content_hash(folder / name) != written:
            raise DataError(folder / name, f"is not what was exported: {CONFIG_FILE} has another SHA-256", REMEDY)
    for file in files:
        if file.absolute().relative_to(folder).as_posix() not in listed:
            raise DataError(file, f"is not among the models that {CONFIG_FILE} lists", REMEDY)
