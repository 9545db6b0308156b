"""Optimisers, and the learning rate over all steps."""

import numpy as np
import pytest
import torch
from torch import nn

from psamil.training.optimisation import Schedule, lr_drops, lr_factor, new_optimizer
from psamil.training.settings import TrainingSettings


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


def test_a_fall_along_a_cosine_is_that_of_torch():
    settings = TrainingSettings(lr=2e-4, first_lr=5e-6, warm_up=0.0, constant=0.0, fall="cosine")
    steps = 100
    found = [settings.lr * lr_factor(step, steps, settings) for step in range(steps)]
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=settings.lr)
    half_steps = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * steps, eta_min=settings.first_lr)
    expected = []
    for _ in range(2 * steps):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        half_steps.step()
    assert found == pytest.approx(expected[1::2])  # the middle of each step


def test_drops_at_epochs_and_on_plateaus():
    at_epochs = TrainingSettings(drop_epochs=[2, 5])
    assert [lr_drops(epoch, [], at_epochs) for epoch in range(7)] == [0, 0, 1, 1, 1, 2, 2]
    assert lr_drops(9, [1.0] * 9, TrainingSettings()) == 0
    plateau = TrainingSettings(plateau_epochs=2)
    losses = [1.0, 0.9, 0.95, 0.9, 0.8, 0.8, 0.9, 0.9, 0.9]
    assert [lr_drops(epoch, losses[:epoch], plateau) for epoch in range(10)] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 3]


def test_a_plateau_is_that_of_torch():
    """Which waits one epoch more than it is told to, and wants a loss that is lower by a ten-thousandth."""
    losses = np.random.default_rng(0).normal(size=60).round(2)
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=3)
    settings = TrainingSettings(plateau_epochs=4, drop_factor=0.5)
    for epoch, loss in enumerate(losses):
        theirs.step(loss)
        assert 0.5 ** lr_drops(epoch, losses[: epoch + 1], settings) == optimizer.param_groups[0]["lr"]


def test_a_schedule_sets_every_group_by_its_own_rate():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam([{"params": model.weight, "lr": 1.0}, {"params": model.bias, "lr": 100.0}])
    flat = TrainingSettings(epochs=4, warm_up=0.0, constant=1.0, drop_epochs=[1], plateau_epochs=1, drop_factor=0.5)
    schedule = Schedule(optimizer, flat, steps_per_epoch=3)
    found = []
    for epoch, history in enumerate(
        ([], [{"validation loss": 1.0}], [{"validation loss": 1.0}, {"validation loss": 1.0}], [{"loss": 1.0}])
    ):
        schedule.set_lr(epoch, 2, history)
        found.append([group["lr"] for group in optimizer.param_groups])
    assert found == [[1.0, 100.0], [0.5, 50.0], [0.25, 25.0], [0.5, 50.0]]


@pytest.mark.parametrize(
    ("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("radam", torch.optim.RAdam)]
)
def test_optimisers_have_betas_and_weight_decay(name, kind):
    model = nn.Linear(2, 1)
    optimizer = new_optimizer(model, TrainingSettings(optimizer=name, betas=[0.5, 0.9], lr=0.1, weight_decay=0.2))
    assert type(optimizer) is kind
    assert {group["betas"] for group in optimizer.param_groups} == {(0.5, 0.9)}
    before = model.weight.detach().clone()
    model(torch.zeros(1, 2)).sum().backward()  # no gradient of the weight: decay alone
    optimizer.step()
    if name == "adam":  # decay is part of the gradient, whose size Adam makes 1
        assert torch.allclose(model.weight, before - 0.1 * before.sign(), atol=1e-4)
    else:
        assert torch.allclose(model.weight, before * (1 - 0.1 * 0.2))
