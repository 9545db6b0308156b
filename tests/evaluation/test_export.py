"""Exported models: the same predictions, a card, nobody's name, and no folder that is not as it was written."""

import json
import re
import shutil
import sys
from dataclasses import replace

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors import safe_open

import psamil
from psamil.cohort import simulate
from psamil.errors import DataError, MissingExtraError, OptionError
from psamil.evaluation import hub
from psamil.evaluation.export import export_run
from psamil.evaluation.external import find_overlap, open_like, origin
from psamil.evaluation.fold_localisation import threshold_of_tiles
from psamil.files import files_below, read_json, write_json
from psamil.training.saved_model import SavedModel
from tests.evaluation.made_runs import make_run, make_splits


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A cohort, a run of two folds and two seeds with learned radii, and its export."""
    home = tmp_path_factory.mktemp("export")
    simulate(home / "cohort", slides=12, tiles=60, dim=8)
    small = {"model": "psa", "model_options": {"heads": 2, "head_dim": 4, "tau": 0.1, "k_init": 3.0}, "epochs": 1}
    options = {"target": "label", "folds": 2, "seeds": 2, "cache": home / "cache", "non_finite": "drop"}
    psamil.fit(home / "cohort", home / "cohort" / "labels.csv", home / "run", **options, **small)
    about = read_json(home / "run" / "run.json")
    about["extraction"] = {
        **{"encoder": "an_encoder", "fingerprint": "f" * 64, "dim": 8, "precision": "float32", "mpp": 0.5},
        **{"tile_px": 256, "tile_um": 128.0, "overlap_px": 0, "least_tissue": 0.25, "masks": False},
        **{"reference": str(home / "encoders" / "an_encoder"), "psamil_version": "0.1.0"},
    }
    about["slides"] = {"a-slide-of-77": "patient-77"}
    write_json(home / "run" / "run.json", about)
    export_run(home / "run", home / "shared", licence="Apache-2.0")
    return home


@pytest.fixture
def shared(home, tmp_path):
    return shutil.copytree(home / "shared", tmp_path / "shared")


@pytest.fixture(scope="module")
def bags(home):
    cohort = psamil.Cohort.open(home / "cohort", home / "cohort" / "labels.csv", target="label")
    return [cohort.load(sample) for sample in cohort.samples]


def card(folder):
    return (folder / "README.md").read_text(encoding="utf-8")


def assert_equal(predictions, others):
    for one, other in zip(predictions, others, strict=True):
        assert (one.values, one.low, one.high, one.predicted) == (other.values, other.low, other.high, other.predicted)
        assert torch.equal(one.tile_scores, other.tile_scores)


def test_predictions_are_the_same_bits(home, bags):
    of_run, of_export = psamil.load(home / "run"), psamil.load(home / "shared")
    assert len(of_export) == len(of_run) == 4
    assert_equal(of_run.predict(bags), of_export.predict(bags))
    assert of_run.threshold == of_export.threshold


def test_one_fold(home, bags, tmp_path):
    export_run(home / "run", tmp_path / "one", fold=1)
    assert_equal(psamil.load(home / "run" / "folds" / "1").predict(bags), psamil.load(tmp_path / "one").predict(bags))
    per_fold = read_json(home / "run" / "summary.json")["metrics"]["auc"]["per_fold"]
    found = read_json(tmp_path / "one" / "config.json")["metrics"]
    assert found["auc"].keys() == {"mean", "low", "high"}
    assert found["auc"]["mean"] == per_fold[1]
    assert all(row["low"] <= row["mean"] <= row["high"] for row in found.values())
    assert "in the test part of this fold" in card(tmp_path / "one")
    with pytest.raises(OptionError, match="fold must be from 0 to 1"):
        export_run(home / "run", tmp_path / "two", fold=2)


def test_nobody_is_named_and_no_path(home):
    """Neither in texts nor in the headers of the models, which are all that is not numbers."""
    patients = read_json(home / "run" / "run.json")["patients"]
    names = {*patients, *patients.values(), "a-slide-of-77", "patient-77"}
    assert len(names) > 12
    secrets = [*names, str(home), read_json(home / "run" / "run.json")["cohort"]["fingerprint"]]
    secrets += [read_json(home / "run" / "splits.json")["hash"], read_json(home / "run" / "run.json")["features"]]
    files = files_below(home / "shared")
    assert {file.suffix for file in files} == {".md", ".json", ".safetensors"}
    for file in files:
        content = file.read_bytes()
        assert not [name for name in secrets if name.encode() in content], file
        assert b"platform" not in content
    with safe_open(home / "shared/folds/0/seed-1/model.safetensors", framework="pt") as file:
        assert set(file.metadata()) == {"about"}
        about = json.loads(file.metadata()["about"])
    assert set(about) == {"format", "task", "settings", "in_dim", "step_um", "epochs", "best_epoch"}
    assert read_json(home / "shared" / "config.json")["extraction"]["reference"] is None


def test_more_in_the_header_of_a_model_stays_behind(home, tmp_path):
    run = shutil.copytree(home / "run", tmp_path / "run")
    file = run / "folds" / "0" / "seed-0" / "model.safetensors"
    saved = SavedModel.load(file)
    replace(saved, about={**saved.about, "trained_on": ["patient-77"]}).save(file)
    assert b"patient-77" in file.read_bytes()
    export_run(run, tmp_path / "shared")
    assert not [path for path in files_below(tmp_path / "shared") if b"patient-77" in path.read_bytes()]
    settings = {**saved.about["settings"], "model_options": {"weights": "/data/weights.pt"}}
    about = {**read_json(run / "run.json"), "settings": settings}
    write_json(run / "run.json", about)
    with pytest.raises(DataError, match="looks like a path"):
        export_run(run, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir() if "other" in path.name] == []  # nothing half done


def test_the_card(home):
    text = card(home / "shared")
    data = huggingface_hub.ModelCard(text).data
    assert (data.library_name, data.license, data.pipeline_tag) == ("psamil", "apache-2.0", "image-classification")
    measured = {result.metric_name: result for result in data.eval_results}
    summary = read_json(home / "run" / "summary.json")["metrics"]["auc"]
    assert measured["auc"].metric_value == round(summary["mean"], 4)
    assert measured["auc"].metric_type == "roc_auc"
    assert (
        f"| auc | {summary['mean']:.3f} | {summary['sd']:.3f} | {summary['low']:.3f} to {summary['high']:.3f} |" in text
    )
    rows = [line for line in text.splitlines() if line.startswith(("| accuracy", "| balanced_accuracy", "| f1"))]
    assert len(rows) == 3
    assert all(re.search(r"\d\.\d{3} to \d\.\d{3}", row) for row in rows)  # every metric has its interval
    for said in (
        "The class (label) of a slide: negative, positive.",
        "Not for diagnosis",
        r"encoder **an\_encoder** (8 numbers, float32), on tiles of **256 px at 0.5 um per px**",
        "Features were read with",
        "12 slides of 12 patients",
        "seeds of the trainings of a fold: 0, 1",
        "2-fold, seed 0",
        "psamil 0.1.0",
        "Peled, Sharon",
    ):
        assert said in text, said
    model = psamil.load(home / "run").members[0].saved
    radii = model.model.priors[0].radius_steps.tolist()
    steps, um = ", ".join(f"{k:.2f}" for k in radii), ", ".join(f"{k * 128:.0f}" for k in radii)
    assert f"| fold 0, seed 0 | 1 | {steps} | {um} |" in text
    fitted = read_json(home / "run/folds/1/seed-1/metrics.json")
    assert f"| fold 1, seed 1 | {fitted['temperature']:.3f} | {fitted['threshold']:.3f} |" in text


@pytest.mark.parametrize("kind", ["three", "survival", "regression"])
def test_other_tasks(kind, tmp_path):
    make_run(tmp_path / "run", make_splits(), signal=1.0, kind=kind, headline="60 slides: a|b <script>")
    export_run(tmp_path / "run", tmp_path / "shared")
    assert len(psamil.load(tmp_path / "shared")) == 3
    text = card(tmp_path / "shared")
    assert huggingface_hub.ModelCard(text).data.license is None
    assert "**None yet.**" in text
    assert "not recorded" in text
    assert r"a\|b \<script\>" in text
    assert "Learned radii" not in text
    assert ("temperature" in text) == (kind == "three")
    assert ("c_index" in text) == (kind == "survival")


def test_what_cannot_be_exported(home, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(DataError, match="is not an empty folder"):
        export_run(home / "run", tmp_path / "full")
    with pytest.raises(DataError, match="is exported already"):
        export_run(home / "shared", tmp_path / "new")
    with pytest.raises(DataError, match="is no run directory"):
        export_run(tmp_path, tmp_path / "new")
    with pytest.raises(OptionError, match="licence must be an identifier"):
        export_run(home / "run", tmp_path / "new", licence="ask me")
    run = shutil.copytree(home / "run", tmp_path / "run")
    (run / "folds" / "1" / "seed-1" / "metrics.json").unlink()
    summary = read_json(run / "summary.json")
    write_json(run / "summary.json", {**summary, "finished": [0]})
    with pytest.raises(DataError, match="has not finished fold 1"):
        export_run(run, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    assert len(psamil.load(export_run(run, tmp_path / "empty", fold=0))) == 2


def test_an_error_leaves_nothing_behind(home, tmp_path):
    def stopped(jobs):
        yield jobs[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_run(home / "run", tmp_path / "new", progress=stopped)
    assert list(tmp_path.iterdir()) == []


def change_model(folder):
    file = folder / "folds/1/seed-0/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def change_threshold(folder):
    write_json(folder / "folds/0/seed-0/metrics.json", {"temperature": 1.0, "threshold": 0.99})


def add_model(folder):
    shutil.copytree(folder / "folds/0", folder / "folds/7")


def edit(**changes):
    def edited(folder):
        write_json(folder / "config.json", {**read_json(folder / "config.json"), **changes})

    return edited


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        pytest.param(change_model, "folds/1/seed-0/model.safetensors: is not what was exported", id="model"),
        pytest.param(change_threshold, "metrics.json: is not what was exported", id="threshold"),
        pytest.param(add_model, "is not among the models that config.json lists", id="another model"),
        pytest.param(lambda f: (f / "folds/1/seed-1/model.safetensors").unlink(), "is missing", id="no model"),
        pytest.param(lambda f: (f / "folds/1/seed-1/metrics.json").unlink(), "is missing", id="no threshold"),
        pytest.param(lambda f: shutil.rmtree(f / "folds/1"), "is missing", id="no fold"),
        pytest.param(lambda f: (f / "config.json").unlink(), "neither the run.json", id="no config"),
        pytest.param(lambda f: (f / "config.json").write_text("{"), "is not valid JSON", id="half a config"),
        pytest.param(edit(format_version=2), "has format version 2, this psamil reads up to 1", id="newer"),
        pytest.param(edit(format_version="1"), "is damaged: format_version", id="odd version"),
        pytest.param(edit(files=None), "is damaged: files is no mapping", id="no sums"),
        pytest.param(edit(files={}), "is not among the models", id="empty sums"),
        pytest.param(edit(files={"../../x": "0"}), "is damaged: it lists '../../x'", id="elsewhere"),
        pytest.param(edit(extraction=[1]), "is damaged: extraction is no mapping", id="odd extraction"),
    ],
)
def test_a_folder_that_is_not_as_it_was_written(damage, told, shared):
    damage(shared)
    with pytest.raises(DataError) as refused:
        psamil.load(shared)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_edited_card_is_not_damage(shared):
    (shared / "README.md").write_text("My model")
    assert len(psamil.load(shared)) == 4


def test_a_single_model_of_it_is_checked_too(shared):
    assert len(psamil.load(shared / "folds" / "1")) == 2
    change_model(shared)
    for part in ("folds/1", "folds/1/seed-0", "folds/1/seed-0/model.safetensors"):
        with pytest.raises(DataError, match="is not what was exported"):
            psamil.load(shared / part)


def test_evaluation_knows_how_to_read_but_not_who_was_seen(home):
    predictor = psamil.load(home / "shared")
    assert origin(predictor)["reading"]["non_finite"] == "drop"
    assert origin(predictor)["patients"] == {}
    cohort = open_like(predictor, home / "cohort", home / "cohort" / "labels.csv", cache=home / "cache")
    assert "as it was exported" in find_overlap(predictor, cohort).unknown


def test_thresholds_of_tiles_come_along(home, tmp_path):
    run = shutil.copytree(home / "run", tmp_path / "run")
    write_json(run / "folds" / "0" / "localisation.json", {"threshold": -1.5, "labels": "c" * 64, "test": {}})
    export_run(run, tmp_path / "shared")
    assert read_json(tmp_path / "shared" / "folds" / "0" / "localisation.json") == {"threshold": -1.5}
    assert threshold_of_tiles(tmp_path / "shared" / "folds" / "0" / "seed-0") == -1.5
    assert np.isnan(threshold_of_tiles(tmp_path / "shared" / "folds" / "1" / "seed-0"))
    (tmp_path / "shared" / "folds" / "0" / "localisation.json").write_text("{}")
    with pytest.raises(DataError, match="is not what was exported"):
        psamil.load(tmp_path / "shared")


def snapshot(source, cache):
    """As the hub's cache: every file is a link to a blob."""
    for i, file in enumerate(files_below(source)):
        blob, link = cache / "blobs" / str(i), cache / "snapshots" / "main" / file.relative_to(source)
        for path in (blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, blob)
        link.symlink_to(blob)
    return cache / "snapshots" / "main"


