"""Chunked HDF5 datasets: every chunk must be there, once, whole, and is read from where it lies in the file.

HDF5 finds chunks by an index. It takes those that it does not find for zeros, and leaves those out that lie beyond a
damaged dimension, both without a word. So the whole index is listed and compared with the shape. Chunks that are plain
numbers are then read without HDF5, which is also twice as fast on TRIDENT's chunks of single rows.
"""

from __future__ import annotations

from array import array
from io import RawIOBase
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from psamil.errors import PsamilError
from psamil.readers.arrays import is_bomb


class ChunkList(NamedTuple):
    """What the index of a dataset says about its chunks."""

    corner: NDArray[np.int64]  # (chunks, axes) where each begins in the array
    start: NDArray[np.int64]  # (chunks,) where it begins in the file
    bytes: NDArray[np.int64]
    skipped_filters: NDArray[np.int64]


class Chunks:
    """The chunks of one dataset. ValueError if they are not exactly those that its shape needs."""

    def __init__(self, dataset: h5py.Dataset, path: Path, listed: ChunkList) -> None:
        self.dataset, self.path = dataset, path
        self.shape, self.chunk, self.dtype = dataset.shape, dataset.chunks, dataset.dtype
        self.per_axis = tuple(-(-size // side) for size, side in zip(self.shape, self.chunk, strict=True))
        self.chunk_bytes = prod(self.chunk) * self.dtype.itemsize
        self.file_bytes = path.stat().st_size
        self.is_filtered = dataset.id.get_create_plist().get_nfilters() > 0
        self._check_count()
        self.corner, self.start, self.bytes, skipped_filters = listed
        if len(self.corner):
            self._check_places()
        is_plain = skipped_filters.astype(bool) | (not self.is_filtered)  # filters are skipped where they gain nothing
        if (self.bytes[is_plain] != self.chunk_bytes).any():
            raise ValueError("it has pieces of the wrong length")

    def read(self) -> NDArray[Any]:
        """All values in one allocation."""
        values = np.empty(self.shape, self.dtype)
        if not len(self.corner):
            return values
        if self.is_filtered:
            self._check_index()
            self.dataset.read_direct(values)
        elif self.chunk[1:] == self.shape[1:]:
            self._read_rows(values)
        else:
            self._read_blocks(values)
        return values

    def _check_count(self) -> None:
        """As many chunks as the shape needs, and not more bytes than the file can hold."""
        widest = self.dataset.maxshape[-1]
        if widest is not None and not self.chunk[-1] <= self.shape[-1] == widest:
            raise ValueError(f"its shape {self.shape} contradicts its pieces {self.chunk} or the largest shape")
        needed, found = prod(self.per_axis), self.dataset.id.get_num_chunks()
        if found != needed:
            raise ValueError(f"its shape {self.shape} needs {needed} pieces, and {found} are there")
        needed_bytes = needed * self.chunk_bytes
        is_too_large = needed_bytes > self.file_bytes and not self.is_filtered
        if is_too_large or is_bomb(needed_bytes, self.file_bytes):
            raise ValueError(f"its shape {self.shape} needs more bytes than the file can hold")

    def _check_places(self) -> None:
        """Every cell of the array has its chunk, and every chunk a place of its own in the file."""
        cell, off_grid = np.divmod(self.corner, self.chunk)
        if off_grid.any() or (cell < 0).any() or (cell >= self.per_axis).any():
            raise ValueError(f"it has pieces outside of its shape {self.shape}")
        if len(np.unique(np.ravel_multi_index(tuple(cell.T), self.per_axis))) < len(cell):
            raise ValueError("it has pieces that are there twice, and others that are missing")
        order = self.start.argsort()
        start, end = self.start[order], (self.start + self.bytes)[order]
        if start[0] < 0 or (end[:-1] > start[1:]).any() or end[-1] > self.file_bytes:
            raise ValueError("it has pieces that overlap or lie outside of the file")

    def _check_index(self) -> None:
        """Chunks that HDF5 lists but does not find are zeros when all are read; read one by one they are errors."""
        for corner, size in zip(self.corner.tolist(), self.bytes.tolist(), strict=True):
            if len(self.dataset.id.read_direct_chunk(tuple(corner))[1]) != size:
                raise ValueError("it has pieces that are listed but not to be found")

    def _read_rows(self, values: NDArray[Any]) -> None:
        """Chunks of whole rows; those that follow each other in the array and in the file are read at once."""
        row, rows = self.corner[:, 0], self.chunk[0]
        follows = (np.diff(row) == rows) & (np.diff(self.start) == self.chunk_bytes)
        first = np.flatnonzero(np.concatenate([[True], ~follows]))
        last = np.append(first[1:], len(row)) - 1
        with self.path.open("rb", buffering=0) as file:
            for start, begin, end in zip(self.start[first], row[first], row[last] + rows, strict=True):
                _fill(values[begin:end], file, start)  # the last chunk can be longer than the array

    def _read_blocks(self, values: NDArray[Any]) -> None:
        """Chunks of parts of rows."""
        block = np.empty(self.chunk, self.dtype)
        with self.path.open("rb", buffering=0) as file:
            for corner, start in zip(self.corner, self.start, strict=True):
                _fill(block, file, start)
                room = values[tuple(slice(at, at + side) for at, side in zip(corner, self.chunk, strict=True))]
                room[...] = block[tuple(slice(size) for size in room.shape)]


def list_chunks(dataset: h5py.Dataset) -> ChunkList:
    if not hasattr(dataset.id, "chunk_iter"):
        raise PsamilError(f"h5py with HDF5 {h5py.version.hdf5_version} is too old; pip install --upgrade h5py")
    listed = array("q")  # five numbers of 8 bytes per chunk, where objects would take as much as small features
    dataset.id.chunk_iter(
        lambda chunk: listed.extend((*chunk.chunk_offset, chunk.byte_offset, chunk.size, chunk.filter_mask))
    )
    table = np.frombuffer(listed, np.int64).reshape(-1, len(dataset.shape) + 3)
    return ChunkList(table[:, :-3], table[:, -3], table[:, -2], table[:, -1])


def _fill(values: NDArray[Any], file: RawIOBase, start: int) -> None:
    """Values from the bytes of the file at ``start``."""
    left = memoryview(values).cast("B")  # type: ignore[arg-type]
    file.seek(int(start))
    while left:
        count = file.readinto(left)  # at most 2 GiB at a time
        if not count:
            raise ValueError("it ends too early")
        left = left[count:]
