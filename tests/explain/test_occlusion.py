"""Tiles that go, and what the prediction does then."""

import numpy as np
import pytest
import torch

from psamil import Bag, PackedBags
from psamil.errors import DataError, OptionError, ShapeError
from psamil.explain import occlude
from psamil.explain.occlusion import OcclusionCurve, without_tiles
from psamil.training.regression_task import RegressionTask
from tests.explain.cases import LABELS, THREE_CLASSES, bag_of, saved_model


def with_a_signal(n=100, striking=5):
    """A mean-pooling model whose logit is the mean of the first feature, and a bag in which few tiles carry it."""
    saved = saved_model("mean", hidden=0)
    saved.model.head.weight.data[:] = torch.eye(1, 6)
    saved.model.head.bias.data[:] = 0
    features = torch.zeros(n, 6, dtype=torch.float64)
    features[:striking, 0] = 10
    return saved, Bag(features, torch.arange(2 * n).reshape(n, 2).double())


def test_a_map_of_the_striking_tiles_is_faithful():
    saved, bag = with_a_signal()
    scores = bag.features[:, 0]
    curve = occlude(saved, bag, scores, [0.02, 0.05, 0.5])
    assert curve.watched == "log-odds of positive"
    assert curve.whole == pytest.approx(0.5)
    assert curve.shares.tolist() == [0.02, 0.05, 0.5]
    np.testing.assert_allclose(curve.top, [30 / 98, 0, 0], atol=1e-12)
    np.testing.assert_allclose(curve.lowest, [50 / 98, 50 / 95, 1])
    assert curve.random.shape == (5, 3)
    assert curve.area > 0.2
    assert occlude(saved, bag, -scores, [0.02, 0.05, 0.5]).area < -0.1


def test_a_random_map_is_not_faithful():
    saved, bag = with_a_signal(n=400, striking=200)
    areas = []
    for seed in range(6):
        scores = torch.rand(400, generator=torch.Generator().manual_seed(100 + seed))
        areas.append(occlude(saved, bag, scores, [0.2, 0.4], seed=seed).area)
    assert abs(np.mean(areas)) < 0.3  # of a logit of 5


def test_the_predicted_class_is_watched():
    saved, bag = with_a_signal()
    saved.model.head.weight.data *= -1
    curve = occlude(saved, bag, bag.features[:, 0], [0.05])
    assert curve.watched == "log-odds of negative"
    assert curve.whole == pytest.approx(0.5)
    other = occlude(saved, bag, bag.features[:, 0], [0.05], watch="positive")
    assert other.whole == pytest.approx(-0.5)
    assert other.area == pytest.approx(-curve.area)
    with pytest.raises(OptionError, match="class or label to watch 'none'"):
        occlude(saved, bag, bag.features[:, 0], [0.05], watch="none")


@pytest.mark.parametrize("task", [THREE_CLASSES, LABELS], ids=["three classes", "labels"])
def test_several_outputs(task):
    saved, bag = saved_model("psa", task), bag_of("lattice", "continuous")
    scores = saved.model(PackedBags.of(bag)).tile_scores.detach()
    logits = saved.model(PackedBags.of(bag)).logits[0].detach()
    p = logits.softmax(0) if task is THREE_CLASSES else logits.sigmoid()
    name = (task.classes if task is THREE_CLASSES else task.labels)[int(p.argmax())]
    curve = occlude(saved, bag, scores, [0.1])
    assert curve.watched == f"log-odds of {name}"
    assert curve.whole == pytest.approx(p.max().logit().item())


def test_numbers_are_watched_by_their_change():
    saved, bag = with_a_signal()
    task = RegressionTask(mean=10.0, std=2.0)
    saved = type(saved)(saved.model, task, saved.about)
    curve = occlude(saved, bag, bag.features[:, 0], [0.05])
    assert curve.watched == "-|change of value|"
    assert curve.whole == 0
    assert curve.top.tolist() == pytest.approx([-1.0])  # 0.5 standard deviations of 2
    assert curve.area > 0


def test_area_by_hand():
    curve = OcclusionCurve(
        "y", 1.0, np.array([0.1, 0.3]), np.array([0.5, 0.0]), np.array([1.0, 1.0]), np.array([[0.9, 0.8], [0.7, 0.8]])
    )
    first = (0.1 * 0.4 / 2 + 0.2 * (0.4 + 0.8) / 2) / 0.3
    second = (0.1 * 0.2 / 2 + 0.2 * (0.2 + 0.8) / 2) / 0.3
    assert curve.area == pytest.approx((first + second) / 2)
    assert curve.area_spread == pytest.approx(abs(first - second) / 2**0.5)


def test_draws_are_seeded_and_slides_stay_apart():
    saved, bag = saved_model("psa"), bag_of("lattice", "continuous")
    scores = torch.arange(80.0)
    one, same, other = (occlude(saved, bag, scores, [0.3], seed=seed).random for seed in (1, 1, 2))
    assert (one == same).all()
    assert (one != other).any()
    left = without_tiles(bag, torch.tensor([0, 39, 40, 41]))
    assert left.slides.tolist() == [0, 38, 76]
    torch.testing.assert_close(left.xy, torch.cat((bag.xy[1:39], bag.xy[42:])))
    gone = without_tiles(bag, torch.arange(40))
    assert gone.slides.tolist() == [0, 0, 40]
    assert np.isfinite(occlude(saved, bag, -scores, [0.5]).top).all()  # without any tile of the first slide


def test_shares_become_whole_tiles():
    saved, bag = with_a_signal(n=10, striking=1)
    curve = occlude(saved, bag, bag.features[:, 0], [0.001, 0.02, 0.999])
    assert curve.shares.tolist() == [0.1, 0.9]


def test_what_cannot_be_occluded():
    saved, bag = with_a_signal()
    with pytest.raises(DataError, match="has 1 tiles"):
        occlude(saved, Bag(bag.features[:1], bag.xy[:1]), torch.zeros(1))
    with pytest.raises(ShapeError, match=r"scores of shape \(100,\), got \(99,\)"):
        occlude(saved, bag, torch.zeros(99))
    for shares, draws in (([], 1), ([0.0], 1), ([1.0], 1), ([0.5], 0)):
        with pytest.raises(OptionError, match="shares must lie between 0 and 1"):
            occlude(saved, bag, torch.zeros(100), shares, draws=draws)
