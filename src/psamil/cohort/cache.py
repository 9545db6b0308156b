"""Bags in one contiguous file each, so that every epoch after the first reads them as fast as the disk allows.

Feature files of the field store one tile per chunk, in rows of several files, or compressed. The cache reads a bag once
through :func:`psamil.readers.open_bag` and keeps the result; opening it again maps the file into memory and copies
nothing.

- The name of an entry is a hash of what the bag is made of: the content of its files, the reading options, the version
  of the code. A file that changes gets a new entry; a moved cohort finds its old ones.
- The content of a file is hashed once and remembered by path, size, time of change and inode.
- Entries are written under a temporary name and renamed. Two processes that build the same entry write the same
  content, and the later one replaces the earlier one without harm to its readers.
- A cache that cannot be written is no reason to do without a bag: it is read from its files, and a warning is given.
- An entry begins with a checksum and one line of JSON (``head -1`` shows it), then the arrays. A damaged or truncated
  entry is built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import time
import warnings
import zlib
from bisect import bisect_left
from dataclasses import asdict, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from psamil.bag import Bag, TileStep
from psamil.errors import DataError, OptionError
from psamil.files import atomic_write, content_hash, files_below, read_json, write_json
from psamil.readers import open_bag
from psamil.readers.ids import SLIDE_EXTENSIONS
from psamil.readers.tiles import BagRef

PACKAGE_VERSION = version("psamil")
CACHE_VERSION = 1  # to be raised when the layout of entries, or what readers make of a file, changes
ALIGNMENT = 64  # bytes
HEADER_LIMIT = 1 << 24  # bytes
ABANDONED_S = 3600.0  # age of a temporary file whose writer must have been killed
PARTS = ("entries", "sources")  # folders of the cache
COMPANION_FOLDERS = ("patches", "h5_files", "tiles", "wsi_states")
COMPANION_TABLES = ("df_slide.csv",)
NO_COMPANIONS = (".lock", ".tmp", ".zarr", *SLIDE_EXTENSIONS)


class Identity(NamedTuple):
    """What tells, without reading, whether a file or folder is still the one that was hashed."""

    size: int
    mtime_ns: int
    inode: int

    @staticmethod
    def of(path: Path) -> Identity:
        try:
            stats = [file.stat() for file in files_below(path)]
        except OSError as error:
            raise DataError(path, f"cannot be read: {error.strerror}", "check the path and its permissions") from error
        return Identity(
            sum(s.st_size for s in stats), max((s.st_mtime_ns for s in stats), default=0), sum(s.st_ino for s in stats)
        )


class BagCache:
    """Opens bags, each from its source the first time and from the cache afterwards.

    Args:
        folder: of the cache; by default ``psamil/bags`` in the user's cache folder.
        verify: check the checksum of all content whenever an entry is opened, not only when it is built.
        reading: options of :func:`psamil.readers.open_bag`.
    """

    def __init__(self, folder: str | Path | None = None, *, verify: bool = False, **reading: Any) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        self.verify, self.reading = verify, reading
        self._contents: dict[Path, tuple[Identity, str]] = {}
        self._is_writable = True  # as long as nothing is known to the contrary
        for place in (*self.folder.parents, self.folder, *(self.folder / part for part in PARTS)):
            if os.path.lexists(place) and not os.path.isdir(place):
                cause = f"is a file where the cache {self.folder} needs a folder"
                raise DataError(place, cause, "move it elsewhere, or choose another folder for the cache")

    def load(self, bag: BagRef | str | Path, *, max_tiles: int | None = None, seed: int = 0, epoch: int = 0) -> Bag:
        """The bag, or a sample of its tiles as :func:`sample_tiles` draws it. Features keep their precision."""
        loaded = self._load(bag)
        return loaded if max_tiles is None else sample_tiles(loaded, max_tiles, seed=seed, epoch=epoch)

    def size_bytes(self) -> int:
        """What the cache takes on the disk."""
        return sum(file.stat().st_size for file in files_below(self.folder)) if self.folder.is_dir() else 0

    def clear(self) -> None:
        """Removes all entries."""
        self._contents.clear()
        for part in PARTS:
            if (self.folder / part).is_dir():
                shutil.rmtree(self.folder / part)

    def _load(self, bag: BagRef | str | Path) -> Bag:
        path, reading = Path(bag.path if isinstance(bag, BagRef) else bag), dict(self.reading)
        if isinstance(bag, BagRef):
            reading |= {"format": bag.format, "member": bag.member}
        sources = [path, *companions(path), *(value for value in reading.values() if isinstance(value, Path))]
        contents = [(source.name, self._content(source)) for source in sources]
        key = _hash([CACHE_VERSION, PACKAGE_VERSION, contents, reading])
        entry = self.folder / "entries" / key[:2] / f"{key}.bag"
        try:
            return read_entry(entry, key, verify=self.verify)
        except (OSError, DataError):  # not there, damaged, or not for us to read
            pass
        before = [Identity.of(source) for source in sources]
        loaded = open_bag(path, **reading)
        if before != [Identity.of(source) for source in sources]:
            raise DataError(path, "changed while it was read", "try again when its writer is done")
        if not self._is_writable:
            return loaded
        try:
            _remove_abandoned(entry)
            write_entry(entry, loaded, key)
            return read_entry(entry, key, verify=True)
        except (OSError, DataError) as error:
            self._give_up_writing(error)
            return loaded

    def _content(self, source: Path) -> str:
        """Hash of the source's content; only if the source is new or changed, it is read."""
        source, now = source.absolute(), Identity.of(source)
        memory = self.folder / "sources" / f"{_hash(str(source))[:32]}.json"
        if source not in self._contents:
            with contextlib.suppress(DataError, KeyError, TypeError):
                known = read_json(memory)
                self._contents[source] = Identity(*known["identity"]), str(known["content"])
        if source not in self._contents or self._contents[source][0] != now:
            try:
                self._contents[source] = now, content_hash(source)
            except OSError as error:
                cause = f"cannot be read: {error.strerror}"
                raise DataError(source, cause, "check the path and its permissions") from error
            self._remember(memory, {"path": str(source), "identity": now, "content": self._contents[source][1]})
        return self._contents[source][1]

    def _remember(self, memory: Path, what: dict[str, Any]) -> None:
        if not self._is_writable:
            return
        try:
            write_json(memory, what)
        except DataError as error:
            self._give_up_writing(error)

    def _give_up_writing(self, error: Exception) -> None:
        """From now on nothing is written: on a full disk, every attempt would take the room that others need."""
        self._is_writable = False
        warnings.warn(f"{error}; until then, bags are read from their files, which is slower", stacklevel=5)


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/psamil/bags``, or the same below ``~/.cache``."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "psamil" / "bags"


