"""Which models of a run may speak about a slide."""

import shutil

import pytest

import psamil
from psamil.cohort import Splits, simulate
from psamil.errors import DataError
from psamil.explain import models_for
from psamil.explain.models_of import ALONE, OF_PATIENTS, SEEN, UNKNOWN
from psamil.files import read_json, write_json


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models_of") / "cohort"
    simulate(folder, slides=12, tiles=50, dim=4)
    options = {"target": "label", "folds": 2, "seeds": 2, "cache": folder.parent / "cache"}
    small = {"model": "mean", "model_options": {"hidden": 0}, "epochs": 1}
    psamil.fit(folder, folder / "labels.csv", folder.parent / "run", **options, **small)
    return folder.parent / "run"


def test_a_tested_slide(run):
    splits = Splits.load(run / "splits.json")
    for fold in (0, 1):
        found = models_for(run, splits[fold].test[0])
        assert [of.path for of in found] == [
            run / "folds" / str(fold) / f"seed-{seed}" / "model.safetensors" for seed in (0, 1)
        ]
        assert [(of.name, of.note) for of in found] == [(f"fold {fold}, seed {seed}", "") for seed in (0, 1)]


def test_a_strange_slide(run):
    found = models_for(str(run), "never heard of")
    assert [of.fold for of in found] == [0, 0, 1, 1]
    assert {of.note for of in found} == {UNKNOWN}


def test_a_slide_of_a_run_of_patients(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    write_json(copy / "run.json", {**read_json(copy / "run.json"), "outcome": {"unit": "patient"}})
    assert {of.note for of in models_for(copy, "a slide of somebody")} == {OF_PATIENTS}


def test_slides_of_known_patients(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    splits = Splits.load(run / "splits.json")
    one, two = splits[0].test[0], splits[1].test[0]
    slides = {"a1": one, "a2": one, two: two}
    about = {**read_json(copy / "run.json"), "outcome": {"unit": "patient"}, "slides": slides}
    write_json(copy / "run.json", about)
    assert {(of.fold, of.note) for of in models_for(copy, "a2")} == {(0, ALONE)}
    assert {(of.fold, of.note) for of in models_for(copy, one)} == {(0, "")}
    assert {(of.fold, of.note) for of in models_for(copy, two)} == {(1, "")}  # a patient and the only slide
    assert {of.note for of in models_for(copy, f"{one}-A")} == {OF_PATIENTS}
    for metrics in copy.glob("folds/0/*/metrics.json"):
        metrics.unlink()
    assert {(of.fold, of.note) for of in models_for(copy, "a1")} == {(1, f"{SEEN}; {ALONE}")}


def test_a_slide_whose_test_fold_is_not_finished(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    slide = Splits.load(run / "splits.json")[0].test[0]
    (copy / "folds/0/seed-1/metrics.json").unlink()
    assert [of.path.parent.name for of in models_for(copy, slide)] == ["seed-0"]
    (copy / "folds/0/seed-0/metrics.json").unlink()
    found = models_for(copy, slide)
    assert [of.fold for of in found] == [1, 1]
    assert {of.note for of in found} == {SEEN}


def test_no_run(run, tmp_path):
    with pytest.raises(DataError, match="has no finished model"):
        models_for(tmp_path, "a slide")
    copy = shutil.copytree(run, tmp_path / "run")
    for metrics in copy.glob("folds/*/*/metrics.json"):
        metrics.unlink()
    with pytest.raises(DataError, match="has no finished model"):
        models_for(copy, "a slide")
