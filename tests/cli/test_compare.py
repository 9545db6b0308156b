"""`psamil compare` as users start it."""

import json
import re
import sys
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from psamil.cli import _plain, main
from psamil.cli.study import Study
from psamil.cluster.engine import JobsError
from psamil.cohort import simulate
from psamil.errors import OptionError
from psamil.evaluation.run import fit
from psamil.files import read_json
from tests.evaluation.made_runs import make_run, make_splits


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


def test_folders_may_stand_before_and_after_options(tmp_path, capsys):
    splits = make_splits()
    one, two = (str(make_run(tmp_path / name, splits, signal=s)) for name, s in (("one", 2.0), ("two", 0.0)))
    out = tmp_path / "out"
    assert run("compare", one, "--out", str(out), two, "--names", "a [bold]", "b") == 0
    printed = capsys.readouterr().out
    assert "a [bold]" in printed
    assert "DeLong" in printed
    assert f"wrote {out / 'index.html'}" in printed.replace("\n", "")
    assert sorted(path.name for path in out.iterdir()) == ["index.html", "table.csv", "table.tex", "tests.csv"]


def test_other_splits_are_refused_in_one_line(tmp_path, capsys):
    one = make_run(tmp_path / "one", make_splits(), signal=1.0)
    two = make_run(tmp_path / "two", make_splits(seed=1), signal=1.0)
    assert run("compare", str(one), str(two), "--out", str(tmp_path / "out")) == 2
    assert "two: has other splits than" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_runs_may_be_named_as_the_help_writes_them():
    expected = ["compare", "--reference", "best", '--runs=["a", "b"]']
    assert list(_plain(["compare", "--runs", "a", "b", "--reference", "best"])) == expected
    assert list(_plain(["compare", "--reference", "best", "--runs=[a, b]"])) == expected


def test_tests_of_an_earlier_comparison_do_not_stay(tmp_path):
    splits = make_splits()
    one, two = (str(make_run(tmp_path / name, splits, signal=s)) for name, s in (("one", 2.0), ("two", 0.0)))
    assert run("compare", one, two, "--out", str(tmp_path / "out")) == 0
    assert (tmp_path / "out" / "tests.csv").exists()
    assert run("compare", one, "--out", str(tmp_path / "out")) == 0
    assert not (tmp_path / "out" / "tests.csv").exists()


def test_values_of_options_are_no_folders():
    words = list(_plain(["compare", "--reference", "best", "a", "--title=x", "b"]))
    assert words == ["compare", "--reference", "best", "--title=x", '--runs=["a", "b"]']
    assert list(_plain(["inspect", "a", "--labels", "b"])) == ["inspect", "a", "--labels", "b"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--classes", "CLR", "DII"], ["CLR", "DII"]),
        (["--classes", "[CLR, DII]"], ["CLR", "DII"]),
        (['--classes=["0", "no"]'], ["0", "no"]),
        (["--classes", "[0, no]"], ["0", "no"]),
        (["--classes", "CLR,DII"], ["CLR,DII"]),
        (["--classes", "[odd", "b]"], ["[odd", "b]"]),
        (["--classes", "[[a], b]"], ["[[a], b]"]),
    ],
    ids=["words", "YAML", "JSON", "numbers", "commas", "brackets", "nested"],
)
def test_several_values_as_words_or_as_a_list(words, expected):
    assert list(_plain(["train", *words])) == ["train", f"--classes={json.dumps(expected)}"]


STUDY = """
features: {folder}
labels: {folder}/labels.csv
target: label
tile_labels: {folder}/tiles
folds: 2
seeds: 1
cache: {folder}/cache
training: {{epochs: 1, lr: 1e-3}}
models:
  abmil: {{model_options: {{hidden: 4}}}}
  wide mean: {{model: mean, model_options: {{hidden: 8}}, lr: 1e-2}}
"""


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "cohort"
    simulate(folder, slides=12, tiles=60, dim=4)
    return folder


def test_classes_with_commas_are_an_error_that_says_how_to_write_them(cohort, tmp_path, capsys):
    words = ("train", str(cohort), str(cohort / "labels.csv"), str(tmp_path / "run"), "--target", "label")
    assert run(*words, "--classes", "positive,negative") == 2
    assert "name them one after the other: --classes positive negative" in capsys.readouterr().err