def companions(path: Path) -> list[Path]:
    """Files that a reader may join with this one: coordinates, sizes of tiles, micrometres per pixel.

    They lie in the folder of the bag or in folders of known names around it and begin with the name of the slide. One
    too many does no harm; a change of one that is missing here would go unnoticed.
    """
    home, stem = os.path.dirname(os.path.abspath(path)), path.stem
    folders = _folders_around(home)
    if os.path.basename(home) in ("h5_files", "pt_files"):
        jobs = os.path.dirname(os.path.dirname(home))
        folders = (*folders, *(os.path.join(jobs, name, "patches") for name in _names(jobs)))
    found = [f"{home}/{name}" for name in COMPANION_TABLES if name in _names(home)]
    for folder in dict.fromkeys(folders):
        names, is_home = _names(folder), folder == home
        for name in names[bisect_left(names, stem + ".") : bisect_left(names, stem + "`")]:  # "`" follows "_"
            is_of_slide = name[len(stem)] == "." or (name[len(stem)] == "_" and not is_home)
            if is_of_slide and not name.lower().endswith(NO_COMPANIONS) and not (is_home and name == path.name):
                found.append(f"{folder}/{name}")
    return [Path(name) for name in found]


@lru_cache(maxsize=64)
def _folders_around(home: str) -> tuple[str, ...]:
    parents = [home, *map(str, list(Path(home).parents)[:3])]
    return home, *(os.path.join(parent, name) for parent in parents for name in COMPANION_FOLDERS)


def _names(folder: str) -> tuple[str, ...]:
    """Sorted names of what a folder holds, listed again only when it has changed."""
    try:
        return _names_at(folder, os.stat(folder).st_mtime_ns)
    except OSError:
        return ()


@lru_cache(maxsize=64)
def _names_at(folder: str, changed_ns: int) -> tuple[str, ...]:
    return tuple(sorted(os.listdir(folder)))


