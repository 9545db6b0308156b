"""The loss of tiles of negative samples: against its definition, and where it does not apply."""

import numpy as np
import pytest
import torch

from psamil.bag import PackedBags
from psamil.cohort import BagCache, Cohort, Split, simulate
from psamil.cohort.outcomes import Classification, MultiLabel
from psamil.errors import OptionError
from psamil.models import create_model, list_models
from psamil.training.fold import train_fold
from psamil.training.objective import Objective, Pass, negative_tile_loss
from psamil.training.settings import TrainingSettings
from psamil.training.tasks import Task
from tests.models.test_check import SMALL

SIZES = [3, 0, 5, 2]


def batch(width: int = 4) -> PackedBags:
    torch.manual_seed(0)
    offsets = torch.tensor([0, *SIZES]).cumsum(0)
    names = tuple("abcd")
    return PackedBags(torch.randn(sum(SIZES), width), torch.rand(sum(SIZES), 2), offsets, offsets, names)


def two_classes() -> Task:
    return Task.fit(Classification("label", ("normal", "tumour"), np.array([0, 1, 0, 1])))


def two_labels() -> Task:
    labels = np.array([[0, 1], [1, 0], [0, 1], [1, 1]])
    return Task.fit(MultiLabel(("a", "b"), labels))


@pytest.mark.parametrize("outputs", [1, 2])
def test_it_is_the_mean_softplus_of_the_tiles_of_bags_that_lack_the_output(outputs):
    bags = batch()
    evidence = torch.randn(len(bags.features), outputs, dtype=torch.float64, requires_grad=True)
    absent = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]])[:, :outputs]
    expected = evidence.new_zeros(())
    for of_bag, lacks in zip(evidence.split(SIZES), absent, strict=True):
        if len(of_bag):  # a bag without tiles says nothing
            expected = expected + (lacks * (1 + of_bag.exp()).log().mean(0)).sum()
    expected = expected / absent.numel()
    loss = negative_tile_loss(evidence, absent, bags)
    torch.testing.assert_close(loss, expected)
    (ours,), (theirs,) = (torch.autograd.grad(value, evidence) for value in (loss, expected))
    torch.testing.assert_close(ours, theirs)
    has_gradient = [bool(of_bag.any()) for of_bag in ours[:, 0].split(SIZES)]
    assert has_gradient == [True, False, False, True]


def test_what_samples_lack():
    assert two_classes().absent(torch.tensor([1, 0, 0])).tolist() == [[0.0], [1.0], [1.0]]
    assert two_labels().absent(torch.tensor([[1.0, 0.0], [0.0, 0.0]])).tolist() == [[0.0, 1.0], [1.0, 1.0]]


def test_its_weight_is_that_of_the_setting():
    bags, targets = batch(), torch.tensor([0, 1, 1, 0])
    torch.manual_seed(0)
    model, task = create_model("abmil", 4, 1, hidden=8), two_classes()
    losses = [float(Objective(model, task, weight)(Pass(bags, targets)).detach()) for weight in (0.0, 1.0, 3.0)]
    assert losses[2] - losses[0] == pytest.approx(3 * (losses[1] - losses[0]))
    evidence = model(bags).tile_evidence
    expected = negative_tile_loss(evidence, task.absent(targets), bags)
    assert losses[1] - losses[0] == pytest.approx(float(expected.detach()))


@pytest.mark.parametrize("name", list_models())
def test_every_model_takes_it_or_says_that_it_gives_no_evidence(name):
    bags = PackedBags(torch.randn(60, 8), torch.randint(0, 9, (60, 2)).float(), *[torch.tensor([0, 30, 60])] * 2, "ab")
    torch.manual_seed(0)
    model = create_model(name, 8, 1, **SMALL.get(name, {}))
    objective = Objective(model, two_classes(), 1.0)
    model.eval()
    evidence = model(bags).tile_evidence
    model.train()
    if evidence is None:
        with pytest.raises(OptionError, match="evidence"):
            objective(Pass(bags, torch.tensor([0, 1])))
    else:
        objective(Pass(bags, torch.tensor([0, 1]))).backward()


def test_among_more_classes_there_is_none_to_lack():
    task = Task.fit(Classification("label", ("a", "b", "c"), np.array([0, 1, 2])))
    objective = Objective(create_model("mean", 4, task.n_out, hidden=4), task, 1.0)
    with pytest.raises(OptionError, match="two classes"):
        objective(Pass(batch(), torch.tensor([0, 1, 2, 0])))


def test_it_makes_tiles_of_the_first_class_speak_against_the_second(tmp_path):
    """By what it is for: of slides that a model cannot tell apart, the tiles are left without evidence."""
    simulate(tmp_path / "cohort", slides=8, tiles=60, dim=8, range_steps=2)
    cohort = Cohort.open(
        tmp_path / "cohort", tmp_path / "cohort" / "labels.csv", target="label", cache=BagCache(tmp_path / "cache")
    )
    split = Split(train=tuple(cohort.ids), val=(), test=())
    shares = {}
    for weight in (0.0, 10.0):
        settings = TrainingSettings(
            model="mean", model_options={"hidden": 8}, epochs=10, lr=1e-2, negative_tiles=weight, patience=None
        )
        saved = train_fold(cohort, split, settings, tmp_path / str(weight))
        first_class = [cohort.samples[i] for i in np.flatnonzero(cohort.outcome.labels == 0)]
        bags = [cohort.load(sample) for sample in first_class]
        with torch.no_grad():
            evidence = saved.model(PackedBags.of(bags)).tile_evidence
        shares[weight] = float((evidence > 0).float().mean())
    assert shares[10.0] < 0.05 < shares[0.0]
