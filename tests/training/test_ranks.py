"""Several processes that train one model: the numbers of one process, whatever is killed or goes wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from psamil.cohort import BagCache, Cohort, Split, simulate
from psamil.errors import DataError, PsamilError
from psamil.training.fold import HISTORY_FILE, MODEL_FILE, STATE_FILE, train_fold
from psamil.training.ranks import Ranks, run_on_ranks
from psamil.training.settings import TrainingSettings

ABMIL = TrainingSettings(model="abmil", epochs=3, batch_samples=4, lr=1e-3, model_options={"hidden": 8})
PSA = replace(ABMIL, model="psa", model_options={"heads": 2, "head_dim": 4})


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks") / "cohort"
    simulate(folder, slides=13, tiles=60, dim=8)
    return Cohort.open(folder, folder / "labels.csv", target="label", cache=BagCache(folder.parent / "cache"))


@pytest.fixture(scope="module")
def split(cohort):
    """Nine training samples: of the last batch of each epoch, the second of two ranks has none."""
    ids = [cohort.ids[i] for i in np.argsort(cohort.outcome.labels, kind="stable")]
    return Split(train=tuple(ids[2:-2]), val=(ids[0], ids[-1], ids[1]), test=(ids[-2],))


def history(folder):
    return [json.loads(line) for line in (folder / HISTORY_FILE).read_text().splitlines()]


def assert_close(a, b, tolerance):
    a, b = a.model.state_dict(), b.model.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("settings", [ABMIL, PSA], ids=["abmil", "psa"])
def test_two_processes_train_the_model_of_one_and_can_be_stopped(cohort, split, tmp_path, settings):
    alone = train_fold(cohort, split, settings, tmp_path / "alone")
    records, steps = [], []
    both = replace(settings, devices=2)
    together = train_fold(cohort, split, both, tmp_path / "together", records.append, steps.append)
    assert_close(alone, together, 1e-5)
    assert together.about["best_epoch"] == alone.about["best_epoch"]
    assert together.about["step_um"] == alone.about["step_um"]
    assert records == history(tmp_path / "together")
    for one, other in zip(history(tmp_path / "alone"), records, strict=True):
        assert one.keys() == other.keys()
        for name in set(one) - {"radii_steps"}:
            assert one[name] == pytest.approx(other[name], abs=1e-4), name
    expected = [(epoch, step, 3) for epoch in range(3) for step in range(3)]
    assert [(step["epoch"], step["step"], step["steps"]) for step in steps] == expected
    if settings is not PSA:
        return

    def stop(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_fold(cohort, split, both, tmp_path / "broken", stop)
    assert not (tmp_path / "broken" / MODEL_FILE).exists()
    assert (tmp_path / "broken" / STATE_FILE).exists()
    train_fold(cohort, split, both, tmp_path / "broken")
    for file in (HISTORY_FILE, MODEL_FILE):
        assert (tmp_path / "broken" / file).read_bytes() == (tmp_path / "together" / file).read_bytes()


def sum_of_gradients(ranks, tell):
    """Rank r has the gradient r + 1 for the first parameter; only the second rank has one for the second."""
    model = nn.ParameterList([torch.zeros(2), torch.zeros(3, 1), torch.zeros(1)])
    model[0].grad = torch.full((2,), ranks.rank + 1.0)
    if ranks.rank == 1:
        model[1].grad = torch.full((3, 1), 7.0)
    ranks.sum_gradients(model)
    model.register_buffer("seen", torch.tensor(ranks.rank + 5))
    ranks.take_tensors_of_first(model.buffers())
    found = [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
    everything = ranks.gather((found, model.seen.item(), ranks.share("abcde")))
    if ranks.is_first:
        tell("found", everything)


def test_gradients_are_summed_and_buffers_shared():
    found = []
    run_on_ranks(2, sum_of_gradients, {"found": found.extend})
    gradients = [[3.0, 3.0], [[7.0]] * 3, None]
    assert found == [(gradients, 5, "ace"), (gradients, 5, "bd")]
    assert Ranks().share("abc") == "abc"
    assert Ranks().gather(1) == [1]


def fail(ranks, tell):
    """The second of the ranks fails, the first one waits for it."""
    if ranks.rank == 1:
        raise DataError("slide.h5", "is damaged", "copy it again")
    ranks.gather(None)


def have_a_bug(ranks, tell):
    if ranks.rank == 1:
        raise ZeroDivisionError("ours")
    ranks.gather(None)


def be_killed(ranks, tell):
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.gather(None)


@pytest.mark.parametrize(
    ("work", "error", "message"),
    [
        (fail, DataError, "slide.h5: is damaged; copy it again"),
        (have_a_bug, RuntimeError, r"(?s)in training process 1:\n.*ZeroDivisionError: ours"),
        (be_killed, PsamilError, "ended with code -9"),
    ],
)
def test_the_end_of_one_process_ends_all(work, error, message):
    with pytest.raises(error, match=message):  # not after the half hour for which the other one would wait
        run_on_ranks(2, work, {})


def wait_for_ever(ranks, tell):
    tell("pid", os.getpid())
    time.sleep(600)


CALLER = """
from psamil.training.ranks import run_on_ranks
from tests.training.test_ranks import wait_for_ever
if __name__ == "__main__":
    run_on_ranks(2, wait_for_ever, {"pid": lambda pid: print(pid, flush=True)})
"""


def test_processes_end_with_a_caller_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", CALLER], stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        pids = [int(caller.stdout.readline()) for _ in range(2)]
        caller.kill()
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
