"""Settings: mistakes are found before anything is trained."""

import pytest

from psamil.errors import OptionError
from psamil.spatial.decays import Gaussian
from psamil.training.settings import TrainingSettings
from psamil.training.tasks import TaskOptions


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"optimizer": "sgd"}, "unknown optimizer 'sgd'; known: 'adam', 'adamw', 'radam'"),
        ({"fall": "step"}, "unknown fall 'step'; known: 'cosine', 'line'"),
        ({"betas": [0.9]}, "betas are two numbers, from 0 to below 1"),
        ({"betas": [0.9, 1.0]}, "betas are two numbers, from 0 to below 1"),
        ({"drop_factor": 0.0}, "drop_factor must lie between 0 and 1"),
        ({"drop_epochs": [3, -1]}, "drop_epochs must not be negative"),
        ({"plateau_epochs": 0}, "plateau_epochs must be at least 1"),
        ({"least_epochs": -1}, "least_epochs must not be negative"),
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
