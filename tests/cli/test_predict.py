"""``psamil predict``: a table of new slides, damage set aside, nothing overwritten."""

import shutil

import h5py
import numpy as np
import pandas as pd
import pytest

import psamil
from psamil.cli import main
from psamil.cohort import simulate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict") / "cohort"
    simulate(folder, slides=12, tiles=60, dim=8)
    return folder


@pytest.fixture(scope="module")
def run(folder):
    options = {"target": "label", "folds": 2, "seeds": 1, "cache": folder.parent / "cache", "non_finite": "drop"}
    small = {"model": "mean", "model_options": {"hidden": 4}, "epochs": 1}
    return psamil.fit(folder, folder / "labels.csv", folder.parent / "run", **options, **small)


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder / "20x_256px_0px_overlap", tmp_path / "copy")


def predict(capsys, run, features, *args):
    """Exit code, standard output and standard error."""
    with pytest.raises(SystemExit) as ended:
        main(["predict", *map(str, (features, "--run", run, *args))])
    told = capsys.readouterr()
    return ended.value.code, told.out, told.err


def files(folder):
    return sorted(folder.glob("features_simulated/*.h5"))


def read_table(path):
    return pd.read_csv(path, dtype={"sample": str}, float_precision="round_trip")


def widen(file):
    """Twice the features."""
    old = file.rename(file.with_suffix(".old"))
    with h5py.File(old) as source, h5py.File(file, "w") as wide:
        wide.attrs.update(source.attrs)
        for name, values in source.items():
            wide[name] = np.tile(values, 2) if name == "features" else values[()]
            wide[name].attrs.update(values.attrs)


def test_new_slides(capsys, folder, run, tmp_path):
    out = tmp_path / "new" / "predictions.csv"
    code, told, _ = predict(capsys, run.folder, folder, "--out", out)
    assert code == 0
    assert f"slides: 12; models: 2; set aside: 0\nwrote {out}" in told
    table = read_table(out).set_index("sample")
    assert len(table) == 12
    cohort = psamil.Cohort.open(folder, folder / "labels.csv", target="label")
    prediction = run.predict(cohort.load(cohort.samples[0]))
    row = table.loc[prediction.id]
    assert row["prob_positive"] == pytest.approx(prediction.probabilities["positive"], rel=1e-12)
    assert row["low_prob_positive"] == pytest.approx(prediction.low["prob_positive"], rel=1e-12)
    assert row["predicted"] == prediction.predicted
    assert row["tiles"] == prediction.tiles


def test_one_model_and_a_test_slide_of_its_run(capsys, run, folder, tmp_path):
    out = tmp_path / "predictions.csv"
    assert predict(capsys, run.folder / "folds" / "0", folder, "--out", out)[0] == 0
    predicted, written = read_table(out).set_index("sample"), run.predictions.set_index("sample")
    tested = written[written["fold"] == 0].index
    assert len(tested) == 6
    np.testing.assert_allclose(
        predicted.loc[tested, "prob_positive"].astype(float), written.loc[tested, "prob_positive"], atol=1e-6
    )


def test_what_cannot_be_predicted_is_listed_and_the_rest_is_done(capsys, run, copy, tmp_path):
    truncated, wide, formula = files(copy)[:3]
    truncated.write_bytes(truncated.read_bytes()[:3000])
    widen(wide)
    formula.rename(formula.with_name("=evil.h5"))
    out = tmp_path / "predictions.csv"
    code, told, errors = predict(capsys, run.folder, copy, "--out", out)
    assert code == 1
    assert "slides: 10; models: 2; set aside: 2" in told
    assert f"set aside: {truncated}" in errors
    assert f"set aside: {wide}: features are 16 wide, the model takes 8" in errors
    assert "'=evil," in out.read_text()


def test_features_are_read_as_in_training_unless_told_otherwise(capsys, run, copy, tmp_path):
    with h5py.File(files(copy)[0], "a") as file:
        file["features"][3] = np.nan
    out = tmp_path / "predictions.csv"
    assert predict(capsys, run.folder, copy, "--out", out)[0] == 0  # the tile is dropped
    code, _, errors = predict(capsys, run.folder, copy, "--out", out, "--non-finite", "error")
    assert code == 1
    assert "1 of" in errors


def test_nothing_to_predict(capsys, run, copy, tmp_path):
    for file in files(copy):
        file.write_bytes(b"nothing")
    out = tmp_path / "predictions.csv"
    code, _, errors = predict(capsys, run.folder, copy, "--out", out)
    assert code == 1
    assert "nothing was written" in errors
    assert not out.exists()
    (tmp_path / "empty").mkdir()
    code, _, errors = predict(capsys, run.folder, tmp_path / "empty", "--out", out)
    assert code == 2
    assert "holds neither slides nor features of a known format" in errors


def test_results_of_the_run_are_not_overwritten(capsys, run, folder, tmp_path):
    before = (run.folder / "predictions.csv").read_bytes()
    code, _, errors = predict(capsys, run.folder, folder, "--out", run.folder / "predictions.csv")
    assert code == 2
    assert "belongs to the run" in errors
    assert (run.folder / "predictions.csv").read_bytes() == before
    assert predict(capsys, run.folder, folder, "--out", tmp_path)[0] == 2
    assert predict(capsys, tmp_path, folder)[0] == 2


