import csv
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psamil.errors import BusyError, DataError
from psamil.files import (
    Lock,
    atomic_write,
    content_hash,
    escape_cell,
    identity_of_process,
    is_stale,
    locks_of_task,
    read_json,
    remove_temporaries,
    unescape_cell,
    without_nan,
    write_json,
)


def test_a_write_is_whole_or_absent(tmp_path):
    path = tmp_path / "new" / "file.txt"
    with atomic_write(path) as temporary:
        temporary.write_text("one")
        assert not path.exists()
        assert temporary.parent == path.parent
    assert path.read_text() == "one"
    with pytest.raises(TypeError), atomic_write(path) as temporary:
        _ = temporary.write_text("two") + "a bug"
    assert path.read_text() == "one"
    assert os.listdir(path.parent) == ["file.txt"]


def test_files_have_the_usual_permissions(tmp_path):
    (tmp_path / "plain").touch()
    with atomic_write(tmp_path / "atomic"):
        pass
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("moment", ["os.fsync", "os.replace"])
def test_a_full_disk_is_one_line_and_harms_nothing(tmp_path, monkeypatch, moment):
    path = tmp_path / "a.json"
    write_json(path, 1)

    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(moment, fail)
    with pytest.raises(DataError, match=r"a\.json: cannot be written, the disk is full; free some space"):
        write_json(path, 2)
    monkeypatch.undo()
    assert read_json(path) == 1
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_libraries_on_a_full_disk(tmp_path):
    with (
        pytest.raises(DataError, match="the disk is full"),
        atomic_write(tmp_path / "a"),
        open("/dev/full", "wb", 0) as f,
    ):
        f.write(b"x")


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"a\.json: cannot be written: .*choose another"):
        write_json(tmp_path / "file" / "a.json", 1)
    with pytest.raises(DataError, match="cannot be written"), Lock(tmp_path / "file" / "lock"):
        pass


def test_an_error_about_another_file_is_not_blamed_on_this_one(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "a"):
        (tmp_path / "other").read_text()


def test_a_killed_writer_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.h5"
    with atomic_write(path) as temporary, h5py.File(temporary, "w") as h5:
        h5["x"] = np.arange(3)
    code = f"""
import os, signal, h5py
from psamil.files import atomic_write
with atomic_write({str(path)!r}) as temporary, h5py.File(temporary, "w") as h5:
    h5["x"] = [9] * 1000
    h5.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    with h5py.File(path) as h5:
        assert h5["x"][:].tolist() == [0, 1, 2]
    assert all(name == "a.h5" or (name.startswith(".") and name.endswith(".tmp")) for name in os.listdir(tmp_path))


def test_what_killed_writers_left_can_be_removed(tmp_path):
    """Of this file alone, whatever signs its name has."""
    ours, others = [".a[1].h5.0123456789ab.tmp"], ["a[1].h5", ".a1.h5.0123456789ab.tmp", ".a[1].h5.notes.tmp", "x.tmp"]
    for name in ours + others:
        (tmp_path / name).touch()
    remove_temporaries(tmp_path / "a[1].h5")
    assert sorted(os.listdir(tmp_path)) == sorted(others)
    remove_temporaries(tmp_path / "none" / "a")


def test_json(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"name": "Gewebe µm", "n": [1, 2.5, None]})
    assert read_json(path) == {"name": "Gewebe µm", "n": [1, 2.5, None]}
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, float("nan"))
    path.write_bytes(b'{"a": ')
    with pytest.raises(DataError, match=r"a\.json: is not valid JSON: .*line 1"):
        read_json(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="is not valid JSON"):
        read_json(path)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_json(tmp_path / "none.json")


def test_content_hash(tmp_path):
    (tmp_path / "a").write_bytes(b"1" * 3_000_000)
    (tmp_path / "b").write_bytes(b"1" * 3_000_000)
    assert content_hash(tmp_path / "a") == content_hash(tmp_path / "b")
    folder = content_hash(tmp_path)
    (tmp_path / "b").rename(tmp_path / "c")
    assert content_hash(tmp_path) != folder


@pytest.mark.parametrize("text", ["=1+1", "+cmd", "-a", "@SUM(A1)", "'=x", "''-x", "\t=x", "plain", "", "'", "-1.5"])
def test_cells(text):
    cell = escape_cell(text)
    assert not cell.startswith(("=", "+", "-", "@", "\t")) or cell == "-1.5"
    assert unescape_cell(cell) == text


@given(st.text())
def test_escaping_loses_nothing(text):
    assert unescape_cell(escape_cell(text)) == text


def test_numbers_are_not_escaped(tmp_path):
    with open(tmp_path / "a.csv", "w", newline="") as file:
        csv.writer(file).writerow([escape_cell(value) for value in (-1.5, -2, None, "=A1")])
    assert (tmp_path / "a.csv").read_text().strip() == "-1.5,-2,,'=A1"


def test_a_lock_excludes_and_goes(tmp_path):
    path = tmp_path / "run" / "lock"
    with Lock(path):
        assert read_json(path)["pid"] == os.getpid()
        with pytest.raises(DataError, match=rf"lock: in use by process {os.getpid()} on .*delete the file"), Lock(path):
            pass
        assert path.exists()
    assert not path.exists()


def test_a_lock_is_waited_for(tmp_path):
    with Lock(tmp_path / "lock") as held:
        threading.Timer(0.2, held.__exit__, (None, None, None)).start()
        with Lock(tmp_path / "lock", wait_s=20):
            pass


def test_locks_of_the_dead_are_taken_over(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    code = f"""
import os, signal
from psamil.files import Lock
with Lock({str(path)!r}):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code])
    assert path.exists()
    with Lock(path):
        assert read_json(path)["pid"] == os.getpid()
    monkeypatch.setattr("psamil.files.UNNAMED_S", 0.2)
    path.write_text('{"host": "ab')  # killed while it wrote
    with Lock(path):
        pass


