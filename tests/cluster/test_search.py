"""Settings are searched on inner folds, by either engine, and a search that was stopped goes on."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from psamil.cluster import search_ray
from psamil.cluster.engine import connected
from psamil.cluster.search import Search, TrialResult, claim, read_trials
from psamil.cluster.search_ray import run_trials
from psamil.cluster.search_space import Choice, Range, Trial, draw_trials
from psamil.cohort import BagCache, Cohort, k_fold, simulate
from psamil.errors import DataError, OptionError, PsamilError
from psamil.evaluation import experiment
from psamil.files import read_json
from psamil.training.settings import TrainingSettings
from tests.cluster.lossy import LossySearch, lines

TRAINING = TrainingSettings(model="mean", model_options={"hidden": 4}, epochs=2)
TRIALS = draw_trials({"lr": Range(1e-3, 1e-1, log=True), "model_options.hidden": Choice((4, 8))}, 3)


def new_cohort(home: Path) -> Cohort:
    labels = simulate(home / "cohort", slides=16, tiles=50, dim=4)
    return Cohort.open(home / "cohort", labels, target="label", cache=BagCache(home / "cache")).checked()


@pytest.fixture(scope="module")
def cohort(tmp_path_factory) -> Cohort:
    return new_cohort(tmp_path_factory.mktemp("home"))


def search_in(folder: Path, cohort: Cohort, training: TrainingSettings = TRAINING) -> Search:
    return Search.of(cohort, k_fold(cohort, 2)[0], training, folder, inner=2)


def files_of(folder: Path) -> dict[str, bytes]:
    """All that is kept but times, which differ from one call to the next."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != "timing.jsonl"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def searched(tmp_path_factory, cohort) -> Path:
    """A finished search, one trial after the other."""
    search = search_in(tmp_path_factory.mktemp("searched") / "fold-0", cohort)
    search.choose([search.run(trial) for trial in TRIALS])
    return search.folder


def test_inner_folds_are_made_of_the_training_and_validation_part(cohort):
    outer = k_fold(cohort, 2)[0]
    search = search_in(Path("unused"), cohort)
    assert set(search.cohort.ids) == set(outer.train + outer.val)
    assert sorted(sample for fold in search.inner.folds for sample in fold.test) == sorted(outer.train + outer.val)
    assert not any(set(fold.ids) & set(outer.test) for fold in search.inner.folds)


def test_the_outer_test_part_is_not_read(tmp_path, searched):
    """Its slides are deleted, once the cohort is open."""
    cohort = new_cohort(tmp_path)
    outer = k_fold(cohort, 2)[0]
    for sample in cohort.select(outer.test).samples:
        sample.bags[0].path.unlink()
    cohort = replace(cohort, loader=None)  # nor are they in a cache
    with pytest.raises(DataError):
        cohort.load(cohort.select(outer.test).samples[0])
    search = search_in(tmp_path / "fold-0", cohort)
    search.choose([search.run(trial) for trial in TRIALS])
    for name in ("trials.csv", "best.yaml"):
        assert (search.folder / name).read_bytes() == (searched / name).read_bytes()


def test_the_table_has_every_trial_and_its_inner_scores(searched):
    table = read_trials(searched.parent, 0)
    assert list(table) == ["trial", "lr", "model_options.hidden", "metric", "mean", "sd", "status"]
    assert list(table["lr"]) == [trial.values["lr"] for trial in TRIALS]
    for trial, mean in zip(table["trial"], table["mean"], strict=True):
        summary = read_json(searched / "trials" / f"trial-{trial}" / "summary.json")
        assert mean == summary["metrics"]["auc"]["mean"]
    assert sorted(table["status"]) == ["chosen", "finished", "finished"]
    assert table["mean"][table["status"] == "chosen"].item() == table["mean"].max()


def test_a_stopped_search_goes_on_and_ends_with_the_same_bytes(tmp_path, cohort, searched, monkeypatch):
    search = search_in(tmp_path / "fold-0", cohort)
    trained: list[Path] = []

    def train_fold(cohort, split, settings, folder, *calls, limit=3):
        trained.append(folder)
        if len(trained) > limit:
            raise KeyboardInterrupt
        return original(cohort, split, settings, folder, *calls)

    original = experiment.train_fold
    monkeypatch.setattr(experiment, "train_fold", train_fold)
    with pytest.raises(KeyboardInterrupt):
        [search.run(trial) for trial in TRIALS]
    done = trained[:3]
    trained.clear()
    search.choose([search.run(trial) for trial in TRIALS])
    assert len(trained) == 3
    assert not set(trained) & set(done)
    assert files_of(tmp_path / "fold-0") == files_of(searched)


