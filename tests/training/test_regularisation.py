"""Dropping features and averaging weights."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from psamil.bag import PackedBags
from psamil.training.regularisation import WeightAverage, drop_features


def ones(n: int, width: int) -> PackedBags:
    return PackedBags(torch.ones(n, width), torch.zeros(n, 2), torch.tensor([0, n]), torch.tensor([0, n]), ("slide",))


def test_dropped_features_keep_their_mean():
    torch.manual_seed(0)
    batch = ones(1000, 50)
    dropped = drop_features(batch, 0.25)
    assert dropped.features.unique().tolist() == pytest.approx([0, 4 / 3])
    assert float((dropped.features == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert float(dropped.features.mean()) == pytest.approx(1.0, abs=0.01)
    assert torch.equal(batch.features, torch.ones(1000, 50))  # a cached bag must not change
    assert dropped.xy is batch.xy


def test_nothing_is_dropped_by_default():
    batch = ones(3, 2)
    assert drop_features(batch, 0.0) is batch


class Counting(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value))
        self.register_buffer("seen", torch.tensor(int(value)))
        self.register_buffer("dictionary", torch.tensor(value))


def test_the_mean_is_that_of_all_steps_and_then_of_a_window():
    average = WeightAverage(window=3)
    expected = 0.0
    for step, value in enumerate([1.0, 5.0, 9.0, 2.0, 4.0], start=1):
        average.add(Counting(value))
        expected += (value - expected) / min(step, 3)
        assert float(average.mean["weight"]) == pytest.approx(expected)
        if step <= 3:
            assert expected == pytest.approx(sum([1.0, 5.0, 9.0][:step]) / step)
    average.begin_anew()
    average.add(Counting(7.0))
    assert float(average.mean["weight"]) == 7.0


def test_what_is_no_weight_is_taken_as_it_is():
    average, model = WeightAverage(window=2), Counting(2.0)
    average.add(Counting(4.0))
    average.add(model)
    with average.taken_by(model):
        assert float(model.weight.detach()) == 3.0
        assert (int(model.seen), float(model.dictionary)) == (2, 2.0)


def test_running_statistics_are_averaged_with_the_weights():
    average, norm = WeightAverage(window=2), nn.BatchNorm1d(1, momentum=None)
    for value in (2.0, 6.0):
        norm.running_mean.fill_(value)
        average.add(norm)
    with average.taken_by(norm):
        assert float(norm.running_mean) == 4.0


def test_a_normalised_layer_is_normalised_with_averaged_weights():
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5)).eval()
    average = WeightAverage(window=4)
    for _ in range(4):
        with torch.no_grad():
            layer.parametrizations.weight.original.normal_()
        average.add(layer)
    before = deepcopy(layer.state_dict())
    with average.taken_by(layer):
        assert float(torch.linalg.matrix_norm(layer.weight.detach(), 2)) == pytest.approx(1.0, abs=0.01)
        assert not layer.training
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)


def test_a_window_of_one_step_is_the_weights_themselves():
    average, model = WeightAverage(window=1), Counting(1.0)
    for value in (3.0, 8.0):
        with torch.no_grad():
            model.weight.fill_(value)
        average.add(model)
        assert float(average.mean["weight"]) == value


def test_the_model_gets_its_own_weights_back_even_after_an_error():
    average, model = WeightAverage(window=2), Counting(2.0)
    average.add(Counting(4.0))
    before = deepcopy(model.state_dict())
    seen = []

    def fail() -> None:
        with average.taken_by(model):
            seen.append(float(model.weight.detach()))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert seen == [4.0]
    assert model.state_dict() == before


def test_the_average_does_not_follow_the_model():
    average, model = WeightAverage(window=2), Counting(2.0)
    average.add(model)
    with torch.no_grad():
        model.weight.fill_(100.0)
    assert float(average.mean["weight"]) == 2.0
