import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from psamil import fit
from psamil.bag import PackedBags
from psamil.cohort import Cohort, simulate
from psamil.evaluation.scores import read_predictions
from psamil.files import write_json
from psamil.models import create_model, list_models
from psamil.recipes import settings_of_recipe
from psamil.training.saved_model import SavedModel

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_learn_radius(tmp_path, capsys):
    """The loss falls, and the head nearest to the planted range comes nearer and orders with it."""
    example = runpy.run_path(str(EXAMPLES / "learn_radius.py"))
    runs = {r: example["train"](r, steps=220) for r in (2.0, 4.0)}
    nearest = {}
    for r, (losses, radii) in runs.items():
        assert sum(losses[:20]) / 20 > 0.6
        assert sum(losses[-20:]) / 20 < 0.4
        first, last = (min(radii[i], key=lambda k: abs(k - r)) for i in (0, -1))
        assert abs(last - r) < abs(first - r) - 0.5
        nearest[r] = last
    assert nearest[2.0] < nearest[4.0] - 1
    example["report"](runs, tmp_path)
    assert (tmp_path / "learn_radius.png").stat().st_size > 10_000
    assert "K = " in capsys.readouterr().out


def test_kill_and_resume(tmp_path, capsys):
    example = runpy.run_path(str(EXAMPLES / "kill_and_resume.py"))
    assert example["main"](3, tmp_path, slides=12, tiles=60, epochs=3) == []
    told = capsys.readouterr().out
    assert told.count(" s  ") >= 3  # a line for each kill
    changed = tmp_path / "killed" / "run" / "folds" / "1" / "seed-0" / "predictions.csv"
    changed.write_text(changed.read_text().replace("1", "2", 1))
    runs = (tmp_path / name / "run" for name in ("left-alone", "killed"))
    assert example["differences"](*runs) == ["folds/1/seed-0/predictions.csv"]


def test_planted_ranges(tmp_path):
    example = runpy.run_path(str(EXAMPLES / "planted_ranges.py"))
    run = example["train"](tmp_path, 2.0, "psa", folds=2, fold=0, slides=12, seed=0)
    cohort = Cohort.open(tmp_path / "cohort", tmp_path / "cohort" / "labels.csv", target="label")
    found = example["heads_of"](run, cohort, [0])
    assert {fold: len(radii) for fold, (radii, _) in found.items()} == {0: 3}
    assert not (run.folder / "folds" / "1").exists()
    model = SavedModel.load(run.folder / "folds" / "0" / "seed-0" / "model.safetensors").model
    batch = PackedBags.of(cohort.load(cohort.samples[0]))
    whole = model(batch).logits
    with example["without_head"](model, 1):
        assert not torch.equal(model(batch).logits, whole)
    assert torch.equal(model(batch).logits, whole)


def test_what_several_trainings_gain(tmp_path):
    simulate(tmp_path / "cohort", slides=24, tiles=60, dim=4)
    sizes = {"model": "mean", "model_options": {"hidden": 4}, "epochs": 1}
    options = {"target": "label", "folds": 2, "val": 0.4, "seeds": 2, "cache": tmp_path / "cache", **sizes}
    run = fit(tmp_path / "cohort", tmp_path / "cohort" / "labels.csv", tmp_path / "run", **options)
    gains = runpy.run_path(str(EXAMPLES / "trainings.py"))["gains"]
    val, test = gains(run.folder)
    assert (val["part"], test["part"], test["trainings"], test["folds"]) == ("val", "test", 2, 2)
    assert test["mean"] == pytest.approx(run.table.loc["auc", "mean"])
    assert test["gain"] == pytest.approx(test["mean"] - test["alone"])
    for fold in (run.folder / "folds").iterdir():  # a second training that says the opposite of the first one
        table = read_predictions(fold / "seed-0" / "predictions.csv")
        positive = (table["prob_positive"] * 1024).round() / 1024  # so that sums are exact
        for seed, of_seed in (("seed-0", positive), ("seed-1", 1 - positive)):
            table.assign(prob_positive=of_seed).to_csv(fold / seed / "predictions.csv", index=False)
    for row in gains(run.folder):
        assert (row["alone"], row["mean"], row["folds with a gain"]) == (pytest.approx(0.5), 0.5, 0)


