"""Predictions of a run on bags: equal to its own, of ensembles, of odd bags; and runs from Python."""

import inspect
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import psamil
from psamil import Bag, BagCache, Cohort
from psamil.cli.train import train
from psamil.cohort import simulate
from psamil.errors import DataError, OptionError
from psamil.evaluation.external import evaluate_run, find_overlap, open_like
from psamil.evaluation.scores import read_predictions
from psamil.files import read_json, write_json
from psamil.training.metrics import roc_auc

SMALL = {"model": "psa", "model_options": {"heads": 2, "head_dim": 4}, "epochs": 2}
TINY = {"model": "mean", "model_options": {"hidden": 4}, "epochs": 1}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Not that of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The classes of `label` are two, those of `grade` three."""
    folder = tmp_path_factory.mktemp("predictor") / "cohort"
    simulate(folder, slides=24, tiles=60, dim=8, slides_per_patient=2)
    table = pd.read_csv(folder / "labels.csv", dtype=str)
    table.assign(grade=[f"G{i // 2 % 3}" for i in range(24)]).to_csv(folder / "labels.csv", index=False)
    return folder


@pytest.fixture(scope="module")
def fit(folder):
    def fitted(out, **options):
        return psamil.fit(folder, folder / "labels.csv", out, cache=folder.parent / "cache", **options)

    return fitted


@pytest.fixture(scope="module")
def run(fit, tmp_path_factory):
    return fit(tmp_path_factory.mktemp("runs") / "run", target="label", folds=2, seeds=2, **SMALL)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Other patients and slides, with other names."""
    folder = tmp_path_factory.mktemp("other") / "cohort"
    simulate(folder, slides=12, tiles=60, dim=8, seed=1)
    table = pd.read_csv(folder / "labels.csv", dtype=str)
    for file in folder.glob("*/features_simulated/*.h5"):
        file.rename(file.with_name(f"other-{file.name}"))
    table = table.assign(case_id="other-" + table["case_id"], slide_id="other-" + table["slide_id"])
    table.assign(grade=[f"G{i % 3}" for i in range(12)]).to_csv(folder / "labels.csv", index=False)
    return folder


def cohort_of(folder, **columns):
    return Cohort.open(folder, folder / "labels.csv", cache=BagCache(folder.parent / "cache"), **columns)


def read_table(path):
    return pd.read_csv(path, dtype={"sample": str}, float_precision="round_trip")


def bag(n, dim=8, **more):
    xy = torch.cartesian_prod(torch.arange(100), torch.arange(100))[:n]
    return Bag(torch.randn(n, dim, generator=torch.Generator().manual_seed(0)), xy, f"bag {n}", **more)


@pytest.mark.parametrize("where", ["folds/0/seed-0", "folds/0/seed-0/model.safetensors"])
def test_one_model_predicts_what_the_run_has_written(folder, run, where):
    written = read_predictions(run.folder / "folds/0/seed-0/predictions.csv").set_index("sample")
    written = written[written["part"] == "test"]
    cohort = cohort_of(folder, target="label").select(list(written.index))
    predictions = psamil.load(run.folder / where).predict([cohort.load(sample) for sample in cohort.samples])
    threshold = read_json(run.folder / "folds/0/seed-0/metrics.json")["threshold"]
    for prediction in predictions:
        expected = written.loc[prediction.id, "prob_positive"]
        assert prediction.probabilities["positive"] == pytest.approx(expected, abs=1e-6)
        assert prediction.predicted == ("positive" if expected >= threshold else "negative")
        assert np.isnan(prediction.low["prob_positive"])


def test_a_fold_predicts_what_the_run_has_written(folder, run):
    """The mean over seeds."""
    written = run.predictions.set_index("sample")
    fold = psamil.load(run.folder / "folds" / "1")
    assert len(fold) == 2
    cohort = cohort_of(folder, target="label")
    for sample in (s for s in cohort.samples if written.loc[s.id, "fold"] == 1):
        p = fold.predict(cohort.load(sample)).probabilities["positive"]
        assert p == pytest.approx(written.loc[sample.id, "prob_positive"], abs=1e-6)


