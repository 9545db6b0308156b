"""What the columns of a table of instances mean, told by their names."""

from __future__ import annotations

import re
from dataclasses import dataclass

MIN_NUMBERED_COLUMNS = 16
UNIT_WORDS = {"um": "um", "µm": "um", "μm": "um", "micron": "um", "microns": "um", "px": "px", "pixel": "px"}
PLACE_WORDS = {"centroid", "center", "centre", "cell", "nucleus", "spot", "pos", "position", "coord", "coordinate"}
PLACE_WORDS |= {"coords", "location", "spatial", "global", "pixels", *UNIT_WORDS}
BAG_WORDS = ("slide", "image", "sample", "bag", "core", "fov", "roi")
FIELD_WORDS = (
    "fov",
    "roi",
    "core",
    "image",
    "sample",
    "bag",
)  # parts that can have positions of their own, finest first
TYPE_NAMES = {"celltype", "phenotype", "class", "classification", "cellclass", "cellphenotype", "type", "annotation"}
TYPE_NAMES |= {"celltypes", "celltypename"}
NO_FEATURE_WORDS = {"id", "ids", "idx", "index", "unnamed", "barcode", "row", "col", "x", "y", "z", *BAG_WORDS}
NO_FEATURE_WORDS |= {"label", "labels", "target", "outcome", "group", "patient", "case", "subject", "person", "donor"}
NO_FEATURE_WORDS |= {"cohort", "fold", "split", "event", "censorship", "survival", "time"}
NO_FEATURE_WORDS |= {f"{word}s" for word in NO_FEATURE_WORDS if len(word) > 2}
# Taken only as whole words: OS9 and MSI1 are proteins.
CLINICAL_WORDS = {"os", "pfs", "dfs", "rfs", "efs", "dss", "pfi", "death", "dead", "alive", "vital", "status", "days"}
CLINICAL_WORDS |= {
    "months",
    "years",
    "age",
    "sex",
    "gender",
    "race",
    "ethnicity",
    "grade",
    "stage",
    "msi",
    "mss",
    "tmb",
}
CLINICAL_WORDS |= {"response", "responses", "responder", "recurrence", "relapse", "progression", "treatment", "therapy"}
CLINICAL_WORDS |= {"arm", "diagnosis", "histology", "subtype", "censored", "censor", "followup", "site", "batch"}


@dataclass(frozen=True)
class Columns:
    """What the columns of a table mean."""

    x: str | None
    y: str | None
    unit: str
    bag: str | None
    field: str | None  # part of the bag that can have positions of its own
    type: str | None
    features: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def used(self) -> list[str]:
        places = (self.x, self.y, self.bag, self.field, self.type)
        return [name for name in places if name is not None] + list(self.features)


def meaning_of(columns: dict[str, str]) -> Columns | None:
    """What columns of these names and kinds ("number" or "text") mean; None if they are not those of a bag."""
    x, y, unit = position_columns([name for name, kind in columns.items() if kind == "number"])
    if x is None and not _are_numbered_features(columns):
        return None
    is_global = x is not None and "global" in _words(x)  # one frame for all fields of view of a slide
    bag = bag_column([name for name in columns if not (is_global and {"fov", "roi"} & set(_words(name)))])
    field = None if x is None or is_global or bag is None else bag_column([n for n in columns if n != bag], FIELD_WORDS)
    type_column = next((name for name in columns if "".join(_words(name)) in TYPE_NAMES), None)
    features = [
        name
        for name, kind in columns.items()
        if kind == "number" and name not in (x, y, bag, field, type_column) and not _is_no_feature(name)
    ]
    if not features and type_column is None:
        return None
    used = {x, y, bag, field, type_column, *features}
    left_out = tuple(name for name in columns if name not in used)
    return Columns(x, y, unit, bag, field, type_column, tuple(features), left_out)


def bag_column(names: list[str], words: tuple[str, ...] = BAG_WORDS) -> str | None:
    """The column that says which bag a row belongs to."""
    for word in words:
        for name in names:
            if "".join(_words(name)) in (word, f"{word}id", f"{word}name", f"{word}number", f"{word}nr"):
                return name
    return None


def _is_no_feature(name: str) -> bool:
    whole_words = set(re.findall(r"[^\W_]+", name.lower()))
    return bool(NO_FEATURE_WORDS & set(_words(name)) or CLINICAL_WORDS & whole_words)


def _words(name: str) -> list[str]:
    """Lower-case words of a column's name: "CenterX_global_px" is center, x, global, px."""
    return re.findall(r"[^\W\d_]+|\d+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def position_columns(names: list[str]) -> tuple[str | None, str | None, str]:
    """Columns of x and y, in micrometres if there are such, and their unit."""
    places: dict[tuple[str, ...], dict[str, str]] = {}
    for name in names:
        words = _words(name)
        axes = [word for word in words if word in ("x", "y")]
        others = tuple(sorted(word for word in words if word not in ("x", "y")))
        if len(axes) == 1 and set(others) <= PLACE_WORDS:
            places.setdefault(others, {}).setdefault(axes[0], name)
    found = []
    for others, axes_of_place in places.items():
        unit = next((UNIT_WORDS[word] for word in others if word in UNIT_WORDS), "px")
        if len(axes_of_place) == 2:
            found.append((unit != "um", len(others), axes_of_place["x"], axes_of_place["y"], unit))
    if not found:
        return None, None, "px"
    _, _, x, y, unit = min(found)
    return x, y, unit


def _are_numbered_features(columns: dict[str, str]) -> bool:
    """Whether all columns are numbers, and their names one word, or none, and a running number."""
    names = [name for name in columns if not name.startswith("Unnamed")]
    numbered = [re.fullmatch(r"(.*?)(\d+)", name) for name in names if columns[name] == "number"]
    stems = {match[1] if match else None for match in numbered}
    return len(numbered) == len(names) >= MIN_NUMBERED_COLUMNS and len(stems) == 1 and None not in stems
