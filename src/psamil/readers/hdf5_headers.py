"""The headers of HDF5 objects, and the texts attached to them, read without HDF5.

Tools write texts with a variable length, which HDF5 keeps in heaps apart from the object. On a damaged heap HDF5 (2.0
and before) can loop for ever, allocate gigabytes or end the process. The few structures on the way to such a text are
simple, and are followed here with every length bounded. What is not understood is left out.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

MAX_BLOCK_BYTES = 1 << 20  # of a part of an object's header, or of a heap
MAX_HEADER_PARTS = 64
MAX_TEXT_BYTES = 64 << 10
CONTINUATION, ATTRIBUTE = 0x10, 0x0C  # kinds of messages in a header
VARIABLE_LENGTH, TEXT = 9, 1  # class of a type, and kind of that class
UNDEFINED = 1 << 62  # addresses from here on are undefined, or nonsense


@dataclass(frozen=True)
class Header:
    """Messages of an object, and where they lie."""

    version: int  # 1, or 2 with checksums; 0: not understood
    messages: tuple[tuple[int, bytes], ...]  # kind and content
    parts: tuple[tuple[int, int], ...]  # start and bytes in the file

    @staticmethod
    def read(file: BinaryIO, start: int) -> Header:
        """Headers are a chain of parts, each a row of messages: kind, size, flags, content."""
        prefix = bytes_at(file, start, 32)
        version = 2 if prefix.startswith(b"OHDR") else 1 if prefix[:1] == b"\x01" else 0
        if version == 2:
            flags = prefix[5]
            size_at = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
            width = 1 << (flags & 3)
            size = int.from_bytes(prefix[size_at : size_at + width], "little")
            message_format, blocks = "<BHB" + ("H" if flags & 4 else ""), [(start + size_at + width, size)]
        elif version == 1:
            message_format, blocks = "<HHB3x", [(start + 16, int.from_bytes(prefix[8:12], "little"))]
        else:
            return Header(0, (), ())
        first_part = (start, blocks[0][0] + blocks[0][1] - start)
        messages: list[tuple[int, bytes]] = []
        message_header = struct.Struct(message_format)
        for part, (block_at, size) in enumerate(blocks):  # grows while it is gone through
            block = bytes_at(file, block_at, size)
            at = 4 if version == 2 and part else 0  # a signature
            while at + message_header.size <= len(block):
                kind, length = message_header.unpack_from(block, at)[:2]
                content = block[at + message_header.size : at + message_header.size + length]
                at += message_header.size + length
                messages.append((kind, content))
                if kind == CONTINUATION and len(content) >= 16 and len(blocks) < MAX_HEADER_PARTS:
                    blocks.append(struct.unpack_from("<QQ", content))
        return Header(version, tuple(messages), (first_part, *blocks[1:]))

    def texts(self, file: BinaryIO) -> dict[str, str | None]:
        """Name and value of every single text of variable length; None for one that is too long to matter."""
        return {name: text for name, text in self._texts(file)}

    def heaps(self, file: BinaryIO) -> list[tuple[int, int]]:
        """Start and bytes of the heaps that hold the texts."""
        heaps = []
        for reference in self._references().values():
            heap = _Heap.at(file, reference.heap_at)
            heaps += [] if heap is None else [(reference.heap_at, heap.size)]
        return heaps
