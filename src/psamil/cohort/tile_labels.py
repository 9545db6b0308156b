"""Labels of single tiles: whether an annotation covers them. They test where a model looks and are never trained on.

One file per slide, about each tile in the order of its feature file:

- ``<slide>.npy``: one number per tile, 0 for normal tiles, a number above it for those of a lesion;
- ``<slide>.npz``, which :func:`psamil.slides.tile_labels.label_tiles` writes: which tiles are ``positive``, the number
  of the lesion (1, 2, ..., 0 for none) of each tile in ``lesions``, and ``lesion_lengths_um``, the major axis of lesion
  1, 2, ..., NaN where it is not known. A lesion may have no tile; tiles around it may be of a lesion without being
  positive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from psamil.errors import DataError
from psamil.files import atomic_write, content_hash
from psamil.readers import BagRef, slide_id
from psamil.readers.opening import finite_tiles

SUFFIXES = (".npy", ".npz")
ARRAYS = ("positive", "lesions", "lesion_lengths_um")  # of a .npz file


@dataclass(frozen=True, eq=False)
class SlideLabels:
    """What annotations say about the tiles of a slide."""

    positive: NDArray[np.bool_]  # (n,)
    lesions: NDArray[np.int64] | None = (
        None  # (n,) number of the lesion, 0 for none; None where lesions have no numbers
    )
    lesion_lengths_um: Mapping[int, float] = field(default_factory=dict)  # of every lesion; NaN where not known

    def take(self, tiles: NDArray[np.bool_]) -> SlideLabels:
        """Of these tiles alone. Lesions stay, even without tiles."""
        kept = None if self.lesions is None else self.lesions[tiles]
        return SlideLabels(self.positive[tiles], kept, self.lesion_lengths_um)


@dataclass(frozen=True)
class TileLabels:
    """The label files of a folder."""

    folder: Path
    files: Mapping[str, Path]  # by slide

    @staticmethod
    def open(folder: str | Path) -> TileLabels:
        """Finds the files. None is read yet."""
        files: dict[str, Path] = {}
        for file in sorted(file for suffix in SUFFIXES for file in Path(folder).glob(f"*{suffix}")):
            other = files.setdefault(slide_id(file), file)
            if other != file:
                raise DataError(file, f"is of the same slide as {other.name}", "keep one of them")
        if not files:
            raise DataError(folder, "holds no tile labels", "name a folder of files <slide>.npy or <slide>.npz")
        return TileLabels(Path(folder), files)

    def of_slide(self, ref: BagRef, tiles: int, *, dropped: bool = False) -> NDArray[np.bool_] | None:
        """(tiles,) whether each tile of the bag is positive; as :meth:`with_lesions`."""
        found = self.with_lesions(ref, tiles, dropped=dropped)
        return None if found is None else found.positive

    def with_lesions(self, ref: BagRef, tiles: int, *, dropped: bool = False) -> SlideLabels | None:
        """Labels of the tiles of the bag, and their lesions; None for a slide without a file.

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
        if len(labels.positive) != expected:
            cause = f"has {len(labels.positive)} labels, but {ref.path} has {expected} tiles"
            raise DataError(path, cause, "label every tile of the feature file, in its order")
        return labels if kept is None else labels.take(kept)

    def count(self, slide: str) -> int:
        """How many tiles its file says are positive."""
        return int(_read(self.files[slide]).positive.sum())

    def fingerprint(self, slides: Iterable[str]) -> str:
        """SHA-256 of the labels of these slides."""
        known = [[slide, content_hash(self.files[slide])] for slide in sorted(slides) if slide in self.files]
        return hashlib.sha256(repr(known).encode()).hexdigest()


def save_labels(path: Path, labels: SlideLabels) -> None:
    """Writes ``<slide>.npz``. Lesions must have numbers."""
    assert labels.lesions is not None
    lengths = np.array([labels.lesion_lengths_um[k + 1] for k in range(len(labels.lesion_lengths_um))], np.float64)
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, positive=labels.positive, lesions=labels.lesions, lesion_lengths_um=lengths)


def _read(path: Path) -> SlideLabels:
    try:
        with path.open("rb") as file:  # NumPy leaves those open that it cannot read
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return SlideLabels(_numbers(path, found) != 0)
            positive, lesions, lengths = (found[name] for name in ARRAYS)
    except KeyError as error:
        raise DataError(path, f"lacks {error}", f"it should hold {', '.join(ARRAYS)}") from error
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(path, f"cannot be read: {cause}", "write it with numpy.save") from error
    positive, lesions = _numbers(path, positive) != 0, _numbers(path, lesions)
    if lesions.shape != positive.shape or lengths.ndim != 1 or lengths.dtype.kind not in "fui":
        cause = f"has {len(positive)} positive, {len(lesions)} lesions and {lengths.dtype} lengths of {lengths.shape}"
        raise DataError(path, cause, "label the tiles again")
    if lesions.max(initial=0) > len(lengths):
        cause = f"has a lesion {lesions.max()}, but lengths of {len(lengths)}"
        raise DataError(path, cause, "lesions are counted 1, 2, ..., and each has a length, if only NaN")
    return SlideLabels(positive, lesions.astype(np.int64), dict(enumerate(lengths.astype(float).tolist(), start=1)))


def _numbers(path: Path, labels: NDArray[Any]) -> NDArray[Any]:
    if labels.ndim != 1 or labels.dtype.kind not in "bui":
        cause = f"is {labels.dtype} of shape {labels.shape}"
        raise DataError(path, cause, "tile labels are one whole number per tile, of shape (tiles,)")
    if labels.dtype.kind == "i" and (labels < 0).any():
        cause = f"has {int((labels < 0).sum())} labels below 0"
        raise DataError(
            path, cause, "0 is a normal tile and a number above it one of a lesion; leave unsure slides out"
        )
    return labels
