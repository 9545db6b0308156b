"""The recipes of the paper's tables: its numbers and rows, the authors' settings, and models that exist."""

from pathlib import Path

import pytest

from psamil.cli.study import Study
from psamil.errors import OptionError
from psamil.models import create_model, list_models
from psamil.recipes.paper_tables import PaperNumber, list_recipes, paper_cohorts, read_recipe
from psamil.report.tables import METRIC_TITLES
from psamil.slides.encoders import list_encoders

TABLES = ("table1", "table2", "table3", "table4")
ROWS = {
    "table1": "ABMIL, CLAM, DTFD-MIL, IBMIL, TransMIL, GTP, SM-MIL, BAYES-MIL, "
    "PSA-MIL [Exp], PSA-MIL [Gau], PSA-MIL [Cau]",
    "table2": "MSA-MIL (baseline), Local [K=7], Local [K=15], PPEG, RPE, RoPe, PSA-MIL [Gau]",
    "table3": "ABMIL, DTFD-MIL, TransMIL, GTP, SM-MIL, BAYES-MIL, PSA-MIL [Gau]",
    "table4": "AB-MIL, DTFD-MIL, Trans-MIL, Sm-MIL, Bayes-MIL, PSA-MIL [Gau]",
}
NUMBERS = [
    ("table1", "abmil", "crc", "auc", "85.21 ± 1.01"),
    ("table1", "gtp", "crc", "f1", "65.85 ± 2.81"),
    ("table1", "sm_transformer", "stad", "accuracy", "79.79 ± 1.88"),
    ("table1", "psa-gaussian", "crc", "auc", "88.97 ± 1.01"),
    ("table1", "psa-cauchy", "stad", "auc", "83.06 ± 0.57"),
    ("table2", "msa", "crc", "auc", "84.34"),
    ("table2", "local-15", "stad", "auc", "81.19"),
    ("table2", "ppeg", "crc", "auc", "86.00"),
    ("table2", "rope", "crc", "auc", "87.38*"),
    ("table2", "psa-gaussian", "stad", "auc", "82.98"),
    ("table3", "transmil", "camelyon16", "patch_f1", "21.1"),
    ("table3", "psa-gaussian", "camelyon16", "froc_tile@6", "75.9"),
    ("table4", "abmil", "brca-uni", "c_index", "61.9"),
    ("table4", "psa-gaussian", "crc-uni", "c_index", "70.7"),
]


def study_of(table, cohort):
    return Study.of(Path(table), {**read_recipe(table).study(cohort), "features": "f", "labels": "l"})


@pytest.mark.parametrize("table", TABLES)
def test_every_row_of_the_paper_is_there_in_its_order(table):
    rows = read_recipe(table).models.values()
    assert ", ".join(row.title for row in rows if row.paper) == ROWS[table]


@pytest.mark.parametrize(("table", "row", "cohort", "metric", "number"), NUMBERS)
def test_numbers_are_those_of_the_paper(table, row, cohort, metric, number):
    assert str(read_recipe(table).models[row].paper[cohort][metric]) == number  # digit by digit


@pytest.mark.parametrize("table", TABLES)
def test_every_row_has_every_number_of_the_paper_and_no_other(table):
    recipe = read_recipe(table)
    known = {
        cohort: list(recipe.metrics) for cohort in recipe.cohorts if "lunit" not in cohort and "giga" not in cohort
    }
    for row in recipe.models.values():
        assert {cohort: list(numbers) for cohort, numbers in row.paper.items()} in (known, {}), row.name
    assert {*recipe.metrics, *recipe.more_metrics} <= set(METRIC_TITLES)


@pytest.mark.parametrize("name", list_recipes())
def test_every_cohort_of_a_recipe_is_a_study_of_models_that_can_be_built(name):
    recipe = read_recipe(name)
    assert recipe.reference in (None, *recipe.models)
    for cohort in recipe.cohorts:
        for settings in study_of(name, cohort).models.values():
            assert settings.model in list_models()
            create_model(settings.model, 16, 4, **settings.model_options)


def test_tables_and_figures_can_share_runs():
    """Rows of one name are the same everywhere, and their titles tell them apart."""
    settings: dict[tuple[str, str], dict] = {}
    for name in list_recipes():
        recipe = read_recipe(name)
        titles = [row.title for row in recipe.models.values()]
        assert len(set(titles)) == len(titles)
        for cohort in recipe.cohorts:
            for row, of in study_of(name, cohort).models.items():
                assert settings.setdefault((cohort, row), of) == of, (name, row)


def test_cohorts_have_the_authors_settings():
    where = {"crc": "table1", "stad": "table1", "camelyon16": "table3"}
    of = {cohort: study_of(table, cohort) for cohort, table in where.items()}
    settings = {cohort: study.models["psa-gaussian"] for cohort, study in of.items()}
    assert [s.max_tiles for s in settings.values()] == [8000, None, None]
    assert {(s.epochs, s.batch_samples, s.lr, s.prior_lr_scale, s.patience) for s in settings.values()} == {
        (15, 8, 1e-4, 100.0, None)
    }
    models = {cohort: create_model(s.model, 384, 1, **s.model_options) for cohort, s in settings.items()}
    assert [sum(p.numel() for p in model.parameters()) for model in models.values()] == [1276709, 1276709, 4875845]
    assert {(model.alpha, model.blocks[0].attention.prior.tau) for model in models.values()} == {(1e-3, 1e-3)}
    assert {study.options["folds"] for study in of.values()} == {5}
    assert of["stad"].options["classes"] == ["GS", "CIN"]  # CIN is positive: the paper's F1 scores are of it


def test_a_preset_is_for_models_of_the_trunk_and_an_own_one_wins():
    models = read_recipe("table3").study("camelyon16")["models"]
    assert models["abmil"] == {"model": "abmil"}
    assert models["psa-gaussian"]["model_options"] == {"preset": "paper-camelyon16", "decay": "gaussian"}
    assert read_recipe("table2").study("stad")["models"]["local-15"]["model_options"] == {
        "preset": "paper-stad",
        "radius_steps": 15.0,
    }


def test_cohorts_name_encoders_that_exist():
    assert all(
        [card.name for card in list_encoders(cohort.encoder)] == [cohort.encoder] for cohort in paper_cohorts().values()
    )


def test_recipes_are_found_and_others_named():
    assert set(TABLES) <= set(list_recipes())
    with pytest.raises(OptionError, match=r"unknown table or figure 'table9'; known: .*'table1'"):
        read_recipe("table9")


@pytest.mark.parametrize("text", ["88.97 ± ", "88", "0.8897 +- 0.01", "~88.9"])
def test_numbers_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="must look like"):
        PaperNumber.of(text)
