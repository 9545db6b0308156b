"""``psamil export`` and what the other verbs do with an exported folder."""

import shutil

import huggingface_hub
import pandas as pd
import pytest

import psamil
from psamil.cli import main
from psamil.cohort import simulate
from tests.cli.verbs import run_verb, small_study


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A study, and the export of its run."""
    home = small_study(tmp_path_factory.mktemp("export"), model="mean")
    with pytest.raises(SystemExit) as ended:
        main(["export", str(home / "run"), "--to", str(home / "shared")])
    assert ended.value.code == 0
    return home


def test_what_is_told(home, tmp_path, capsys):
    code, told, errors = run_verb(capsys, "export", home / "run", "--to", tmp_path / "new", "--fold", "1")
    assert (code, told) == (0, f"wrote {tmp_path / 'new'}\n")
    assert "names no licence yet" in errors
    code, _, errors = run_verb(capsys, "export", home / "run", "--to", tmp_path / "mit", "--licence", "mit")
    assert (code, errors) == (0, "")
    code, _, errors = run_verb(capsys, "export", home / "run", "--to", tmp_path / "new")
    assert code == 2
    assert "is not an empty folder" in errors
    code, _, errors = run_verb(capsys, "export", home / "run", "--to", tmp_path / "other", "--public")
    assert code == 2
    assert "--push" in errors


def test_predictions_from_features_and_from_slides(home, tmp_path, capsys):
    tables = []
    for run in ("run", "shared"):
        out = tmp_path / f"{run}.csv"
        assert run_verb(capsys, "predict", home / "features", "--run", home / run, "--out", out)[0] == 0
        tables.append(out.read_bytes())
    assert tables[0] == tables[1]
    slide, out = home / "slides" / "s3.tif", tmp_path / "slide.csv"
    words = ("predict", slide, "--run", home / "shared", "--out", out, "--workers", "1")
    code, _, errors = run_verb(capsys, *words)
    assert code == 2
    assert "wants the code" in errors  # of an encoder that strangers name
    code, _, errors = run_verb(capsys, *words, "--trust-encoder")
    assert code == 0, errors
    row = pd.read_csv(tmp_path / "shared.csv").set_index("sample").loc["s3"]
    pd.testing.assert_series_equal(pd.read_csv(out).set_index("sample").loc["s3"], row)


def test_evaluation_says_that_overlap_is_unknown(home, tmp_path, capsys):
    words = ("--run", home / "shared", "--out", tmp_path / "out", "--cache", home / "cache")
    code, told, errors = run_verb(capsys, "evaluate", home / "features", home / "labels.csv", *words)
    assert code == 0, errors
    assert "Overlap: the training data of a model are not known, as it was exported" in errors
    assert "auc" in told


def test_training_does_not_go_on_in_it(home, tmp_path, capsys):
    shared = shutil.copytree(home / "shared", tmp_path / "shared")
    words = (home / "features", home / "labels.csv", shared, "--target", "label", "--cache", home / "cache")
    code, _, errors = run_verb(capsys, "train", *words, "--folds", "2")
    assert code == 2
    assert "is not empty and no run" in errors


def test_push_and_predict_from_the_hub(home, tmp_path, capsys, monkeypatch):
    made = []
    there = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub, "create_repo", lambda name, **options: made.append((name, options["private"])))
    monkeypatch.setattr(
        huggingface_hub, "upload_folder", lambda folder_path, **options: shutil.copytree(folder_path, there)
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(there))
    code, _, errors = run_verb(
        capsys, "export", home / "run", "--to", tmp_path / "new", "--push", "me/my-model", "--licence", "mit"
    )
    assert code == 0
    assert "uploaded to https://huggingface.co/me/my-model" in errors
    assert made == [("me/my-model", True)]
    assert 'psamil.load("hf://me/my-model")' in (there / "README.md").read_text()
    out = tmp_path / "predictions.csv"
    code, told, errors = run_verb(capsys, "predict", home / "features", "--run", "hf://me/my-model", "--out", out)
    assert code == 0, errors
    assert "slides: 8; models: 2" in told


def test_without_a_network(home, tmp_path, capsys, monkeypatch):
    def unreachable(*args, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "create_repo", unreachable)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    code, _, errors = run_verb(capsys, "export", home / "run", "--to", tmp_path / "new", "--push", "me/my-model")
    assert code == 2
    assert f"hf upload me/my-model {tmp_path / 'new'}" in errors
    assert len(psamil.load(tmp_path / "new")) == 2  # the folder is there
    code, _, errors = run_verb(capsys, "predict", home / "features", "--run", "hf://me/my-model")
    assert code == 2
    assert errors.count("\n") == 1
    assert "hf download me/my-model --local-dir" in errors
    code, _, errors = run_verb(capsys, "export", home / "run", "--to", tmp_path / "next", "--push", "my-model")
    assert code == 2
    assert "owner/name" in errors
    assert not (tmp_path / "next").exists()


def test_patients_of_several_slides(tmp_path, capsys):
    """The unit comes along."""
    simulate(tmp_path / "cohort", slides=16, tiles=60, dim=8, slides_per_patient=2)
    options = {
        "target": "label",
        "folds": 2,
        "seeds": 1,
        "cache": tmp_path / "cache",
        "unit": "patient",
        "model": "mean",
    }
    psamil.fit(tmp_path / "cohort", tmp_path / "cohort" / "labels.csv", tmp_path / "run", **options, epochs=1)
    assert run_verb(capsys, "export", tmp_path / "run", "--to", tmp_path / "shared")[0] == 0
    code, _, errors = run_verb(capsys, "predict", tmp_path / "cohort", "--run", tmp_path / "shared")
    assert code == 2
    assert "trained on patients with all of their slides" in errors
