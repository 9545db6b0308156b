"""`psamil reproduce` as users start it: every table end to end on a small simulated cohort."""

import base64
import sys

import pandas as pd
import pytest

from psamil.cli import main
from psamil.cohort import simulate
from psamil.evaluation.run_folder import read_run
from psamil.recipes.paper_tables import read_recipe
from psamil.report.paper_table import CONSTANT
from tests.models.test_check import SMALL

SIMULATED = {
    "table1": ("crc", "study.classes=[negative, positive]"),
    "table2": ("stad", "study.classes=[negative, positive]"),
    "table3": ("camelyon16", "study.classes=[negative, positive]"),
    "table4": ("brca-uni", "study.time=survival_months", "study.censorship=censorship"),
}


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reproduce") / "cohort"
    simulate(folder, slides=12, tiles=50, tile_spread=0.0, dim=8, range_steps=2, censored_share=0.1)
    return folder


def words_for(table, cohort, out, *more):
    """Two folds of one epoch of small models."""
    name, *columns = SIMULATED[table]
    recipe = read_recipe(table)
    sizes = [
        f"{row}.model_options.{option}={value}"
        for row, of in recipe.models.items()
        for option, value in SMALL.get(of.settings.get("model", row), {}).items()
    ]
    small = [
        "study.folds=2",
        "study.val=0.4",
        f"study.cache={cohort.parent / 'cache'}",
        "training.epochs=1",
        *sizes,
        *more,
    ]
    paths = ["--features", f"{name}={cohort}", "--labels", f"{name}={cohort / 'labels.csv'}"]
    tiles = ["--tile-labels", f"{name}={cohort / 'tiles'}"] if recipe.cohorts[name].tile_labels_from else []
    return ["reproduce", table, *paths, *tiles, "--out", str(out), "--options", *columns, *small]


@pytest.mark.parametrize("table", SIMULATED)
def test_every_row_of_the_paper_is_trained_and_shown_beside_its_numbers(table, cohort, tmp_path, capsys):
    assert run(*words_for(table, cohort, tmp_path / "out")) == 0
    printed = capsys.readouterr().out
    name, recipe = SIMULATED[table][0], read_recipe(table)
    for row in recipe.models.values():
        assert row.title in printed
        for number in row.paper.get(name, {}).values():
            assert f"paper {number} " in printed
        assert (tmp_path / "out" / name / row.name / "summary.json").exists()
    assert CONSTANT in printed
    assert "validation part" in printed
    assert ("threshold" in printed) == (table in ("table1", "table3"))  # others have no metric with one
    assert ("the same risk" in printed) == (table == "table4")
    assert "Not as in the recipe: " in printed
    assert "training.epochs=1" in printed
    assert "patients; the paper's are" in printed or table == "table4"
    assert "um apart, the paper's are 256 um" in printed
    result = tmp_path / "out" / table
    found = pd.read_csv(result / "table.csv", dtype={"paper": str})
    assert len(found) == (len(recipe.models) + 1) * len(recipe.cohorts) * len({*recipe.metrics, *recipe.more_metrics})
    papers = [row.paper.get(name, {}) for row in recipe.models.values()]
    assert {number.value for of in papers for number in of.values()} <= set(found["paper"].dropna())  # digit by digit
    ours = found[(found["cohort"] == name) & (found["method"] != CONSTANT)]
    assert ours["mean"].between(0, 100).all()
    others = found[found["cohort"] != name]
    assert others["mean"].isna().all()
    assert (others["missing"] == "not given").all()
    tests = ours[(ours["metric"] == next(iter(recipe.metrics))) & (ours["run"] != recipe.reference)]
    assert tests["paired_t_test_p"].notna().any()
    assert (result / name / "index.html").exists()
    for file in ("index.html", "table.tex"):
        text = (result / file).read_text()
        assert all(row.title in text for row in recipe.models.values())
        assert all(row.group in text for row in recipe.models.values())
    assert all(row.group in printed for row in recipe.models.values())


