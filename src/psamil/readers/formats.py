"""The formats, and which one a file has."""

from __future__ import annotations

from pathlib import Path

from psamil.errors import DataError, one_of
from psamil.readers import clam, h5ad, instance_table, npz, psa_authors, slideflow, stamp, trident, wsidata
from psamil.readers.ids import slide_id
from psamil.readers.tiles import BagRef, Reader

# In the order in which they are asked: the one that takes any features in .h5 and .pt is the last.
_MODULES: tuple[Reader, ...] = (trident, stamp, wsidata, slideflow, psa_authors, npz, instance_table, h5ad, clam)
READERS: dict[str, Reader] = {reader.NAME: reader for reader in _MODULES}

# Their stores are of one slide, and what is inside are its features from several encoders. Elsewhere it is slides.
MEMBERS_ARE_ENCODERS = (wsidata.NAME,)


def format_of(path: Path, format: str | None = None) -> str | None:
    """Name of the first format that recognises the file, or the given one; None if there is none."""
    if format is not None:
        if format not in READERS:
            raise one_of("format", format, READERS)
        return format
    return next((name for name, reader in READERS.items() if reader.recognise(path)), None)


def locate_bag(path: BagRef | Path | str, format: str | None = None, member: str | None = None) -> BagRef:
    """The one bag that is meant by a path."""
    if isinstance(path, BagRef):
        return path
    path = Path(path)
    if not path.exists():
        raise DataError(path, "does not exist", "check the path")
    if not path.is_file() and not is_store(path):
        raise DataError(
            path, "is not a file of features", "open the bags of a folder one by one, as find_bags lists them"
        )
    found = format_of(path, format)
    if found is None:
        raise DataError(path, "is of no known format", f"if it is one of {', '.join(READERS)}, name it with `format=`")
    names = members_of(path, found, member)
    if member is None and len(names) == 1:
        member = names[0]
    if member not in names:
        known = ", ".join(map(str, names[:20]))
        cause = f"holds {len(names)} bags" if member is None else f"has no bag {member!r}"
        raise DataError(path, cause, f"name one with `member=`: {known}")
    return bag_ref(path, found, member)


def members_of(path: Path, format: str, asked: str | None) -> list[str | None]:
    """Names of the bags inside a file. The features asked for can be the only ones of a store, which needs no name."""
    names = READERS[format].members(path)
    return [asked] if names == [None] and asked is not None and format in MEMBERS_ARE_ENCODERS else names


def bag_ref(path: Path, format: str, member: str | None) -> BagRef:
    is_slide = member is not None and format not in MEMBERS_ARE_ENCODERS
    return BagRef(str(member) if is_slide else slide_id(path), path, format, member)


def is_store(path: Path) -> bool:
    """A folder that is one file to its users."""
    return path.is_dir() and path.suffix.lower() == ".zarr"
