"""Localisation in a run and on another cohort: of the models' own tile scores, with a threshold from validation."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import psamil
from psamil.bag import PackedBags
from psamil.cohort import BagCache, Cohort, simulate
from psamil.errors import DataError
from psamil.evaluation.external import evaluate_run, open_like
from psamil.evaluation.fold_localisation import LOCALISATION_METRICS
from psamil.evaluation.localisation import ScoredSlide, lesion_froc, patch_auc, patch_f1, tile_froc
from psamil.evaluation.run_comparison import compare_runs
from psamil.evaluation.tile_resamples import RESAMPLES
from psamil.files import Lock, read_json
from psamil.training.metrics import threshold_of_best_f1
from psamil.training.saved_model import SavedModel

SETTINGS = {"model": "abmil", "model_options": {"hidden": 8}, "epochs": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("localisation") / "cohort"
    simulate(folder, slides=24, tiles=60, dim=8, slides_per_patient=2, range_steps=2.0, phenotype_share=0.06)
    return folder


def fit(folder, out, **options):
    chosen = {"target": "label", "folds": 2, "seeds": 1, "val": 0.5, "unit": "patient", **SETTINGS, **options}
    return psamil.fit(folder, folder / "labels.csv", out, cache=folder.parent / "cache", **chosen)


@pytest.fixture(scope="module")
def run(folder):
    return fit(folder, folder.parent / "run", tile_labels=folder / "tiles", seeds=2)


def mean_of_seeds(folder, fold, ids, values_of=lambda output: output.tile_scores):
    of_seeds = [scored(folder, fold / f"seed-{seed}", ids, values_of) for seed in (0, 1)]
    return {
        slide: replace(one, scores=np.mean([of_seed[slide].scores for of_seed in of_seeds], axis=0))
        for slide, one in of_seeds[0].items()
    }


def scored(folder, job, ids, values_of):
    """By hand: one patient after the other, slide by slide."""
    cohort = Cohort.open(folder, folder / "labels.csv", target="label", unit="patient")
    model = SavedModel.load(job / "model.safetensors").model
    slides = {}
    for sample in cohort.select(ids).samples:
        bag = cohort.load(sample)
        with torch.no_grad():
            scores = values_of(model(PackedBags.of(bag)))
        for i, slide in enumerate(bag.slide_ids):
            tiles = slice(int(bag.slides[i]), int(bag.slides[i + 1]))
            labels = np.load(folder / "tiles" / f"{slide}.npy")
            slides[slide] = ScoredSlide(bag.xy[tiles].double().numpy(), scores[tiles].double().numpy(), labels)
    return slides


def test_metrics_are_those_of_the_mean_scores_of_the_models(folder, run):
    splits = psamil.cohort.Splits.load(run.folder / "splits.json")
    fold = run.folder / "folds" / "0"
    val, test = (mean_of_seeds(folder, fold, ids) for ids in (splits[0].val, splits[0].test))
    written = load_file(fold / "tile_scores.safetensors")
    assert written.keys() == test.keys()
    for slide, known in test.items():
        assert written[slide].numpy() == pytest.approx(known.scores, abs=1e-5)
    pooled = [np.concatenate([getattr(s, name) for s in val.values()]) for name in ("positive", "scores")]
    slides, threshold = list(test.values()), threshold_of_best_f1(*pooled)
    tiles = tile_froc(slides)
    expected = [
        patch_auc(slides),
        patch_auc(slides, "per slide"),
        patch_f1(slides, threshold),
        tiles.score(),
        tiles.area(),
        lesion_froc(slides).score(),
    ]
    evidence = list(
        mean_of_seeds(folder, fold, splits[0].test, lambda output: output.tile_evidence.squeeze(1)).values()
    )
    of_evidence = patch_auc(evidence), patch_auc(evidence, "per slide")
    expected += [*of_evidence, tile_froc(evidence).score(), lesion_froc(evidence).score()]
    assert expected[-4] != pytest.approx(expected[0], abs=0.01)  # another map
    found = read_json(fold / "localisation.json")
    assert found["threshold"] == pytest.approx(threshold, abs=1e-5)
    assert found["slides"] == found["labelled_slides"] == {"val": len(val), "test": len(test)}
    assert list(found["test"].values()) == pytest.approx(expected, abs=1e-6)
    for name in LOCALISATION_METRICS:
        assert run.summary["metrics"][name]["per_fold"][0] == found["test"][name]
        assert run.summary["metrics"][name]["sd"] is not None
    for name in ("patch_auc", "froc_tile@6"):
        of = run.summary["metrics"][name]
        assert of["low"] < of["mean"] < of["high"]
        assert len(found["resampled"][name]) == RESAMPLES
    assert "low" not in run.summary["metrics"]["patch_f1"]
    assert run.summary["localisation"] == {"slides": 24, "labelled_slides": 24}
    assert "tile labels" not in str(run)


def test_slides_without_labels_are_told_and_counted(folder, tmp_path):
    (tmp_path / "tiles").mkdir()
    for file in sorted((folder / "tiles").iterdir())[4:]:
        (tmp_path / "tiles" / file.name).write_bytes(file.read_bytes())
    told = []
    run = fit(folder, tmp_path / "run", tile_labels=tmp_path / "tiles", tell=told.append)
    names = "'slide_00000', 'slide_00001', 'slide_00002', 'slide_00003'"
    assert f"4 of 24 slides have no tile labels and do not count in localisation: {names}." in "\n".join(told)
    assert run.summary["localisation"] == {"slides": 24, "labelled_slides": 20}
    assert "Localisation is of the 20 of 24 test slides that have tile labels." in str(run)
    assert compare_runs([run.folder], names=["a"]).unlabelled == [
        "a: Localisation is of the 20 of 24 test slides that have tile labels."
    ]


def test_lesions_need_positions_of_the_files(folder, tmp_path):
    run = fit(folder, tmp_path / "run", tile_labels=folder / "tiles", positions="shuffled", fold=0)
    assert run.summary["metrics"]["froc_lesion"]["mean"] is None
    assert run.summary["metrics"]["froc_tile@6"]["mean"] is not None
    predictor = psamil.load(run.folder)
    cohort = open_like(predictor, folder, folder / "labels.csv", cache=folder.parent / "cache")
    found = evaluate_run(predictor, cohort.with_tile_labels(folder / "tiles"), tmp_path / "out", overlap="allow")
    assert found["localisation"]["metrics"]["froc_lesion"]["estimate"] is None
    assert found["localisation"]["metrics"]["patch_auc"]["estimate"] is not None


def test_a_fold_that_another_process_localises_is_left_to_it(folder, tmp_path):
    fit(folder, tmp_path / "run")
    with Lock(tmp_path / "run" / "folds" / "0" / "lock"):
        partly = fit(folder, tmp_path / "run", tile_labels=folder / "tiles")
    per_fold = partly.summary["metrics"]["patch_auc"]["per_fold"]
    assert [value is None for value in per_fold] == [True, False]
    assert (
        None
        not in fit(folder, tmp_path / "run", tile_labels=folder / "tiles").summary["metrics"]["patch_auc"]["per_fold"]
    )


def test_a_finished_run_is_localised_without_training_it_again(folder, tmp_path):
    fit(folder, tmp_path / "run")
    weights = {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("m*.*")}
    again = fit(folder, tmp_path / "run", tile_labels=folder / "tiles")
    assert again.summary["metrics"]["patch_auc"]["mean"] is not None
    assert {file: file.stat().st_mtime_ns for file in weights} == weights
    written = tmp_path / "run" / "folds" / "0" / "localisation.json"
    before = written.stat().st_mtime_ns
    fit(folder, tmp_path / "run", tile_labels=folder / "tiles")
    assert written.stat().st_mtime_ns == before
    (tmp_path / "tiles").mkdir()
    for file in (folder / "tiles").iterdir():
        np.save(tmp_path / "tiles" / file.name, ~np.load(file))
    flipped = fit(folder, tmp_path / "run", tile_labels=tmp_path / "tiles")
    auc, other = (one.summary["metrics"]["patch_auc"]["mean"] for one in (again, flipped))
    assert other == pytest.approx(1 - auc)


def test_labels_that_do_not_fit_stop_before_training(folder, tmp_path):
    np.save(tmp_path / "slide_00007.npy", np.zeros(3, bool))
    with pytest.raises(DataError, match=r"slide_00007.npy: has 3 labels"):
        fit(folder, tmp_path / "run", tile_labels=tmp_path)
    assert not (tmp_path / "run").exists()


def test_another_cohort(folder, run, tmp_path):
    predictor = psamil.load(run.folder / "folds" / "0")
    cohort = open_like(predictor, folder, folder / "labels.csv", cache=folder.parent / "cache")
    splits = psamil.cohort.Splits.load(run.folder / "splits.json")
    tested = cohort.select(splits[0].test).with_tile_labels(folder / "tiles")
    found = evaluate_run(predictor, tested, tmp_path / "out")["localisation"]
    fold = read_json(run.folder / "folds" / "0" / "localisation.json")
    assert found["threshold"] == pytest.approx(fold["threshold"])
    assert {name: of["estimate"] for name, of in found["metrics"].items()} == pytest.approx(fold["test"], abs=1e-6)
    assert load_file(tmp_path / "out" / "tile_scores.safetensors").keys() == {
        r.id for s in tested.samples for r in s.bags
    }


def test_without_labels_in_validation_there_is_no_threshold(folder, tmp_path):
    splits = psamil.cohort.k_fold(Cohort.open(folder, folder / "labels.csv", target="label", unit="patient"), 2)
    cohort = Cohort.open(folder, folder / "labels.csv", target="label", unit="patient", cache=BagCache(tmp_path / "c"))
    (tmp_path / "tiles").mkdir()
    for sample in cohort.select(splits[0].test).samples:
        for ref in sample.bags:
            (tmp_path / "tiles" / f"{ref.id}.npy").write_bytes((folder / "tiles" / f"{ref.id}.npy").read_bytes())
    run = fit(folder, tmp_path / "run", tile_labels=tmp_path / "tiles", splits=splits, fold=0)
    assert run.summary["metrics"]["patch_f1"]["mean"] is None
    assert run.summary["metrics"]["patch_auc"]["mean"] is not None


def test_models_without_evidence_are_tested_on_their_scores_alone(folder, tmp_path):
    run = fit(folder, tmp_path / "run", tile_labels=folder / "tiles", fold=0, model="ibmil", model_options={})
    assert run.summary["metrics"]["patch_auc"]["mean"] is not None
    assert not [name for name in run.summary["metrics"] if name.startswith("evidence")]


def test_evidence_on_another_cohort(folder, run, tmp_path):
    predictor = psamil.load(run.folder)
    cohort = open_like(predictor, folder, folder / "labels.csv", cache=folder.parent / "cache")
    found = evaluate_run(predictor, cohort.with_tile_labels(folder / "tiles"), tmp_path / "out", overlap="allow")
    slides = []
    for sample in cohort.samples:
        bag = cohort.load(sample)
        evidence = predictor.predict(bag).tile_evidence.squeeze(1).double().numpy()
        for i, slide in enumerate(bag.slide_ids):
            tiles = slice(int(bag.slides[i]), int(bag.slides[i + 1]))
            slides.append(
                ScoredSlide(bag.xy[tiles].double().numpy(), evidence[tiles], np.load(folder / "tiles" / f"{slide}.npy"))
            )
    metrics = found["localisation"]["metrics"]
    assert metrics["evidence_patch_auc"]["estimate"] == pytest.approx(patch_auc(slides))
    assert metrics["evidence_froc_tile@6"]["estimate"] == pytest.approx(tile_froc(slides).score())
    assert list(metrics) == list(LOCALISATION_METRICS)
