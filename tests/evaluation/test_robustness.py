"""``psamil train`` on data and disks as they are: what is damaged, missing, one-sided or full ends as promised."""

import json
import shutil
import subprocess

import h5py
import numpy as np
import pandas as pd
import pytest

from psamil.cli import main
from psamil.cohort import Split, Splits, simulate
from psamil.files import read_json
from psamil.training.fold import STATE_FILE
from psamil.training.timing import TIMING_FILE

SLIDES = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("robustness") / "cohort"
    simulate(folder, slides=SLIDES, tiles=60, dim=8)
    return folder


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "cohort")


def files(folder):
    return sorted(folder.glob("*/features_simulated/*.h5"))


def labels_of(folder):
    return pd.read_csv(folder / "labels.csv", dtype=str)


def train(capsys, cohort, run, *options, labels=None, cache=None, hidden=4):
    """Exit code, and what was told on standard error. Two folds of the smallest model, unless options say otherwise."""
    paths = [cohort, labels or cohort / "labels.csv", run, "--cache", cache or run.parent / "cache"]
    small = ["--training.model", "mean", "--training.model_options", json.dumps({"hidden": hidden})]
    chosen = ["--folds", "2", "--seeds", "1", "--training.epochs", "2", *small, *options]
    if "--time" not in options:
        chosen += ["--target", "label"]
    with pytest.raises(SystemExit) as ended:
        main(["train", *map(str, paths), *map(str, chosen)])
    return ended.value.code, capsys.readouterr().err


def predicted(run):
    return set(pd.read_csv(run / "predictions.csv", dtype={"sample": str})["sample"])


def contents(run):
    """All but the times that epochs took, which are never the same."""
    files = [file for file in run.rglob("*") if file.is_file() and file.name != TIMING_FILE]
    return {str(file.relative_to(run)): file.read_bytes() for file in files}


@pytest.fixture
def damaged(copy):
    file = files(copy)[3]
    file.write_bytes(file.read_bytes()[:3000])
    return file


def test_a_truncated_slide_is_set_aside_by_name(capsys, copy, damaged, tmp_path):
    code, told = train(capsys, copy, tmp_path / "run")
    assert code == 0
    assert f"set aside: {damaged}" in told.replace("\n", "")
    assert predicted(tmp_path / "run") == {file.stem for file in files(copy)} - {damaged.stem}


def test_a_truncated_slide_can_be_refused(capsys, copy, damaged, tmp_path):
    code, told = train(capsys, copy, tmp_path / "run", "--damaged", "refuse")
    assert code == 2
    assert str(damaged) in told.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_slides_and_rows_that_miss_each_other_are_named(capsys, copy, tmp_path):
    table = labels_of(copy)
    no_row, no_value = table.loc[0, "slide_id"], table.loc[1, "slide_id"]
    table.loc[1, "label"] = None
    stranger = table.iloc[[2]].assign(slide_id="never_scanned", case_id="unknown")
    pd.concat([table.drop(index=0), stranger]).to_csv(copy / "labels.csv", index=False)
    code, told = train(capsys, copy, tmp_path / "run")
    assert code == 0
    assert f"1 bags have no label: '{no_row}'" in told
    assert f"1 samples have no value and are left out: '{no_value}'" in told
    assert "1 slides of the table have no bag: 'never_scanned'" in told
    assert predicted(tmp_path / "run") == {file.stem for file in files(copy)} - {no_row, no_value}


def part_of(groups, one_sided):
    """A fold of which one part has only the first group; groups are two lists of samples."""
    first, second = groups
    thirds = {"train": slice(0, 3), "val": slice(3, 5), "test": slice(5, None)}
    parts = {name: [*first[of], *second[of]] for name, of in thirds.items()}
    parts[one_sided] = first[thirds[one_sided]]
    return Splits((Split.of(parts, "made"),))


def scores(run):
    return read_json(run / "summary.json")["metrics"]


@pytest.mark.parametrize("one_sided", ["train", "val", "test"])
def test_a_part_of_one_class(capsys, folder, tmp_path, one_sided):
    table = labels_of(folder)
    groups = [table.loc[table["label"] == label, "slide_id"].tolist() for label in ("negative", "positive")]
    part_of(groups, one_sided).save(tmp_path / "splits.json")
    code, told = train(capsys, folder, tmp_path / "run", "--splits", tmp_path / "splits.json")
    if one_sided == "train":
        assert code == 2
        assert "fold 0, column 'label': the training part has no sample of class 'positive'" in told.splitlines()[-1]
        assert not (tmp_path / "run").exists()
        return
    assert code == 0
    assert (scores(tmp_path / "run")["auc"]["mean"] is None) == (one_sided == "test")
    history = (tmp_path / "run" / "folds" / "0" / "seed-0" / "history.jsonl").read_text()
    assert ("validation -loss" in history) == (one_sided == "val")
    assert scores(tmp_path / "run")["accuracy"]["mean"] is not None


@pytest.mark.parametrize("censored", ["train", "val", "test"])
def test_a_part_without_events(capsys, folder, tmp_path, censored):
    table = labels_of(folder)
    table["censorship"] = [str(i % 2) for i in range(SLIDES)]
    table.to_csv(tmp_path / "labels.csv", index=False)
    groups = [table.loc[table["censorship"] == value, "slide_id"].tolist() for value in "10"]
    part_of(groups, censored).save(tmp_path / "splits.json")
    survival = ["--time", "survival_months", "--censorship", "censorship", "--splits", tmp_path / "splits.json"]
    code, told = train(capsys, folder, tmp_path / "run", *survival, labels=tmp_path / "labels.csv")
    if censored == "train":
        assert code == 2
        assert "fold 0, column 'censorship': the training part has no event" in told.splitlines()[-1]
        assert not (tmp_path / "run").exists()
        return
    assert code == 0
    assert (scores(tmp_path / "run")["c_index"]["mean"] is None) == (censored == "test")


