"""Labels of single tiles: whether an annotation covers them. They test where a model looks and are never trained on.

One file ``<slide>.npy`` per slide holds one number per tile, in the order of its feature file: 0 for normal tiles,
a number above it for those of a lesion.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from psamil.errors import DataError
from psamil.files import content_hash
from psamil.readers import BagRef, slide_id
from psamil.readers.opening import finite_tiles


@dataclass(frozen=True)
class TileLabels:
    """The label files of a folder."""

    folder: Path
    files: Mapping[str, Path]  # by slide

    @staticmethod
    def open(folder: str | Path) -> TileLabels:
        """Finds the files. None is read yet."""
        files: dict[str, Path] = {}
        for file in sorted(Path(folder).glob("*.npy")):
            other = files.setdefault(slide_id(file), file)
            if other != file:
                raise DataError(file, f"is of the same slide as {other.name}", "keep one of them")
        if not files:
            raise DataError(folder, "holds no tile labels", "name a folder of files <slide>.npy")
        return TileLabels(Path(folder), files)

    def of_slide(self, ref: BagRef, tiles: int, *, dropped: bool = False) -> NDArray[np.bool_] | None:
        """(tiles,) whether each tile of the bag is labelled; None for a slide without a file.

        Args:
            ref: of the slide.
            tiles: how many tiles its bag has.
            dropped: whether the bag was read without its tiles with NaN or infinite features. Labels are about all
                tiles of the feature file; theirs are then left out, too.
        """
        if ref.id not in self.files:
            return None
        path = self.files[ref.id]
        labels = _read(path)
        kept = finite_tiles(ref) if dropped else None
        expected = tiles if kept is None else len(kept)
        if len(labels) != expected:
            cause = f"has {len(labels)} labels, but {ref.path} has {expected} tiles"
            raise DataError(path, cause, "label every tile of the feature file, in its order")
        return labels if kept is None else labels[kept]

    def fingerprint(self, slides: Iterable[str]) -> str:
        """SHA-256 of the labels of these slides."""
        known = [[slide, content_hash(self.files[slide])] for slide in sorted(slides) if slide in self.files]
        return hashlib.sha256(repr(known).encode()).hexdigest()


def _read(path: Path) -> NDArray[np.bool_]:
    try:
        labels = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(path, f"cannot be read: {cause}", "write it with numpy.save") from error
    if labels.ndim != 1 or labels.dtype.kind not in "bui":
        cause = f"is {labels.dtype} of shape {labels.shape}"
        raise DataError(path, cause, "tile labels are one whole number per tile, of shape (tiles,)")
    if labels.dtype.kind == "i" and (labels < 0).any():
        cause = f"has {int((labels < 0).sum())} labels below 0"
        raise DataError(
            path, cause, "0 is a normal tile and a number above it one of a lesion; leave unsure slides out"
        )
    return np.asarray(labels != 0)
