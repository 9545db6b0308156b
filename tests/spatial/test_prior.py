import pytest
import torch

from psamil.errors import OptionError
from psamil.spatial import DECAYS, DistancePrior, parameter_groups


@pytest.mark.parametrize(
    ("decay", "first", "last"), [("gaussian", 6.5, 7.5), ("exponential", 6.40, 7.38), ("cauchy", 6.5, 7.5)]
)
def test_initial_radii_are_those_of_the_authors(decay, first, last):
    radii = DistancePrior(3, decay).radius_steps
    assert radii[0].item() == pytest.approx(first, abs=0.01)
    assert radii[-1].item() == pytest.approx(last, abs=0.01)
    assert DistancePrior(1, decay).radius_steps.item() == pytest.approx(7.0, abs=0.2)


@pytest.mark.parametrize("decay", DECAYS)
def test_theta_radius_and_rate_agree(decay):
    prior = DistancePrior(4, decay, k_min=2, k_max=12, k_init=5)
    torch.testing.assert_close(prior.decay.radius(prior.theta, prior.tau), prior.radius_steps)
    torch.testing.assert_close(2 + 10 * prior.rate, prior.radius_steps)
    prior.set_radii(torch.tensor([2.5, 4.0, 9.0, 11.9]))
    torch.testing.assert_close(prior.radius_steps, torch.tensor([2.5, 4.0, 9.0, 11.9]))


def test_the_gradient_never_dies_at_the_bounds():
    prior = DistancePrior(2)
    with torch.no_grad():
        prior.free.copy_(torch.tensor([-1000.0, 1000.0]))
    radii = prior.radius_steps
    assert 1 <= radii[0] < 1.01
    assert 24.99 < radii[1] <= 25
    (gradient,) = torch.autograd.grad(radii.sum(), prior.free)
    assert (gradient > 1e-7).all()


def test_a_head_at_a_bound_comes_back():
    prior = DistancePrior(1)
    with torch.no_grad():
        prior.free.fill_(3.0)
    assert prior.radius_steps > 24
    optimizer = torch.optim.Adam(prior.parameters(), lr=1e-2)
    for _ in range(600):
        optimizer.zero_grad()
        (prior.radius_steps - 5).square().sum().backward()
        optimizer.step()
    assert prior.radius_steps.item() == pytest.approx(5, abs=0.5)


def test_priors_have_their_own_learning_rate_and_no_weight_decay():
    model = torch.nn.ModuleList([torch.nn.Linear(3, 2), DistancePrior(2), DistancePrior(3)])
    weights, priors = parameter_groups(model, lr=1e-3, weight_decay=0.1, prior_lr_scale=50)
    assert (weights["lr"], weights["weight_decay"]) == (1e-3, 0.1)
    assert (priors["lr"], priors["weight_decay"]) == (0.05, 0.0)
    assert {id(p) for p in priors["params"]} == {id(model[1].free), id(model[2].free)}
    assert len(weights["params"]) == 2
    assert len(parameter_groups(model[0], lr=1e-3)) == 1


@pytest.mark.parametrize("decay", DECAYS)
def test_small_initial_radii(decay):
    for k_init in (0.5, 1.0, 1.1, 4.5):
        radii = DistancePrior(3, decay, k_min=0.2, k_max=5.0, k_init=k_init).radius_steps
        assert ((radii > 0.2) & (radii < 5)).all()
        assert radii.min() < k_init < radii.max()


def test_errors():
    with pytest.raises(OptionError, match="k_min < k_init < k_max"):
        DistancePrior(2, k_init=30)
    with pytest.raises(OptionError, match="tau"):
        DistancePrior(2, tau=0)
    with pytest.raises(OptionError, match=r"strictly between 1\.0 and 25\.0"):
        DistancePrior(1).set_radii(torch.tensor([25.0]))


@pytest.mark.parametrize("decay", DECAYS)
def test_a_radius_for_each_head(decay):
    prior = DistancePrior(3, decay, k_init=[3.0, 7.0, 15.0])
    torch.testing.assert_close(prior.radius_steps, torch.tensor([3.0, 7.0, 15.0]), rtol=1e-5, atol=0)
    with pytest.raises(OptionError, match="k_min < k_init < k_max, got"):
        DistancePrior(2, decay, k_init=[3.0, 25.0])
    with pytest.raises(OptionError, match="k_min < k_init < k_max, got"):
        DistancePrior(2, decay, k_init=[])


@pytest.mark.parametrize(
    ("heads", "k_init", "radii"),
    [
        (4, [2, 16], [2, 4, 8, 16]),
        (3, [16, 4], [16, 8, 4]),
        (1, [3, 12], [6]),
        (2, [3, 7, 15], [3, 15]),
        (5, [2, 8, 18], [2, 4, 8, 12, 18]),
        (3, [5], [5, 5, 5]),
    ],
)
def test_radii_for_another_number_of_heads(heads, k_init, radii):
    prior = DistancePrior(heads, k_init=k_init)
    torch.testing.assert_close(prior.radius_steps.tolist(), [float(r) for r in radii], rtol=1e-5, atol=0)