def test_a_run_is_gone_on_with_and_rows_can_be_chosen(cohort, tmp_path, capsys):
    words = words_for("table1", cohort, tmp_path / "out")
    assert run(*words, "--models", "psa", "--fold", "0") == 0
    captured = capsys.readouterr()
    assert "Not finished: crc" in captured.err
    assert not (tmp_path / "out" / "table1").exists()
    assert run(*words, "--models", "psa") == 0
    printed = capsys.readouterr().out
    assert "left out" in printed
    assert "paper 85.21 ± 1.01" in printed  # of ABMIL, which is not trained
    assert sorted(path.name for path in (tmp_path / "out" / "crc").iterdir() if path.is_dir()) == [
        "psa-cauchy",
        "psa-exponential",
        "psa-gaussian",
    ]
    settings = read_run(tmp_path / "out" / "crc" / "psa-cauchy")["settings"]
    assert settings["model_options"] == {"preset": "paper-crc", "decay": "cauchy", "head_dim": 8}
    assert (settings["max_tiles"], settings["epochs"], settings["patience"]) == (8000, 1, None)

    table1 = (tmp_path / "out" / "table1" / "table.csv").read_bytes()
    table2 = [word.replace("stad=", "crc=") for word in words_for("table2", cohort, tmp_path / "out")]
    assert run(*table2, "--models", "psa-gaussian") == 0
    captured = capsys.readouterr()
    assert "epoch" not in captured.err  # it was trained for Table 1
    assert "* AUC" not in captured.out  # what others would be tested against is left out
    assert (tmp_path / "out" / "table1" / "table.csv").read_bytes() == table1
    assert (tmp_path / "out" / "table2" / "crc" / "index.html").exists()


def test_a_row_that_fails_does_not_stop_the_others(cohort, tmp_path, capsys):
    words = words_for("table1", cohort, tmp_path / "out", "clam_sb.lr=1e30")
    assert run(*words, "--models", "abmil", "clam_sb", "dtfd") == 2
    captured = capsys.readouterr()
    assert " became nan in epoch 1" in captured.err.replace("\n", " ").split("clam_sb failed: ")[1]
    assert " became nan" in captured.out.split("CLAM on TCGA-CRC (clam_sb) failed: ")[1]
    assert f"wrote {tmp_path / 'out' / 'table1' / 'index.html'}" in captured.out.replace("\n", "")
    found = pd.read_csv(tmp_path / "out" / "table1" / "table.csv")
    auc = found[(found["cohort"] == "crc") & (found["metric"] == "auc")].set_index("run")
    assert auc.loc["clam_sb", "missing"] == "failed"
    assert auc.loc[["abmil", "dtfd"], "mean"].notna().all()


def test_when_every_row_fails_there_are_the_numbers_of_the_paper(cohort, tmp_path, capsys):
    words = words_for("table1", cohort, tmp_path / "out", "training.lr=1e30")
    assert run(*words, "--models", "abmil") == 2
    printed = capsys.readouterr().out
    assert "ABMIL on TCGA-CRC (abmil) failed: " in printed
    assert "paper 85.21 ± 1.01" in printed
    assert "without numbers of ours: TCGA-STAD." in printed


def test_the_constant_classifier_says_the_commonest_class(cohort, tmp_path):
    words = words_for("table1", cohort, tmp_path / "out", "study.classes=[positive, negative]")
    labels = pd.read_csv(cohort / "labels.csv")
    commoner = tmp_path / "labels.csv"
    labels.loc[labels.index[labels["label"] == "positive"][:2], "label"] = "negative"  # 8 of 12, negative is "positive"
    labels.to_csv(commoner, index=False)
    assert run(*[word.replace(str(cohort / "labels.csv"), str(commoner)) for word in words], "--models", "abmil") == 0
    found = pd.read_csv(tmp_path / "out" / "table1" / "table.csv")
    constant = found[(found["method"] == CONSTANT) & (found["cohort"] == "crc")].set_index("metric")["mean"]
    assert constant.round(6).to_dict() == {
        "auc": 50.0,
        "accuracy": pytest.approx(200 / 3, abs=1e-4),
        "f1": 80.0,
        "balanced_accuracy": 50.0,
        "average_precision": pytest.approx(200 / 3, abs=1e-4),
    }


def test_without_data_it_says_what_is_needed_and_where_it_is_obtained(capsys):
    assert run("reproduce", "table3") == 2
    told = capsys.readouterr().err
    for text in ("grand-challenge.org", "lunit-vits16", "--tile-labels camelyon16=PATH", "Normal or Tumor"):
        assert text in told
    assert run("reproduce", "table4", "--cohorts", "crc-uni") == 2
    told = capsys.readouterr().err
    assert "crc-uni: TCGA-CRC, UNI" in told
    assert "brca" not in told
    assert "NAME.time=COLUMN NAME.event=COLUMN (or NAME.censorship=COLUMN)" in told


def test_all_that_is_missing_is_said_at_once(cohort, capsys):
    labels = ["--labels", f"crc={cohort / 'labels.csv'}", f"stad={cohort / 'labels.csv'}"]
    assert run("reproduce", "table1", "--features", f"crc={cohort}", *labels, "--options", "crc.target=msi") == 2
    told = capsys.readouterr().err
    assert "has no column 'msi'" in told
    assert "- stad has no features: psamil extract" in told