def test_an_ensemble_is_the_mean_of_calibrated_models_with_their_range(run):
    whole, singles = psamil.load(run.folder), [psamil.load(f) for f in run.folder.glob("folds/*/seed-*")]
    assert len(whole) == len(singles) == 4
    alone = [single.predict(bag(30)) for single in singles]
    p = [prediction.probabilities["positive"] for prediction in alone]
    prediction = run.predict(bag(30))
    assert prediction.probabilities["positive"] == pytest.approx(np.mean(p))
    assert (prediction.low["prob_positive"], prediction.high["prob_positive"]) == pytest.approx((min(p), max(p)))
    assert sum(prediction.probabilities.values()) == pytest.approx(1)
    assert prediction.tile_scores.shape == (30,)
    torch.testing.assert_close(prediction.tile_scores, torch.stack([a.tile_scores for a in alone]).mean(0))
    assert whole.threshold == pytest.approx(np.mean([single.threshold for single in singles]))


def test_temperature_is_applied(run, tmp_path):
    """The same model with another temperature: the logit is divided by it."""
    shutil.copytree(run.folder / "folds/0/seed-0", tmp_path / "model")
    text = (tmp_path / "model/metrics.json").read_text()
    before = read_json(tmp_path / "model/metrics.json")["temperature"]
    (tmp_path / "model/metrics.json").write_text(text.replace(f'"temperature": {before}', '"temperature": 4.0'))
    p, q = (
        psamil.load(path).predict(bag(9)).probabilities["positive"]
        for path in (run.folder / "folds/0/seed-0", tmp_path / "model")
    )
    assert np.log(q / (1 - q)) * 4 == pytest.approx(np.log(p / (1 - p)) * before)


def test_thresholds_are_applied(run, other, tmp_path):
    """Two models with thresholds whose mean makes three of twelve slides negative."""
    cohort = cohort_of(other, target="label")
    bags = [cohort.load(sample) for sample in cohort.samples]
    changed = shutil.copytree(run.folder, tmp_path / "run") / "folds" / "0"
    p = np.array([prediction.probabilities["positive"] for prediction in psamil.load(changed).predict(bags)])
    middle = float(np.sort(p)[2:4].mean())
    for seed, threshold in enumerate((middle - 0.3, middle + 0.3)):
        metrics = changed / f"seed-{seed}" / "metrics.json"
        write_json(metrics, {**read_json(metrics), "threshold": threshold})
    predictor = psamil.load(changed)
    chosen = np.where(p >= middle, "positive", "negative")
    assert [prediction.predicted for prediction in predictor.predict(bags)] == list(chosen)
    assert (p < 0.5).sum() != (p < middle).sum()  # or else one half would do as well
    result = evaluate_run(predictor, cohort, tmp_path / "evaluation")
    truth = [sample.outcome for sample in cohort.samples]
    assert result["metrics"]["accuracy"]["estimate"] == pytest.approx(np.mean(chosen == truth))


