"""The headers of HDF5 objects, read without HDF5: rows of messages that say what an object is and where its parts lie.

Every length is bounded, so that a damaged file cannot make this loop for ever or allocate gigabytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import BinaryIO

MAX_BLOCK_BYTES = 1 << 20
MAX_HEADER_PARTS = 64
CONTINUATION = 0x10  # kind of the message that says where the header goes on
NOWHERE = 1 << 62  # addresses from here on are undefined, or nonsense


@dataclass(frozen=True)
class Header:
    version: int  # 1; 2: with checksums; 0: not understood
    messages: tuple[tuple[int, bytes], ...]  # kind and content
    parts: tuple[tuple[int, int], ...]  # where the header lies in the file: start and bytes

    @staticmethod
    def read(file: BinaryIO, start: int) -> Header:
        """Headers are a chain of parts, each a row of messages: kind, size, flags, content."""
        prefix = bytes_at(file, start, 32)
        if prefix.startswith(b"OHDR"):
            flags = prefix[5]
            size_at = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
            width = 1 << (flags & 3)
            size = int.from_bytes(prefix[size_at : size_at + width], "little")
            version, row, parts = 2, "<BHB" + ("H" if flags & 4 else ""), [(start + size_at + width, size)]
        elif prefix[:1] == b"\x01":
            version, row, parts = 1, "<HHB3x", [(start + 16, int.from_bytes(prefix[8:12], "little"))]
        else:
            return Header(0, (), ())
        messages: list[tuple[int, bytes]] = []
        message_header = struct.Struct(row)
        for part, (part_at, size) in enumerate(parts):  # grows while it is gone through
            block = bytes_at(file, part_at, size)
            at = 4 if version == 2 and part else 0  # a signature
            while at + message_header.size <= len(block):
                kind, length = message_header.unpack_from(block, at)[:2]
                content = block[at + message_header.size : at + message_header.size + length]
                at += message_header.size + length
                messages.append((kind, content))
                if kind == CONTINUATION and len(content) >= 16 and len(parts) < MAX_HEADER_PARTS:
                    parts.append(struct.unpack_from("<QQ", content))
        first_end = sum(parts[0])
        return Header(version, tuple(messages), ((start, first_end - start), *parts[1:]))


def bytes_at(file: BinaryIO, start: int, size: int) -> bytes:
    """At most as many bytes as there are, and as are sensible."""
    if start >= NOWHERE:
        return b""
    file.seek(start)
    return file.read(min(size, MAX_BLOCK_BYTES))