def test_paths_that_do_not_exist_are_said_at_once_with_what_should_be_there(cohort, capsys):
    assert run("reproduce", "table1", "--features", "crc=nowhere", "--labels", "crc=nothing.csv") == 2
    told = capsys.readouterr().err
    assert "- crc has no features at nowhere, which does not exist: psamil extract" in told
    assert "- crc has no labels at nothing.csv, which does not exist: columns slide or patient" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table9"], "unknown table or figure 'table9'"),
        (["table1", "--features", "brca=x"], "unknown cohort of table1 'brca'; known: 'crc', 'stad'"),
        (["table1", "--features", "crc"], "--features takes NAME=PATH, such as crc=PATH, got 'crc'"),
        (["figure-decays", "--features", "crc=x"], "figure-decays needs no data"),
        (["table1", "--features", "crc=x", "--cohorts", "stad"], "unknown cohort among those given 'stad'"),
        (["table1", "--cohorts", "brca"], "unknown cohort of table1 'brca'"),
        (["table1", "--models", "camil"], "unknown model of table1 'camil'"),
        (["table1", "--features", "crc=x", "--options", "epochs=2"], "--options takes SCOPE.NAME=VALUE"),
        (["table1", "--features", "crc=x", "--options", "training.epochs=[2"], "--options cannot take"),
        (["table1", "--features", "crc=x", "--options", "crc.target.x=2"], "--options cannot take"),
    ],
    ids=["table", "cohort", "path", "no data", "cohorts", "unknown", "model", "scope", "value", "plain value"],
)
def test_mistakes_are_one_line(words, message, capsys):
    assert run("reproduce", *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("dtfd.model_options.hiden=4", "dtfd: model 'dtfd' cannot be made with"),
        ("dtfd.accelerator=abacus", "dtfd: accelerator 'abacus' cannot be used here"),
        ("crc.clases=[negative, positive]", "unknown option 'clases'; did you mean 'classes'?"),
    ],
    ids=["model", "device", "cohort"],
)
def test_a_mistake_in_an_option_is_found_before_anything_is_trained(option, message, cohort, tmp_path, capsys):
    words = words_for("table1", cohort, tmp_path / "out", option)
    if option.startswith("crc"):
        words.remove("study.classes=[negative, positive]")
    assert run(*words, "--models", "abmil", "dtfd") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_figure_that_needs_no_data_is_drawn(tmp_path, capsys):
    assert run("reproduce", "figure-decays", "--out", str(tmp_path)) == 0
    file = tmp_path / "figure-decays" / "figure-decays.png"
    assert f"wrote {file}" in capsys.readouterr().out.replace("\n", "")
    assert file.exists()


def test_a_figure_without_matplotlib_is_refused_before_anything_is_trained(cohort, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    paths = ["--features", f"crc={cohort}", "--labels", f"crc={cohort / 'labels.csv'}", "--out", str(tmp_path / "out")]
    assert run("reproduce", "figure-dynamics", *paths, "--options", "crc.classes=[negative, positive]") == 2
    assert "figures needs the package matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_figure_is_drawn_beside_the_runs_of_its_cohort(cohort, tmp_path, capsys):
    paths = ["--features", f"crc={cohort}", "--labels", f"crc={cohort / 'labels.csv'}", "--out", str(tmp_path)]
    small = ["crc.classes=[negative, positive]", "study.folds=2", "training.epochs=2", "diversity.lr=2e-4"]
    small += [f"study.cache={cohort.parent / 'cache'}", "training.model_options.head_dim=8"]
    rows = ["--models", "no-diversity", "diversity"]
    assert run("reproduce", "figure-dynamics", *paths, *rows, "--options", *small) == 0
    printed = capsys.readouterr().out
    assert "with diversity loss" in printed
    assert "paper's" not in printed.replace("the paper's are", "")  # which has no such numbers
    drawn = tmp_path / "figure-dynamics" / "crc" / "figure-dynamics"
    titles = {"without diversity loss", "with diversity loss"}
    assert set(pd.read_csv(drawn.with_suffix(".csv"))["run"]) == titles
    page = (tmp_path / "figure-dynamics" / "index.html").read_text()
    assert base64.b64encode(drawn.with_suffix(".png").read_bytes()).decode() in page
    learning_rates = [read_run(tmp_path / "crc" / name)["settings"]["lr"] for name in ("no-diversity", "diversity")]
    assert learning_rates == [1e-4, 2e-4]
