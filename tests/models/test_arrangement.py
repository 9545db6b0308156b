"""The arrangement against its formula, what it must not see, and PSA-MIL with it."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from psamil import Bag, PackedBags, check_model, create_model
from psamil.errors import OptionError
from psamil.models.arrangement import Arrangement, logarithmic_mean
from psamil.spatial import DistancePrior, Layout
from tests.spatial.cases import positions


def two_bags() -> PackedBags:
    """One of two slides, and one of cells."""
    generator = torch.Generator().manual_seed(0)
    two = torch.cat((positions("lattice", 30), positions("lattice", 11, seed=1)))
    features = torch.randn(66, 6, generator=generator, dtype=torch.float64)
    first = Bag(features[:41], two, "two slides", slides=torch.tensor([0, 30, 41]))
    return PackedBags.of([first, Bag(features[41:], positions("continuous", 25), "cells")])


def kinds_of(batch: PackedBags) -> PackedBags:
    """The same with features that are kinds of tiles, one each."""
    return replace(batch, features=torch.nn.functional.one_hot(batch.features.argmax(1), 6).double())


def arranged(batch: PackedBags, heads: int = 2, n_out: int = 2) -> tuple:
    torch.manual_seed(0)
    model = Arrangement(batch.features.shape[1], n_out, heads).double()
    torch.nn.init.normal_(model.learned)
    torch.nn.init.normal_(model.bias)
    prior = DistancePrior(heads, k_init=4.0).double()
    return model, prior, *model(batch, Layout.of(batch.xy, batch.slides), prior)


def enrichment_of_slide(x: torch.Tensor, xy: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    """(heads, kinds, kinds) counted pair by pair, for tiles of one kind each."""
    kinds, weights = x.argmax(1), torch.zeros(len(theta), x.shape[1], x.shape[1], dtype=torch.float64)
    for head, sigma in enumerate(theta.tolist()):
        radius = sigma * math.sqrt(2 * math.log(1e3))
        for i in range(len(x)):
            distance = (xy - xy[i]).norm(dim=1)
            near = torch.where(distance <= radius, (-(distance**2) / (2 * sigma**2)).exp(), 0.0)
            for j in range(len(x)):
                if j != i:
                    weights[head, kinds[i], kinds[j]] += near[j] / near.sum()
    table = weights / weights.sum((1, 2), keepdim=True)
    chance = table.sum(2, keepdim=True) * table.sum(1, keepdim=True)
    n = len(x)  # each of them has neighbours
    return (n * table + 5).log() - (n * chance + 5).log()


def test_it_is_linear_in_the_enrichment_of_pairs_of_kinds():
    batch = kinds_of(two_bags())
    model, prior, logits, evidence = arranged(batch)
    slides = [
        enrichment_of_slide(batch.features[a:b], batch.xy[a:b].double(), prior.theta.detach())
        for a, b in pairwise(batch.slides.tolist())
    ]
    first, second, cells = (torch.einsum("hab,ohab->o", one, model.weight) + 4 * model.bias for one in slides)
    torch.testing.assert_close(logits, torch.stack([(first + second) / 2, cells]))
    torch.testing.assert_close(logits, torch.stack([evidence[:41].mean(0), evidence[41:].mean(0)]))


def test_its_scale_is_that_of_the_slides_it_has_seen():
    batch = kinds_of(two_bags())
    model, prior, _, _ = arranged(batch)
    batch.features[:, 2] = 0  # never there: the same in all slides
    layout = Layout.of(batch.xy, batch.slides)
    found = torch.stack([slide.enrichment() for slide in model.meetings(batch, layout, prior)]).detach()
    model.measure([batch], prior)
    torch.testing.assert_close(model.mean, found.mean(0))
    assert (model.deviation[:, 2] == 0.05).all()
    assert (model.deviation[:, :, 2] == 0.05).all()
    torch.testing.assert_close(model.deviation, found.std(0, correction=0).clamp(min=0.05))
    scaled = torch.einsum("shab,ohab->so", (found - model.mean) / model.deviation, model.weight) + 4 * model.bias
    torch.testing.assert_close(model(batch, layout, prior)[0][1], scaled[2])


def test_features_count_relative_to_their_sum_and_not_below_0():
    batch = kinds_of(two_bags())
    _, _, logits, evidence = arranged(batch)
    _, _, logits_of_other, evidence_of_other = arranged(replace(batch, features=250 * batch.features))
    torch.testing.assert_close((logits_of_other, evidence_of_other), (logits, evidence))
    below = torch.where(batch.features > 0, batch.features, -1.0)
    torch.testing.assert_close(arranged(replace(batch, features=below))[2], logits)


def test_a_kind_that_never_occurs_says_nothing():
    batch = kinds_of(two_bags())
    batch.features[:, 2] = 0
    model, prior, _, evidence = arranged(batch)
    with torch.no_grad():
        model.learned[:, :, 2] += 5
        model.learned[:, :, :, 2] += 5
    torch.testing.assert_close(model(batch, Layout.of(batch.xy, batch.slides), prior)[1], evidence)


def test_what_a_slide_consists_of_is_not_in_it():
    """Types at random, few or many of one, on small and large slides: all alike; types in clumps: not."""
    generator = torch.Generator().manual_seed(1)

    def value(is_first: torch.Tensor) -> float:
        side = math.isqrt(len(is_first))
        types = torch.stack((is_first, ~is_first), 1).double()
        torch.manual_seed(0)
        batch = PackedBags.of(
            Bag(types, torch.cartesian_prod(torch.arange(side), torch.arange(side)).double(), "slide")
        )
        model, _, logits, _ = arranged(batch, heads=1, n_out=1)
        return abs(float((logits - 4 * model.bias).detach()))

    at_random = [value(torch.rand(n, generator=generator) < share) for share in (0.05, 0.2, 0.5) for n in (1600, 6400)]
    assert value(torch.arange(1600) < 800) > 10 * max(at_random)


def test_isolated_tiles_are_no_meetings():
    """Two tiles that touch, and many out of reach: two meetings, not as many as there are tiles."""
    far = 100 * torch.arange(1, 500, dtype=torch.float64)[:, None].expand(-1, 2)
    xy = torch.cat((torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=torch.float64), far))
    kinds = torch.nn.functional.one_hot(torch.arange(501) % 6, 6).double()
    model, prior, _, _ = arranged(PackedBags.of(Bag(kinds, xy, "slide")))
    batch = PackedBags.of(Bag(kinds, xy, "slide"))
    (slide,) = model.meetings(batch, Layout.of(batch.xy, batch.slides), prior)
    expected = torch.zeros(2, 6, 6, dtype=torch.float64)
    expected[:, 0, 1] = expected[:, 1, 0] = 1
    torch.testing.assert_close(slide.counts.detach(), expected)


def test_a_kind_that_training_hardly_saw_does_not_outweigh_all_others():
    torch.manual_seed(0)
    few, many = torch.randint(0, 5, (20, 400)), torch.randint(0, 5, (400,))
    few[0, 0] = 5  # one tile of the sixth kind in all slides
    many[:60] = 5  # a slide full of them, side by side
    xy = torch.cartesian_prod(torch.arange(20), torch.arange(20)).double()
    seen, new = (
        PackedBags.of([Bag(torch.nn.functional.one_hot(one, 6).double(), xy, "slide") for one in kinds])
        for kinds in (few, many[None])
    )
    model, prior, _, _ = arranged(seen)
    model.measure([seen], prior)
    (slide,) = model.meetings(new, Layout.of(new.xy, new.slides), prior)
    scaled = (slide.enrichment().detach() - model.mean) / model.deviation
    assert float(scaled.abs().max()) < 60


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_leaves_its_sums_alone(dtype):
    batch = kinds_of(two_bags())
    batch = replace(batch, features=batch.features.float())
    model = create_model("psa", 6, 2, heads=2, head_dim=4, arrangement=True)
    torch.nn.init.normal_(model.arrangement.learned)
    layout = Layout.of(batch.xy, batch.slides)
    expected = model.arrangement(batch, layout, model.priors[0])
    with torch.autocast("cpu", dtype):
        torch.testing.assert_close(model.arrangement(batch, layout, model.priors[0]), expected, rtol=0, atol=0)


def test_slides_in_which_nobody_meets():
    """One tile, tiles out of reach and none at all: as where kinds meet by chance, with gradients."""
    far = torch.tensor([[0.0, 0.0], [100.0, 0.0], [0.0, 100.0]], dtype=torch.float64)
    features = torch.eye(3, 6, dtype=torch.float64)
    bags = [Bag(features, far, "far"), Bag(features[:1], far[:1], "one"), Bag(features[:0], far[:0], "none")]
    model, prior, logits, evidence = arranged(PackedBags.of(bags))
    torch.testing.assert_close(evidence, 4 * model.bias.expand(4, -1))
    logits.sum().backward()
    assert model.learned.grad.isfinite().all()
    assert prior.free.grad.isfinite().all()


def test_logarithmic_mean_and_its_gradient():
    p = torch.tensor([1.0, 0.5, 0.2, 0.2 * (1 + 1e-5), 1e-3], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.1, 0.5, 0.2, 0.2, 1.0], dtype=torch.float64, requires_grad=True)
    mean = logarithmic_mean(p, q)
    expected = [0.9 / math.log(10), 0.5, 0.2, 0.2 * (1 + 0.5e-5), 0.999 / math.log(1000)]
    torch.testing.assert_close(mean, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0)
    assert torch.autograd.gradcheck(logarithmic_mean, (p, q))


@pytest.mark.parametrize("pooling", ["linear", "gated"])
def test_logits_of_psa_are_the_mean_of_the_evidence(pooling):
    torch.manual_seed(0)
    model = create_model("psa", 6, 3, heads=2, head_dim=4, pooling=pooling, arrangement=True).double()
    torch.nn.init.normal_(model.arrangement.learned)
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
    torch.nn.init.normal_(model.arrangement.learned)
    out = model(two_bags())
    alone = out.extra_predictions["arrangement"]
    assert alone.bag.tolist() == [0, 1]
    torch.testing.assert_close(out.logits, trunk_alone(model))
    evidence = model.predict(*model.tiles(two_bags()), two_bags()).tile_evidence
    torch.testing.assert_close(out.tile_evidence, evidence)  # whatever learns from it leaves the arrangement alone
    torch.testing.assert_close(model.eval()(two_bags()).logits, trunk_alone(model) + 4 * alone.logits)
    own = dict(model.arrangement.named_parameters())

    def learning(loss: torch.Tensor) -> set[str]:
        parameters = dict(model.named_parameters())
        found = torch.autograd.grad(loss, parameters.values(), retain_graph=True, allow_unused=True)
        return {name for name, gradient in zip(parameters, found, strict=True) if gradient is not None}

    by_the_whole = learning(out.logits.square().sum())
    by_itself = learning(alone.logits.square().sum())
    assert not {f"arrangement.{name}" for name in own} & by_the_whole
    assert {"head.weight", "score.weight"} <= by_the_whole
    assert by_itself == {"arrangement.learned", "arrangement.bias", "blocks.0.attention.prior.free"}


def test_it_begins_as_the_model_of_the_paper():
    torch.manual_seed(0)
    plain = create_model("psa", 6, 2, heads=2, head_dim=4)
    torch.manual_seed(0)
    model = create_model("psa", 6, 2, heads=2, head_dim=4, arrangement=True)
    batch = two_bags()
    torch.testing.assert_close(model.eval()(batch).logits, plain.eval()(batch).logits)


def test_psa_gives_it_its_scale_before_the_first_epoch():
    torch.manual_seed(0)
    model = create_model("psa", 6, 2, heads=2, head_dim=4, arrangement=True).double().eval()
    batch = kinds_of(two_bags())
    model.start_epoch(1, 3, lambda: iter([batch]))
    assert (model.arrangement.deviation == 1).all()
    model.start_epoch(0, 3, lambda: iter([batch]))
    layout = Layout.of(batch.xy, batch.slides)
    found = [slide.enrichment() for slide in model.arrangement.meetings(batch, layout, model.priors[0])]
    torch.testing.assert_close(model.arrangement.mean, torch.stack(found).mean(0).detach())


def test_it_keeps_what_every_model_promises():
    check_model("psa", heads=2, head_dim=4, arrangement=True)


@pytest.mark.parametrize(("width", "options"), [(6, {"pooling": "evidence"}), (65, {})])
def test_errors(width, options):
    with pytest.raises(OptionError, match="arrangement"):
        create_model("psa", width, 2, heads=2, head_dim=4, arrangement=True, **options)
