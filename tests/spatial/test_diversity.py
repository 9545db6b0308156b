import math

import pytest
import torch

from psamil.errors import OptionError
from psamil.spatial import DistancePrior, diversity_entropy

FORMS = ("quadrature", "monte-carlo", "binning")
# Gradient of the entropy in the rates at the initial radii (Gaussian decay): the two densities agree, the bins do not
FIRST_GRADIENT = {2: -1.00, 3: -0.67, 4: -0.51, 8: -0.26}


def entropy_and_gradient(heads: int, form: str) -> tuple[float, torch.Tensor]:
    rates = DistancePrior(heads).double().rate.detach().requires_grad_()
    entropy = diversity_entropy(rates, form, samples=200_000, generator=torch.Generator().manual_seed(0))
    return entropy.item(), torch.autograd.grad(entropy, rates)[0]


@pytest.mark.parametrize("heads", FIRST_GRADIENT)
def test_gradient_at_initialisation(heads):
    _, quadrature = entropy_and_gradient(heads, "quadrature")
    _, monte_carlo = entropy_and_gradient(heads, "monte-carlo")
    assert quadrature[0].item() == pytest.approx(FIRST_GRADIENT[heads], abs=0.01)
    assert quadrature[-1].item() == pytest.approx(-FIRST_GRADIENT[heads], abs=0.01)
    torch.testing.assert_close(monte_carlo, quadrature, atol=0.03, rtol=0)


def test_the_authors_bins_have_no_gradient_at_two_and_three_heads():
    for heads, bits in ((2, 0.0), (3, 1.0)):
        entropy, gradient = entropy_and_gradient(heads, "binning")
        assert entropy == pytest.approx(bits, abs=1e-3)
        assert gradient.abs().max() < 1e-5
    entropy, gradient = entropy_and_gradient(4, "binning")
    assert entropy == pytest.approx(0.35, abs=0.01)
    torch.testing.assert_close(gradient, torch.tensor([-3.1, -2.1, -1.4, -0.9]).double(), atol=0.06, rtol=0)


def test_known_entropies():
    one = torch.tensor([0.4], dtype=torch.float64)
    gaussian = 0.5 * math.log(2 * math.pi * math.e * 0.1**2)
    assert diversity_entropy(one).item() == pytest.approx(gaussian, abs=1e-12)
    apart = torch.tensor([0.0, 1.0], dtype=torch.float64)  # ten bandwidths: a mixture without overlap
    assert diversity_entropy(apart).item() == pytest.approx(gaussian + math.log(2), abs=1e-5)


def test_the_default_form_moves_heads_apart():
    prior = DistancePrior(3)
    optimizer = torch.optim.Adam(prior.parameters(), lr=1e-2)
    for _ in range(600):
        optimizer.zero_grad()
        (-diversity_entropy(prior.rate)).backward()
        optimizer.step()
    low, middle, high = prior.radius_steps.sort().values.tolist()
    assert low < 3
    assert 10 < middle < 16
    assert high > 22


def test_a_head_at_a_bound_is_moved_by_diversity():
    prior = DistancePrior(3)
    with torch.no_grad():
        prior.free.copy_(torch.tensor([2.9, 3.0, 3.1]))  # all at the upper bound
    optimizer = torch.optim.Adam(prior.parameters(), lr=1e-1)
    for _ in range(600):
        optimizer.zero_grad()
        (-diversity_entropy(prior.rate)).backward()
        optimizer.step()
    assert prior.radius_steps.min() < 5
    assert prior.radius_steps.max() > 20


def test_unknown_form():
    with pytest.raises(OptionError, match="unknown form of diversity 'kde'"):
        diversity_entropy(torch.rand(3), "kde")