def test_a_study_trains_and_compares(cohort, tmp_path, capsys):
    file, out = tmp_path / "study.yaml", tmp_path / "out"
    file.write_text(STUDY.format(folder=cohort))
    assert run("compare", "--study", str(file), "--out", str(out), "--fold", "1") == 0
    told = capsys.readouterr()
    assert "abmil 1 of 2, wide mean 1 of 2" in told.err.replace("\n", " ")
    assert not (out / "index.html").exists()
    assert run("compare", "--study", str(file), "--out", str(out), "--reference", "wide mean") == 0
    told = capsys.readouterr()
    assert "fold 1" not in told.err  # it was finished
    table = pd.read_csv(out / "table.csv")
    assert table["run"].tolist() == ["abmil", "wide mean"]
    assert table["patch_auc_mean"].notna().all()
    assert set(pd.read_csv(out / "tests.csv")["reference"]) == {"wide mean"}
    assert "abmil" in (out / "table.tex").read_text()
    assert "<h2>Localisation</h2>" in (out / "index.html").read_text()
    settings = [read_json(out / name / "run.json")["settings"] for name in ("abmil", "wide mean")]
    assert [(s["model"], s["epochs"], s["lr"]) for s in settings] == [("abmil", 1, 1e-3), ("mean", 1, 1e-2)]
    assert len({read_json(out / name / "run.json")["splits"] for name in ("abmil", "wide mean")}) == 1


def test_whoever_finishes_the_last_fold_compares(cohort, tmp_path, monkeypatch):
    """Another process finishes the other fold of the first model while this one is at the second."""
    file, out, begun = tmp_path / "study.yaml", tmp_path / "out", []
    file.write_text(STUDY.format(folder=cohort))

    def fit_beside_another_process(**options):
        begun.append({**options, "fold": 1})
        if len(begun) == 2:
            for other in begun:
                fit(**other)
        return fit(**options)

    monkeypatch.setattr(sys.modules["psamil.cli.study"], "fit", fit_beside_another_process)
    assert run("compare", "--study", str(file), "--out", str(out), "--fold", "0") == 0
    assert pd.read_csv(out / "table.csv")["folds"].tolist() == [2, 2]


FAILING = STUDY + "  diverging: {{model: mean, lr: 1e30}}\n"


def test_a_model_that_fails_is_told_and_the_others_are_compared(cohort, tmp_path, capsys):
    file, out = tmp_path / "study.yaml", tmp_path / "out"
    file.write_text(FAILING.format(folder=cohort))
    assert run("compare", "--study", str(file), "--out", str(out), "--reference", "diverging") == 2
    told = capsys.readouterr()
    assert "diverging failed: the validation score became" in told.err.replace("\n", " ")
    assert "diverging failed: the validation score became" in told.out.replace("\n", " ")
    assert pd.read_csv(out / "table.csv")["run"].tolist() == ["abmil", "wide mean"]
    assert set(pd.read_csv(out / "tests.csv")["reference"]) == {"abmil"}  # the first, instead
    assert "diverging failed" in (out / "index.html").read_text()
    file.write_text(STUDY.format(folder=cohort).replace("lr: 1e-3", "lr: 1e30").replace(", lr: 1e-2", ""))
    assert run("compare", "--study", str(file), "--out", str(tmp_path / "none")) == 2
    assert "wide mean failed" in capsys.readouterr().err
    assert not (tmp_path / "none" / "index.html").exists()


def test_what_holds_for_all_models_of_a_study_ends_it_at_once(cohort, tmp_path, capsys):
    file = tmp_path / "study.yaml"
    for change, message in (
        (("folds: 2", "folds: 40"), "fold"),
        (("hidden: 8", "hiden: 8"), "wide mean: model 'mean'"),
    ):
        file.write_text(STUDY.format(folder=cohort).replace(*change))
        assert run("compare", "--study", str(file), "--out", str(tmp_path / "out")) == 2
        told = capsys.readouterr().err
        assert message in told
        assert "failed" not in told
        assert not list(tmp_path.glob("out/*/run.json"))