def test_from_the_hub(home, bags, tmp_path, monkeypatch):
    asked = []

    def download(repository, **options):
        asked.append((repository, options))
        return str(folder)

    folder = snapshot(home / "shared", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    predictor = psamil.load("hf://someone/a-model")
    assert_equal(psamil.load(home / "run").predict(bags[:2]), predictor.predict(bags[:2]))
    assert origin(predictor)["extraction"]["encoder"] == "an_encoder"
    psamil.load("hf:/someone/a-model@v1.0")  # as a pathlib.Path writes it
    patterns = ["*.safetensors", "*.json", "*.md"]
    assert asked == [
        ("someone/a-model", {"revision": revision, "allow_patterns": patterns}) for revision in (None, "v1.0")
    ]
    for odd in ("hf://a-model", "hf://a/b/c", "hf://../x y"):
        with pytest.raises(OptionError, match="owner/name"):
            psamil.load(odd)


def test_to_the_hub(home, monkeypatch):
    calls = []
    monkeypatch.setattr(huggingface_hub, "create_repo", lambda *args, **options: calls.append((args, options)))
    monkeypatch.setattr(huggingface_hub, "upload_folder", lambda **options: calls.append(options))
    assert hub.push(home / "shared", "someone/a-model", private=True) == "https://huggingface.co/someone/a-model"
    made, uploaded = calls
    assert made == (("someone/a-model",), {"private": True, "exist_ok": True})
    assert (uploaded["repo_id"], uploaded["folder_path"]) == ("someone/a-model", home / "shared")
    assert uploaded["delete_patterns"] == "folds/*"


def failures():
    made = {}
    for name, status in (("RepositoryNotFoundError", 404), ("HfHubHTTPError", 403), ("HfHubHTTPError", 500)):
        kind = getattr(huggingface_hub.errors, name)
        error = kind.__new__(kind)
        Exception.__init__(error, "two\nlines")
        error.response = type("Response", (), {"status_code": status})()
        made[f"{name} {status}"] = error
    return {**made, "no network": ConnectionError("[Errno -2]\nName or service not known")}


@pytest.mark.parametrize(
    ("failure", "down", "up"),
    [
        ("RepositoryNotFoundError 404", "hf auth login", "hf auth login"),
        ("HfHubHTTPError 403", "hf auth login", "hf auth login"),
        ("HfHubHTTPError 500", "hf download someone/a-model --local-dir", "hf upload someone/a-model"),
        ("no network", "hf download someone/a-model --local-dir", "hf upload someone/a-model"),
    ],
)
def test_failures_of_the_hub_are_one_line(failure, down, up, home, monkeypatch):
    def fails(*args, **options):
        raise failures()[failure]

    for name in ("snapshot_download", "create_repo"):
        monkeypatch.setattr(huggingface_hub, name, fails)
    with pytest.raises(DataError, match=re.escape(down)) as loading:
        psamil.load("hf://someone/a-model")
    with pytest.raises(DataError, match=re.escape(up)) as pushing:
        hub.push(home / "shared", "someone/a-model", private=True)
    for told in (loading, pushing):
        assert "\n" not in str(told.value)


def test_without_the_package_of_the_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"psamil\[hub\]"):
        psamil.load("hf://someone/a-model")


def test_model_options_are_those_of_the_run(home):
    config = read_json(home / "shared" / "config.json")
    assert config["settings"] == read_json(home / "run" / "run.json")["settings"]
    assert config["task"] == {"kind": "classification", "classes": ["negative", "positive"]}
