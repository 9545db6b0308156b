"""`--options` of `psamil reproduce`: where they are written to, and which would have no effect."""

import pytest

from psamil.cli.paper_options import study_file
from psamil.errors import OptionError
from psamil.recipes.paper_tables import read_recipe


def file_of(recipe, cohort, *options, rows=None):
    found = read_recipe(recipe)
    return study_file(found, cohort, {}, rows or list(found.models), options)


def test_scopes_are_cohorts_all_cohorts_rows_and_all_rows():
    options = ["study.folds=3", "crc.target=msi", "stad.target=no", "training.lr=1e-3", "abmil.model_options.hidden=4"]
    file = file_of("table1", "crc", *options)
    assert (file["folds"], file["target"], file["training"]["lr"]) == (3, "msi", "1e-3")  # a number for Study.of
    assert file["models"]["abmil"] == {"model": "abmil", "model_options": {"hidden": 4}}


def test_the_preset_of_the_cohort_is_replaced_where_it_was():
    file = file_of("table1", "crc", "training.model_options.preset=paper-stad")
    assert file["models"]["psa-gaussian"]["model_options"] == {"preset": "paper-stad", "decay": "gaussian"}
    assert file["models"]["abmil"] == {"model": "abmil"}
    assert "model_options" not in file["training"]


@pytest.mark.parametrize(
    ("recipe", "option", "row"),
    [
        ("figure-alpha", "training.model_options.alpha=0.5", "exponential-alpha-0"),
        ("figure-alpha", "training.model_options={alpha: 0.5}", "exponential-alpha-0"),
        ("table1", "training.model=abmil", "abmil"),
        ("figure-dynamics", "training.model_options.preset=paper-stad", "legacy"),
    ],
    ids=["alpha", "mapping", "model", "preset of a row"],
)
def test_what_rows_set_themselves_cannot_be_set_for_all(recipe, option, row):
    with pytest.raises(OptionError, match=rf"has no effect on '{row}'.*as in {row}\.model"):
        file_of(recipe, "crc", option)


def test_rows_that_are_not_trained_do_not_count_and_own_options_win():
    rows = ["no-diversity", "diversity"]
    file = file_of("figure-dynamics", "crc", "training.model_options.preset=paper-stad", rows=rows)
    assert file["models"]["diversity"]["model_options"]["preset"] == "paper-stad"
    file = file_of("table1", "crc", "abmil.lr=1e-2", "training.lr=1e-3")
    assert (file["models"]["abmil"]["lr"], file["training"]["lr"]) == ("1e-2", "1e-3")


def test_a_column_of_censorship_takes_the_place_of_the_recipe_s_events():
    assert file_of("table4", "crc-uni", "crc-uni.time=months")["event"] == "event"
    file = file_of("table4", "crc-uni", "crc-uni.censorship=alive")
    assert (file["time"], file["censorship"]) == ("time", "alive")
    assert "event" not in file
    assert file_of("table4", "crc-uni", "crc-uni.censorship=alive", "crc-uni.event=dead")["event"] == "dead"  # refused
