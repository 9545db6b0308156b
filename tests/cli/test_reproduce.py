"""`psamil reproduce` as users start it: every table end to end on a small simulated cohort."""

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
    "table4": ("brca-uni", "study.time=survival_months", "study.event=null", "study.censorship=censorship"),
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
            assert f"paper {number.value:.2f}" in printed
        assert (tmp_path / "out" / name / row.name / "summary.json").exists()
    assert CONSTANT in printed
    assert "validation part" in printed
    assert "Not as in the recipe: " in printed
    assert "training.epochs=1" in printed
    assert "the paper's are" in printed or table == "table4"  # other numbers of patients
    found = pd.read_csv(tmp_path / "out" / "table.csv")
    assert len(found) == (len(recipe.models) + 1) * len(recipe.cohorts) * len({*recipe.metrics, *recipe.more_metrics})
    ours = found[(found["cohort"] == name) & (found["method"] != CONSTANT)]
    assert ours["mean"].between(0, 100).all()
    others = found[found["cohort"] != name]
    assert others["mean"].isna().all()
    assert (others["missing"] == "not given").all()
    tests = ours[(ours["metric"] == next(iter(recipe.metrics))) & (ours["run"] != recipe.reference)]
    assert tests["paired_t_test_p"].notna().any()
    assert (tmp_path / "out" / name / "index.html").exists()
    for file in ("index.html", "table.tex"):
        text = (tmp_path / "out" / file).read_text()
        assert all(row.title in text for row in recipe.models.values())


def test_a_run_is_gone_on_with_and_rows_can_be_chosen(cohort, tmp_path, capsys):
    words = words_for("table1", cohort, tmp_path / "out")
    assert run(*words, "--models", "psa", "--fold", "0") == 0
    captured = capsys.readouterr()
    assert "Not finished: crc" in captured.err
    assert not (tmp_path / "out" / "table.csv").exists()
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


def test_the_constant_classifier_says_the_commonest_class(cohort, tmp_path):
    words = words_for("table1", cohort, tmp_path / "out", "study.classes=[positive, negative]")
    labels = pd.read_csv(cohort / "labels.csv")
    commoner = tmp_path / "labels.csv"
    labels.loc[labels.index[labels["label"] == "positive"][:2], "label"] = "negative"  # 8 of 12, negative is "positive"
    labels.to_csv(commoner, index=False)
    assert run(*[word.replace(str(cohort / "labels.csv"), str(commoner)) for word in words], "--models", "abmil") == 0
    found = pd.read_csv(tmp_path / "out" / "table.csv")
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


def test_all_that_is_missing_is_said_at_once(cohort, capsys):
    labels = ["--labels", f"crc={cohort / 'labels.csv'}", f"stad={cohort / 'labels.csv'}"]
    assert run("reproduce", "table1", "--features", f"crc={cohort}", *labels, "--options", "crc.target=msi") == 2
    told = capsys.readouterr().err
    assert "has no column 'msi'" in told
    assert "- stad has no features: psamil extract" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table9"], "unknown table or figure 'table9'"),
        (["table1", "--features", "brca=x"], "unknown cohort of table1 'brca'; known: 'crc', 'stad'"),
        (["table1", "--features", "x"], "--features takes NAME=PATH"),
        (["table1", "--features", "crc=x", "--cohorts", "stad"], "unknown cohort among those given 'stad'"),
        (["table1", "--models", "camil"], "unknown model of table1 'camil'"),
        (["table1", "--features", "crc=x", "--options", "epochs=2"], "--options takes SCOPE.NAME=VALUE"),
        (["table1", "--features", "crc=x", "--options", "training.epochs=[2"], "--options cannot take"),
        (["table1", "--features", "crc=x", "--options", "crc.target.x=2"], "--options cannot take"),
    ],
    ids=["table", "cohort", "path", "cohorts", "model", "scope", "value", "plain value"],
)
def test_mistakes_are_one_line(words, message, capsys):
    assert run("reproduce", *words) == 2
    assert message in capsys.readouterr().err


def test_a_figure_that_needs_no_data_is_drawn(tmp_path, capsys):
    assert run("reproduce", "figure-decays", "--out", str(tmp_path)) == 0
    assert f"wrote {tmp_path / 'figure-decays.png'}" in capsys.readouterr().out.replace("\n", "")
    assert (tmp_path / "figure-decays.png").exists()


def test_a_figure_is_drawn_beside_the_runs_of_its_cohort(cohort, tmp_path, capsys):
    paths = ["--features", f"crc={cohort}", "--labels", f"crc={cohort / 'labels.csv'}", "--out", str(tmp_path)]
    small = ["crc.classes=[negative, positive]", "study.folds=2", "training.epochs=2", "diversity.lr=2e-4"]
    small += [f"study.cache={cohort.parent / 'cache'}", "training.model_options.head_dim=8"]
    rows = ["--models", "no-diversity", "diversity"]
    assert run("reproduce", "figure-dynamics", *paths, *rows, "--options", *small) == 0
    assert "with diversity loss" in capsys.readouterr().out
    assert (tmp_path / "crc" / "figure-dynamics.png").exists()
    learning_rates = [read_run(tmp_path / "crc" / name)["settings"]["lr"] for name in ("no-diversity", "diversity")]
    assert learning_rates == [1e-4, 2e-4]