@pytest.mark.parametrize("model", ["psa", "abmil", "mean"])
@pytest.mark.parametrize("tiles", [0, 1, 2])
def test_few_tiles(fit, tmp_path_factory, tiles, model):
    out = tmp_path_factory.getbasetemp() / f"few-{model}"
    few = fit(out, target="label", folds=2, fold=0, model=model, epochs=1)
    prediction = few.predict(bag(tiles, dim=8 if tiles else 0))
    assert 0 < prediction.probabilities["positive"] < 1
    assert prediction.tile_scores.shape == (tiles,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_features_of_any_precision(run, dtype):
    one = bag(20)
    p = run.predict(replace(one, features=one.features.to(dtype))).probabilities["positive"]
    assert p == pytest.approx(run.predict(one).probabilities["positive"], abs=1e-2)


def test_bags_that_do_not_fit(run):
    with pytest.raises(DataError, match=r"bag 'bag 5': features are 16 wide, the model takes 8"):
        run.predict([bag(3), bag(5, dim=16)])
    broken = bag(5)
    broken.features[2, 1] = torch.nan
    with pytest.raises(DataError, match="1 of 5 tiles have NaN"):
        run.predict(broken)


def test_another_tile_step_is_told_with_both_numbers(run):
    trained = run.predictor.step_um
    assert trained == pytest.approx(128)
    run.predict([bag(9, step_um=1.24 * trained), bag(9, step_um=trained / 1.24), bag(9)])
    with pytest.warns(UserWarning, match=r"and 1 more bags.*256 um, but was 128 um") as told:
        _, *doubtful = run.predict([bag(9, step_um=130.0), bag(9, step_um=256.0), bag(9, step_um=64.0)])
    assert len(told) == 1
    assert all("128 um" in prediction.note for prediction in doubtful)


def test_three_classes(fit, folder, other, tmp_path):
    run = fit(tmp_path / "run", target="grade", folds=2, **TINY)
    prediction = run.predict(bag(12))
    assert list(prediction.probabilities) == ["G0", "G1", "G2"]
    assert sum(prediction.probabilities.values()) == pytest.approx(1)
    assert prediction.predicted == max(prediction.probabilities, key=prediction.probabilities.get)
    predictor = psamil.load(run.folder)
    result = evaluate_run(predictor, open_like(predictor, other, other / "labels.csv"), tmp_path / "evaluation")
    assert {"macro_auc", "macro_f1", "accuracy"} <= result["metrics"].keys()
    written = read_table(tmp_path / "evaluation" / "predictions.csv")
    accuracy = (written["truth"] == written["predicted"]).mean()
    assert result["metrics"]["accuracy"]["estimate"] == pytest.approx(accuracy)


def test_survival(fit, folder, other, tmp_path):
    columns = {"time": "survival_months", "censorship": "censorship", "unit": "patient"}
    run = fit(tmp_path / "run", folds=2, **columns, **TINY)
    written = run.predictions.set_index("sample")
    cohort = cohort_of(folder, **columns)
    sample = next(s for s in cohort.samples if written.loc[s.id, "fold"] == 0)
    single = psamil.load(run.folder / "folds" / "0").predict(cohort.load(sample))
    for name in ("risk", "survival_1"):
        assert single.values[name] == pytest.approx(written.loc[sample.id, name], abs=1e-6)
    both = run.predict(cohort.load(sample))
    assert list(both.values) == ["risk"]  # the folds have time bins of their own
    assert both.low["risk"] <= both.values["risk"] <= both.high["risk"]
    assert both.predicted is None
    predictor = psamil.load(run.folder)
    found = open_like(predictor, other, other / "labels.csv")  # columns and unit as in training
    result = evaluate_run(predictor, found, tmp_path / "evaluation")
    assert found.unit == "patient"
    c_index = result["metrics"]["c_index"]
    assert 0 <= c_index["low"] <= c_index["estimate"] <= c_index["high"] <= 1


def test_regression_and_labels(fit, folder, tmp_path):
    number = fit(tmp_path / "number", target="survival_months", kind="regression", folds=2, **TINY)
    assert list(number.predict(bag(5)).values) == ["value"]
    assert number.predictions["truth"].dtype == float
    table = pd.read_csv(folder / "labels.csv", dtype=str)
    table = table.assign(a=(table["label"] == "positive").astype(int), b=[i // 2 % 2 for i in range(24)])
    labels = psamil.fit(folder, table, tmp_path / "labels", target=["a", "b"], folds=2, **TINY)
    prediction = labels.predict(bag(5))
    yes = [name for name, p in prediction.probabilities.items() if p >= 0.5]
    assert prediction.predicted == ", ".join(yes)
    predictor = labels.predictor
    cohort = Cohort.open(folder, table, target=["b", "a"])
    result = evaluate_run(predictor, cohort, tmp_path / "evaluation", overlap="allow")
    assert 0 <= result["metrics"]["macro_auc"]["estimate"] <= 1


def test_external_validation_fits_nothing(run, other, tmp_path):
    predictor = psamil.load(run.folder)
    cohort = open_like(predictor, other, other / "labels.csv")
    result = evaluate_run(predictor, cohort, tmp_path / "evaluation")
    assert result["threshold"] == predictor.threshold
    assert result["temperatures"] == [
        read_json(job / "metrics.json")["temperature"] for job in sorted(run.folder.glob("folds/*/seed-*"))
    ]
    assert result["overlap"]["samples"] == []
    assert result == read_json(tmp_path / "evaluation" / "metrics.json")
    written = read_table(tmp_path / "evaluation" / "predictions.csv").set_index("sample")
    sample = cohort.samples[3]
    expected = predictor.predict(cohort.load(sample))
    assert written.loc[sample.id, "prob_positive"] == pytest.approx(expected.probabilities["positive"], abs=1e-12)
    assert written.loc[sample.id, "predicted"] == expected.predicted
    auc = result["metrics"]["auc"]
    assert auc["estimate"] == pytest.approx(roc_auc(written["truth"] == "positive", written["prob_positive"]))
    assert auc["low"] <= auc["estimate"] <= auc["high"]
    assert all(row["low"] is not None for row in result["metrics"].values())
    flipped = pd.read_csv(other / "labels.csv", dtype=str)
    flipped["label"] = flipped["label"].map({"positive": "negative", "negative": "positive"})
    again = evaluate_run(predictor, open_like(predictor, other, flipped), tmp_path / "flipped")
    assert again["metrics"]["auc"]["estimate"] == pytest.approx(1 - auc["estimate"])
    other_table = read_table(tmp_path / "flipped" / "predictions.csv").set_index("sample")
    assert (other_table["predicted"] == written["predicted"]).all()
    with pytest.raises(DataError, match="not an empty folder"):
        evaluate_run(predictor, cohort, tmp_path / "evaluation")


def test_training_data_are_recognised_by_patient(run, folder, tmp_path):
    """The second slide of a patient whose first slide was trained on, under another name."""
    renamed = shutil.copytree(folder, tmp_path / "renamed")
    table = pd.read_csv(renamed / "labels.csv", dtype=str)
    for file in renamed.glob("*/features_simulated/*.h5"):
        file.rename(file.with_name(f"new-{file.name}"))
    table["slide_id"] = "new-" + table["slide_id"]
    table.loc[table.index >= 20, "case_id"] = "stranger-" + table["case_id"]
    predictor = psamil.load(run.folder)
    cohort = open_like(predictor, renamed, table)
    assert find_overlap(predictor, cohort).samples == tuple(sorted(table["slide_id"][:20]))
    with pytest.raises(OptionError, match="20 samples of 10 patients were in the training data"):
        evaluate_run(predictor, cohort, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    with pytest.raises(OptionError, match="unknown policy for overlaps"):
        evaluate_run(predictor, cohort, tmp_path / "refused", overlap="maybe")
    rest = evaluate_run(predictor, cohort, tmp_path / "rest", overlap="leave out")
    assert rest["cohort"]["headline"].startswith("4 slides of 2 patients")
    everything = evaluate_run(predictor, cohort, tmp_path / "all", overlap="allow")
    assert everything["cohort"]["headline"].startswith("24 slides")
    assert len(everything["overlap"]["patients"]) == 10


def test_the_test_part_of_a_fold_is_no_training_data(run, folder):
    table = run.predictions
    tested = list(table.loc[table["fold"] == 0, "sample"])
    cohort = cohort_of(folder, target="label")
    assert find_overlap(psamil.load(run.folder / "folds" / "0"), cohort.select(tested)).samples == ()
    assert find_overlap(psamil.load(run.folder), cohort.select(tested)).samples == tuple(sorted(tested))


def test_a_model_without_its_run(run, folder, tmp_path):
    shutil.copy(run.folder / "folds/0/seed-0/model.safetensors", tmp_path / "moved.safetensors")
    with pytest.warns(UserWarning, match="it is not calibrated"):
        predictor = psamil.load(tmp_path / "moved.safetensors")
    assert predictor.threshold == 0.5
    assert "not known" in find_overlap(predictor, cohort_of(folder, target="label")).unknown


def test_an_unknown_class_is_refused(run, other, tmp_path):
    predictor = psamil.load(run.folder)
    cohort = open_like(predictor, other, other / "labels.csv", target="grade")
    with pytest.raises(DataError, match=r"does not know class 'G0', 'G1', 'G2'"):
        evaluate_run(predictor, cohort, tmp_path / "evaluation")


def test_what_is_no_run(tmp_path, run):
    with pytest.raises(DataError, match="does not exist"):
        psamil.load(tmp_path / "nothing")
    with pytest.raises(DataError, match="has no finished model"):
        psamil.load(tmp_path)
    torch.save({"weights": torch.ones(1)}, tmp_path / "model.pt")
    with pytest.raises(DataError, match=r"model\.pt: is "):
        psamil.load(tmp_path / "model.pt")
    with pytest.raises(OptionError, match="device 'nonsense' cannot be used"):
        psamil.load(run.folder, device="nonsense")


def test_models_that_predict_different_things_are_no_ensemble(fit, run, tmp_path):
    mixed = shutil.copytree(run.folder, tmp_path / "mixed")
    grades = fit(tmp_path / "grades", target="grade", folds=2, fold=0, **TINY)
    shutil.copytree(grades.folder / "folds/0/seed-0", mixed / "folds/1/seed-7")
    with pytest.raises(DataError, match="predicts something else"):
        psamil.load(mixed)


def test_fit_returns_what_is_in_the_folder(run, fit):
    assert run.summary == read_json(run.folder / "summary.json")
    assert len(run.predictions) == 24
    assert run.table.loc["auc", "mean"] == run.summary["metrics"]["auc"]["mean"]
    assert "balanced_accuracy" in str(run)
    reported = []
    again = fit(run.folder, target="label", folds=2, seeds=2, report=lambda *line: reported.append(line), **SMALL)
    assert again.summary == run.summary
    assert reported == []  # nothing was done again


def test_how_the_data_were_read_is_known_before_training(fit, tmp_path):
    """Of a run that is stopped in its first epoch."""

    def stop(job, record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run", target="label", folds=2, report=stop, **TINY)
    about = read_json(tmp_path / "run" / "run.json")
    assert about["outcome"]["target"] == "label"
    assert about["outcome"]["unit"] == "slide"
    assert about["reading"] == {"non_finite": "error", "positions": "file"}
    assert about["patients"]["slide_00001"] == "case_00000"


def test_another_number_of_threads_is_told(fit, tmp_path):
    def go_on(**options):
        told = []
        fit(tmp_path / "run", target="label", folds=2, tell=told.append, **TINY, **options)
        return [line for line in told if "threads" in line]

    assert go_on(fold=0) == []
    about = read_json(tmp_path / "run" / "run.json")
    assert go_on(fold=0) == []  # the same number
    write_json(tmp_path / "run" / "run.json", {**about, "threads": 7})
    told = go_on()
    assert len(told) == 1
    assert f"begun with 7 threads and goes on with {torch.get_num_threads()}" in told[0]
    assert go_on() == []  # nothing is left to be trained


def test_a_validation_part_of_few_patients_is_told(fit, tmp_path):
    def told_of(name, **options):
        told = []
        fit(tmp_path / name, target="label", folds=2, fold=0, tell=told.append, **TINY, **options)
        return [line for line in told if "choose the epoch" in line]

    (line,) = told_of("run")
    about = read_json(tmp_path / "run" / "run.json")
    folds = psamil.cohort.read_splits(tmp_path / "run" / "splits.json").folds
    fewest = min(len({about["patients"][sample] for sample in fold.val}) for fold in folds)
    assert 0 < fewest < 10
    assert line.startswith(f"Only {fewest} patients")
    assert told_of("all", val=0.0) == []
    assert told_of("own", splits=tmp_path / "run" / "splits.json") == []  # which val does not change


def test_fit_and_train_take_the_same_options():
    options, of_verb = (inspect.signature(function).parameters for function in (psamil.fit, train))
    assert set(options) - set(of_verb) == {
        "tell",
        "report",
        "on_step",
        "settings",
        "recipe",
    }  # the parser adds --recipe
    # from Python, engine is a function; on the command line, training has what the recipe gives
    common = set(of_verb) - {"engine", "address", "cpus_per_job", "gpus_per_job", "training"}
    assert {name: of_verb[name].default for name in common} == {name: options[name].default for name in common}


def test_settings_and_reading_are_checked(run, fit, tmp_path):
    with pytest.raises(OptionError, match="unknown setting of training 'epoch'"):
        fit(tmp_path / "new", target="label", epoch=3)
    with pytest.raises(DataError, match="is a run with non_finite = 'error', not 'drop'"):
        fit(run.folder, target="label", folds=2, seeds=2, non_finite="drop", **SMALL)
