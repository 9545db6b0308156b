"""Texts attached to HDF5 objects, read without HDF5.

Tools write them as texts of variable length, which HDF5 keeps in heaps apart from the object. On a damaged heap HDF5
(2.0 and before) can loop for ever, allocate gigabytes or end the process. The few structures on the way to such a text
are simple, and are followed here with every length bounded. What is not understood is left out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MAX_BLOCK_BYTES = 1 << 20  # of a part of an object's header, or of a heap
MAX_HEADER_PARTS = 64
MAX_TEXT_BYTES = 64 << 10
CONTINUATION, ATTRIBUTE = 0x10, 0x0C  # kinds of messages in a header
VARIABLE_LENGTH, TEXT = 9, 1  # class of a type, and kind of that class


def read_texts(path: Path, header_at: int) -> dict[str, str]:
    """Name and value of every single text of variable length that is attached to the object with this header."""
    texts: dict[str, str] = {}
    with path.open("rb") as file:
        for message in _attribute_messages(file, header_at):
            try:
                name, reference = _text_attribute(message)
                texts[name] = _from_heap(file, *reference)
            except (_NotUnderstoodError, struct.error, UnicodeDecodeError):
                continue
    return texts


class _NotUnderstoodError(Exception):
    pass


def _attribute_messages(file: BinaryIO, header_at: int) -> Iterator[bytes]:
    """Headers are a chain of parts, each a row of messages: kind, size, flags, content."""
    prefix = _bytes_at(file, header_at, 32)
    is_version_2 = prefix.startswith(b"OHDR")
    if is_version_2:
        flags = prefix[5]
        start = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        width = 1 << (flags & 3)
        size = int.from_bytes(prefix[start : start + width], "little")
        message_format, parts = "<BHB" + ("H" if flags & 4 else ""), [(header_at + start + width, size)]
    elif prefix[:1] == b"\x01":
        message_format, parts = "<HHB3x", [(header_at + 16, int.from_bytes(prefix[8:12], "little"))]
    else:
        return
    message_header = struct.Struct(message_format)
    for part, (start, size) in enumerate(parts):  # grows while it is gone through
        block = _bytes_at(file, start, size)
        at = 4 if is_version_2 and part else 0  # a signature
        while at + message_header.size <= len(block):
            kind, length = message_header.unpack_from(block, at)[:2]
            content = block[at + message_header.size : at + message_header.size + length]
            at += message_header.size + length
            if kind == CONTINUATION and len(content) >= 16 and len(parts) < MAX_HEADER_PARTS:
                parts.append(struct.unpack_from("<QQ", content))
            elif kind == ATTRIBUTE:
                yield content


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


def _from_heap(file: BinaryIO, text_bytes: int, heap_at: int, number: int) -> str:
    signature, version, heap_bytes = struct.unpack_from("<4sB3xQ", _bytes_at(file, heap_at, 16))
    if signature != b"GCOL" or version != 1 or text_bytes > MAX_TEXT_BYTES:
        raise _NotUnderstoodError
    heap, at = _bytes_at(file, heap_at, heap_bytes), 16
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


def _bytes_at(file: BinaryIO, start: int, size: int) -> bytes:
    if start >= 1 << 62:  # undefined, or nonsense
        return b""
    file.seek(start)
    return file.read(min(size, MAX_BLOCK_BYTES))
