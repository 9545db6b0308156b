"""Texts attached to HDF5 objects, read without HDF5.

Tools write them as texts of variable length, which HDF5 keeps in heaps apart from the object. On a damaged heap HDF5
(2.0 and before) can loop for ever, allocate gigabytes or end the process. The few structures on the way to such a text
are simple, and are followed here with every length bounded. What is not understood is left out: who needs all texts has
to compare their names with those that HDF5 lists.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

from psamil.readers.hdf5_headers import Header, bytes_at

MAX_TEXT_BYTES = 64 << 10
ATTRIBUTE = 0x0C  # kind of a message in a header
HEAP_OF_TEXTS = b"GCOL"  # how it begins
VARIABLE_LENGTH, TEXT = 9, 1  # class of a type, and kind of that class


def read_texts(file: BinaryIO, header: Header) -> dict[str, str | None]:
    """Name and value of every single text of variable length that is attached to an object.

    None stands for a text that is too long to matter.
    """
    texts: dict[str, str | None] = {}
    for name, reference in _text_attributes(header):
        try:
            texts[name] = _from_heap(file, *reference)
        except (_NotUnderstoodError, struct.error, UnicodeDecodeError):
            continue
    return texts


def text_heaps(file: BinaryIO, header: Header) -> Iterator[tuple[int, int]]:
    """Start and bytes of the heaps in which the texts lie."""
    for _, (_, heap_at, _) in _text_attributes(header):
        start = bytes_at(file, heap_at, 16)
        if start.startswith(HEAP_OF_TEXTS):
            yield heap_at, struct.unpack("<8xQ", start)[0]


class _NotUnderstoodError(Exception):
    pass


def _text_attributes(header: Header) -> Iterator[tuple[str, tuple[int, int, int]]]:
    for kind, content in header.messages:
        if kind == ATTRIBUTE:
            try:
                yield _text_attribute(content)
            except (_NotUnderstoodError, struct.error, UnicodeDecodeError):
                continue


def _text_attribute(message: bytes) -> tuple[str, tuple[int, int, int]]:
    """Name of the attribute, and bytes, heap and number in the heap of its text."""
    version, flags, name_size, type_size, space_size = struct.unpack_from("<BBHHH", message)
    if version not in (1, 2, 3) or (version > 1 and flags):  # a type that is shared lies elsewhere
        raise _NotUnderstoodError
    name_at = 9 if version == 3 else 8
    type_at = name_at + _padded(name_size, version)
    space_at = type_at + _padded(type_size, version)
    value_at = space_at + _padded(space_size, version)
    kind, kind_bits = struct.unpack_from("<BB", message, type_at)
    axes = struct.unpack_from("<xB", message, space_at)[0]
    if kind & 0x0F != VARIABLE_LENGTH or kind_bits & 0x0F != TEXT or axes:
        raise _NotUnderstoodError
    name = message[name_at : name_at + name_size].split(b"\0")[0].decode()
    return name, struct.unpack_from("<IQI", message, value_at)


def _from_heap(file: BinaryIO, text_bytes: int, heap_at: int, number: int) -> str | None:
    if not text_bytes and not heap_at:
        return ""
    signature, version, heap_bytes = struct.unpack_from("<4sB3xQ", bytes_at(file, heap_at, 16))
    if signature != HEAP_OF_TEXTS or version != 1:
        raise _NotUnderstoodError
    if text_bytes > MAX_TEXT_BYTES:
        return None
    heap, at = bytes_at(file, heap_at, heap_bytes), 16
    while at + 16 <= len(heap):
        found, size = struct.unpack_from("<H6xQ", heap, at)
        if found == number and text_bytes <= size <= len(heap) - at - 16:
            return heap[at + 16 : at + 16 + text_bytes].split(b"\0")[0].decode()
        if found == 0:  # the rest is free
            break
        at += 16 + (size + 7) // 8 * 8
    raise _NotUnderstoodError


def _padded(size: int, version: int) -> int:
    return (size + 7) // 8 * 8 if version == 1 else size
