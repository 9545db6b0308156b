"""The arrangement against its formula, what it must not see, and PSA-MIL with it."""

from itertools import pairwise

import pytest
import torch

from psamil import Bag, PackedBags, check_model, create_model
from psamil.errors import OptionError
from psamil.models.arrangement import Arrangement
from psamil.spatial import DistancePrior, Layout, spatial_lag_reference
from tests.spatial.cases import positions


def two_bags() -> PackedBags:
    """One of two slides, and one of cells."""
    generator = torch.Generator().manual_seed(0)
    two = torch.cat((positions("lattice", 30), positions("lattice", 11, seed=1)))
    features = torch.randn(66, 6, generator=generator, dtype=torch.float64)
    first = Bag(features[:41], two, "two slides", slides=torch.tensor([0, 30, 41]))
    return PackedBags.of([first, Bag(features[41:], positions("continuous", 25), "cells")])


def arranged(batch: PackedBags, heads: int = 2, channels: int = 3, n_out: int = 2) -> tuple:
    torch.manual_seed(0)
    model = Arrangement(batch.features.shape[1], n_out, heads, channels).double()
    prior = DistancePrior(heads, k_init=4.0).double()
    layout = Layout.of(batch.xy, batch.slides)
    return model, prior, *model(batch.features, batch, layout, prior)


def test_it_is_a_bilinear_form_of_tiles_and_their_surroundings():
    batch = two_bags()
    model, prior, logits, evidence = arranged(batch)
    u = model.values(batch.features).view(-1, 2, 3)
    u = torch.cat([u[a:b] - u[a:b].mean(0) for a, b in pairwise(batch.slides.tolist())])
    lag = spatial_lag_reference(u, batch.xy, prior.theta, decay="gaussian", bags=batch.slides)
    covariance = u[..., :, None] * lag[..., None, :]  # (n, heads, channels, channels)
    expected = model.meetings(covariance.flatten(1))
    torch.testing.assert_close(evidence, expected)
    torch.testing.assert_close(logits, torch.stack([expected[:41].mean(0), expected[41:].mean(0)]))


def test_what_a_slide_consists_of_is_not_in_it():
    """Types at random, few or many of one: all alike; types in clumps: not."""
    generator = torch.Generator().manual_seed(1)
    xy = torch.cartesian_prod(torch.arange(40), torch.arange(40)).double()

    def value(is_first: torch.Tensor) -> float:
        types = torch.stack((is_first, ~is_first), 1).double()
        torch.manual_seed(0)
        batch = PackedBags.of(Bag(types, xy, "slide"))
        model, _, logits, _ = arranged(batch, heads=1, channels=1, n_out=1)
        return abs(float((logits - model.meetings.bias).detach()))

    at_random = [value(torch.rand(1600, generator=generator) < share) for share in (0.05, 0.2, 0.5)]
    in_halves = value(xy[:, 0] < 20)
    assert in_halves > 20 * max(at_random)


@pytest.mark.parametrize("pooling", ["linear", "gated"])
def test_logits_of_psa_are_the_mean_of_the_evidence(pooling):
    torch.manual_seed(0)
    model = create_model("psa", 6, 3, heads=2, head_dim=4, pooling=pooling, arrangement=4).double()
    batch = two_bags()
    out = model(batch)
    means = torch.stack([out.tile_evidence[:41].mean(0), out.tile_evidence[41:].mean(0)])
    torch.testing.assert_close(out.logits, means, rtol=1e-5, atol=1e-6)
    out.logits.square().sum().backward()
    for name, parameter in model.arrangement.named_parameters():
        assert parameter.grad.abs().max() > 0, name


def test_without_weights_of_meetings_it_is_the_model_of_the_paper():
    torch.manual_seed(0)
    plain = create_model("psa", 6, 2, heads=2, head_dim=4)
    torch.manual_seed(0)
    model = create_model("psa", 6, 2, heads=2, head_dim=4, arrangement=4)
    torch.nn.init.zeros_(model.arrangement.meetings.weight)
    torch.nn.init.zeros_(model.arrangement.meetings.bias)
    batch = two_bags()
    torch.testing.assert_close(model(batch).logits, plain(batch).logits)


def test_it_keeps_what_every_model_promises():
    check_model("psa", heads=2, head_dim=4, arrangement=4)


def test_errors():
    for options in ({"arrangement": -1}, {"arrangement": 4, "pooling": "evidence"}):
        with pytest.raises(OptionError, match="arrangement is a number of channels"):
            create_model("psa", 6, 2, heads=2, head_dim=4, **options)