def test_recipes_put_to_the_test(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = runpy.run_path(str(EXAMPLES / "recipe.py"))
    variants, table_of = example["variants"], example["table_of"]
    assert {of["model"] for of in variants("lesions", None, False).values()} == set(list_models())
    assert variants("crc", ["psa-shuffled"], False)["psa-shuffled"]["positions"] == "shuffled"
    (without,) = variants("crc", ["psa-without-arrangement"], False).values()
    assert without["model_options"]["arrangement"] is False
    of_abmil = example["MODELS_OF_CELLS"]["abmil"]
    assert variants("tnbc", ["sm_abmil"], False)["sm_abmil"]["lr"] == of_abmil.lr
    assert "lr" not in variants("crc", ["sm_abmil"], False)["sm_abmil"]  # it learns there by the rate of the recipe
    assert set(variants("brca", None, False)) == set(list_models())  # in a line; no control of positions there are not
    whole = settings_of_recipe("detection", "psa")
    for name, own in variants("lesions", None, True).items():
        changed = own.get("model_options") or {key: value for key, value in own.items() if key != "model"}
        of_recipe = whole.model_options if "model_options" in own else whole.to_json()
        assert name == "psa" or all(of_recipe[key] != value for key, value in changed.items()), name
        create_model("psa", 4, 1, **{**whole.model_options, **own.get("model_options", {})})
    of_seeds = [{"variant": "psa", "auc": auc, "low": 0.0, "high": 1.0} for auc in (0.8, 0.9)]
    frame = pd.DataFrame([*of_seeds, {"variant": "mean", "auc": 0.95, "low": 0.9, "high": 1.0}])
    table = table_of(frame)
    assert list(table.columns[0].cells) == ["mean", "psa (2)"]
    assert list(table.columns[1].cells) == ["0.950 (0.900 to 1.000)", "0.850 (0.215 to 1.485)"]  # t of one degree


def test_a_search_shows_what_validation_finds_and_no_more(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = runpy.run_path(str(EXAMPLES / "recipe.py"))
    searched = example["variants"]("lesions", ["gtp"], False, search=True)
    assert list(searched) == ["gtp, half of the features dropped", "gtp, no features dropped"]
    assert [own["drop_features"] for own in searched.values()] == [0.5, 0.0]
    of_trunk = example["variants"]("lesions", ["psa"], False, search=True)
    assert len(of_trunk) == 4
    found = {(own["drop_features"], own["model_options"]["first_attention"]) for own in of_trunk.values()}
    assert found == {(drop, first) for drop in (0.5, 0.0) for first in ("mean", "random")}
    assert all(own["model_options"]["head_dim"] == 32 for own in of_trunk.values())
    runs = pd.DataFrame({"variant": [*searched], "validation_auc": [0.7, 0.8], "auc": [0.9, 0.1]})
    table = example["table_of"](runs, ("validation_auc",))
    assert [list(column.cells) for column in table.columns] == [[*searched][::-1], ["0.800", "0.700"]]


def test_a_run_without_validation_parts_has_no_score_of_them(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = runpy.run_path(str(EXAMPLES / "recipe.py"))
    for fold, metrics in enumerate([{"val": {"auc": 0.5}}, {"val": {"auc": 1.0}}]):
        write_json(tmp_path / "chosen" / "folds" / str(fold) / "seed-0" / "metrics.json", metrics)
    write_json(tmp_path / "last" / "folds" / "0" / "seed-0" / "metrics.json", {"test": {"auc": 0.9}})
    assert example["validation_auc"](tmp_path / "chosen") == 0.75
    assert np.isnan(example["validation_auc"](tmp_path / "last"))


def test_statistics_of_neighbouring_cells():
    example = runpy.run_path(str(EXAMPLES / "neighbourhoods.py"))
    types = np.eye(2)[[0, 0, 1, 1]]  # a pair of one type, and far from it a pair of the other
    pairs = example["shares"](types, np.array([[0.0, 0], [0, 1], [9, 9], [9, 8]]), 1)
    np.testing.assert_allclose(pairs, [[0.5, 0], [0, 0.5]])
    more = example["enrichment"](pairs, types.mean(0))
    np.testing.assert_allclose(more[0], np.log([0.501 / 0.251, 0.001 / 0.251]))
    assert example["shares"](types[:1], np.zeros((1, 2)), 10).sum() == 0
    patients, generator = np.arange(200) // 2, np.random.default_rng(0)
    y, parts = patients % 2 == 0, [(patients >= 40, patients < 40), (patients < 60, patients >= 60)]
    told, noise = y[:, None] + 0.1 * generator.normal(size=(200, 1)), generator.normal(size=(200, 1))
    assert example["aucs_by_patient"](told, y, patients, parts) == [1, 1]
    assert max(example["aucs_by_patient"](noise, y, patients, parts)) < 0.8
    other_way = np.where(patients < 50, told[:, 0], 1 - told[:, 0])[:, None]  # what is in no part teaches nothing
    part = (patients < 40, (patients >= 40) & (patients < 50))
    assert example["aucs_by_patient"](other_way, y, patients, [part]) == [1]


def test_scores_are_counted_in_the_largest_piece_of_tissue():
    example = runpy.run_path(str(EXAMPLES / "recipe_maps.py"))
    xy = np.array([[0.0, 0], [1, 1], [2, 1], [9, 9], [9, 8]])
    slide = example["ScoredSlide"](xy, np.arange(5.0), np.array([True, False, True, True, False]))
    piece = example["largest_piece"](slide)
    assert piece.scores.tolist() == [0, 1, 2]
    assert piece.positive.tolist() == [True, False, True]