@pytest.mark.parametrize("ending", [None, RuntimeError("a bug")], ids=["failed", "bug"])
def test_after_a_job_that_failed_the_others_are_summed_up(cohort, tmp_path, ending):
    file = tmp_path / "study.yaml"
    file.write_text(FAILING.format(folder=cohort))
    study = Study.read(file)

    def run_here(jobs):
        failures = {}
        for job in jobs:
            try:
                job.call(job.shared)
            except OptionError as error:
                failures[job.name] = str(error)
        raise ending or JobsError(failures, len(jobs))

    if ending is None:
        runs, failed = study.run(tmp_path / "out", Console(stderr=True), run_jobs=run_here)
        assert [run.summary["finished"] for run in runs] == [[0, 1], [0, 1], []]
        assert list(failed) == ["diverging"]
        assert re.match(r"fold 0: .* became .*; fold 1: .* became ", failed["diverging"])
    else:
        with pytest.raises(RuntimeError, match="a bug"):
            study.run(tmp_path / "out", Console(stderr=True), run_jobs=run_here)
    assert read_json(tmp_path / "out" / "abmil" / "summary.json")["finished"] == [0, 1]


def test_own_settings_of_a_model_stand_beside_the_common_ones(tmp_path):
    (tmp_path / "study.yaml").write_text(
        "{features: a, labels: b, training: {task: {balance: none, bins: 5}, model_options: {hidden: 4}}, "
        "models: {abmil: {task: {bins: 3}}, mean: {model_options: {dropout: 0.5}}}}"
    )
    abmil, mean = Study.read(tmp_path / "study.yaml").models.values()
    assert (abmil.task.balance, abmil.task.bins, abmil.model_options) == ("none", 3, {"hidden": 4})
    assert (mean.task.bins, mean.model_options) == (5, {"hidden": 4, "dropout": 0.5})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("target:", "targt:"), "unknown option 'targt'; did you mean 'target'?"),
        (("epochs: 1", "epoch: 1"), "unknown setting 'epoch'; did you mean 'epochs'?"),
        (("model: mean", "modle: mean"), "unknown setting of model 'wide mean' 'modle'; did you mean 'model'?"),
        (("abmil:", "ab/mil:"), "model 'ab/mil' cannot be the name of a folder"),
        (("abmil:", "abmill:"), "'abmill'; did you mean 'abmil'?"),
        (("folds: 2", "folds: two"), "folds"),
        (("lr: 1e-2", "lr: fast"), "model 'wide mean'"),
        (("\nlabels:", "\n# labels:"), "has no 'labels'"),
        (("models:", "models: ["), "is not valid YAML"),
        (("target: label", "target: !!python/object/apply:os.getcwd []"), "is not valid YAML"),
        (("target: label", "out: there"), "unknown option 'out'"),
    ],
    ids=["option", "setting", "of model", "folder", "model", "type", "number", "missing", "YAML", "code", "out"],
)
def test_mistakes_in_a_study_are_named(cohort, tmp_path, capsys, change, message):
    file = tmp_path / "study.yaml"
    file.write_text(STUDY.format(folder=cohort).replace(*change))
    assert run("compare", "--study", str(file), "--out", str(tmp_path / "out")) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "out").exists()


def test_runs_or_a_study(tmp_path, capsys):
    assert run("compare") == 2
    assert "name run directories, or a study file" in capsys.readouterr().err
    file = tmp_path / "study.yaml"
    file.write_text("")
    assert run("compare", "run", "--study", str(file)) == 2
    assert run("compare", "run", "--fold", "1") == 2
    assert "fold is for a study" in capsys.readouterr().err


def test_the_example_study(tmp_path, capsys, monkeypatch):
    """On fewer slides and in one epoch."""
    text = (Path(__file__).parents[2] / "examples" / "study.yaml").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    simulate(Path("cohort"), slides=12, tiles=60, dim=4)
    assert "epochs: 12" in text
    Path("study.yaml").write_text(text.replace("epochs: 12", "epochs: 1"))
    assert run("compare", "--study", "study.yaml", "--out", "study") == 0
    assert pd.read_csv("study/table.csv")["run"].tolist() == ["psa", "abmil", "mean"]
