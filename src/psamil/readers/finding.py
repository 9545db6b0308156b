"""Finds the bags of a folder, whichever tool left them there.

- Files that cannot be used are set aside with the reason; they never end the search.
- What tools write beside features (tilings, masks, pictures, logs, locks) is passed over and counted.
- A slide is found once. The ``.pt`` that CLAM writes for each ``.h5`` is the same bag; features of one slide from two
  encoders are not, and the user has to choose.

Only the structure of files is looked at. Damage inside of the arrays is found when a bag is opened or described.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from psamil.errors import DataError, MissingExtraError, one_of
from psamil.readers.formats import READERS, bag_ref, is_store, members_of
from psamil.readers.hdf5 import CheckedH5
from psamil.readers.tiles import BagRef

SIDECAR_ENDINGS = (".index.npz", ".coordinates.npz", "_patches.h5")
BAG_ENDINGS = (".h5", ".hdf5", ".pt", ".pth", ".npz", ".parquet", ".pq", ".h5ad", ".zarr")  # no other is missed
H5_ENDINGS = (".h5", ".hdf5")
TWIN_FOLDERS = ("h5_files", "pt_files")


@dataclass(frozen=True, order=True)
class SetAside:
    """A file that should be a bag and is none."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Found:
    """The bags of a folder, in order of their ids; what was set aside; and how many other files there are."""

    bags: tuple[BagRef, ...]
    set_aside: tuple[SetAside, ...] = ()
    ignored: int = 0


def find_bags(folder: Path | str, format: str | None = None, member: str | None = None) -> Found:
    """All bags of a folder and the folders below, or of a single file.

    Args:
        folder: where to look.
        format: name of the format, one of ``READERS``; by default each file tells its own.
        member: which features to take from stores that hold those of several encoders.

    Raises:
        DataError: no such folder, or slides that occur more than once, with the places.
    """
    folder = Path(folder)
    if not folder.exists():
        raise DataError(folder, "does not exist", "check the path")
    if format is not None and format not in READERS:
        raise one_of("format", format, READERS)
    bags: list[BagRef] = []
    set_aside: list[SetAside] = []
    ignored = 0
    for path in _candidates(folder):
        try:
            refs = _bags_of(path, format, member)
        except (DataError, MissingExtraError) as error:
            set_aside.append(SetAside(path, _reason(error)))
            continue
        bags += refs
        ignored += not refs
    once = _without_second_copies(bags)
    _refuse_repeated_ids(folder, once)
    return Found(tuple(sorted(once)), tuple(sorted(set_aside)), ignored + len(bags) - len(once))


def _bags_of(path: Path, format: str | None, member: str | None) -> list[BagRef]:
    """The bags in one file; none if it is no bag. DataError if it should be one."""
    if path.name.startswith(".") or path.name.endswith(SIDECAR_ENDINGS) or not (path.is_file() or is_store(path)):
        return []
    lock = path.with_name(f"{path.name}.lock")
    if lock.exists():
        raise DataError(path, "is being written", f"wait; or, if nothing runs any more, delete it and {lock.name}")
    asked = READERS if format is None else (format,)
    found = next((name for name in asked if READERS[name].recognise(path)), None)
    if found is None:
        if format is None and path.name.lower().endswith(BAG_ENDINGS) and not _has_only_coordinates(path):
            raise DataError(path, "is of no known format", "name it with `format=` if it is, or move it elsewhere")
        return []
    names = members_of(path, found, member)
    refs = [bag_ref(path, found, name) for name in names]
    if len({ref.id for ref in refs}) == len(refs):
        return refs
    chosen = [ref for ref in refs if ref.member == member]
    if not chosen:
        raise DataError(path, "has features of several kinds", f"name one with `member=`: {', '.join(map(str, names))}")
    return chosen


def _has_only_coordinates(path: Path) -> bool:
    """Tilings and heatmaps: an h5 with coordinates and without features."""
    if not path.name.lower().endswith(H5_ENDINGS):
        return False
    with CheckedH5(path) as file:
        return "coords" in file.names


def _candidates(folder: Path) -> Iterator[Path]:
    """Every file below the folder, and every store as one."""
    if not folder.is_dir() or is_store(folder):
        yield folder
        return
    visited: set[tuple[int, int]] = set()  # folders can link to each other in circles
    for place, folders, files in os.walk(folder, followlinks=True):
        here = Path(place)
        folders.sort()
        status = here.stat()
        if (status.st_dev, status.st_ino) in visited:
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        stores = [name for name in folders if is_store(here / name)]
        folders[:] = [name for name in folders if name not in stores and not name.startswith(".")]
        yield from (here / name for name in sorted([*stores, *files]))


def _without_second_copies(bags: list[BagRef]) -> list[BagRef]:
    """Features that a tool wrote both as ``.h5`` and as ``.pt`` are one bag: the one that has coordinates."""
    copies: dict[tuple[str, Path], list[BagRef]] = defaultdict(list)
    for ref in bags:
        folder = ref.path.parent
        copies[ref.id, folder.parent if folder.name in TWIN_FOLDERS else folder].append(ref)
    once: list[BagRef] = []
    for refs in copies.values():
        in_h5 = [ref for ref in refs if ref.path.name.lower().endswith(H5_ENDINGS)]
        once += in_h5 or refs
    return once


def _refuse_repeated_ids(folder: Path, bags: list[BagRef]) -> None:
    by_id: dict[str, list[BagRef]] = defaultdict(list)
    for ref in bags:
        by_id[ref.id].append(ref)
    repeated = {id: refs for id, refs in by_id.items() if len(refs) > 1}
    if not repeated:
        return
    id, refs = next(iter(repeated.items()))
    places = sorted({str(ref.path.parent) for refs in repeated.values() for ref in refs})
    cause = f"{len(repeated)} slides occur more than once: {id!r} is in {' and '.join(str(ref.path) for ref in refs)}"
    if len(places) > 1:
        raise DataError(folder, cause, f"name one of these folders instead: {', '.join(places[:10])}")
    raise DataError(folder, cause, "rename one of the files, or move it elsewhere")


def _reason(error: DataError | MissingExtraError) -> str:
    """Cause and remedy, without the path, which is told beside it."""
    if isinstance(error, MissingExtraError):
        return str(error)
    return error.cause + (f"; {error.remedy}" if error.remedy else "")
