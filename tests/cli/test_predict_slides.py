"""``psamil predict SLIDE --run RUN``: features as in training, a prediction, a heat map; nothing that does not fit."""

import shutil

import pandas as pd
import pytest
from PIL import Image

from psamil.files import read_json, write_json
from tests.cli.verbs import ENCODER, run_verb, small_study

WORDS = ("--workers", "1")
TRUST = (*WORDS, "--trust-encoder")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return small_study(tmp_path_factory.mktemp("slides"), model="mean")


def test_from_a_slide_to_a_prediction_and_a_heat_map(home, tmp_path, capsys):
    assert read_json(home / "run" / "run.json")["extraction"]["tile_px"] == 64
    slide, out = home / "slides" / "s3.tif", tmp_path / "new.csv"
    code, told, errors = run_verb(capsys, "predict", slide, "--run", home / "run", "--out", out, *TRUST)
    assert code == 0, errors
    assert "slides: 1; models: 2; set aside: 0" in told
    assert run_verb(capsys, "predict", home / "features", "--run", home / "run", "--out", tmp_path / "all.csv")[0] == 0
    of_features = pd.read_csv(tmp_path / "all.csv").set_index("sample").loc["s3"]
    pd.testing.assert_series_equal(pd.read_csv(out).set_index("sample").loc["s3"], of_features)
    with Image.open(tmp_path / "new-heat-maps" / "s3.png") as picture:
        assert picture.width > 500
        assert len(picture.convert("RGB").getcolors(10**6)) > 20
    assert (tmp_path / "new-features" / "extraction.json").exists()


def test_a_folder_of_slides_with_one_that_is_damaged(home, tmp_path, capsys):
    for name in ("s0", "s1"):
        shutil.copy(home / "slides" / f"{name}.tif", tmp_path)
    (tmp_path / "s2.svs").write_text("no slide")
    code, told, errors = run_verb(
        capsys, "predict", tmp_path, "--run", home / "run", "--out", tmp_path / "out" / "p.csv", *TRUST
    )
    assert code == 1
    assert "slides: 2; models: 2; set aside: 1" in told
    assert "set aside" in errors
    assert "s2.svs" in errors
    assert len(list((tmp_path / "out" / "p-heat-maps").iterdir())) == 2


def test_other_features_are_refused(home, tmp_path, capsys):
    words = ("--encoder", ENCODER, "--tile-px", "96", *WORDS)
    assert run_verb(capsys, "extract", home / "slides", "--out", tmp_path / "other", *words)[0] == 0
    code, _, errors = run_verb(
        capsys, "predict", tmp_path / "other", "--run", home / "run", "--out", tmp_path / "p.csv"
    )
    assert code == 2
    assert "has other features than the models were trained on: tile_px 96, not 64" in errors


def test_an_encoder_that_has_changed_is_refused(home, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(home / "run", run)
    about = read_json(run / "run.json")
    about["extraction"]["fingerprint"] = "0" * 64
    write_json(run / "run.json", about)
    code, _, errors = run_verb(capsys, "predict", home / "slides", "--run", run, "--out", tmp_path / "p.csv", *TRUST)
    assert code == 2
    assert "was trained on features made with another encoder: fingerprint" in errors
    code, _, errors = run_verb(capsys, "predict", home / "slides", "--run", run, "--out", tmp_path / "p.csv", *WORDS)
    assert code == 2
    assert f"wants the code {ENCODER} to be run" in errors
    del about["extraction"]
    write_json(run / "run.json", about)
    code, _, errors = run_verb(capsys, "predict", home / "slides", "--run", run, "--out", tmp_path / "p.csv", *TRUST)
    assert code == 2
    assert "does not say how the features it was trained on were made" in errors


def test_what_cannot_be_predicted_is_told_before_features_are_made(home, tmp_path, capsys):
    slides, out = home / "slides", tmp_path / "p.csv"
    code, _, errors = run_verb(
        capsys, "predict", slides, "--run", home / "run", "--out", out, "--unit", "patient", *TRUST
    )
    assert code == 2
    assert "--patients" in errors
    run = tmp_path / "run"
    shutil.copytree(home / "run", run)
    about = read_json(run / "run.json")
    about["extraction"]["reference"] = None
    write_json(run / "run.json", about)
    code, _, errors = run_verb(capsys, "predict", slides, "--run", run, "--out", out, *TRUST)
    assert code == 2
    assert "'small_encoder', a module that only Python code has" in errors
    for folder in ("x", "y"):
        (tmp_path / "twice" / folder).mkdir(parents=True)
        shutil.copy(slides / "s0.tif", tmp_path / "twice" / folder)
    code, _, errors = run_verb(capsys, "predict", tmp_path / "twice", "--run", home / "run", "--out", out, *TRUST)
    assert code == 2
    assert "has the same name as" in errors
    assert not (tmp_path / "p-features").exists()