@pytest.fixture(scope="module")
def ray():
    """Started once."""
    pytest.importorskip("ray")
    with connected(None) as ray:
        yield ray


def test_a_lost_worker_is_made_up_for_and_a_bug_is_not_tried_again(tmp_path, cohort, ray, monkeypatch):
    monkeypatch.setattr(search_ray, "LOSSES", 1)
    search = search_in(tmp_path / "fold-0", cohort)
    lossy, told = LossySearch(search.cohort, search.inner, search.training, search.folder), []
    with pytest.raises(ZeroDivisionError, match="a bug") as error:
        run_trials(lossy, TRIALS[:2], tell=told.append)
    assert "lossy.py" in str(error.value)  # where it was
    assert sorted(lines(lossy.folder / "log", "begun")) == ["0", "0", "1"]
    assert sorted(told) == ["ZeroDivisionError: a bug", f"trial 0: auc 0.500 ({TRIALS[0]})"]
    monkeypatch.setattr(search_ray, "LOSSES", 0)
    with pytest.raises(PsamilError, match=r"^1 of 1 trials failed.*: trial 2: its worker was lost again and again: "):
        run_trials(lossy, TRIALS[2:])
    assert lines(lossy.folder / "log", "begun").count("2") == 1


def test_ray_tune_runs_the_same_trials_with_the_same_bytes(tmp_path, cohort, searched, ray):
    search, told = search_in(tmp_path / "fold-0", cohort), []
    results = run_trials(search, TRIALS, tell=told.append)
    assert [result.trial for result in results] == TRIALS
    assert sorted(told) == sorted(map(str, results))
    search.choose(results)
    assert files_of(tmp_path / "fold-0") == files_of(searched)


def test_settings_that_do_not_work_fail_alone(tmp_path, cohort):
    search = search_in(tmp_path / "fold-0", cohort)
    trials = [Trial(0, {"lr": 1e-9}), Trial(1, {"lr": 1e-3})]
    results = [search.run(trial) for trial in trials]
    assert search.choose(results).trial == trials[1]
    status = pd.read_csv(search.folder / "trials.csv")["status"].tolist()
    assert status[0].startswith("failed: first_lr must lie between 0 and lr")
    assert status[1] == "chosen"
    with pytest.raises(OptionError, match="no trial has a score; trial 0: failed: first_lr"):
        search.choose(results[:1])


def test_null_is_a_value_like_others(tmp_path, cohort):
    search = search_in(tmp_path / "fold-0", cohort)
    values = [{"gradient_clip": clip, "epochs": 3, "model": model} for clip, model in ((None, "mean"), (5, "max"))]
    results = [TrialResult(Trial(i, of), "finished", "auc", 0.5) for i, of in enumerate(values)]
    search.choose([*results, TrialResult(Trial(2, {**values[0], "gradient_clip": 0.5}), "failed: null")])
    table = read_trials(tmp_path, 0)
    assert table["gradient_clip"].tolist() == [None, 5, 0.5]
    assert table["epochs"].dtype.kind == "i"
    assert table["metric"].isna().tolist() == table["mean"].isna().tolist() == [False, False, True]
    assert table["status"].tolist() == ["chosen", "finished", "failed: null"]


def test_of_an_error_the_lowest_is_chosen_and_of_equal_ones_the_first(tmp_path, cohort):
    search = search_in(tmp_path / "fold-0", cohort)

    def chosen(metric: str, *means: float) -> int:
        results = [TrialResult(Trial(i, {"lr": 0.1}), "finished", metric, mean) for i, mean in enumerate(means)]
        return search.choose(results).trial.number

    assert chosen("auc", 0.5, 0.7, 0.6) == 1
    assert chosen("mae", 0.7, 0.5, 0.6) == 1
    assert chosen("auc", 0.3, 0.1 + 0.2, 0.2) == 0


def test_another_search_needs_another_folder(tmp_path):
    wanted = {"trials": 3, "space": {"lr": {"values": (1, 2)}}}
    claim(tmp_path, wanted)
    claim(tmp_path, wanted)
    with pytest.raises(DataError, match="is a search with other trials; choose a new folder"):
        claim(tmp_path, {**wanted, "trials": 4})
