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
    shutil.move(wide, copy / "before.hdf5")
    with h5py.File(copy / "before.hdf5") as before, h5py.File(wide, "w") as file:
        before.copy("coords", file)
        file["features"] = np.zeros((len(before["features"]), 20), np.float32)
    (copy / "before.hdf5").unlink()
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
    assert "1 slides of the table are left out, since their file was set aside: 'slide_00000'" in told
    assert "meant?" not in told
    assert "Usable: 4 of 7 slides, 1 files set aside; read the notes and what is said about the labels." in told
    assert f"Next: psamil train {copy} {copy / 'labels.csv'} run" in told
    assert f"or: in Python, cohort = psamil.Cohort.open('{copy}', '{copy / 'labels.csv'}').checked()" in told


def test_what_does_not_match_prevents_ready(capsys, copy):
    labels = (copy / "labels.csv").read_text()
    header, *rows = labels.splitlines()
    table = copy / "other.csv"
    table.write_text("\n".join([header, *rows[:-1]]))
    code, told, _ = run(capsys, copy, "--labels", table, "--picture", "null")
    assert code == 0
    assert "1 bags have no label: 'slide_00007'" in told
    assert "Usable: 7 slides; read the notes and what is said about the labels." in told
    table.write_text("\n".join([header, *rows, rows[0].replace("_00000", "_zz")]))
    assert "Usable: 8 slides; read" in run(capsys, copy, "--labels", table, "--picture", "null")[1]
    table.write_text(labels.replace("negative", "", 1))
    assert "Usable: 7 slides; read" in run(capsys, copy, "--labels", table, "--picture", "null")[1]


def test_json_lists_all_names_and_counts_numbers(capsys, cohort, tmp_path):
    names = [f"zz{i}" for i in range(40)]
    table = tmp_path / "labels.csv"
    rows = [f"slide_0000{i},p{i},{'ab'[i % 2]}" for i in range(5)] + [f"{name},{name},a" for name in names]
    table.write_text("\n".join(["slide_id,case_id,label", *rows]))
    told = json.loads(run(capsys, cohort, "--labels", table, "--picture", "null", "--json")[1])
    assert told["verdict"] == "usable"
    assert told["labels"]["without_bag"] == names
    assert told["labels"]["without_label"] == [f"slide_0000{i}" for i in (5, 6, 7)]
    assert told["labels"]["counts"] == {"a": 3, "b": 2}
    assert told["loadable"] == [f"slide_0000{i}" for i in range(5)]
    survival = ("--labels", cohort / "labels.csv", "--time", "survival_months", "--censorship", "censorship")
    told = json.loads(run(capsys, cohort, *survival, "--picture", "null", "--json")[1])
    assert told["verdict"] == "ready"
    counts = told["labels"]["counts"]
    assert counts.keys() == {"events", "censored"}
    assert sum(counts.values()) == 8


def test_the_verdict_counts_what_can_be_loaded(capsys, copy):
    for path in features(copy)[:5]:
        with h5py.File(path, "r+") as file:
            file["features"][3] = np.nan
    code, told, _ = run(capsys, copy, "--picture", "null")
    assert code == 0
    assert "Usable: 3 of 8 slides; read the notes." in told
    for path in features(copy)[5:]:
        with h5py.File(path, "r+") as file:
            file["features"][3] = np.inf
    code, told, _ = run(capsys, copy, "--picture", "null", "--labels", copy / "labels.csv")
    assert code == 1
    assert "Not usable: 0 of 8 slides." in told


def test_features_of_two_encoders_are_a_choice(capsys, copy):
    one = copy / "20x_256px_0px_overlap" / "features_simulated"
    two = shutil.copytree(one, one.with_name("features_other"))
    options = ("--labels", copy / "labels.csv", "--target", "label", "--picture", "null")
    code, told, error = run(capsys, copy, *options)
    assert (code, error) == (1, "")
    assert "8 slides occur more than once" in told
    assert "Not usable" in told
    command = "psamil inspect {} --labels {} --target label"
    commands = [command.format(folder, copy / "labels.csv") for folder in (two, one)]
    assert f"Next: {commands[0]}\nor: {commands[1]}\n" in told
    code, told, _ = run(capsys, copy, *options, "--json")
    told = json.loads(told)
    assert (code, told["verdict"]) == (1, "unusable")
    assert told["choices"] == [{"path": str(folder), "slides": 8} for folder in (two, one)]
    assert told["next"] == commands


def test_slides_twice_in_one_folder(capsys, tmp_path):
    for name in ("a.npz", "a.svs.npz"):
        np.savez(tmp_path / name, features=np.ones((4, 2), np.float32), coords=np.eye(4)[:, :2] * 256, unit="px0")
    code, told, _ = run(capsys, tmp_path, "--picture", "null", "--json")
    told = json.loads(told)
    assert (code, told["verdict"], told["choices"]) == (1, "unusable", [])
    assert "rename one of the files" in told["error"]


def test_columns_of_other_names_are_noted(capsys, tmp_path):
    places = np.random.default_rng(0).uniform(0, 1000, (30, 2))
    for name, columns in (("a", "CD3,CD8"), ("b", "CD8,CD3"), ("c", "CD3,CD8")):
        lines = [f"x,y,{columns}", *(f"{x},{y},1.5,2.5" for x, y in places)]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    code, told, _ = run(capsys, tmp_path, "--picture", "null")
    assert code == 0
    assert "slide b: columns of features are not named as in slides a, c: column 1 is 'CD8', there 'CD3'" in told
    assert "Usable: 2 of 3 slides" in told


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


def test_options_of_the_outcome(capsys, cohort, tmp_path):
    """What the errors advise can be done."""
    grades = tmp_path / "grades.csv"
    header = "slide_id,case_id,grade,kras,tp53\n"
    grades.write_text(header + "".join(f"slide_0000{i},p{i},{10 + i % 3},{i % 2},{i % 4 // 2}\n" for i in range(8)))

    def outcome(*options):
        told = run(capsys, cohort, "--labels", grades, "--picture", "null", "--json", *options)[1]
        return json.loads(told)["labels"]

    assert outcome("--target", "grade")["counts"] == {"10": 3, "11": 3, "12": 2}
    assert outcome("--target", "grade", "--kind", "regression")["kind"] == "regression"
    chosen = outcome("--classes", "12", "10", "--target", "grade")
    assert (chosen["kind"], chosen["counts"]) == ("binary", {"12": 2, "10": 3})
    assert outcome("--target", "kras", "tp53")["kind"] == "multilabel"
    assert outcome("--target=kras", "--classes=1", "--picture", "null") is None  # one class is too few


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