def test_who_is_stale():
    me = identity_of_process(os.getpid())
    assert me["host"] == socket.gethostname()
    assert not is_stale(me)
    assert is_stale(me | {"boot": "another"}) == ("boot" in me)
    assert is_stale(me | {"start": "1"}) == ("start" in me)
    assert not is_stale(me | {"host": "elsewhere", "boot": "another"})
    assert not is_stale({"host": me["host"], "pid": os.getpid()})  # a system that says no more
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert is_stale({"host": me["host"], "pid": child.pid})


def test_locks_of_an_earlier_attempt_on_another_host_are_taken_over(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    monkeypatch.setattr("socket.gethostname", lambda: "lost")
    with locks_of_task("job 1"):
        Lock(path).__enter__()
    monkeypatch.undo()
    assert read_json(path)["task"] == "job 1"
    with pytest.raises(BusyError, match="on lost"), Lock(path):  # no task: nothing is known of that host
        pass
    with locks_of_task("job 2"), pytest.raises(BusyError, match="on lost"), Lock(path):
        pass
    with locks_of_task("job 1"):
        with Lock(path):
            assert read_json(path)["host"] == socket.gethostname()
            with pytest.raises(BusyError), Lock(path):  # this process, which lives
                pass
        assert not path.exists()
        with Lock(path):
            child = f"from psamil.files import *\nwith locks_of_task('job 1'), Lock({str(path)!r}): pass"
            ended = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
            assert "in use by process" in ended.stderr  # of the same task; its holder lives on this host
    with Lock(path):
        assert "task" not in read_json(path)


def test_one_of_many_takes_over_a_stale_lock(tmp_path):
    path, log = tmp_path / "lock", tmp_path / "log"
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": 2**22 + 1}))
    code = f"""
import os
from psamil.files import Lock
for _ in range(20):
    with Lock({str(path)!r}, wait_s=60):
        descriptor = os.open({str(log)!r}, os.O_CREAT | os.O_EXCL)  # fails if another process is inside
        os.close(descriptor)
        os.unlink({str(log)!r})
"""
    workers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
    assert [worker.wait() for worker in workers] == [0] * 4
    assert not path.exists()


def test_two_never_take_over_the_same_stale_lock(tmp_path):
    """Many stale locks, of which four processes keep as many as they can get; no file is ever locked by the system."""
    for i in range(150):
        (tmp_path / f"{i}.lock").write_text(json.dumps({"host": socket.gethostname(), "pid": 2**22 + 1}))
    code = f"""
import sys, time
from pathlib import Path
from psamil.errors import BusyError
from psamil.files import Lock
folder, won = Path({str(tmp_path)!r}), []
sys.stdout.write("ready\\n"); sys.stdout.flush()
sys.stdin.readline()
for i in range(150):
    try:
        Lock(folder / f"{{i}}.lock").__enter__()
        won.append(i)
    except BusyError:
        pass
print(*won, flush=True)
sys.stdin.readline()  # the locks are held until all have tried
"""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    workers = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(4)]
    assert [worker.stdout.readline() for worker in workers] == ["ready\n"] * 4
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    won = [int(i) for worker in workers for i in worker.stdout.readline().split()]
    for worker in workers:
        worker.communicate("end\n")
    assert sorted(won) == list(range(150))
    assert not list(tmp_path.glob("*.removal"))


def test_a_lock_whose_remover_was_killed_is_taken_over(tmp_path):
    for name in ("lock", "lock.removal"):
        (tmp_path / name).write_text(json.dumps({"host": socket.gethostname(), "pid": 2**22 + 1}))
    with Lock(tmp_path / "lock"):
        assert os.listdir(tmp_path) == ["lock"]


def test_a_lock_that_is_being_made_is_not_taken_over(tmp_path):
    """Its process lives and has not written its name yet."""
    path = tmp_path / "lock"
    path.touch()
    threading.Timer(0.3, path.write_text, (json.dumps(identity_of_process(os.getpid())),)).start()
    with pytest.raises(BusyError, match=f"in use by process {os.getpid()}"), Lock(path):
        pass


def test_numbers_that_json_lacks_become_null():
    values = {"a": [1.0, np.nan, {"b": np.float64("-inf")}], "c": "nan", "d": None, "e": 3}
    assert without_nan(values) == {"a": [1.0, None, {"b": None}], "c": "nan", "d": None, "e": 3}


def test_a_lock_works_where_files_cannot_be_linked(tmp_path, monkeypatch):
    def refuse(*paths):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    with Lock(tmp_path / "lock"):
        with pytest.raises(BusyError, match=str(os.getpid())), Lock(tmp_path / "lock"):
            pass
        assert [file.name for file in tmp_path.iterdir()] == ["lock"]
    assert not list(tmp_path.iterdir())


def test_killed_while_it_takes_a_lock_a_process_leaves_none_without_a_name(tmp_path):
    code = f"""
import os, signal
from psamil.files import Lock
os.link = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
Lock({str(tmp_path / "lock")!r}).__enter__()
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert not (tmp_path / "lock").exists()
    with Lock(tmp_path / "lock"):  # at once
        pass
    assert not list(tmp_path.iterdir())


def test_a_lock_is_tried_again_when_its_holder_tidied_up_meanwhile(tmp_path, monkeypatch):
    link, removed = os.link, []

    def late(named, path):
        if not removed:
            remove_temporaries(path)
            removed.append(named)
        link(named, path)

    monkeypatch.setattr("os.link", late)
    with Lock(tmp_path / "lock"):
        assert removed
        assert [file.name for file in tmp_path.iterdir()] == ["lock"]
