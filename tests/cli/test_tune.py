"""`psamil tune` as users start it."""

import sys
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import yaml

from psamil.cli import main
from psamil.cohort import Cohort, Splits, k_fold, simulate
from psamil.evaluation import experiment
from psamil.files import read_json
from tests.cli.verbs import run_verb

SPACE = "lr: {low: 1e-3, high: 1e-1, log: true}\nmodel: [mean, max]\n"


def words(home: Path, out: str, *more: object) -> list[object]:
    """Of a small search in this home."""
    (home / "space.yaml").write_text(SPACE)
    data = [home / "cohort", home / "cohort" / "labels.csv", home / out, "--target", "label", "--cache", home / "cache"]
    how = ["--space", home / "space.yaml", "--trials", 2, "--inner", 2, "--folds", 2, "--training.epochs", 2]
    return ["tune", *data, *how, *more]


def new_home(home: Path) -> Path:
    simulate(home / "cohort", slides=16, tiles=50, dim=4)
    return home


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """With a search (home/tuned) whose outer folds were worked on one by one."""
    home = new_home(tmp_path_factory.mktemp("home"))
    for fold in (0, 1):
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, words(home, "tuned", "--fold", fold))))
        assert ended.value.code == 0
    return home


def test_outer_folds_one_by_one_make_the_whole(home):
    summary = read_json(home / "tuned" / "summary.json")
    assert summary["finished"] == [0, 1]
    runs = [read_json(home / "tuned" / f"fold-{k}" / "run" / "summary.json") for k in (0, 1)]
    assert summary["metrics"]["auc"]["per_fold"] == [run["metrics"]["auc"]["per_fold"][0] for run in runs]
    for k in ("0", "1"):
        trials = pd.read_csv(home / "tuned" / f"fold-{k}" / "trials.csv")
        best = trials[trials["status"] == "chosen"].iloc[0]
        assert (summary["chosen"][k]["trial"], summary["chosen"][k]["model"]) == (best["trial"], best["model"])
    assert len(pd.read_csv(home / "tuned" / "predictions.csv")) == 16
    assert (home / "tuned" / "trials.png").read_bytes().startswith(b"\x89PNG")
    drawn = (home / "tuned" / "trials.svg").read_text()
    assert all(text in drawn for text in ("outer fold 1", ">lr<", ">model<", ">max<", "mean of inner folds"))


def test_called_again_it_trains_nothing_and_tells_the_same(home, capsys, monkeypatch):
    def train_fold(*_):
        raise AssertionError("was trained again")

    monkeypatch.setattr(experiment, "train_fold", train_fold)
    code, printed, told = run_verb(capsys, *words(home, "tuned"))
    assert code == 0
    assert told.count("outer fold ") == told.count("chosen: trial ") == 2
    assert "Chosen settings" in printed
    assert "2 of 2 folds" in printed


def test_the_best_settings_are_a_file_for_train(home, capsys):
    best = home / "tuned" / "fold-1" / "best.yaml"
    assert yaml.safe_load(best.read_text())["recipe"] == "context"  # others would add what they have for the model
    data = [
        home / "cohort",
        home / "cohort" / "labels.csv",
        home / "run",
        "--target",
        "label",
        "--cache",
        home / "cache",
    ]
    assert run_verb(capsys, "train", *data, "--config", best, "--folds", 2, "--fold", 1)[0] == 0
    assert [path.name for path in (home / "run" / "folds" / "1").glob("seed-*")] == ["seed-0"]  # as in the search
    model = Path("folds") / "1" / "seed-0" / "model.safetensors"
    assert (home / "run" / model).read_bytes() == (home / "tuned" / "fold-1" / "run" / model).read_bytes()


def test_another_search_in_the_same_folder_is_refused(home, capsys):
    code, _, told = run_verb(capsys, *words(home, "tuned", "--search-seed", 1))
    assert code == 2
    assert "tuned: is a search with other search_seed" in told


def test_a_fold_that_there_is_not_is_refused(home, capsys):
    code, _, told = run_verb(capsys, *words(home, "other", "--fold", 2))
    assert code == 2
    assert "fold must be from 0 to 1, got 2" in told
    assert not (home / "other").exists()


def test_other_labels_and_features_of_the_test_part_change_its_result_and_not_the_choice(tmp_path, capsys):
    home = new_home(tmp_path)
    table = home / "cohort" / "labels.csv"
    splits = k_fold(Cohort.open(home / "cohort", table, target="label"), 2)
    splits.save(home / "splits.json")
    more = ["--splits", home / "splits.json", "--fold", 0]
    assert run_verb(capsys, *words(home, "before", *more))[0] == 0
    _spoil(home, Splits.load(home / "splits.json")[0].test)
    assert run_verb(capsys, *words(home, "after", *more))[0] == 0
    before, after = home / "before" / "fold-0", home / "after" / "fold-0"
    for name in ("trials.csv", "best.yaml"):
        assert (before / name).read_bytes() == (after / name).read_bytes()
    models = sorted(path.relative_to(before) for path in before.rglob("model.safetensors"))
    assert len(models) == 5  # 2 trials on 2 inner folds, and the outer fold
    for model in models:
        assert (before / model).read_bytes() == (after / model).read_bytes()
    predicted = [pd.read_csv(home / out / "predictions.csv") for out in ("before", "after")]
    assert not np.allclose(predicted[0]["prob_positive"], predicted[1]["prob_positive"])
    assert (predicted[0]["truth"] != predicted[1]["truth"]).all()


def _spoil(home: Path, slides: tuple[str, ...]) -> None:
    """Turns their labels round and makes noise of their features."""
    table = pd.read_csv(home / "cohort" / "labels.csv")
    turned = table["label"].map({"negative": "positive", "positive": "negative"})
    table["label"] = turned.where(table["slide_id"].isin(slides), table["label"])
    table.to_csv(home / "cohort" / "labels.csv", index=False)
    noise = np.random.default_rng(0)
    for slide in slides:
        (path,) = (home / "cohort").rglob(f"{slide}.h5")
        with h5py.File(path, "r+") as file:
            file["features"][...] = noise.normal(size=file["features"].shape)


def test_without_what_draws_the_picture_nothing_is_trained(home, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, told = run_verb(capsys, *words(home, "undrawn"))
    assert code == 2
    assert "psamil[plot]" in told
    assert not (home / "undrawn").exists()


def test_trials_without_a_setting_are_in_the_picture_and_in_the_table(tmp_path, capsys):
    home = new_home(tmp_path)
    wanted = words(home, "tuned", "--training.model", "mean", "--fold", 0)
    (home / "space.yaml").write_text("gradient_clip: [null, 5]\n")
    code, printed, _ = run_verb(capsys, *wanted)
    assert code == 0
    assert "gradient_clip" in printed
    drawn = (home / "tuned" / "trials.svg").read_text()
    assert all(f">{value}<" in drawn for value in ("null", "5.0"))
    assert read_json(home / "tuned" / "summary.json")["chosen"]["0"]["gradient_clip"] in (None, 5)
