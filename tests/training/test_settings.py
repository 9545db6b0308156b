"""Settings: the schedule over all steps, and mistakes that are found before anything is trained."""

import numpy as np
import pytest

from psamil.errors import OptionError
from psamil.spatial.decays import Gaussian
from psamil.training.settings import TrainingSettings, lr_factor
from psamil.training.tasks import TaskOptions


def test_the_schedule_rises_stays_and_falls_over_the_real_number_of_steps():
    settings, steps = TrainingSettings(), 1000
    factors = np.array([lr_factor(step, steps, settings) for step in range(steps)])
    assert factors[0] * settings.lr == pytest.approx(1e-6, rel=0.5)
    assert factors[49:51].mean() == pytest.approx((1 + 0.01) / 2)  # half-way up
    assert factors[99] < 1 == factors[100] == factors[909]  # 10 %, then 90 % of the rest
    assert factors[910] < 1
    assert factors[-1] * settings.lr == pytest.approx(1e-6, rel=0.6)
    assert (np.diff(factors[:101]) > 0).all()
    assert (np.diff(factors[909:]) < 0).all()


@pytest.mark.parametrize("steps", [10, 77, 1000])
def test_the_mean_learning_rate_does_not_depend_on_the_number_of_steps(steps):
    settings = TrainingSettings()
    mean = np.mean([lr_factor(step, steps, settings) for step in range(steps)])
    assert mean == pytest.approx(0.81 + 0.19 * (1 + 0.01) / 2, abs=0.01)


def test_schedules_without_a_part():
    assert lr_factor(0, 1, TrainingSettings()) == 1
    flat = TrainingSettings(warm_up=0.0, constant=1.0)
    assert {lr_factor(step, 9, flat) for step in range(9)} == {1.0}
    only_up = TrainingSettings(warm_up=1.0)
    assert lr_factor(8, 9, only_up) == pytest.approx(0.01 + 0.99 * 8.5 / 9)
    only_down = TrainingSettings(warm_up=0.0, constant=0.0)
    assert [lr_factor(step, 2, only_down) for step in (0, 1)] == pytest.approx([0.01 + 0.99 * 0.75, 0.01 + 0.99 * 0.25])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"optimizer": "sgd"}, "unknown optimizer 'sgd'; known: 'adam', 'adamw'"),
        ({"precision": "16-true"}, "unknown precision '16-true'; known: '16-mixed', '32-true'"),
        ({"devices": 0}, "devices must be at least 1"),
        ({"devices": 9}, "batches of 8 samples cannot be shared by 9 devices"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"batch_samples": 0}, "batch_samples must be at least 1"),
        ({"samples_per_pass": 0}, "samples_per_pass must be at least 1"),
        ({"max_tiles": 0}, "max_tiles must be at least 1"),
        ({"patience": 0}, "patience must be at least 1"),
        ({"warm_up": 1.5}, "warm_up is a share"),
        ({"constant": -0.1}, "constant is a share"),
        ({"lr": 1e-7}, "first_lr must lie between 0 and lr = 1e-07"),
        ({"lr": float("nan")}, "first_lr must lie"),
        ({"drop_features": 1.0}, "drop_features is a share, from 0 to below 1, got 1.0"),
        ({"drop_features": -0.1}, "drop_features is a share"),
        ({"average_epochs": -1.0}, "average_epochs must not be negative"),
        ({"seed": -1}, "seed must not be negative"),
        ({"weight_decay": -1.0}, "weight_decay must not be negative"),
        ({"gradient_clip": 0.0}, "gradient_clip must be positive"),
        ({"model_options": {"decay": Gaussian()}}, "option 'decay' of the model is a Gaussian; only plain values"),
        ({"model_options": {"alpha": float("nan")}}, "option 'alpha' of the model is a float"),
    ],
)
def test_mistakes_are_named(setting, message):
    with pytest.raises(OptionError, match=message):
        TrainingSettings(**setting)


def test_settings_become_plain_values():
    settings = TrainingSettings(model_options={"sizes": (1, 2)}, task=TaskOptions(bins=3))
    plain = settings.to_json()
    assert plain["model_options"] == {"sizes": [1, 2]}
    assert plain["task"]["bins"] == 3
    assert plain["epochs"] == 15