def test_a_class_of_one_slide(capsys, folder, tmp_path):
    """No splitting gives each training part one of it: that is said before anything is trained."""
    table = labels_of(folder)
    table.loc[0, "label"] = "rare"
    table.to_csv(tmp_path / "labels.csv", index=False)
    with pytest.warns(UserWarning, match="'rare' has 1; some test parts will have none"):
        code, told = train(capsys, folder, tmp_path / "run", labels=tmp_path / "labels.csv")
    assert code == 2
    assert "rare" in told.splitlines()[-1]
    assert not (tmp_path / "run").exists()
    others = ["--classes", "negative", "positive"]
    assert train(capsys, folder, tmp_path / "run", *others, labels=tmp_path / "labels.csv")[0] == 0
    assert predicted(tmp_path / "run") == set(table["slide_id"][1:])


@pytest.mark.parametrize("policy", ["error", "drop", "zero"])
def test_features_that_are_not_finite(capsys, copy, tmp_path, policy):
    odd = files(copy)[2]
    with h5py.File(odd, "a") as file:
        file["features"][5] = np.nan
    code, told = train(capsys, copy, tmp_path / "run", "--non-finite", policy)
    assert code == 0
    assert (f"set aside: {odd}" in told.replace("\n", "")) == (policy == "error")
    assert (odd.stem in predicted(tmp_path / "run")) == (policy != "error")
    assert pd.read_csv(tmp_path / "run" / "predictions.csv")["prob_positive"].between(0, 1).all()
    if policy == "error":
        code, told = train(capsys, copy, tmp_path / "refused", "--damaged", "refuse")
        assert code == 2
        assert "1 of" in told.splitlines()[-1]
        assert odd.name in told.splitlines()[-1]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, and how to make it larger or smaller."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(size_kb, *options):
        words = ["mount", "-t", "tmpfs", "-o", ",".join([*options, f"size={size_kb}k"]), "tmpfs", str(disk)]
        return subprocess.run(words, capture_output=True, text=True)

    if shutil.which("mount") is None:
        pytest.skip("the system has no mount")
    if (tried := mount(64)).returncode != 0:
        pytest.skip(f"file systems cannot be mounted here: {tried.stderr.strip()}")
    yield disk, lambda size_kb: mount(size_kb, "remount").check_returncode()
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_up_with_states(capsys, folder, tmp_path, small_disk):
    """A state takes 0.6 MB, and a new one is written beside the old one."""
    disk, resize = small_disk
    cache, hidden = tmp_path / "cache", 4000
    assert train(capsys, folder, tmp_path / "run", cache=cache, hidden=hidden)[0] == 0
    run, state = disk / "run", disk / "run" / "folds" / "0" / "seed-0" / STATE_FILE
    resize(1000)
    code, told = train(capsys, folder, run, cache=cache, hidden=hidden)
    assert code == 2
    assert told.splitlines()[-1] == (
        f"psamil: {state}: cannot be written, the disk is full; free some space or choose another folder"
    )
    assert state.stat().st_size > 600_000  # of the first epoch
    assert not list(disk.rglob(".*.tmp"))
    resize(20_000)
    assert train(capsys, folder, run, cache=cache, hidden=hidden)[0] == 0
    assert contents(run) == contents(tmp_path / "run")


def test_a_disk_that_is_full_from_the_beginning(capsys, folder, tmp_path, small_disk):
    disk, resize = small_disk
    resize(20_000)
    cache = tmp_path / "cache"
    assert train(capsys, folder, tmp_path / "run", cache=cache)[0] == 0
    filler = disk / "filler"
    filler.write_bytes(bytes(20_000 * 1024))
    code, told = train(capsys, folder, disk / "run", cache=cache)
    assert code == 2
    assert "the disk is full" in told.splitlines()[-1]
    assert all(content == b"" for content in contents(disk / "run").values())
    filler.unlink()
    assert train(capsys, folder, disk / "run", cache=cache)[0] == 0
    assert contents(disk / "run") == contents(tmp_path / "run")


@pytest.mark.filterwarnings("default")
def test_a_cache_on_a_full_disk(capsys, folder, tmp_path, small_disk):
    """It is done without, with a warning: the same results. Once there is room, it is filled."""
    disk, resize = small_disk
    assert train(capsys, folder, tmp_path / "run")[0] == 0
    cache = disk / "cache"
    with pytest.warns(UserWarning, match=rf"{cache}.*the disk is full.*bags are read from their files"):
        assert train(capsys, folder, tmp_path / "other", cache=cache)[0] == 0
    assert contents(tmp_path / "other") == contents(tmp_path / "run")
    assert not list(disk.rglob(".*.tmp"))
    assert len(list(cache.rglob("*.bag"))) < SLIDES
    resize(20_000)
    assert train(capsys, folder, tmp_path / "again", cache=cache)[0] == 0
    assert contents(tmp_path / "again") == contents(tmp_path / "run")
    assert len(list(cache.rglob("*.bag"))) == SLIDES
