"""Spaces of settings, and the trials drawn from them."""

import pytest

from psamil.cluster.search_space import Choice, Range, Trial, draw_trials, read_space
from psamil.errors import DataError, OptionError
from psamil.training.settings import TrainingSettings

SPACE = {"lr": Range(1e-5, 1e-1, log=True), "batch_samples": Range(2, 4), "weight_decay": Range(0, 0.5)}


def test_ranges_are_drawn_evenly_and_whole_numbers_stay_whole():
    drawn = draw_trials(SPACE, 400)
    orders = [trial.values["lr"] for trial in drawn]
    assert all(1e-5 <= lr <= 1e-1 for lr in orders)
    assert 70 < sum(lr < 1e-4 for lr in orders) < 130  # a quarter of the four orders of magnitude
    whole = [trial.values["batch_samples"] for trial in drawn]
    assert {type(value) for value in whole} == {int}
    assert all(100 < whole.count(value) < 170 for value in (2, 3, 4))
    assert 70 < sum(trial.values["weight_decay"] < 0.125 for trial in drawn) < 130


def test_the_same_seed_draws_the_same_trials_however_many():
    assert draw_trials(SPACE, 3) == draw_trials(SPACE, 10)[:3]
    assert draw_trials(SPACE, 3, seed=1) != draw_trials(SPACE, 3)


def test_a_small_space_is_tried_once_in_all_combinations():
    drawn = draw_trials({"optimizer": Choice(("adam", "adamw")), "epochs": Choice((1, 2, 3))}, 50)
    assert sorted((trial.values["optimizer"], trial.values["epochs"]) for trial in drawn) == [
        (optimizer, epochs) for optimizer in ("adam", "adamw") for epochs in (1, 2, 3)
    ]
    assert [trial.number for trial in drawn] == list(range(6))


def test_no_trials_are_refused():
    with pytest.raises(OptionError, match="at least 1"):
        draw_trials(SPACE, 0)


def test_values_take_their_places_beside_shared_settings():
    shared = TrainingSettings(model="abmil", model_options={"hidden": 4, "gated": True}, epochs=3)
    settings = Trial(0, {"lr": 0.01, "model_options.hidden": 8, "task.balance": "none"}).settings(shared)
    assert (settings.lr, settings.epochs, settings.task.balance) == (0.01, 3, "none")
    assert settings.model_options == {"hidden": 8, "gated": True}
    assert shared.model_options["hidden"] == 4


def test_a_file_gives_numbers_for_what_yaml_takes_for_texts(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text("lr: {low: 1e-5, high: 1e-3, log: true}\nweight_decay: [0, 1e-4]\nmodel_options.decay: [cauchy]\n")
    assert read_space(path) == {
        "lr": Range(1e-5, 1e-3, log=True),
        "weight_decay": Choice((0, 1e-4)),
        "model_options.decay": Choice(("cauchy",)),
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rate: [1]", "unknown setting 'rate'"),
        ("task.weight: [1]", "unknown setting 'task.weight'"),
        ("model_options: [{}]", "unknown setting 'model_options'"),
        ("lr: 0.1", "neither a list of values nor"),
        ("lr: []", "neither a list of values nor"),
        ("lr: {low: 1, high: 2, step: 1}", "neither a list of values nor"),
        ("lr: {low: 2, high: 1}", "low = 2.0 is not below high = 1.0"),
        ("lr: {low: 0, high: 1, log: true}", "begins above 0"),
        ("lr: {low: 0, high: 1, log: 10}", "log is true or false"),
        ("lr: {low: a, high: b}", "'lr' cannot be 'a': it is of type float"),
        ("model_options.tau: {low: a, high: b}", "numbers, not 'a'"),
        ("lr: [fast]", "'lr' cannot be 'fast': it is of type float"),
        ("epochs: {low: 1.5, high: 3}", "'epochs' cannot be 1.5: it is of type int"),
        ("optimizer: [true]", "'optimizer' cannot be True: it is of type str"),
        ("[lr]", "names no settings"),
        ("{lr", "is not valid YAML"),
    ],
)
def test_wrong_files_are_refused_with_a_reason(tmp_path, text, said):
    path = tmp_path / "space.yaml"
    path.write_text(text)
    with pytest.raises(DataError, match=r"space\.yaml") as error:
        read_space(path)
    assert said in str(error.value)


def test_whole_ends_are_of_whole_numbers_only_where_the_setting_is(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text("warm_up: {low: 0, high: 1}\nepochs: {low: 1, high: 2}\nmodel_options.heads: {low: 1, high: 2}\n")
    drawn = draw_trials(read_space(path), 50)
    assert sum(0 < trial.values["warm_up"] < 1 for trial in drawn) > 40
    for name in ("epochs", "model_options.heads"):
        assert {trial.values[name] for trial in drawn} == {1, 2}


def test_null_may_be_tried(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text("patience: [null, 3]\nmodel_options.gated: [true, false]\n")
    assert read_space(path) == {"patience": Choice((None, 3)), "model_options.gated": Choice((True, False))}
