"""Files that are whole or absent: atomic writes, JSON, locks, content hashes, and cells of CSV files.

A process can be killed, a disk can fill up and two processes can want the same file. Whatever happens, a reader finds
the old content or the new one, never half of it, and a user gets one line that says why a file could not be written.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import math
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from psamil.errors import BusyError, DataError

CHUNK_BYTES = 1 << 20
UNNAMED_S = 2.0  # how long a process may take from making a lock file to writing its name into it

_task: str | None = None  # that this process works on; see locks_of_task


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Gives a temporary file in the same folder to write and close; it takes its final name once it is on the disk.

    After an error the temporary file is gone and what was at ``path`` before is still there. A killed process can leave
    a file behind whose name begins with a dot and ends with ``.tmp``. Missing folders are made.

    >>> with atomic_write("labels.csv") as temporary:
    ...     temporary.write_text("slide_id,label")
    """
    path = Path(path)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}.tmp"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except Exception as error:
        if _is_about_another_file(error, path, temporary) or not (isinstance(error, OSError) or _disk_is_full(error)):
            raise
        raise unwritable(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def remove_temporaries(path: str | Path) -> None:
    """Removes what killed writers of a file left beside it. For whoever alone may write it, by a lock."""
    path = Path(path)
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 12}.tmp"):
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Waits until a file, or the list of files of a folder, is on the disk."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems cannot do this for folders
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def _is_about_another_file(error: Exception, path: Path, temporary: Path) -> bool:
    named = getattr(error, "filename", None)
    return named is not None and Path(os.fsdecode(named)) not in (path, temporary, *path.parents)


def _disk_is_full(error: Exception) -> bool:
    """Some libraries wrap the system's error in their own."""
    return getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error)


def unwritable(path: str | Path, error: Exception) -> DataError:
    """The error for a file that cannot be written, with the cause in one line."""
    cause = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
    with contextlib.suppress(OSError):
        if _disk_is_full(error) or shutil.disk_usage(Path(path).parent).free < CHUNK_BYTES:
            return DataError(path, "cannot be written, the disk is full", "free some space or choose another folder")
    return DataError(path, f"cannot be written: {cause}", "make its folder writable or choose another one")


