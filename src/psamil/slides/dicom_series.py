"""Which DICOM series a file belongs to, as far as it is one of a slide."""

from __future__ import annotations

import re
from pathlib import Path

HEADER_BYTES = 1 << 16  # what identifies a file comes first; then follow specimen, optics and pixels
# MediaStorageSOPClassUID (0002,0002), 30 bytes. Annotations name this class, too, but as that of what they refer to.
WHOLE_SLIDE_IMAGE = b"\x02\0\x02\0UI\x1e\x001.2.840.10008.5.1.4.1.1.77.1.6"
# StudyInstanceUID (0020,000D) and SeriesInstanceUID (0020,000E), each with four bytes for type and length. They are
# neighbours in the head of a file; where a file refers to other series, they are not.
STUDY_AND_SERIES = re.compile(rb"\x20\0\x0d\0.{4}[0-9.]+\0?\x20\0\x0e\0.{4}([0-9.]+)", re.DOTALL)


def slide_series(path: Path) -> str | None:
    """SeriesInstanceUID; None for what is no slide, such as annotations, which may lie beside one, or damaged."""
    try:
        with open(path, "rb") as file:
            head = file.read(HEADER_BYTES)
    except OSError:
        return None  # who opens it says why
    if head[128:132] != b"DICM" or WHOLE_SLIDE_IMAGE not in head:
        return None
    found = STUDY_AND_SERIES.search(head)
    return None if found is None else found[1].decode("ascii")
