"""``psamil explain``: a folder for each slide, and what cannot be explained is said."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import tifffile
import torch
from PIL import Image

from psamil import find_bags, fit, open_bag
from psamil.cli import explanation_pictures
from psamil.cohort import Splits, simulate
from psamil.evaluation.predictor import Member
from psamil.explain import explain_bag, occlude
from psamil.files import read_json, write_json
from psamil.training.settings import TrainingSettings
from tests.cli.verbs import run_verb, small_study
from tests.evaluation.made_runs import make_run, make_splits
from tests.serve.cases import MPP, OFFSET_PX0, WHOLE_PX0, write_features
from tests.slides.drawn import waves, write_offset_slide

PSA = {"model": "psa", "model_options": {"heads": 2, "head_dim": 4, "k_init": 2.0}}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return small_study(tmp_path_factory.mktemp("explain"), **PSA)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Features without slides, and a run of a model without heads."""
    folder = tmp_path_factory.mktemp("simulated")
    simulate(folder / "cohort", slides=8, tiles=50, dim=4)
    options = {"target": "label", "folds": 2, "seeds": 1, "cache": folder / "cache", "epochs": 1}
    fit(folder / "cohort", folder / "cohort/labels.csv", folder / "run", model="max", **options)
    return folder


def test_a_slide_with_heads(home, tmp_path, capsys):
    args = ("--run", home / "run", "--out", tmp_path, "--slide", "s2", "--slides", home / "slides", "--tile", 3)
    code, told, errors = run_verb(capsys, "explain", home / "features", *args, "--overlay")
    assert code == 0, errors
    assert f"slides explained: 1; not explained: 0\nwrote {tmp_path}" in told
    pictures = ["heads.png", "heat-map.png", "heat-map.svg", "posterior.png", "top-tiles.png"]
    data = ["explanation.json", "overlay.tiff", "regions.geojson", "tiles.csv", "tiles.geojson"]
    assert sorted(file.name for file in (tmp_path / "s2").iterdir()) == sorted(pictures + data)
    for name in pictures:
        if name.endswith("png"):
            with Image.open(tmp_path / "s2" / name) as picture:
                assert len(picture.convert("RGB").getcolors(10**7)) > 20, name

    about = read_json(tmp_path / "s2" / "explanation.json")
    fold = about["model"]["fold"]
    assert "s2" in Splits.load(home / "run" / "splits.json")[fold].test
    assert about["model"]["note"] == ""
    (ref,) = (ref for ref in find_bags(home / "features").bags if ref.id == "s2")
    member, bag = Member.load(home / "run" / about["model"]["file"]), open_bag(ref)
    expected = explain_bag(member.saved, bag, temperature=member.temperature)
    assert {name: about["prediction"][name] for name in expected.values} == pytest.approx(dict(expected.values))
    assert [tile["tile"] for tile in about["top_tiles"]] == expected.top_tiles(20)
    for told_head, head in zip(about["heads"], expected.heads, strict=True):
        assert told_head["radius_steps"] == pytest.approx(head.radius_steps)
        assert told_head["radius_um"] == pytest.approx(head.radius_steps * bag.step_um)
    assert about["head_similarity"][0][0][0] is None
    curve = occlude(member.saved, bag, expected.tile_scores, watch=about["prediction"]["predicted"])
    assert about["occlusion"]["area"] == pytest.approx(curve.area)

    table = pd.read_csv(tmp_path / "s2" / "tiles.csv")
    np.testing.assert_allclose(table["score"], expected.tile_scores, rtol=1e-5)
    np.testing.assert_allclose(table["head 2 received"], expected.heads[1].received, rtol=1e-5)
    np.testing.assert_allclose(table["head 1 neighbourhood"], expected.heads[0].neighbourhood, rtol=1e-5)
    assert table["share"].sum() == pytest.approx(1)
    assert list(table["tile"]) == list(range(bag.n))
    tiles = json.loads((tmp_path / "s2" / "tiles.geojson").read_text())["features"]
    assert [feature["geometry"]["coordinates"][0][0] for feature in tiles] == table[["x_px0", "y_px0"]].values.tolist()
    assert "head 2 received" in tiles[0]["properties"]["measurements"]


