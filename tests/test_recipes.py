"""Recipes: there for every model with a paper, complete, trained with, and won over by what the user says."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from psamil import PackedBags, create_model, fit, list_models
from psamil.cli import main
from psamil.cli.study import Study
from psamil.cohort import BagCache, Cohort, Split, simulate
from psamil.errors import OptionError
from psamil.evaluation.run_folder import read_run
from psamil.recipes import (
    FOLDER,
    SAME_AUTHORS,
    TRUNK_OF_PSA,
    for_model,
    seeds_of_recipe,
    settings_of_recipe,
    with_own_options,
)
from psamil.training.fold import train_fold
from psamil.training.settings import TrainingSettings
from psamil.training.tasks import TaskOptions
from tests.models.test_check import SMALL

WITHOUT_PAPER = ("max", "mean", "psa_evidence", "size")
MODELS = [name for name in list_models() if name not in WITHOUT_PAPER]
AUTHORS = sorted((FOLDER / "authors").glob("*.yaml"))
OPTIMISATION = {
    *("epochs", "batch_samples", "optimizer", "lr", "first_lr", "warm_up", "constant", "weight_decay"),
    *("gradient_clip", "patience", "task"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes") / "cohort"
    simulate(folder, slides=6, tiles=50, dim=8, range_steps=2)
    return folder


@pytest.fixture(scope="module")
def cohort(folder):
    return Cohort.open(folder, folder / "labels.csv", target="label", cache=BagCache(folder.parent / "cache"))


@pytest.fixture(scope="module")
def split(cohort):
    ids = [cohort.ids[i] for i in np.argsort(cohort.outcome.labels, kind="stable")]
    return Split(train=tuple(ids[1:-1]), val=(ids[0], ids[-1]), test=())


@pytest.mark.parametrize("model", MODELS)
def test_every_model_with_a_paper_is_trained_by_the_recipe_of_its_authors(model, cohort, split, tmp_path):
    settings = replace(settings_of_recipe("authors", model), epochs=1, model_options=SMALL.get(model, {}))
    saved = train_fold(cohort, split, settings, tmp_path)
    assert saved.about["settings"]["model"] == model
    assert all(parameter.isfinite().all() for parameter in saved.model.parameters())


@pytest.mark.parametrize(
    "file", [*sorted(FOLDER.glob("c*.yaml")), FOLDER / "detection.yaml", *AUTHORS], ids=lambda file: file.stem
)
def test_a_recipe_names_every_setting_of_optimisation(file):
    found = yaml.safe_load(file.read_text())
    assert set(found) >= OPTIMISATION
    assert "balance" in found["task"]
    if file in AUTHORS:
        assert file.stem in MODELS  # not a file that nobody reads
        assert settings_of_recipe("authors", file.stem) != settings_of_recipe("common", file.stem)


def test_models_that_share_a_recipe_exist():
    assert {*SAME_AUTHORS, *SAME_AUTHORS.values(), *TRUNK_OF_PSA} <= set(MODELS)
    assert settings_of_recipe("authors", "longmil") == replace(
        settings_of_recipe("authors", "clam_sb"), model="longmil"
    )


def test_the_common_recipe_is_the_same_for_all_models():
    first, *others = (settings_of_recipe("common", name) for name in list_models())
    assert all(replace(other, model=first.model) == first for other in others)
    assert (first.batch_samples, first.patience, first.task.balance) == (8, None, "weights")


def test_the_recipe_of_the_paper_is_the_common_one():
    assert settings_of_recipe("paper", "psa") == settings_of_recipe("common", "psa")
    assert settings_of_recipe("paper", "psa").model_options == {}  # options of the model are the paper's by default


@pytest.mark.parametrize("model", list_models())
def test_every_model_is_trained_by_the_recipe_for_detection(model, cohort, split, tmp_path):
    """Which differs from the default in five things; the loss of tiles is for all models that give evidence."""
    settings = settings_of_recipe("detection", model)
    assert (settings.model_options.get("pooling") == "opposed") == (model in TRUNK_OF_PSA)
    assert (settings.model_options.get("first_attention") == "mean") == (model in TRUNK_OF_PSA)
    own = ("pooling", "first_attention", "slide_share")
    options = {name: value for name, value in settings.model_options.items() if name not in own}
    plain = replace(settings, negative_tiles=0.0, drop_features=0.0, model_options=options)
    assert plain == settings_of_recipe("context", model)
    options = {**settings.model_options, **SMALL.get(model, {})}
    saved = train_fold(cohort, split, replace(settings, epochs=1, model_options=options), tmp_path)
    with torch.no_grad():
        output = saved.model(PackedBags.of(cohort.load(cohort.samples[0])))
    assert (output.tile_evidence is not None) == (settings.negative_tiles > 0)


@pytest.mark.parametrize("model", list_models())
def test_the_recipe_for_cells_differs_from_the_default_in_options_of_models(model):
    cells, default = settings_of_recipe("cells", model), settings_of_recipe("context", model)
    assert replace(cells, model_options={}) == replace(default, model_options={})
    assert (cells.model_options != {}) == (model in TRUNK_OF_PSA)
    assert cells.model_options.get("arrangement", False) == (model == "psa")
    create_model(model, 4, 2, **cells.model_options)


@pytest.mark.parametrize("recipe", ["context", "detection", "cells"])
def test_recipes_know_the_models_they_have_settings_for(recipe):
    found = yaml.safe_load((FOLDER / f"{recipe}.yaml").read_text())["models"]
    assert set(found) <= set(list_models())


def test_as_many_trainings_as_the_recipe_says_unless_told(folder, tmp_path, capsys):
    def trained(out):
        return sorted(job.name for job in (tmp_path / out / "folds" / "0").glob("seed-*"))

    for out, options in [("default", []), ("cells", ["--recipe", "cells"]), ("told", ["--seeds", "2"])]:
        settings_on_the_command_line(folder, tmp_path / out, capsys, *options)
    assert trained("default") == ["seed-0", "seed-1", "seed-2"]
    assert trained("cells") == ["seed-0"]
    assert seeds_of_recipe("detection") == 3
    assert trained("told") == ["seed-0", "seed-1"]

    options = {"target": "label", "folds": 2, "fold": 0, "epochs": 1, "cache": folder.parent / "cache"}
    fit(folder, folder / "labels.csv", tmp_path / "fit", model="mean", **options)
    assert trained("fit") == ["seed-0", "seed-1", "seed-2"]
    settings = settings_of_recipe("context", "mean")  # then there is no recipe to speak of
    fit(folder, folder / "labels.csv", tmp_path / "settings", training=settings, **options)
    assert trained("settings") == ["seed-0"]


def test_recipes_of_papers_train_once():
    assert {recipe: seeds_of_recipe(recipe) for recipe in ("paper", "common", "authors")} == {
        "paper": 1,
        "common": 1,
        "authors": 1,
    }
    with pytest.raises(OptionError, match="unknown recipe"):
        seeds_of_recipe("contxt")


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, {"heads": 3, "pooling": "evidence"}),
        ({"heads": 2}, {"heads": 2, "pooling": "evidence"}),
        ({"preset": "paper-crc", "tau": 0.1}, {"preset": "paper-crc", "tau": 0.1}),  # nothing of the recipe in it
    ],
)
def test_own_options_win_one_by_one_but_a_preset_takes_the_place_of_all(own, expected):
    of_recipe = {"heads": 3, "pooling": "evidence"}
    assert with_own_options(of_recipe, own) == expected
    assert of_recipe == {"heads": 3, "pooling": "evidence"}


def settings_on_the_command_line(folder, out, capsys, *options):
    """What is trained with, from the run directory."""
    where = [str(folder), str(folder / "labels.csv"), str(out), "--target", "label", "--folds", "2", "--fold", "0"]
    with pytest.raises(SystemExit) as end:
        main(["train", *where, "--cache", str(folder.parent / "cache"), *options, "--training.epochs", "1"])
    assert end.value.code == 0
    capsys.readouterr()
    return read_run(out)["settings"]


def test_a_preset_by_its_name_alone_is_not_mixed_with_the_recipe(folder, tmp_path, capsys):
    given = ["--training.model_options.preset", "paper-demo"]
    assert settings_on_the_command_line(folder, tmp_path / "run", capsys, *given)["model_options"] == {
        "preset": "paper-demo"
    }


@pytest.mark.parametrize("model", ["psa", "abmil"])
def test_printed_options_train_the_same(model, folder, tmp_path, capsys):
    small = ["--training.model_options", '{"heads": 2, "head_dim": 4}' if model == "psa" else '{"hidden": 4}']
    options = ["--recipe", "detection", "--training.model", model, *small]
    with pytest.raises(SystemExit) as end:
        main(["train", "f", "l", "o", *options, "--print_config"])
    assert end.value.code in (None, 0)
    printed = yaml.safe_load(capsys.readouterr().out)
    dropped = {"psa": 0.5, "abmil": 0.0}[model]
    assert (printed["training"]["negative_tiles"], printed["training"]["drop_features"]) == (1.0, dropped)
    file = tmp_path / "options.yaml"
    kept = {name: printed[name] for name in ("recipe", "training")}
    file.write_text(yaml.safe_dump(kept))
    with pytest.raises(SystemExit):
        main(["train", "f", "l", "o", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["seeds"] == seeds_of_recipe("context")
    with pytest.raises(SystemExit):
        main(["train", "f", "l", "o", "--recipe", "cells", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["seeds"] == seeds_of_recipe("cells") != seeds_of_recipe("context")
    direct = settings_on_the_command_line(folder, tmp_path / "direct", capsys, *options)
    assert settings_on_the_command_line(folder, tmp_path / "printed", capsys, "--config", str(file)) == direct


def test_a_recipe_that_does_not_fit_the_outcome_is_refused_before_training(tmp_path, capsys):
    labels = simulate(tmp_path / "cohort", slides=9, tiles=50, dim=4)
    table = pd.read_csv(labels)
    table["kind"] = [f"kind {i % 3}" for i in range(len(table))]
    table.to_csv(labels, index=False)
    with pytest.raises(OptionError, match="two classes"):
        fit(
            tmp_path / "cohort",
            labels,
            tmp_path / "run",
            target="kind",
            folds=3,
            recipe="detection",
            cache=tmp_path / "c",
        )
    assert not (tmp_path / "run" / "run.json").exists()


def test_another_model_by_the_same_recipe_keeps_what_the_user_changed():
    psa = settings_of_recipe("detection", "psa")
    changed = replace(psa, lr=0.5, model_options={**psa.model_options, "head_dim": 8})
    local = settings_of_recipe("detection", "local")
    expected = replace(local, lr=0.5, model_options={**local.model_options, "head_dim": 8})
    assert for_model(changed, "detection", "local", {}) == expected
    assert for_model(psa, "detection", "gtp", {}) == settings_of_recipe("detection", "gtp")
    assert for_model(changed, "detection", "psa", {}) == changed
    with_preset = for_model(changed, "detection", "psa", {"preset": "paper-crc"})
    assert with_preset.model_options == {"head_dim": 8, "preset": "paper-crc"}


@pytest.mark.parametrize("way", ["python", "command line", "study"])
def test_the_default_is_the_recipe_context(way, folder, tmp_path):
    own = {"epochs": 1, "model_options": {"heads": 2, "head_dim": 4}}
    if way == "python":
        fitted(folder, tmp_path, **own)
    elif way == "command line":
        where = [str(folder), str(folder / "labels.csv"), str(tmp_path / "run"), "--target", "label", "--folds", "2"]
        given = ["--training.epochs", "1", "--training.model_options", '{"heads": 2, "head_dim": 4}']
        with pytest.raises(SystemExit) as end:
            main(["train", *where, "--fold", "0", "--cache", str(folder.parent / "cache"), *given])
        assert end.value.code == 0
    of_recipe = settings_of_recipe("context", "psa")
    expected = replace(of_recipe, epochs=1, model_options={**of_recipe.model_options, **own["model_options"]})
    if way == "study":
        file = tmp_path / "study.yaml"
        file.write_text(yaml.safe_dump({"features": "f", "labels": "l", "training": own, "models": {"psa": None}}))
        assert Study.read(file).models["psa"] == expected
    else:
        assert read_run(tmp_path / "run")["settings"] == expected.to_json()


@pytest.mark.parametrize(
    ("recipe", "model", "message"),
    [
        ("author", "psa", "unknown recipe 'author'.*'authors'"),
        ("authors", "abmill", "unknown model 'abmill'.*'abmil'"),
        *(("authors", name, f"no recipe of the authors of model '{name}'; take the recipe") for name in WITHOUT_PAPER),
    ],
)
def test_mistakes_are_named(recipe, model, message):
    with pytest.raises(OptionError, match=message):
        settings_of_recipe(recipe, model)


def fitted(folder, tmp_path, **options):
    cache = folder.parent / "cache"
    return fit(folder, folder / "labels.csv", tmp_path / "run", target="label", folds=2, fold=0, cache=cache, **options)


def test_from_python_single_settings_win_over_a_recipe(folder, tmp_path):
    fitted(folder, tmp_path, recipe="authors", model="abmil", epochs=1, model_options={"hidden": 4})
    expected = replace(settings_of_recipe("authors", "abmil"), epochs=1, model_options={"hidden": 4})
    assert read_run(tmp_path / "run")["settings"] == expected.to_json()


def test_from_python_a_recipe_takes_the_place_of_other_settings(folder, tmp_path):
    with pytest.raises(OptionError, match="give training or a recipe"):
        fitted(folder, tmp_path, recipe="authors", training=TrainingSettings(model="abmil"))


@pytest.mark.parametrize("by_file", [False, True], ids=["options", "file"])
def test_on_the_command_line_what_is_given_wins_even_if_it_is_a_default(by_file, folder, tmp_path):
    default = TrainingSettings()
    given = {"model": "abmil", "epochs": 1, "optimizer": "adam", "lr": 1e-3, "gradient_clip": default.gradient_clip}
    if by_file:
        file = tmp_path / "options.yaml"
        file.write_text(yaml.safe_dump({"recipe": "authors", "training": {**given, "task": {"bins": 3}}}))
        options = ["--config", str(file)]
    else:
        options = ["--recipe", "authors", "--training.task.bins", "3"]
        options += [part for name, value in given.items() for part in (f"--training.{name}", str(value))]
    where = [str(folder), str(folder / "labels.csv"), str(tmp_path / "run"), "--target", "label"]
    with pytest.raises(SystemExit) as end:
        main(["train", *where, "--folds", "2", "--fold", "0", "--cache", str(folder.parent / "cache"), *options])
    assert end.value.code == 0
    task = TaskOptions(balance="none", bins=3)
    expected = replace(settings_of_recipe("authors", "abmil"), **given, task=task)
    assert read_run(tmp_path / "run")["settings"] == expected.to_json()


def test_on_the_command_line_a_wrong_recipe_is_one_line(folder, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", str(folder), str(folder / "labels.csv"), str(tmp_path / "run"), "--recipe", "mine"])
    assert end.value.code == 2
    assert (
        capsys.readouterr().err
        == "psamil: unknown recipe 'mine'; known: 'authors', 'cells', 'common', 'context', 'detection', 'paper'\n"
    )


@pytest.mark.parametrize(
    ("said", "seeds"),
    [
        ({}, 3),
        ({"seeds": None}, 3),
        ({"recipe": "authors"}, 1),
        ({"seeds": 2}, 2),
        ({"recipe": "authors", "seeds": 3}, 3),
    ],
)
def test_in_a_study_all_models_have_as_many_trainings_as_its_recipe_says(said, seeds, tmp_path):
    file = tmp_path / "study.yaml"
    models = {"psa": None, "clam_sb": {"recipe": "authors"}}
    file.write_text(yaml.safe_dump({"features": "f", "labels": "l", **said, "models": models}))
    assert Study.read(file).options["seeds"] == seeds


def test_in_a_study_a_recipe_holds_for_all_models_but_those_that_name_another(tmp_path):
    file = tmp_path / "study.yaml"
    models = {"clam_sb": None, "other": {"model": "clam_sb", "recipe": "common", "lr": 1e-3}}
    study = {"features": "f", "labels": "l", "recipe": "authors", "training": {"epochs": 15, "task": {"bins": 3}}}
    file.write_text(yaml.safe_dump({**study, "models": models}))
    found = Study.read(file).models
    authors, common = (settings_of_recipe(recipe, "clam_sb") for recipe in ("authors", "common"))
    assert found["clam_sb"] == replace(authors, epochs=15, task=replace(authors.task, bins=3))
    assert found["other"] == replace(common, epochs=15, lr=1e-3, task=replace(common.task, bins=3))