@pytest.mark.filterwarnings("default")
def test_another_tile_step_stands_in_the_table(capsys, run, folder, tmp_path):
    out = tmp_path / "predictions.csv"
    with pytest.warns(UserWarning, match="radii mean other lengths"):
        assert predict(capsys, run.folder, folder, "--out", out, "--um-per-step", "256")[0] == 0
    assert read_table(out)["note"].str.contains("256 um, but was 128 um").all()


@pytest.fixture(scope="module")
def of_patients(tmp_path_factory):
    """A run on patients of two slides each."""
    folder = tmp_path_factory.mktemp("patients") / "cohort"
    simulate(folder, slides=16, tiles=60, dim=8, slides_per_patient=2)
    options = {"target": "label", "folds": 2, "seeds": 1, "cache": folder.parent / "cache", "unit": "patient"}
    small = {"model": "mean", "model_options": {"hidden": 4}, "epochs": 1}
    return folder, psamil.fit(folder, folder / "labels.csv", folder.parent / "run", **options, **small)


def test_patients_are_predicted_with_all_of_their_slides(capsys, of_patients, tmp_path):
    folder, run = of_patients
    out = tmp_path / "predictions.csv"
    code, told, _ = predict(capsys, run.folder, folder, "--out", out, "--patients", folder / "labels.csv")
    assert code == 0
    assert "patients: 8; models: 2; set aside: 0" in told
    table = read_table(out).set_index("sample")
    cohort = psamil.Cohort.open(folder, folder / "labels.csv", target="label", unit="patient")
    assert list(table.index) == list(cohort.ids)
    for sample in cohort.samples:
        prediction = run.predict(cohort.load(sample))
        assert table.loc[sample.id, "prob_positive"] == pytest.approx(prediction.probabilities["positive"], rel=1e-12)
        assert table.loc[sample.id, "tiles"] == prediction.tiles


def test_patients_need_a_table(capsys, of_patients, run, tmp_path):
    folder, patients = of_patients
    out = tmp_path / "predictions.csv"
    code, _, errors = predict(capsys, patients.folder, folder, "--out", out)
    assert code == 2
    assert "trained on patients with all of their slides; name a table of slides and patients with --patients" in errors
    code, told, _ = predict(capsys, patients.folder, folder, "--out", out, "--unit", "slide")
    assert code == 0
    assert "slides: 16" in told
    code, _, errors = predict(capsys, run.folder, folder, "--out", out, "--patients", folder / "labels.csv")
    assert code == 2
    assert "add --unit patient" in errors
    code, _, errors = predict(capsys, run.folder, folder, "--out", out, "--unit", "cell")
    assert code == 2
    assert "unknown unit 'cell'" in errors


def test_slides_outside_of_the_table_and_damaged_ones_are_set_aside(capsys, of_patients, tmp_path):
    folder, run = of_patients
    copy = shutil.copytree(folder / "20x_256px_0px_overlap", tmp_path / "copy")
    table = pd.read_csv(folder / "labels.csv", dtype=str)[["case_id", "slide_id"]]
    table[table["slide_id"] != "slide_00003"].to_csv(tmp_path / "patients.csv", index=False)
    damaged = copy / "features_simulated" / "slide_00000.h5"
    damaged.write_bytes(damaged.read_bytes()[:3000])
    out = tmp_path / "predictions.csv"
    code, told, errors = predict(capsys, run.folder, copy, "--out", out, "--patients", tmp_path / "patients.csv")
    assert code == 1
    assert "patients: 8; models: 2; set aside: 2" in told
    assert f"slide_00003.h5: is not in {tmp_path / 'patients.csv'}" in errors
    assert f"set aside: {damaged}" in errors
    alone = psamil.open_bag(copy / "features_simulated" / "slide_00001.h5")  # what is left of the first patient
    assert read_table(out).set_index("sample").loc["case_00000", "tiles"] == alone.n
    table[["slide_id"]].to_csv(tmp_path / "slides.csv", index=False)
    code, _, errors = predict(capsys, run.folder, copy, "--out", out, "--patients", tmp_path / "slides.csv")
    assert code == 2
    assert "no column is known to name patients" in errors


def test_a_patient_without_some_slides_is_said_to_be(capsys, of_patients, tmp_path):
    folder, run = of_patients
    copy = shutil.copytree(folder / "20x_256px_0px_overlap", tmp_path / "copy")
    (copy / "features_simulated" / "slide_00000.h5").unlink()
    damaged = copy / "features_simulated" / "slide_00002.h5"
    damaged.write_bytes(damaged.read_bytes()[:3000])
    for name in ("slide_00004.h5", "slide_00005.h5"):  # all slides of a patient, who is not asked for
        (copy / "features_simulated" / name).unlink()
    out = tmp_path / "predictions.csv"
    code, told, errors = predict(capsys, run.folder, copy, "--out", out, "--patients", folder / "labels.csv")
    assert code == 1
    assert "patients: 7; models: 2; set aside: 1" in told
    assert "predicted without some of their slides (see the column note): 'case_00000', 'case_00001'\n" in errors
    notes = read_table(out).set_index("sample")["note"]
    assert notes[["case_00000", "case_00001"]].tolist() == ["predicted from 1 of 2 slides"] * 2
    assert notes.drop(["case_00000", "case_00001"]).isna().all()
