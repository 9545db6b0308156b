"""Cross-validation: the same bits after any number of kills, no second run in the same folder, one fold alone."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from psamil.bag import PackedBags
from psamil.cohort import BagCache, Cohort, Split, Splits, k_fold, simulate
from psamil.errors import BusyError, DataError, OptionError
from psamil.evaluation.experiment import cross_validate, summarise
from psamil.evaluation.scores import read_predictions
from psamil.files import Lock, read_json
from psamil.training.fold import MODEL_FILE
from psamil.training.saved_model import SavedModel
from psamil.training.settings import TrainingSettings
from psamil.training.timing import TIMING_FILE

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
    """All but locks, and the times that epochs took, which are never the same."""
    return {
        str(file.relative_to(run)): file.read_bytes()
        for file in sorted(run.rglob("*"))
        if file.is_file() and file.name not in ("lock", TIMING_FILE)
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
    with pytest.raises(DataError, match=r"other settings \(model_options, epochs\)"):
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
    slides = pd.read_csv(folder / "labels.csv", dtype=str).set_index("slide_id")["case_id"].to_dict()
    assert read_json(tmp_path / "run" / "run.json")["slides"] == slides


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


MEAN = TrainingSettings(model="mean", epochs=2, model_options={"hidden": 4})


class Killed(BaseException):
    pass


def test_stopped_after_any_write_it_ends_with_the_same_bits(cohort, splits, tmp_path, monkeypatch):
    """Run, splits, history, state, model, predictions, metrics, summary; before and after each gets its name."""
    cross_validate(cohort, splits, MEAN, tmp_path / "whole", fold=1)
    whole, original = files_of(tmp_path / "whole"), os.replace
    written = []

    def replace_and_die(source, target, *, after):
        is_the_last = len(written) == stop
        if is_the_last and not after:
            raise Killed
        original(source, target)
        written.append(Path(target).name)
        if is_the_last:
            raise Killed

    for after in (True, False):
        stop = 0
        while True:
            run = tmp_path / f"{after} {stop}"
            written.clear()
            monkeypatch.setattr(os, "replace", partial(replace_and_die, after=after))
            try:
                cross_validate(cohort, splits, MEAN, run, fold=1)
            except Killed:
                monkeypatch.setattr(os, "replace", original)
                cross_validate(cohort, splits, MEAN, run, fold=1)
                assert files_of(run) == whole, (after, written)
                stop += 1
            else:
                break
        expected = [
            "run.json",
            "splits.json",
            *["timing.jsonl", "history.jsonl", "state.safetensors"] * 2,
            "model.safetensors",
        ]
        assert written == [*expected, "predictions.csv", "metrics.json", "predictions.csv", "summary.json"]


def test_what_killed_processes_leave_behind_is_removed(cohort, splits, tmp_path):
    folder = tmp_path / "run" / "folds" / "0" / "seed-0"
    folder.mkdir(parents=True)
    (folder.parents[2] / ".run.json.123.tmp").write_text("half")
    (folder / ".state.safetensors.123.tmp").write_text("half")
    with pytest.raises(DataError, match="is not empty and no run"):
        cross_validate(cohort, splits, MEAN, tmp_path / "run", fold=0)
    shutil.rmtree(tmp_path / "run" / "folds")
    cross_validate(cohort, splits, MEAN, tmp_path / "run", fold=0)
    (folder / "metrics.json").unlink()
    (folder / ".state.safetensors.123.tmp").write_text("half")
    cross_validate(cohort, splits, MEAN, tmp_path / "run", fold=0)
    assert not list(folder.glob(".*"))


def test_several_processes_start_at_once(cohort, splits, tmp_path):
    """As the jobs of an array do: none is refused, and the last summary knows all folds."""
    whole = cross_validate(cohort, splits, MEAN, tmp_path / "whole")
    children = []
    for fold in range(3):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                cross_validate(cohort, splits, MEAN, tmp_path / "run", fold=fold)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert read_json(tmp_path / "run" / "summary.json") == whole
    assert files_of(tmp_path / "run") == files_of(tmp_path / "whole")


def test_a_fold_that_is_asked_for_and_busy_is_an_error(cohort, splits, tmp_path):
    cross_validate(cohort, splits, MEAN, tmp_path / "run", fold=0)
    with (
        Lock(tmp_path / "run" / "folds" / "1" / "seed-0" / "lock"),
        pytest.raises(BusyError, match="in use by process"),
    ):
        cross_validate(cohort, splits, MEAN, tmp_path / "run", fold=1)


def parted(cohort, is_test) -> Split:
    """Training on the samples for which it is false, without validation."""
    chosen = dict(zip(cohort.ids, is_test, strict=True))
    return Split(tuple(s for s in chosen if not chosen[s]), (), tuple(s for s in chosen if chosen[s]))


def test_a_fold_without_a_class_is_refused_before_anything_is_trained(cohort, splits, tmp_path):
    both = Splits((splits[0], parted(cohort, cohort.outcome.labels == 1)))
    with pytest.raises(DataError, match="fold 1, column 'label': the training part has no sample of class 'positive'"):
        cross_validate(cohort, both, MEAN, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert cross_validate(cohort, both, MEAN, tmp_path / "run", fold=0)["finished"] == [0]


def test_one_class_in_test_and_validation_has_no_auc(cohort, tmp_path):
    labels = dict(zip(cohort.ids, cohort.outcome.labels, strict=True))
    fold = k_fold(cohort, 3)[0]
    few = Split(fold.train, *(tuple(s for s in part if labels[s]) for part in (fold.val, fold.test)))
    summary = cross_validate(cohort, Splits((few,)), MEAN, tmp_path / "run")
    assert summary["metrics"]["auc"]["mean"] is None
    assert summary["metrics"]["accuracy"]["mean"] is not None
    history = (tmp_path / "run" / "folds" / "0" / "seed-0" / "history.jsonl").read_text()
    assert '"validation -loss"' in history


def test_a_class_of_one_slide_is_trained_on(folder, tmp_path):
    table = pd.read_csv(folder / "labels.csv", dtype=str)
    table.loc[0, "label"] = "rare"
    cohort = Cohort.open(folder, table, target="label", cache=BagCache(folder.parent / "cache"))
    patients = sorted(set(cohort.patients) - {table.loc[0, "case_id"]})
    fold = parted(cohort, [patient in patients[:4] for patient in cohort.patients])
    assert cross_validate(cohort, Splits((fold,)), MEAN, tmp_path / "run")["finished"] == [0]
    without = Splits((Split(fold.test, (), fold.train),))
    with pytest.raises(DataError, match="no sample of class 'rare'"):
        cross_validate(cohort, without, MEAN, tmp_path / "other")


def test_censored_parts(folder, tmp_path):
    table = pd.read_csv(folder / "labels.csv", dtype=str)
    half = sorted(set(table["case_id"]))[::2]
    table["censorship"] = table["case_id"].isin(half).astype(int).astype(str)
    cohort = Cohort.open(folder, table, time="survival_months", censorship="censorship")
    trained_on_events = parted(cohort, ~cohort.outcome.events)
    summary = cross_validate(cohort, Splits((trained_on_events,)), MEAN, tmp_path / "run")
    assert summary["metrics"]["c_index"]["mean"] is None
    with pytest.raises(DataError, match="fold 0, column 'censorship': the training part has no event"):
        cross_validate(cohort, Splits((parted(cohort, cohort.outcome.events),)), MEAN, tmp_path / "other")


@pytest.mark.parametrize("names", [("0", "1"), ("NA", "None"), ("=1", "-x")])
def test_classes_of_any_name(folder, cohort, splits, tmp_path, names):
    table = pd.read_csv(folder / "labels.csv", dtype=str)
    table["label"] = table["label"].map(dict(zip(("negative", "positive"), names, strict=True)))
    if names == ("NA", "None"):  # which a table cannot say
        outcome = replace(cohort.outcome, classes=names)
        samples = tuple(replace(s, outcome=names[cohort.outcome.labels[i]]) for i, s in enumerate(cohort.samples))
        named = replace(cohort, outcome=outcome, samples=samples)
    else:
        options = {"kind": "classification", "classes": list(names), "cache": BagCache(folder.parent / "cache")}
        named = Cohort.open(folder, table, target="label", **options)
    summary = cross_validate(named, splits, MEAN, tmp_path / "named")
    plain = cross_validate(cohort, splits, MEAN, tmp_path / "plain")
    assert summary["metrics"] == plain["metrics"]
    assert summary["metrics"]["auc"]["mean"] is not None


def test_a_split_without_test_part_trains_a_model(cohort, tmp_path):
    summary = cross_validate(cohort, Splits((Split(cohort.ids),)), MEAN, tmp_path / "run")
    assert summary == {"folds": 1, "finished": [0], "metrics": {}}
    assert (tmp_path / "run" / "folds" / "0" / "seed-0" / MODEL_FILE).exists()


@pytest.mark.parametrize(
    "wrong", [{"model": "resnet"}, {"model_options": {"hidde": 4}}, {"precision": "7-true"}, {"accelerator": "abacus"}]
)
def test_wrong_options_leave_no_run_behind(cohort, splits, tmp_path, wrong):
    with pytest.raises(OptionError):
        cross_validate(cohort, splits, replace(MEAN, **wrong), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_seeds(cohort, splits, tmp_path):
    settings = replace(MEAN, seed=9)
    jobs = []
    both = cross_validate(
        cohort, splits, settings, tmp_path / "run", seeds=2, report=lambda job, record: jobs.append(job)
    )
    assert list(dict.fromkeys(jobs)) == [f"fold {k}, seed {seed}" for k in range(3) for seed in (9, 10)]
    single = tmp_path / "run" / "folds" / "0"
    models = [(single / f"seed-{seed}" / MODEL_FILE).read_bytes() for seed in (9, 10)]
    assert models[0] != models[1]
    tables = [read_predictions(single / f"seed-{seed}" / "predictions.csv") for seed in (9, 10)]
    mean = read_predictions(tmp_path / "run" / "predictions.csv").set_index("sample")
    for table in tables:
        table.set_index("sample", inplace=True)
    for sample in splits[0].test:
        expected = (tables[0].loc[sample, "prob_positive"] + tables[1].loc[sample, "prob_positive"]) / 2
        assert mean.loc[sample, "prob_positive"] == pytest.approx(expected, rel=1e-12)
    (single / "seed-10" / "metrics.json").unlink()
    assert summarise(tmp_path / "run")["finished"] == [1, 2]  # an ensemble of one does not compare with those of two
    assert cross_validate(cohort, splits, settings, tmp_path / "run", seeds=2) == both
    with pytest.raises(OptionError, match="seeds must be at least 1"):
        cross_validate(cohort, splits, settings, tmp_path / "none", seeds=0)


def test_one_seed_gives_the_same_numbers_in_the_fold_and_in_the_summary(cohort, splits, tmp_path):
    summary = cross_validate(cohort, splits, SETTINGS, tmp_path / "run")
    for k in range(3):
        metrics = read_json(tmp_path / "run" / "folds" / str(k) / "seed-0" / "metrics.json")["test"]
        assert {name: of["per_fold"][k] for name, of in summary["metrics"].items()} == metrics


def test_a_run_knows_the_names_of_few_features(tmp_path):
    rng = np.random.default_rng(0)
    for n_features, is_known in ((3, True), (300, False)):
        folder, names = tmp_path / str(n_features), [f"kind {i}" for i in range(n_features)]
        folder.mkdir()
        for i in range(4):
            x, xy = rng.random((5, n_features), dtype=np.float32), rng.random((5, 2))
            np.savez(folder / f"s{i}.npz", features=x, coords=xy, unit="px", continuous=True, feature_names=names)
        pd.DataFrame({"slide_id": [f"s{i}" for i in range(4)], "label": list("abab")}).to_csv(folder / "labels.csv")
        cohort = Cohort.open(folder, folder / "labels.csv", target="label")
        cross_validate(cohort, k_fold(cohort, 2, val=0.0), MEAN, folder / "run", fold=0)
        assert read_json(folder / "run" / "run.json").get("feature_names") == (names if is_known else None)


def test_a_run_says_how_it_was_made(cohort, splits, tmp_path):
    cross_validate(cohort, splits, MEAN, tmp_path / "run", fold=0)
    about = read_json(tmp_path / "run" / "run.json")
    assert about["settings"]["model_options"] == {"hidden": 4}
    assert about["patients"] == dict(zip(cohort.ids, cohort.patients, strict=True))
    assert about["threads"] == torch.get_num_threads()
    assert about["environment"]["packages"].keys() >= {"psamil", "torch"}
    assert Splits.load(tmp_path / "run" / "splits.json").hash == about["splits"] == splits.hash


def test_the_same_files_read_in_another_way_are_another_run(folder, cohort, splits, tmp_path):
    cross_validate(cohort, splits, MEAN, tmp_path / "run", fold=0)
    zeroed = replace(cohort, loader=BagCache(folder.parent / "cache", non_finite="zero"))
    with pytest.raises(DataError, match="is a run with other reading"):
        cross_validate(zeroed, splits, MEAN, tmp_path / "run", fold=0)