def write_json(path: str | Path, value: Any) -> None:
    """Writes a JSON file atomically. NaN and infinity, which JSON does not have, raise ValueError."""
    text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False)
    with atomic_write(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def without_nan(value: Any) -> Any:
    """NaN and infinite numbers, which JSON does not have, as None; in mappings and lists, too."""
    if isinstance(value, dict):
        return {name: without_nan(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}", "check the path and its permissions") from error
    except (ValueError, RecursionError) as error:
        raise DataError(path, f"is not valid JSON: {error}", "restore the file or delete it") from error


def content_hash(path: str | Path) -> str:
    """SHA-256 of a file's content, or of the names and contents of all files of a folder."""
    path = Path(path)
    digest = hashlib.sha256()
    for file in files_below(path):
        if file != path:
            digest.update(f"{file.relative_to(path).as_posix()}\0{file.stat().st_size}\0".encode())
        with open(file, "rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def files_below(path: Path) -> list[Path]:
    """The file itself, or every file of the folder, sorted."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def escape_cell(value: Any) -> Any:
    """A value for a CSV file that a spreadsheet will not run as a formula. Numbers stay as they are."""
    return "'" + value if isinstance(value, str) and _is_formula(value.lstrip("'")) else value


def unescape_cell(cell: str) -> str:
    """The value that :func:`escape_cell` made this cell of."""
    return cell[1:] if cell.startswith("'") and _is_formula(cell.lstrip("'")) else cell


def _is_formula(text: str) -> bool:
    if not text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False


class Lock:
    """Holds a file as the sign that this process is at work: ``with Lock(run / "train.lock"): ...``.

    Whoever makes the file holds the lock: of several that try, every file system lets one succeed, also those that are
    shared or have no ``flock``. The file says who holds it. A lock whose process has ended is taken over: its process
    id does not exist any more on this host, or is another process now, or the host was started anew. Whether a process
    on another host lives cannot be known; its lock counts, unless it was at the same task (:func:`locks_of_task`).

    Args:
        path: of the lock file, made and removed by the lock.
        wait_s: seconds to wait for another holder before BusyError is raised.
    """

    def __init__(self, path: str | Path, *, wait_s: float = 0.0) -> None:
        self.path, self.wait_s = Path(path), wait_s

    def __enter__(self) -> Lock:
        deadline = time.monotonic() + self.wait_s
        while (holder := self._take()) is not None:
            if time.monotonic() >= deadline:
                who = f"in use by process {holder.get('pid')} on {holder.get('host')}"
                raise BusyError(self.path, who, "wait until it ends; if there is no such process, delete the file")
            time.sleep(min(0.05, self.wait_s))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _holder_of(self.path) == _own_identity():
            self.path.unlink(missing_ok=True)

    def _take(self) -> dict[str, Any] | None:
        """Makes the lock ours, or says whose it is."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while not _make_lock_file(self.path):
                holder = _holder_of(self.path)
                if holder is None:
                    continue
                if not is_stale(holder):
                    return holder
                # One process at a time may remove it, and looks again: by now it could be the lock of a living one.
                removal = Lock(self.path.with_name(f"{self.path.name}.removal"))
                if (remover := removal._take()) is not None:
                    return remover
                try:
                    holder = _holder_of(self.path)
                    if holder is not None and is_stale(holder):
                        self.path.unlink(missing_ok=True)
                finally:
                    removal.__exit__(None, None, None)
            remove_temporaries(self.path)
        except OSError as error:
            raise unwritable(self.path, error) from error
        return None


@contextlib.contextmanager
def locks_of_task(task: str) -> Iterator[None]:
    """Locks that this process takes carry the id of a task, and those of an earlier attempt at it are taken over.

    For whoever tries a task again only when the earlier attempt is known to be dead, as Ray does after it has lost a
    node: the locks of that node could otherwise never be told from those of a living one.
    """
    global _task
    before, _task = _task, task
    try:
        yield
    finally:
        _task = before


def _make_lock_file(path: Path) -> bool:
    """Whether it is ours now; False if there is one.

    It appears with what it says, by a link: a process that is killed in between leaves no lock that names nobody.
    """
    if path.exists():
        return False
    named = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    content = json.dumps(_own_identity()).encode()
    try:
        named.write_bytes(content)
        try:
            os.link(named, path)
        except (FileExistsError, FileNotFoundError):  # who got the lock meanwhile may have tidied up
            return False
        except OSError:  # a file system without links
            return _make_lock_file_alone(path, content)
        return True
    finally:
        named.unlink(missing_ok=True)


def _make_lock_file_alone(path: Path, content: bytes) -> bool:
    """The same in two steps: others see for a moment a lock that does not name its holder yet."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return True


def _holder_of(path: Path) -> dict[str, Any] | None:
    """Whom a lock file names. {}: after a while still nobody, as its process was killed before. None: there is none."""
    deadline = time.monotonic() + UNNAMED_S
    while True:
        try:
            holder = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            holder = None
        if isinstance(holder, dict):
            return holder
        if time.monotonic() >= deadline:
            return {}
        time.sleep(0.02)


def identity_of_process(pid: int) -> dict[str, Any]:
    """What tells a process from all others, as far as the system says: host, boot, process id, time of its start."""
    identity: dict[str, Any] = {"host": socket.gethostname(), "pid": pid}
    with contextlib.suppress(OSError):
        identity["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError, IndexError):
        identity["start"] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return identity


def _own_identity() -> dict[str, Any]:
    identity = identity_of_process(os.getpid())
    return identity if _task is None else identity | {"task": _task}


def is_stale(holder: dict[str, Any]) -> bool:
    """Whether the process that wrote this identity has certainly ended."""
    pid = holder.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return True
    now = identity_of_process(pid)
    if holder.get("host") != now["host"]:
        return _task is not None and holder.get("task") == _task
    if any(key in holder and key in now and holder[key] != now[key] for key in ("boot", "start")):
        return True
    if os.name != "posix":  # where signal 0 would not only ask
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # it exists and belongs to somebody else
        return False
    return False