def sample_tiles(bag: Bag, max_tiles: int, *, seed: int = 0, epoch: int = 0) -> Bag:
    """At most ``max_tiles`` tiles of the bag, in their order, each set of tiles as probable as any other.

    Which ones depends on the seed, the epoch and the name of the bag alone: not on the order of bags, and not on the
    number of workers.
    """
    if max_tiles < 1:
        raise OptionError(f"max_tiles must be at least 1, got {max_tiles}")
    if bag.n <= max_tiles:
        return bag
    random = np.random.default_rng(int(_hash([seed, epoch, bag.id]), 16))
    tiles = torch.from_numpy(np.sort(random.choice(bag.n, max_tiles, replace=False)))
    slides = torch.searchsorted(tiles, bag.slides)
    return replace(bag, features=bag.features[tiles], xy=bag.xy[tiles], slides=slides)


def write_entry(path: Path, bag: Bag, key: str) -> None:
    """Writes a bag as one file: a checksum, a line of JSON, the arrays."""
    arrays = {name: _bytes(getattr(bag, name)) for name in ("features", "xy", "slides")}
    header = {
        "key": key,
        "id": bag.id,
        "step_um": bag.step_um,
        "step": None if bag.step is None else asdict(bag.step),
        "slide_ids": bag.slide_ids,
        "shapes": {name: getattr(bag, name).shape for name in arrays},
        "dtypes": {name: str(getattr(bag, name).dtype).removeprefix("torch.") for name in arrays},
        "crc32": {name: zlib.crc32(array) for name, array in arrays.items()},
    }
    text = json.dumps(header).encode() + b"\n"
    start = b"%08x " % zlib.crc32(text) + text
    with atomic_write(path) as temporary, open(temporary, "wb") as file:
        parts: list[bytes | memoryview] = [start, *arrays.values()]
        for part in parts:
            file.write(part)
            file.write(bytes(-file.tell() % ALIGNMENT))


def read_entry(path: Path, key: str, *, verify: bool = False) -> Bag:
    """Maps an entry into memory. What is written to its tensors stays in this process.

    DataError if it is damaged. Without ``verify``, that is seen from its size and header.
    """
    with open(path, "rb") as file:
        header = _read_header(path, file)
        offset, spans = file.tell(), {}
        for name, shape in header["shapes"].items():
            offset += -offset % ALIGNMENT
            size = int(np.prod(shape)) * _dtype(header, name).itemsize
            spans[name] = (offset, size)
            offset += size
        if header["key"] != key or os.fstat(file.fileno()).st_size != offset + -offset % ALIGNMENT:
            raise _damaged(path, "truncated")
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if verify:
        for name, (begin, size) in spans.items():
            with memoryview(memory) as view, view[begin : begin + size] as part:
                if zlib.crc32(part) != header["crc32"][name]:
                    raise _damaged(path, f"wrong checksum of {name}")
    arrays = {name: _tensor(memory, spans[name], _dtype(header, name), header["shapes"][name]) for name in spans}
    step = None if header["step"] is None else TileStep(**header["step"])
    return Bag(**arrays, id=header["id"], step_um=header["step_um"], step=step, slide_ids=tuple(header["slide_ids"]))


def _read_header(path: Path, file: BinaryIO) -> dict[str, Any]:
    checksum, _, text = file.readline(HEADER_LIMIT).partition(b" ")
    if not text.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
        raise _damaged(path, "wrong header")
    header: dict[str, Any] = json.loads(text)
    return header


def _damaged(path: Path, how: str) -> DataError:
    return DataError(path, f"damaged entry of the cache: {how}", "delete it; it will be built again")


def _dtype(header: dict[str, Any], name: str) -> torch.dtype:
    dtype = getattr(torch, header["dtypes"][name])
    assert isinstance(dtype, torch.dtype)
    return dtype


def _tensor(memory: mmap.mmap, span: tuple[int, int], dtype: torch.dtype, shape: list[int]) -> Tensor:
    begin, size = span
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, offset=begin, count=size // dtype.itemsize).view(shape)


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _remove_abandoned(entry: Path) -> None:
    for temporary in entry.parent.glob(f".{entry.name}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - temporary.stat().st_mtime > ABANDONED_S:
                temporary.unlink()


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
