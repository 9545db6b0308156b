"""State files: everything comes back bit by bit; damaged files and full disks are named, and no code is run."""

import os
import pickle
import resource
from contextlib import contextmanager

import pytest
import torch

from psamil.errors import DataError
from psamil.training.state import (
    optimizer_tensors,
    read_tensors,
    restore_optimizer,
    with_prefix,
    without_prefix,
    write_tensors,
)

REMEDY = "delete it"


@contextmanager
def files_limited_to(size):
    """No file can grow beyond this many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_tensors_and_facts_come_back(tmp_path):
    shared = torch.randn(4, 4)
    tensors = {
        "a": shared,
        "transposed": shared.T,
        "half": torch.randn(3).half(),
        "number": torch.tensor(7.0),
        "whole": torch.arange(3),
        "empty": torch.empty(0, 2),
    }
    about = {"loss": 0.1 + 0.2, "name": "Ä", "nothing": None}
    write_tensors(tmp_path / "file", tensors, about)
    read, facts = read_tensors(tmp_path / "file", REMEDY)
    assert facts == about
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor), name
        assert read[name].dtype == tensor.dtype


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_an_optimiser_goes_on_with_the_same_bits(kind, tmp_path):
    def step(model, optimizer, x):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    torch.manual_seed(0)
    model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    optimizer = kind(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimizer, x)
    write_tensors(tmp_path / "file", with_prefix("optimizer", optimizer_tensors(optimizer)), {})
    other = torch.nn.Linear(3, 2)
    other.load_state_dict(model.state_dict())
    resumed = kind(other.parameters(), lr=0.1)
    restore_optimizer(resumed, without_prefix("optimizer", read_tensors(tmp_path / "file", REMEDY)[0]))
    for _ in range(3):
        step(model, optimizer, x)
        step(other, resumed, x)
    assert torch.equal(model.weight, other.weight)


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        os.urandom(5000),
        pickle.dumps(Harmful()),
        b"\x02\x00\x00\x00\x00\x00\x00\x00{}",
        b"\xff" * 8 + b"{}",
    ],
    ids=["empty", "one byte", "random", "pickle", "no header", "huge header"],
)
def test_damaged_files_are_refused_and_run_no_code(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(DataError, match=r"file: is damaged, or no file of psamil .*; delete it") as error:
        read_tensors(tmp_path / "file", REMEDY)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "harm").exists()


def test_truncated_and_strange_files_are_refused(tmp_path):
    path = tmp_path / "file"
    write_tensors(path, {"a": torch.randn(100)}, {})
    whole = path.read_bytes()
    for size in range(0, len(whole), 37):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match="is damaged"):
            read_tensors(path, REMEDY)
    write_tensors(path, {}, [1, 2])  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no mapping"):
        read_tensors(path, REMEDY)
    with pytest.raises(DataError, match="is damaged"):
        read_tensors(tmp_path, REMEDY)
    with pytest.raises(DataError, match="is damaged"):
        read_tensors(tmp_path / "absent", REMEDY)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "file"
    write_tensors(path, {"a": torch.zeros(10)}, {})
    before = path.read_bytes()
    with files_limited_to(200_000), pytest.raises(DataError, match="file: cannot be written") as error:
        write_tensors(path, {"a": torch.zeros(100_000)}, {})
    assert "\n" not in str(error.value)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_others_may_read_what_the_mask_of_the_process_lets_them(tmp_path):
    before = os.umask(0o022)
    try:
        write_tensors(tmp_path / "file", {"a": torch.zeros(1)}, {})
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644
