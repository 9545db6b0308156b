import numpy as np
import pandas as pd
import pytest

from psamil.evaluation.sample_predictions import RunPredictions, _rows_of_fold
from psamil.files import write_json
from psamil.training.class_tasks import MultiLabelTask
from psamil.training.survival_task import SurvivalTask
from tests.evaluation.made_runs import make_run, make_splits


@pytest.fixture(scope="module")
def splits():
    return make_splits(patients=30, folds=2)


@pytest.mark.parametrize("kind", ["binary", "three", "survival", "regression"])
def test_every_tested_sample_has_a_row(kind, splits, tmp_path):
    run = make_run(tmp_path / "run", splits, signal=1.0, kind=kind, seeds=2)
    found = RunPredictions.of(run)
    table = pd.read_csv(run / "predictions.csv", dtype={"truth": str}, keep_default_na=False).set_index("sample")
    assert set(found.rows) == set(table.index)
    for sample, row in found.rows.items():
        assert row["fold"] == table.loc[sample, "fold"]
        for name, value in row["values"].items():
            assert value == pytest.approx(table.loc[sample, name])
        if kind in ("binary", "three"):
            assert row["truth"] == table.loc[sample, "truth"]
            assert row["error"] == pytest.approx(1 - table.loc[sample, f"prob_{row['truth']}"])
            assert row["confidence"] == pytest.approx(table.loc[sample, f"prob_{row['predicted']}"])
            assert row["wrong"] == (row["truth"] != row["predicted"])


def test_threshold_is_that_of_validation(splits, tmp_path):
    run = make_run(tmp_path / "run", splits, signal=3.0)
    job = run / "folds" / "0" / "seed-0" / "predictions.csv"
    table = pd.read_csv(job)
    table["prob_positive"] = 0.9 + 0.1 * table["prob_positive"]  # which is above one half for everybody
    table["prob_negative"] = 1 - table["prob_positive"]
    table.to_csv(job, index=False)
    rows = [row for row in RunPredictions.of(run).rows.values() if row["fold"] == 0]
    assert {row["predicted"] for row in rows} == {"negative", "positive"}


def test_error_of_a_number(splits, tmp_path):
    for row in RunPredictions.of(make_run(tmp_path / "run", splits, signal=1.0, kind="regression")).rows.values():
        assert row["error"] == pytest.approx(abs(row["values"]["value"] - row["truth"]))
        assert row["predicted"] is row["confidence"] is row["wrong"] is None


def test_error_of_survival_is_the_share_of_pairs_on_the_wrong_side():
    table = pd.DataFrame(
        {
            "sample": ["a", "b", "c", "d"],
            "part": "test",
            "time": [1.0, 2.0, 3.0, 0.5],
            "event": [1, 1, 0, 0],
            "risk": [0.9, 0.1, 0.5, 0.0],
        }
    )
    rows = {row["sample"]: row for row in _rows_of_fold(table, SurvivalTask((0.0, 2.0, 4.0), "nll", 1.0), 0)}
    # To be compared: a before b (right), a before c (right), b before c (wrong). d was not seen long enough.
    assert {name: row["error"] for name, row in rows.items()} == {"a": 0, "b": 0.5, "c": 0.5, "d": None}
    assert rows["a"]["truth"] == "event at 1"
    assert rows["d"]["truth"] == "censored at 0.5"


def test_several_labels():
    task = MultiLabelTask(("x", "y"), ((1.0, 1.0), (1.0, 1.0)), "none")
    table = pd.DataFrame(
        {"sample": ["a"], "part": "test", "truth_x": [1.0], "truth_y": [0.0], "prob_x": [0.7], "prob_y": [0.6]}
    )
    (row,) = _rows_of_fold(table, task, 3)
    assert (row["truth"], row["predicted"], row["wrong"], row["fold"]) == ("x", "x, y", True, 3)
    assert row["error"] == pytest.approx(0.6)
    assert row["confidence"] == pytest.approx(0.6)


def test_slides_of_patients(splits, tmp_path):
    run = make_run(tmp_path / "run", splits, signal=1.0)
    slides = RunPredictions.of(run)
    assert slides.sample_of("p001") == "p001"
    assert slides.sample_of("p001-A") is None
    assert slides.of_slide("p001-A")["truth"] is None
    about = {**pd.read_json(run / "run.json", typ="series").to_dict(), "outcome": {"unit": "patient"}}
    write_json(run / "run.json", about)
    patients = RunPredictions.of(run)
    assert patients.sample_of("p001-A.2") == "p001"
    assert patients.sample_of("p0011") is None
    assert patients.of_slide("p001-A") == patients.rows["p001"]
    assert not np.isnan(patients.rows["p001"]["error"])
    write_json(run / "run.json", {**about, "slides": {"x-1": "p001", "p002": "p003"}})
    named = RunPredictions.of(run)
    assert [named.sample_of(slide) for slide in ("x-1", "p002", "p001", "p001-A")] == ["p001", "p003", "p001", None]
