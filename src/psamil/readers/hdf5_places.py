"""Where things lie in an HDF5 file, so that numbers that would be read from a wrong place are noticed.

The format that h5py writes by default has no checksums: one wrong byte in an address, and HDF5 reads other bytes of the
file as features. But in a whole file no two things share a place, and what lies between them was never written. So the
places of all arrays and of the structures around them are collected, and a file is refused

- if two of them overlap, or one lies outside of the file;
- if there is anything but zeros beside plain numbers: what a block that was moved by a few bytes leaves behind.

Known limits: a block that was moved by so little that it leaves only zeros behind; and the second rule is given up for
files that have groups, links, or structures of the newer format, which has checksums of its own. That rule also refuses
whole files in which an array was deleted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from psamil.readers.chunks import ChunkList, list_chunks
from psamil.readers.hdf5_headers import Header, bytes_at
from psamil.readers.hdf5_texts import HEAP_OF_TEXTS, text_heaps

SYMBOL_TABLE, LAYOUT = 0x11, 0x08  # kinds of messages in a header
CHUNKED = 2  # class of a layout


class _Superblock(NamedTuple):
    """How many entries the structures of a file have, at half full."""

    bytes: int
    group_leaf: int
    group_node: int
    chunk_node: int


class _Places:
    """Starts and ends of things in a file, collected one after the other."""

    def __init__(self) -> None:
        self._starts: list[NDArray[np.int64]] = []
        self._sizes: list[NDArray[np.int64]] = []
        self._are_plain: list[NDArray[np.bool_]] = []

    def add(self, starts: NDArray[np.int64], sizes: NDArray[np.int64], is_plain: bool = False) -> None:
        self._starts.append(starts)
        self._sizes.append(sizes)
        self._are_plain.append(np.full(len(starts), is_plain))

    def sorted(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """(n,) start, end, and whether it is plain numbers."""
        starts, sizes = np.concatenate(self._starts), np.concatenate(self._sizes)
        are_plain = np.concatenate(self._are_plain)
        order = starts.argsort(kind="stable")
        order = order[sizes[order] != 0]
        return starts[order], (starts + sizes)[order], are_plain[order]


def check_places(file: h5py.File, path: Path) -> dict[str, ChunkList]:
    """The chunks of all datasets. ValueError if things share a place, or there is something where nothing should be."""
    places, chunks = _Places(), {}
    own = {name: file[name] for name in file if isinstance(file.get(name, getlink=True), h5py.HardLink)}
    objects = list(own.values())
    for name, dataset in own.items():
        if isinstance(dataset, h5py.Dataset) and not _is_elsewhere(dataset):
            if dataset.chunks is not None:
                chunks[name] = list_chunks(dataset)
            _add_values(places, dataset, chunks.get(name))
    with path.open("rb") as raw:
        headers = [Header.read(raw, h5py.h5o.get_info(owner.id).addr) for owner in (file, *objects)]
        superblock = _superblock(raw)
        table = np.array(sorted(_structures(raw, headers, superblock)), np.uint64).reshape(-1, 2).astype(np.int64)
        places.add(table[:, 0], table[:, 1])
        starts, ends, are_plain = places.sorted()
        size = path.stat().st_size
        if starts[0] < 0 or (ends <= starts).any() or (ends[:-1] > starts[1:]).any() or ends[-1] > size:
            raise ValueError("parts of it overlap or lie outside of the file")
        is_all_known = len(own) == len(file) and not any(isinstance(owner, h5py.Group) for owner in objects)
        if is_all_known and superblock is not None and all(header.version == 1 for header in headers):
            _check_gaps(raw, np.append(starts, size), np.append(0, ends), np.pad(are_plain, 1))
    return chunks


def _check_gaps(
    raw: BinaryIO, starts: NDArray[np.int64], ends: NDArray[np.int64], are_plain: NDArray[np.bool_]
) -> None:
    """Gaps go from each end to the start of the same index. Those beside plain numbers must be empty."""
    for gap in np.flatnonzero((starts > ends) & (are_plain[:-1] | are_plain[1:])):
        at, end = int(ends[gap]), int(starts[gap])
        while at < end:
            block = bytes_at(raw, at, end - at)
            at += len(block) - len(block.lstrip(b"\0"))
            if any(block):
                at += _abandoned_heap_bytes(raw, at)


def _abandoned_heap_bytes(raw: BinaryIO, at: int) -> int:
    """Texts that were replaced by others leave their heap behind. Nothing else may be left there."""
    start = bytes_at(raw, at, 16)
    size = struct.unpack("<8xQ", start)[0] if start.startswith(HEAP_OF_TEXTS) and len(start) == 16 else 0
    if not size:
        remedy = "if an array was deleted on purpose, copy the others to a new file"
        raise ValueError(f"there is something at byte {at} that belongs to nothing; {remedy}")
    return int(size)


def _is_elsewhere(dataset: h5py.Dataset) -> bool:
    return dataset.shape is None or dataset.is_virtual or bool(dataset.id.get_create_plist().get_external_count())


def _add_values(places: _Places, dataset: h5py.Dataset, chunks: ChunkList | None) -> None:
    """Where the numbers of a dataset are, unless they are kept in its header."""
    if chunks is not None:
        places.add(chunks.start, chunks.bytes, is_plain=dataset.id.get_create_plist().get_nfilters() == 0)
    elif dataset.id.get_offset() is not None:
        block = np.array([[dataset.id.get_offset(), dataset.id.get_storage_size()]], np.uint64).astype(np.int64)
        places.add(block[:, 0], block[:, 1], is_plain=True)


def _superblock(raw: BinaryIO) -> _Superblock | None:
    """The first structure of files of the older format; None for the newer."""
    version, group_leaf, group_node, chunk_node = struct.unpack("<8xB7xHH4xH", bytes_at(raw, 0, 26))
    if version == 0:
        return _Superblock(96, group_leaf, group_node, 32)
    return _Superblock(100, group_leaf, group_node, chunk_node) if version == 1 else None


def _structures(raw: BinaryIO, headers: list[Header], superblock: _Superblock | None) -> set[tuple[int, int]]:
    """Start and bytes of everything that is known and is no array."""
    structures = {part for header in headers for part in header.parts}
    structures |= {heap for header in headers for heap in text_heaps(raw, header)}
    if superblock is not None:
        structures |= {(0, superblock.bytes), *_old_indices(raw, headers, superblock)}
    return structures


def _old_indices(raw: BinaryIO, headers: list[Header], superblock: _Superblock) -> Iterator[tuple[int, int]]:
    """Start and bytes of the indices of groups and of chunks."""
    for header in headers:
        for kind, content in header.messages:
            if kind == SYMBOL_TABLE and len(content) >= 16:
                tree_at, heap_at = struct.unpack_from("<QQ", content)
                yield from _group_index(raw, tree_at, heap_at, superblock)
            elif kind == LAYOUT and content[:2] == bytes((3, CHUNKED)) and len(content) >= 11:
                axes, tree_at = struct.unpack_from("<BQ", content, 2)
                yield from _Tree(raw, superblock.chunk_node, key_bytes=8 + 8 * axes).nodes(tree_at)


def _group_index(raw: BinaryIO, tree_at: int, heap_at: int, superblock: _Superblock) -> Iterator[tuple[int, int]]:
    """A tree of lists of entries, and a heap of names."""
    tree = _Tree(raw, superblock.group_node, key_bytes=8)
    for node_at, size in tree.nodes(tree_at):
        yield node_at, size
        level, children = tree.read(node_at)
        if level == 0:
            yield from ((child, 8 + 2 * superblock.group_leaf * 40) for child in children)
    heap = bytes_at(raw, heap_at, 32)
    if heap.startswith(b"HEAP"):
        size, names_at = struct.unpack("<8xQ8xQ", heap)
        yield from ((heap_at, 32), (names_at, size))


class _Tree:
    """An index: nodes of keys and children by turns."""

    def __init__(self, raw: BinaryIO, half_full: int, key_bytes: int) -> None:
        self.raw, self.key_bytes = raw, key_bytes
        self.node_bytes = 24 + 2 * half_full * (8 + key_bytes) + key_bytes
        self.most_nodes = raw.seek(0, 2) // self.node_bytes

    def read(self, node_at: int) -> tuple[int, list[int]]:
        """Level, which is 0 at the leaves, and where the children lie."""
        node = bytes_at(self.raw, node_at, self.node_bytes)
        if not node.startswith(b"TREE"):
            return 0, []
        level, entries = struct.unpack_from("<xBH", node, 4)
        children = [24 + self.key_bytes + i * (self.key_bytes + 8) for i in range(entries)]
        return level, [struct.unpack_from("<Q", node, at)[0] for at in children if at + 8 <= len(node)]

    def nodes(self, root_at: int) -> Iterator[tuple[int, int]]:
        """Start and bytes of every node. Leaves of large trees are many, and are not read."""
        level, children = self.read(root_at)
        if level or children:
            yield root_at, self.node_bytes
        count = 1
        while level > 0:
            count += len(children)
            if count > self.most_nodes:
                raise ValueError("its index of pieces is larger than the file")
            yield from ((child, self.node_bytes) for child in children)
            level -= 1
            if level > 0:
                children = [child for node_at in children for child in self.read(node_at)[1]]
