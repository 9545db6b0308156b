"""``psamil inspect`` on a healthy, a mixed and a broken folder."""

import json
import shutil

import h5py
import numpy as np
import pytest

from psamil.cli import main
from psamil.cohort.simulation import simulate


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cohorts") / "healthy"
    simulate(folder, slides=8, tiles=60, dim=16)
    return folder


@pytest.fixture
def copy(cohort, tmp_path):
    return shutil.copytree(cohort, tmp_path / "copy")


def features(folder):
    return sorted(folder.glob("20x_256px_0px_overlap/features_simulated/*.h5"))


def run(capsys, *args):
    """Exit code, standard output and standard error."""
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *map(str, args)])
    told = capsys.readouterr()
    return ended.value.code, told.out, told.err


def test_a_healthy_folder(capsys, cohort, tmp_path):
    picture = tmp_path / "picture.png"
    code, told, _ = run(capsys, cohort, "--labels", cohort / "labels.csv", "--picture", picture)
    assert code == 0
    for words in ("trident", "8, of which 0 empty", "16 x float16", "512 px0", "metadata", "negative 4 / positive 4"):
        assert words in told
    assert "Ready: 8 slides." in told
    assert f"Picture of some slides: {picture}" in told
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_labels_it_asks_for_them(capsys, cohort):
    code, told, _ = run(capsys, cohort, "--picture", "null")
    assert code == 0
    assert f"Next: psamil inspect {cohort} --labels TABLE" in told
    assert "Picture" not in told


def test_a_mixed_folder(capsys, copy):
    """Damage is named and set aside, oddities are noted, the rest can be used."""
    truncated, empty, nan, doubled, wide = features(copy)[:5]
    truncated.write_bytes(truncated.read_bytes()[:3000])
    with h5py.File(empty, "w") as file:
        file["features"], file["coords"] = np.empty((0, 16), np.float16), np.empty((0, 2), np.int64)
    with h5py.File(nan, "r+") as file:
        file["features"][3] = np.nan
    with h5py.File(doubled, "r+") as file:
        file["coords"].attrs["patch_size_level0"] = 1024
        file["coords"].attrs["patch_size"] = 512
    with h5py.File(wide, "r+") as file:
        n = len(file["features"])
        del file["features"]
        file["features"] = np.zeros((n, 20), np.float32)
    code, told, _ = run(capsys, copy, "--labels", copy / "labels.csv", "--picture", "null")
    assert code == 0
    assert "Set aside (1)" in told
    assert str(truncated) in told
    assert "There are 2 widths of features: 16 in slides slide_00002" in told
    assert "20 in slide slide_00004; keep" in told
    assert "slide slide_00001: has no tiles" in told
    assert "slide slide_00002: has NaN or infinite features" in told
    assert "slide slide_00003: 100% of the tiles" in told
    assert "neighbour at 512" in told
    assert "1 slides of the table have no bag" in told
    assert "Usable: 6 slides, 1 files set aside; read the notes." in told


def test_a_broken_folder(capsys, copy):
    for path in features(copy):
        path.write_bytes(b"not an h5 file at all")
    code, told, _ = run(capsys, copy, "--labels", copy / "labels.csv", "--picture", "null")
    assert code == 1
    assert "Set aside (8)" in told
    assert "Not usable: 0 slides, 8 files set aside." in told


def test_labels_that_do_not_fit(capsys, cohort, tmp_path):
    table = tmp_path / "labels.csv"
    table.write_text("slide_id,label\nother_1,a\nother_2,b\n")
    code, told, _ = run(capsys, cohort, "--labels", table, "--picture", "null")
    assert code == 1
    assert "none of the 8 bags match a row" in told
    assert "the labels do not fit" in told


def test_survival(capsys, cohort):
    labels = ("--labels", cohort / "labels.csv", "--time", "survival_months", "--censorship", "censorship")
    code, told, _ = run(capsys, cohort, *labels, "--picture", "null")
    assert code == 0
    assert "events" in told


def test_json_for_machines(capsys, copy):
    features(copy)[0].write_bytes(b"")
    code, told, _ = run(capsys, copy, "--labels", copy / "labels.csv", "--picture", "null", "--json")
    assert code == 0
    told = json.loads(told)
    assert told["verdict"] == "usable"
    assert [entry["path"] for entry in told["set_aside"]] == [str(features(copy)[0])]
    assert len(told["slides"]) == 7
    assert told["slides"][0]["step"]["um"] == 128.0
    assert told["labels"]["samples"] == 7


def test_what_a_user_can_mend_is_one_line(capsys, tmp_path):
    code, told, error = run(capsys, tmp_path / "nowhere")
    assert (code, told) == (2, "")
    assert error.strip().splitlines() == [f"psamil: {tmp_path / 'nowhere'}: does not exist; check the path"]
    code, _, error = run(capsys, tmp_path, "--target", "label")
    assert code == 2
    assert "--labels" in error


def test_an_empty_folder(capsys, tmp_path):
    code, told, _ = run(capsys, tmp_path, "--picture", "null")
    assert code == 1
    assert "no bag of a known format" in told


@pytest.mark.parametrize("verb", ["inspect", "simulate"])
def test_help_shows_an_example(capsys, verb):
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    assert f"Example: psamil {verb}" in " ".join(capsys.readouterr().out.split())
