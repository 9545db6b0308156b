"""What the viewer shows: runs, and the slides that there are features of.

Names in addresses are opaque: hashes that mean nothing to anybody but the study, which looks them up. No part of an
address ever becomes part of a path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from psamil.cohort.tile_labels import TileLabels
from psamil.errors import DataError
from psamil.evaluation.run_folder import features_of, read_run
from psamil.evaluation.sample_predictions import RunPredictions
from psamil.readers import BagRef, find_bags, slide_id
from psamil.slides import find_slides


@dataclass(frozen=True)
class StudiedSlide:
    """A slide with features, and perhaps its picture and labels of its tiles."""

    ref: BagRef
    picture: Path | None
    has_labels: bool

    @property
    def name(self) -> str:
        return self.ref.id

    @property
    def id(self) -> str:
        return opaque_id(self.name)


@dataclass(frozen=True)
class StudiedRun:
    """A run: one model, as a user sees it, in as many copies as it has folds and seeds."""

    folder: Path
    name: str
    about: Mapping[str, Any]

    @property
    def id(self) -> str:
        return opaque_id(str(self.folder))

    @property
    def reading(self) -> dict[str, Any]:
        """How features were read in training: options of :func:`psamil.open_bag`."""
        return dict(self.about.get("reading") or {})

    @cached_property
    def predictions(self) -> RunPredictions:
        return RunPredictions.of(self.folder)


@dataclass(frozen=True, eq=False)
class Study:
    """Runs over the same slides."""

    runs: Mapping[str, StudiedRun]  # by id, in the order in which they were given
    slides: Mapping[str, StudiedSlide]
    labels: TileLabels | None
    outside: int = 0  # pictures that are links out of the folder of slides, and are not shown

    @staticmethod
    def open(
        runs: Sequence[Path],
        features: Path | None = None,
        slides: Path | None = None,
        tile_labels: Path | None = None,
    ) -> Study:
        """Finds what belongs together.

        Args:
            runs: run directories, whose samples have the same names.
            features: folder of features; by default the one that the first run was trained on.
            slides: folder of slides. What links in it lead to outside of it is not shown.
            tile_labels: folder of labels of tiles.
        """
        folders = [folder.resolve() for folder in runs]
        names = [folder.name for folder in folders]
        if len(set(names)) < len(names):
            names = [f"{folder.parent.name}/{folder.name}" for folder in folders]
        studied = [StudiedRun(folder, name, read_run(folder)) for folder, name in zip(folders, names, strict=True)]
        _refuse_other_tiles(studied)
        folder = features_of(folders[0], features)
        found = find_bags(folder)
        if not found.bags:
            raise DataError(folder, "has no features of a known format", "look into it with psamil inspect")
        pictures, outside = ({}, 0) if slides is None else pictures_below(slides)
        labels = None if tile_labels is None else TileLabels.open(tile_labels)
        shown = [
            StudiedSlide(ref, pictures.get(ref.id), labels is not None and ref.id in labels.files) for ref in found.bags
        ]
        _refuse_strangers(studied, shown, features)
        if pictures and all(slide.picture is None for slide in shown):
            cause = f"has slides named like {min(pictures)!r}, the features are named like {shown[0].name!r}"
            raise DataError(slides, cause, "name the folder of the slides that the features were made of")
        return Study({run.id: run for run in studied}, {slide.id: slide for slide in shown}, labels, outside)


def opaque_id(name: str) -> str:
    """The same for the same name, whatever else there is."""
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def pictures_below(folder: Path) -> tuple[dict[str, Path], int]:
    """The slides of a folder by name, and how many links lead out of it: what they lead to is none of its slides."""
    inside = folder.resolve()
    resolved = {slide_id(path): path.resolve() for path in find_slides(folder)}
    kept = {name: path for name, path in resolved.items() if path.is_relative_to(inside)}
    return kept, len(resolved) - len(kept)


def _refuse_other_tiles(runs: Sequence[StudiedRun]) -> None:
    """Runs that leave out tiles cannot be shown tile by tile beside runs that do not."""
    dropping = [run.reading.get("non_finite") == "drop" for run in runs]
    if any(dropping) and not all(dropping):
        cause = "was trained without the tiles that have NaN or infinite features, other runs with them"
        raise DataError(runs[dropping.index(True)].folder, cause, "look at them one at a time")


def _refuse_strangers(runs: Sequence[StudiedRun], slides: Sequence[StudiedSlide], features: Path | None) -> None:
    """Features of which no run knows a single slide are the wrong ones, more often than not."""
    for run in runs:
        if run.predictions.samples and not any(run.predictions.sample_of(slide.name) for slide in slides):
            known = sorted(run.predictions.samples)[0]
            cause = f"has features of {len(slides)} slides ({slides[0].name!r}, ...), none of which is in {run.folder}"
            raise DataError(features or "the folder of features", cause, f"its samples are named like {known!r}")
