"""HDF5 files of strangers: only plain numbers that lie wholly inside the file are read.

- Links, virtual datasets and external storage can pull in other files of the machine: refused.
- Objects and variable-length values are no feature arrays: refused.
- Nothing is allocated before the file has been seen to hold that many bytes.
- The stored bytes must be those that the shape needs, so that a damaged dimension cannot give a short bag.
- No two parts of the file may share a place, so that a damaged address cannot give other bytes as features.
- Texts that cannot be read are not left out, since one of them may be the unit of the coordinates.
- Whatever else h5py stumbles over becomes one :class:`DataError` that names the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import h5py
import numpy as np
from h5py import h5t
from numpy.typing import NDArray

from psamil.errors import DataError
from psamil.readers.arrays import hollow
from psamil.readers.chunks import ChunkList, Chunks
from psamil.readers.hdf5_headers import Header
from psamil.readers.hdf5_places import check_places
from psamil.readers.hdf5_texts import read_texts

FLOATS = (h5t.IEEE_F16LE, h5t.IEEE_F32LE, h5t.IEEE_F64LE)
INTEGERS = (
    *(h5t.STD_I8LE, h5t.STD_I16LE, h5t.STD_I32LE, h5t.STD_I64LE),
    *(h5t.STD_U8LE, h5t.STD_U16LE, h5t.STD_U32LE, h5t.STD_U64LE),
)
MAX_ATTRIBUTE_BYTES = 64 << 10
MADE_AGAIN = "make the file again, or leave it out"


class CheckedH5:
    """An HDF5 file, opened to read numbers and attributes of datasets at its root. Use it in a ``with`` block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._chunks: dict[str, ChunkList] | None = None  # of all datasets, once their places have been checked
        with self._failures_named():
            self._file = h5py.File(path, "r")
            if self._file.userblock_size:
                self._file.close()
                raise ValueError("it begins with a block that is not HDF5")

    def __enter__(self) -> CheckedH5:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._failures_named():
            self._file.close()

    @property
    def names(self) -> frozenset[str]:
        """Names of the datasets and groups at the root."""
        with self._failures_named():
            return frozenset(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape that the file announces; whether it holds that much is checked when it is read."""
        with self._failures_named():
            return tuple(self._own(name).shape or ())

    def attributes(self, name: str | None = None) -> dict[str, Any]:
        """Numbers, short arrays and texts attached to a dataset, or to the file. The text "None" means nothing."""
        with self._failures_named():
            owner = self._file if name is None else self._own(name)
            values = {key: _plain(owner.attrs[key]) for key in owner.attrs if _is_safe(owner.attrs.get_id(key))}
            with self.path.open("rb") as raw:
                values |= read_texts(raw, Header.read(raw, h5py.h5o.get_info(owner.id).addr))
            lost = [str(key) for key in owner.attrs if key not in values and _is_text(owner.attrs.get_id(key))]
            if lost:
                raise ValueError(f"its attributes {', '.join(lost)} cannot be read")
        return {key: value for key, value in values.items() if value not in (None, "None")}

    def read(self, name: str, *, with_values: bool = True) -> NDArray[Any]:
        """The whole dataset in one allocation; without values an array of that shape and dtype without memory."""
        with self._failures_named():
            dataset = self._numbers(name)
            if self._chunks is None:
                self._chunks = check_places(self._file, self.path)
            chunks = None if dataset.chunks is None else Chunks(dataset, self.path, self._chunks[name])
            if chunks is None:
                _check_one_block(dataset, self.path)
            if not with_values:
                return hollow(dataset.shape, dataset.dtype)
            if chunks is not None:
                return chunks.read()
            values = np.empty(dataset.shape, dataset.dtype)
            if values.size:
                dataset.read_direct(values)
            return values

    def _own(self, name: str) -> h5py.Dataset:
        """A dataset that is part of this file."""
        if name not in self.names:
            raise DataError(self.path, f"has no dataset {name!r}", f"it has {', '.join(sorted(self.names)) or 'none'}")
        if not isinstance(self._file.get(name, getlink=True), h5py.HardLink):
            self._refuse(f"{name!r} is a link to another place, which could be any file of this machine")
        dataset = self._file[name]
        if not isinstance(dataset, h5py.Dataset):
            self._refuse(f"{name!r} is a group where an array is expected")
        return dataset

    def _numbers(self, name: str) -> h5py.Dataset:
        """A dataset of plain numbers that are stored in this file."""
        dataset = self._own(name)
        if dataset.is_virtual or dataset.id.get_create_plist().get_external_count():
            self._refuse(f"{name!r} is stored outside of this file, which could be any file of this machine")
        kind = dataset.id.get_type()
        if not any(kind == known for known in FLOATS + INTEGERS):
            self._refuse(f"{name!r} does not hold plain little-endian numbers")
        if dataset.shape is None:
            self._refuse(f"{name!r} has no shape")
        return dataset

    def _refuse(self, cause: str) -> NoReturn:
        raise DataError(self.path, f"is refused: {cause}", "write it again as plain arrays inside one file")

    @contextmanager
    def _failures_named(self) -> Iterator[None]:
        """h5py raises errors of many kinds for damaged files; none of them names the file."""
        try:
            yield
        except FileNotFoundError as error:
            raise DataError(self.path, "does not exist", "check the path") from error
        except PermissionError as error:
            raise DataError(self.path, "may not be read", "ask for permission to read it") from error
        except BlockingIOError as error:
            raise DataError(self.path, "is being written by another process", "wait until that has ended") from error
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError, AttributeError) as error:
            raise DataError(self.path, f"is damaged, incomplete or not HDF5 ({error})", MADE_AGAIN) from error


def _check_one_block(dataset: h5py.Dataset, path: Path) -> None:
    needed, stored = prod(dataset.shape) * dataset.dtype.itemsize, dataset.id.get_storage_size()
    if stored != needed or stored > path.stat().st_size:
        raise ValueError(f"its shape {dataset.shape} needs {needed} bytes, and {stored} are there")


def _is_safe(attribute: h5py.h5a.AttrID) -> bool:
    """Short, and of a type that HDF5 converts without following what a damaged file says."""
    kind = attribute.get_type()
    is_text = isinstance(kind, h5t.TypeStringID) and not kind.is_variable_str()
    is_number = any(kind == known for known in FLOATS + INTEGERS)
    return (is_text or is_number) and attribute.get_storage_size() <= MAX_ATTRIBUTE_BYTES


def _is_text(attribute: h5py.h5a.AttrID) -> bool:
    """A single text of variable length."""
    kind = attribute.get_type()
    is_single = attribute.get_space().get_simple_extent_type() == h5py.h5s.SCALAR
    return is_single and isinstance(kind, h5t.TypeStringID) and bool(kind.is_variable_str())


def _plain(value: Any) -> Any:
    """Texts and numbers of Python; None for anything else that an attribute can be."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf":
        return value.tolist()
    return value if isinstance(value, int | float | str) else None
