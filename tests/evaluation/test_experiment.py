"""Cross-validation: the same bits after any number of kills, no second run in the same folder, one fold alone."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

from psamil.bag import PackedBags
from psamil.cohort import BagCache, Cohort, k_fold, simulate
from psamil.errors import DataError, OptionError
from psamil.evaluation.experiment import cross_validate, summarise
from psamil.files import read_json
from psamil.training.fold import MODEL_FILE
from psamil.training.saved_model import SavedModel
from psamil.training.settings import TrainingSettings

SMALL = {"heads": 2, "head_dim": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experiment") / "cohort"
    simulate(folder, slides=24, tiles=60, dim=8, slides_per_patient=2)
    return folder


@pytest.fixture(scope="module")
def cohort(folder):
    return Cohort.open(folder, folder / "labels.csv", target="label", cache=BagCache(folder.parent / "cache"))


@pytest.fixture(scope="module")
def splits(cohort):
    return k_fold(cohort, 3, seed=1)


def files_of(run: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(run)): file.read_bytes()
        for file in sorted(run.rglob("*"))
        if file.is_file() and file.name != "lock"
    }


SETTINGS = TrainingSettings(epochs=3, batch_samples=4, samples_per_pass=2, max_tiles=40, model_options=SMALL)


def killed_after(seconds: float, work) -> bool:
    """Does the work in a process of its own and kills it after a while; whether it was still at work."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_killed_at_random_moments_it_ends_with_the_same_bits(cohort, splits, tmp_path):
    start = time.monotonic()
    cross_validate(cohort, splits, SETTINGS, tmp_path / "whole", seeds=2)
    taken = time.monotonic() - start
    moments = random.Random(0)
    kills = 0
    while killed_after(
        moments.uniform(0.02, taken / 8), lambda: cross_validate(cohort, splits, SETTINGS, tmp_path / "broken", seeds=2)
    ):
        kills += 1
        assert kills < 200
    assert kills >= 3
    whole, broken = files_of(tmp_path / "whole"), files_of(tmp_path / "broken")
    assert {name for name in broken if not name.endswith(".tmp")} == whole.keys()
    for name, content in whole.items():
        assert broken[name] == content, name


def test_a_finished_run_is_not_done_again_and_another_is_refused(cohort, splits, tmp_path):
    settings = TrainingSettings(model="mean", epochs=1, model_options={"hidden": 4})
    summary = cross_validate(cohort, splits, settings, tmp_path / "run")
    before = {name: (tmp_path / "run" / name).stat().st_mtime_ns for name in files_of(tmp_path / "run")}
    assert cross_validate(cohort, splits, settings, tmp_path / "run") == summary
    unchanged = [name for name in before if (tmp_path / "run" / name).stat().st_mtime_ns == before[name]]
    assert {name for name in before if "folds" in name} <= set(unchanged)
    with pytest.raises(DataError, match="other settings"):
        cross_validate(cohort, splits, TrainingSettings(model="mean", epochs=2), tmp_path / "run")
    with pytest.raises(DataError, match="other splits"):
        cross_validate(cohort, k_fold(cohort, 3, seed=2), settings, tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(DataError, match="is not empty and no run"):
        cross_validate(cohort, splits, settings, tmp_path / "full")


def test_folds_can_be_done_one_by_one(cohort, splits, tmp_path):
    settings = TrainingSettings(model="mean", epochs=1, model_options={"hidden": 4})
    whole = cross_validate(cohort, splits, settings, tmp_path / "whole")
    for fold in (2, 0):
        partial = cross_validate(cohort, splits, settings, tmp_path / "parts", fold=fold)
    assert partial["finished"] == [0, 2]
    assert cross_validate(cohort, splits, settings, tmp_path / "parts", fold=1) == whole
    with pytest.raises(OptionError, match="from 0 to 2"):
        cross_validate(cohort, splits, settings, tmp_path / "parts", fold=3)


def test_a_fold_that_another_process_works_on_is_left_to_it(cohort, splits, tmp_path):
    settings = TrainingSettings(model="mean", epochs=1, model_options={"hidden": 4})
    lock = tmp_path / "run" / "folds" / "1" / "seed-0" / "lock"
    cross_validate(cohort, splits, settings, tmp_path / "run", fold=0)
    with subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE) as sleeper:
        assert sleeper.stdout is not None
        sleeper.stdout.readline()
        assert cross_validate(cohort, splits, settings, tmp_path / "run")["finished"] == [0, 2]
        sleeper.kill()
    assert cross_validate(cohort, splits, settings, tmp_path / "run")["finished"] == [0, 1, 2]  # its lock is stale


HOLD = """
import sys, time
from psamil.files import Lock
with Lock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_predictions_and_models_agree(cohort, splits, tmp_path):
    cross_validate(cohort, splits, SETTINGS, tmp_path / "run", seeds=2)
    table = pd.read_csv(tmp_path / "run" / "predictions.csv", dtype={"sample": str})
    assert sorted(table["sample"]) == sorted(cohort.ids)  # every slide is tested once
    for k, fold in enumerate(splits.folds):
        assert set(table.loc[table["fold"] == k, "sample"]) == set(fold.test)
    single = tmp_path / "run" / "folds" / "0" / "seed-0"
    model = SavedModel.load(single / MODEL_FILE)
    written = pd.read_csv(single / "predictions.csv", dtype={"sample": str}).set_index("sample")
    sample = cohort.select(splits[0].test).samples[0]
    with torch.no_grad():
        logit = model.model(PackedBags.of(cohort.load(sample))).logits.item()
    assert logit == pytest.approx(written.loc[sample.id, "logit_0"], rel=1e-5)
    metrics = read_json(single / "metrics.json")
    temperature = metrics["temperature"]
    assert torch.tensor(logit / temperature).sigmoid() == pytest.approx(written.loc[sample.id, "prob_positive"], 1e-5)
    assert summarise(tmp_path / "run") == read_json(tmp_path / "run" / "summary.json")


def test_survival(folder, tmp_path):
    cohort = Cohort.open(folder, folder / "labels.csv", time="survival_months", censorship="censorship", unit="patient")
    settings = TrainingSettings(model="abmil", epochs=2, model_options={"hidden": 8})
    summary = cross_validate(cohort, k_fold(cohort, 2), settings, tmp_path / "run")
    assert 0 <= summary["metrics"]["c_index"]["mean"] <= 1


def test_the_test_part_does_not_touch_training(cohort, splits, folder, tmp_path):
    """Other labels in the test part: the same weights."""
    fold = splits[0]
    table = pd.read_csv(folder / "labels.csv", dtype=str)
    test = table["slide_id"].isin(fold.test)
    table.loc[test, "label"] = table.loc[test, "label"].map({"positive": "negative", "negative": "positive"})
    other = Cohort.open(folder, table, target="label", cache=BagCache(folder.parent / "cache"))
    settings = TrainingSettings(model="mean", epochs=2, model_options={"hidden": 4})
    for name, of in (("a", cohort), ("b", other)):
        cross_validate(of, splits, settings, tmp_path / name, fold=0)
    a, b = (files_of(tmp_path / name) for name in ("a", "b"))
    assert a["folds/0/seed-0/model.safetensors"] == b["folds/0/seed-0/model.safetensors"]
    assert a["folds/0/seed-0/metrics.json"] != b["folds/0/seed-0/metrics.json"]


def test_locks_are_released(cohort, splits, tmp_path):
    cross_validate(cohort, splits, TrainingSettings(model="mean", epochs=1), tmp_path / "run")
    assert not list((tmp_path / "run").rglob("lock"))
