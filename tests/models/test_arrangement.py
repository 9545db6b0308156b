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


def arranged(batch: PackedBags, heads: int = 2, n_out: int = 2) -> tuple:
    torch.manual_seed(0)
    model = Arrangement(batch.features.shape[1], n_out, heads).double()
    torch.nn.init.normal_(model.meetings)
    torch.nn.init.normal_(model.bias)
    prior = DistancePrior(heads, k_init=4.0).double()
    return model, prior, *model(batch, Layout.of(batch.xy, batch.slides), prior)


def residuals(batch: PackedBags) -> torch.Tensor:
    slides = [batch.features[a:b] for a, b in pairwise(batch.slides.tolist())]
    return torch.cat([(x - x.mean(0)) / (x.square().mean(0) + 0.01).sqrt() for x in slides])


def test_it_is_a_bilinear_form_of_tiles_and_their_surroundings():
    batch = two_bags()
    model, prior, logits, evidence = arranged(batch)
    u = residuals(batch)[:, None].expand(-1, 2, -1)
    lag = spatial_lag_reference(u, batch.xy, prior.theta, decay="gaussian", bags=batch.slides)
    covariance = u[..., :, None] * lag[..., None, :]  # (n, heads, kinds, kinds)
    expected = torch.einsum("nhab,ohab->no", covariance, model.weight) + 30 * model.bias
    torch.testing.assert_close(evidence, expected)
    torch.testing.assert_close(logits, torch.stack([expected[:41].mean(0), expected[41:].mean(0)]))


def test_a_kind_that_never_occurs_says_nothing():
    batch = two_bags()
    batch.features[:, 2] = 0
    model, prior, _, evidence = arranged(batch)
    with torch.no_grad():
        model.meetings[:, :, 2] += 5
        model.meetings[:, :, :, 2] += 5
    torch.testing.assert_close(model(batch, Layout.of(batch.xy, batch.slides), prior)[1], evidence)


def test_what_a_slide_consists_of_is_not_in_it():
    """Types at random, few or many of one: all alike; types in clumps: not."""
    generator = torch.Generator().manual_seed(1)
    xy = torch.cartesian_prod(torch.arange(40), torch.arange(40)).double()

    def value(is_first: torch.Tensor) -> float:
        types = torch.stack((is_first, ~is_first), 1).double()
        torch.manual_seed(0)
        batch = PackedBags.of(Bag(types, xy, "slide"))
        model, _, logits, _ = arranged(batch, heads=1, n_out=1)
        return abs(float((logits - 30 * model.bias).detach()))

    at_random = [value(torch.rand(1600, generator=generator) < share) for share in (0.05, 0.2, 0.5)]
    in_halves = value(xy[:, 0] < 20)
    assert in_halves > 20 * max(at_random)


@pytest.mark.parametrize("pooling", ["linear", "gated"])
def test_logits_of_psa_are_the_mean_of_the_evidence(pooling):
    torch.manual_seed(0)
    model = create_model("psa", 6, 3, heads=2, head_dim=4, pooling=pooling, arrangement=True).double()
    torch.nn.init.normal_(model.arrangement.meetings)
    batch = two_bags()
    out = model.eval()(batch)
    means = torch.stack([out.tile_evidence[:41].mean(0), out.tile_evidence[41:].mean(0)])
    torch.testing.assert_close(out.logits, means, rtol=1e-5, atol=1e-6)


def trunk_alone(model: torch.nn.Module) -> torch.Tensor:
    """Logits of PSA-MIL without its arrangement."""
    batch = two_bags()
    return model.predict(*model.tiles(batch), batch).logits


def test_both_learn_apart_and_predict_together():
    torch.manual_seed(0)
    model = create_model("psa", 6, 3, heads=2, head_dim=4, arrangement=True).double().train()
    torch.nn.init.normal_(model.arrangement.meetings)
    out = model(two_bags())
    alone = out.extra_predictions["arrangement"]
    assert alone.bag.tolist() == [0, 1]
    torch.testing.assert_close(out.logits, trunk_alone(model))
    evidence = model.predict(*model.tiles(two_bags()), two_bags()).tile_evidence
    torch.testing.assert_close(out.tile_evidence, evidence)  # whatever learns from it leaves the arrangement alone
    torch.testing.assert_close(model.eval()(two_bags()).logits, trunk_alone(model) + 30 * alone.logits)
    own = dict(model.arrangement.named_parameters())

    def learning(loss: torch.Tensor) -> set[str]:
        parameters = dict(model.named_parameters())
        found = torch.autograd.grad(loss, parameters.values(), retain_graph=True, allow_unused=True)
        return {name for name, gradient in zip(parameters, found, strict=True) if gradient is not None}

    by_the_whole = learning(out.logits.square().sum())
    by_itself = learning(alone.logits.square().sum())
    assert not {f"arrangement.{name}" for name in own} & by_the_whole
    assert {"head.weight", "score.weight"} <= by_the_whole
    assert by_itself == {"arrangement.meetings", "arrangement.bias", "blocks.0.attention.prior.free"}


def test_it_begins_as_the_model_of_the_paper():
    torch.manual_seed(0)
    plain = create_model("psa", 6, 2, heads=2, head_dim=4)
    torch.manual_seed(0)
    model = create_model("psa", 6, 2, heads=2, head_dim=4, arrangement=True)
    batch = two_bags()
    torch.testing.assert_close(model.eval()(batch).logits, plain.eval()(batch).logits)


def test_it_keeps_what_every_model_promises():
    check_model("psa", heads=2, head_dim=4, arrangement=True)


@pytest.mark.parametrize(("width", "options"), [(6, {"pooling": "evidence"}), (65, {})])
def test_errors(width, options):
    with pytest.raises(OptionError, match="arrangement"):
        create_model("psa", width, 2, heads=2, head_dim=4, arrangement=True, **options)