def test_features_alone(home, tmp_path, capsys):
    args = ("--run", home / "run", "--out", tmp_path, "--slide", "s0", "s1", "--occlusion", "false", "--geojson=false")
    code, told, errors = run_verb(capsys, "explain", home / "features", *args)
    assert code == 0, errors
    assert "slides explained: 2" in told
    files = ["explanation.json", "heads.png", "heat-map.png", "heat-map.svg", "posterior.png", "tiles.csv"]
    for name in ("s0", "s1"):
        assert sorted(file.name for file in (tmp_path / name).iterdir()) == files
        assert read_json(tmp_path / name / "explanation.json")["occlusion"] is None


@pytest.fixture(scope="module")
def scanned(tmp_path_factory):
    """Features of a grey slide whose scanned area has an offset, and runs that were not trained."""
    folder, columns = tmp_path_factory.mktemp("scanned"), 9
    corners = [(OFFSET_PX0[0] + 64 * (i % columns), OFFSET_PX0[1] + 64 * (i // columns)) for i in range(80)]
    write_features(folder / "features", "p001", np.array(corners)[np.arange(80) % 7 > 0], seed=0, dim=2)
    (folder / "slides").mkdir()
    write_offset_slide(folder / "slides" / "p001.scn", waves(640, 640)[:, :, [0] * 3], OFFSET_PX0, WHOLE_PX0, MPP)
    make_run(folder / "run", make_splits(), signal=1.0, settings=TrainingSettings(**PSA))
    make_run(folder / "survival", make_splits(), signal=1.0, settings=TrainingSettings(**PSA), kind="survival")
    return folder


def test_a_slide_with_an_offset(scanned, tmp_path, capsys):
    args = (
        "--run",
        scanned / "run",
        "--slides",
        scanned / "slides",
        "--out",
        tmp_path,
        "--overlay",
        "--occlusion=false",
    )
    code, _, errors = run_verb(capsys, "explain", scanned / "features", *args)
    assert code == 0, errors
    table = pd.read_csv(tmp_path / "p001" / "tiles.csv")
    corners = table[["x_px0", "y_px0"]].to_numpy()
    assert (corners.min(0) == OFFSET_PX0).all()  # counted as OpenSlide does
    tiles = json.loads((tmp_path / "p001" / "tiles.geojson").read_text())["features"]
    on_image = np.array([feature["geometry"]["coordinates"][0][0] for feature in tiles])
    assert (on_image == corners - OFFSET_PX0).all()  # counted as QuPath does
    regions = json.loads((tmp_path / "p001" / "regions.geojson").read_text())["features"]
    ends = np.concatenate([feature["geometry"]["coordinates"][0] for feature in regions])
    high = on_image[table["percentile"] >= 90]
    assert (ends.min(0) == high.min(0)).all()
    assert (ends.max(0) == high.max(0) + 64).all()
    colours = tifffile.imread(tmp_path / "p001" / "overlay.tiff").astype(int)
    assert colours.shape[1::-1] == WHOLE_PX0
    coloured = np.zeros(colours.shape[:2], dtype=bool)
    for x, y in corners:
        coloured[y : y + 64, x : x + 64] = True
    np.testing.assert_array_equal((np.ptp(colours, axis=2) > 8)[::8, ::8], coloured[::8, ::8])


def test_a_slide_lies_around_a_tile_only_where_positions_are_its_own(scanned, tmp_path, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr(explanation_pictures, "save_posterior", lambda *args: shown.append(args[3]))
    for other in ("save_heat_map", "save_priors", "save_tiles"):
        monkeypatch.setattr(explanation_pictures, other, lambda *args, **options: None)
    run = shutil.copytree(scanned / "run", tmp_path / "run")
    for positions in ("file", "row order", "shuffled"):
        write_json(run / "run.json", {**read_json(run / "run.json"), "reading": {"positions": positions}})
        options = ("--slides", scanned / "slides", "--out", tmp_path / "out", "--occlusion=false", "--tile", 20)
        code, _, errors = run_verb(capsys, "explain", scanned / "features", "--run", run, *options)
        assert code == 0, errors
    assert shown[0] is not None
    assert shown[1:] == [None, None]


def test_a_survival_model_has_a_risk_and_intervals(scanned, tmp_path, capsys):
    args = ("--run", scanned / "survival", "--out", tmp_path, "--occlusion=false")
    code, _, errors = run_verb(capsys, "explain", scanned / "features", *args)
    assert code == 0, errors
    risk = read_json(tmp_path / "p001" / "explanation.json")["prediction"]["risk"]
    drawn = (tmp_path / "p001" / "heat-map.svg").read_text(encoding="utf-8")
    assert f">p001: risk {risk:.2f}<".replace("-", "−") in drawn
    columns = pd.read_csv(tmp_path / "p001" / "tiles.csv").columns
    assert [name for name in columns if name.startswith("evidence")] == ["evidence interval 1", "evidence interval 2"]


def test_a_model_without_heads_and_slides_that_fail(simulated, tmp_path, capsys):
    files = sorted((simulated / "cohort").rglob("*/features_simulated/*.h5"))[:3]
    (tmp_path / "features").mkdir()
    for file in files:
        shutil.copy(file, tmp_path / "features")
    damaged = tmp_path / "features" / files[1].name
    damaged.write_bytes(damaged.read_bytes()[:-500])
    args = ("--run", simulated / "run", "--out", tmp_path / "out")
    code, told, errors = run_verb(capsys, "explain", tmp_path / "features", *args)
    assert code == 1
    assert "slides explained: 2; not explained: 1" in told
    assert f"not explained: {damaged}" in errors
    assert sorted(folder.name for folder in (tmp_path / "out").iterdir()) == [files[0].stem, files[2].stem]
    some = tmp_path / "out" / files[0].stem
    assert not (some / "heads.png").exists()
    assert not (some / "posterior.png").exists()
    about = read_json(some / "explanation.json")
    assert about["heads"] == []
    assert "share" not in pd.read_csv(some / "tiles.csv")


def test_a_new_slide_and_a_tile_that_is_not_there(home, tmp_path, capsys):
    (ref,) = (ref for ref in find_bags(home / "features").bags if ref.id == "s3")
    (tmp_path / "new.h5").write_bytes(ref.path.read_bytes())
    n = open_bag(ref).n
    args = ("explain", tmp_path / "new.h5", "--run", home / "run", "--out", tmp_path / "out", "--occlusion=false")
    code, _, errors = run_verb(capsys, *args)
    assert code == 0
    assert "new: the run does not know this slide" in errors
    code, _, errors = run_verb(capsys, *args, "--tile", n)
    assert code == 1
    assert f"not explained: new: it has no tile {n}: name one from 0 to {n - 1} with --tile" in errors


def test_what_cannot_be_asked(home, tmp_path, capsys):
    run, features = ("--run", home / "run", "--out", tmp_path / "out"), home / "features"
    for args, words in (
        ((features, *run, "--overlay"), "name the folder of the slides with --slides"),
        ((features, *run, "--slide", "s9"), "has no slide 's9'; its slides are 's0', 's1'"),
        ((features, "--run", tmp_path, "--out", tmp_path / "out"), "is no run directory"),
        ((home / "slides", *run), "holds no features of a known format"),
    ):
        code, _, errors = run_verb(capsys, "explain", *args)
        assert code == 2
        assert words in errors
    assert not (tmp_path / "out").exists()


def test_features_of_another_width(home, simulated, tmp_path, capsys):
    code, told, errors = run_verb(capsys, "explain", simulated / "cohort", "--run", home / "run", "--out", tmp_path)
    assert code == 1
    assert "slides explained: 0; not explained: 8" in told
    assert "features are 4 wide" in errors
    assert torch.is_grad_enabled()
