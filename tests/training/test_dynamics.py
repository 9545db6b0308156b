"""What is kept of every epoch beside the loss: how alike heads are, and in a file of its own what the epoch took."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from psamil.cohort import BagCache, Cohort, Split, simulate
from psamil.models.head_similarity import head_similarity
from psamil.training import timing
from psamil.training.fold import HISTORY_FILE, MODEL_FILE, train_fold
from psamil.training.prediction import loader_for
from psamil.training.settings import TrainingSettings
from psamil.training.timing import TIMING_FILE, Stopwatch, read_timing

PSA = TrainingSettings(epochs=2, batch_samples=4, patience=None, model_options={"heads": 3, "head_dim": 4})
LEGACY = replace(PSA, model_options={"preset": "legacy", "head_dim": 4})


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dynamics") / "cohort"
    simulate(folder, slides=12, tiles=60, dim=8)
    return Cohort.open(folder, folder / "labels.csv", target="label", cache=BagCache(folder.parent / "cache"))


@pytest.fixture(scope="module")
def split(cohort):
    ids = [cohort.ids[i] for i in np.argsort(cohort.outcome.labels, kind="stable")]
    return Split(train=tuple(ids[2:-2]), val=(*ids[:2], ids[-1]), test=(ids[-2],))


def history(folder):
    return [json.loads(line) for line in (folder / HISTORY_FILE).read_text().splitlines()]


@pytest.mark.parametrize("settings", [PSA, LEGACY], ids=["psa", "legacy"])
def test_similarity_is_the_mean_over_validation_slides_and_pairs(cohort, split, tmp_path, settings):
    model = train_fold(cohort, split, settings, tmp_path)
    record = history(tmp_path)[model.about["best_epoch"]]
    means = []
    (attention,) = [module for module in model.model.modules() if hasattr(module, "prior")]
    for batch in loader_for(model.model, cohort, 8).batches([sample] for sample in cohort.select(split.val).samples):
        with torch.no_grad():
            ((_, tokens),) = model.model.attention_layers(batch)
            heads = attention.attend(*attention.project(tokens), batch.xy, batch.layout)
        means.append(head_similarity(heads)[[1, 2, 2], [0, 0, 1]].mean())
    assert len(means) == 3
    assert record["head_similarity"] == pytest.approx(float(torch.stack(means).mean()), rel=1e-5)


@pytest.mark.parametrize("settings", [PSA, LEGACY], ids=["psa", "legacy"])
def test_a_training_that_was_stopped_has_the_same_history(cohort, split, tmp_path, settings):
    def stop(record):
        raise KeyboardInterrupt

    train_fold(cohort, split, settings, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train_fold(cohort, split, settings, tmp_path / "broken", stop)
    before = read_timing(tmp_path / "broken")
    train_fold(cohort, split, settings, tmp_path / "broken")
    for file in (HISTORY_FILE, MODEL_FILE):
        assert (tmp_path / "broken" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert all(record["head_similarity"] > 0 for record in history(tmp_path / "whole"))
    after = read_timing(tmp_path / "broken")
    assert [record["epoch"] for record in after] == [0, 1]
    assert after[:1] == before


def test_models_without_heads_and_trainings_without_validation(cohort, split, tmp_path):
    mean = TrainingSettings(model="mean", epochs=1, model_options={"hidden": 4})
    train_fold(cohort, split, mean, tmp_path / "mean")
    train_fold(cohort, replace(split, val=()), replace(PSA, epochs=1), tmp_path / "psa")
    for name in ("mean", "psa"):
        assert [record["head_similarity"] for record in history(tmp_path / name)] == [None]
        assert [record["seconds"] > 0 for record in read_timing(tmp_path / name)] == [True]


def test_a_stopwatch_measures_from_its_start_and_forgets_what_was_not_completed(tmp_path, monkeypatch):
    now = iter([100.0, 100.5, 107.0, 110.0, 110.25])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    cpu = torch.device("cpu")
    first = Stopwatch(tmp_path, cpu)  # 100
    first.start()
    first.write(0)  # 6.5 s
    (tmp_path / TIMING_FILE).write_text((tmp_path / TIMING_FILE).read_text() + '{"epoch": 1, "seconds": 9}\n')
    Stopwatch(tmp_path, cpu, epochs=1).write(1)
    records = read_timing(tmp_path)
    assert [(record["epoch"], record["seconds"]) for record in records] == [(0, 6.5), (1, 0.25)]
    assert all(10 < record["peak_memory_mb"] < 2**20 for record in records)
    assert read_timing(tmp_path / "nowhere") == []


def test_systems_that_do_not_tell_memory_train_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    Stopwatch(tmp_path, torch.device("cpu")).write(0)
    assert [record["peak_memory_mb"] for record in read_timing(tmp_path)] == [None]
