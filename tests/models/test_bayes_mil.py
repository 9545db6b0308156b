"""Bayes-MIL: its layers and divergences by hand and by sampling, the model against a loop over bags."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from psamil import Bag, PackedBags, create_model
from psamil.errors import OptionError
from psamil.models import check_model
from psamil.models.bayes_mil import VariationalLinear, normal_divergence, smooth_in_space
from tests.models.cases import bags_at


def model_of(n_out: int = 1, **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    model = create_model("bayes_mil", 6, n_out, **{"hidden": 8, "attention_dim": 4, **options})
    with torch.no_grad():  # the initial weights are so small that all tiles look alike
        for layer in model.modules():
            if isinstance(layer, VariationalLinear):
                layer.theta.mul_(50)
                layer.bias.uniform_(-0.5, 0.5)
    return model


def bags(dtype: torch.dtype = torch.float64) -> list[Bag]:
    generator = torch.Generator().manual_seed(1)
    lattice = torch.cartesian_prod(torch.arange(5), torch.arange(4)).float()[torch.arange(20) % 3 > 0]
    places = {
        "lattice": lattice,
        "two slides": torch.cat((lattice[:7], lattice[:7] + 0.25)),
        "empty": torch.zeros(0, 2),
        "scattered": 4 * torch.rand(15, 2, generator=generator),
        "one tile": torch.zeros(1, 2),
    }
    return bags_at(places, dtype, generator)


def linear(layer: VariationalLinear, x: Tensor) -> Tensor:
    return x @ layer.theta.T + layer.bias


def expected_output(model: torch.nn.Module, bag: Bag, prior: Normal) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, scores and the mean KL of one bag in evaluation, tile by tile."""
    h = (bag.features @ model.embed.project[0].weight.T + model.embed.project[0].bias).relu()
    gated = linear(model.tile_logits.tanh, h).tanh() * linear(model.tile_logits.gate, h).sigmoid()
    moments = linear(model.tile_logits.moments, gated)
    slide = torch.repeat_interleave(bag.slides.diff())
    d = torch.cdist(bag.xy.double(), bag.xy.double(), compute_mode="donot_use_mm_for_euclid_dist")
    kernel = torch.exp(-2 * d**2) * ((d <= 1.5) & (slide[:, None] == slide))
    mean, variance = kernel @ moments[:, 0] / kernel.sum(1), moments[:, 1].exp()
    scores = mean / (1 + math.pi / 8 * variance).sqrt()
    attention = scores.sigmoid()
    z = attention @ h / attention.sum() if bag.n else torch.zeros_like(h.sum(0))
    kl = kl_divergence(Normal(mean, variance.sqrt()), prior).mean() if bag.n else torch.zeros(()).double()
    return linear(model.head, z), scores, kl


NEGATIVE, OTHER = Normal(-5.0, math.exp(-0.5)), Normal(0.0, math.exp(1.5))


@pytest.mark.parametrize(
    ("n_out", "classes", "negative"),
    [(1, (0, 1, 0, 0, 1), (0, 2, 3)), (1, None, ()), (3, (0, 1, 0, 0, 2), ())],
    ids=["two classes", "no classes", "three classes"],
)
def test_against_a_loop_over_bags(n_out: int, classes: tuple[int, ...] | None, negative: tuple[int, ...]) -> None:
    model = model_of(n_out, attention_kl=0.1, weights_kl=0.01).double().eval()
    out = model(PackedBags.of(bags()), None if classes is None else torch.tensor(classes))
    priors = [NEGATIVE if i in negative else OTHER for i in range(5)]
    results = [expected_output(model, bag, prior) for bag, prior in zip(bags(), priors, strict=True)]
    logits, scores, kls = zip(*results, strict=True)
    torch.testing.assert_close(out.logits, torch.stack(logits))
    torch.testing.assert_close(out.tile_scores, torch.cat(scores))
    attention_kl = 0.1 * torch.stack(kls).mean()
    torch.testing.assert_close(out.auxiliary_losses["attention"], attention_kl)
    layers = model.tile_logits.tanh, model.tile_logits.gate, model.tile_logits.moments, model.head
    torch.testing.assert_close(out.auxiliary_losses["weights"], 0.01 * sum(layer.kl for layer in layers))

    used = {name: p for name, p in model.named_parameters() if "log_alpha" not in name}
    weight = torch.randn(5, n_out, dtype=torch.float64)
    found = torch.autograd.grad((out.logits * weight).sum() + out.auxiliary_losses["attention"], list(used.values()))
    expected = torch.autograd.grad((torch.stack(logits) * weight).sum() + attention_kl, list(used.values()))
    for name, a, b in zip(used, found, expected, strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


def test_a_layer_draws_what_its_weights_would_give() -> None:
    torch.manual_seed(0)
    layer = VariationalLinear(5, 3, log_alpha=-1.0).double()
    layer.theta.data.mul_(100)
    layer.bias.data += 1
    x = torch.randn(5, dtype=torch.float64)
    drawn = layer(x.expand(40_000, -1)).detach()
    noise = 1 + math.exp(-0.5) * torch.randn(40_000, 3, 5, dtype=torch.float64)
    of_weights = (layer.theta * noise @ x + layer.bias).detach()
    for moment in (torch.mean, torch.std):
        torch.testing.assert_close(moment(drawn, 0), moment(of_weights, 0), rtol=0.02, atol=0.03)
    layer.eval()
    torch.testing.assert_close(layer(x), layer.theta @ x + 1)


def test_divergence_of_weights_by_hand() -> None:
    layer = VariationalLinear(4, 3, log_alpha=0.0)
    one = 0.5 * math.log(2) - 0.6134 * math.exp(-(0.2026**2))  # alpha = 1
    assert float(layer.kl.detach()) == pytest.approx(3 * one, abs=1e-6)  # averaged over 4 inputs, summed over 3 outputs
    layer = VariationalLinear(4, 3, log_alpha=-4.0)
    other = 0.5 * math.log(1 + math.exp(4)) - 0.6134 * math.exp(-((0.2026 - 2.8504) ** 2))
    assert float(layer.kl.detach()) == pytest.approx(3 * other, abs=1e-5)


def test_divergence_of_attention() -> None:
    mean, log_variance = torch.linspace(-6, 3, 7).double(), torch.linspace(-2, 4, 7).double()
    for prior_mean, prior_log_variance in ((-5.0, -1.0), (0.0, 3.0)):
        prior = torch.full((7,), prior_mean).double(), torch.full((7,), prior_log_variance).double()
        expected = kl_divergence(Normal(mean, (log_variance / 2).exp()), Normal(prior[0], (prior[1] / 2).exp()))
        torch.testing.assert_close(normal_divergence(mean, log_variance, *prior), expected)


def test_random_field() -> None:
    xy = torch.cartesian_prod(torch.arange(5), torch.arange(5)).float()
    batch = PackedBags.of(Bag(torch.zeros(25, 1), xy))
    spike = torch.zeros(25)
    spike[12] = 1  # in the middle: its neighbours have all of theirs
    smooth = smooth_in_space(spike, batch, 0.5, 1.5).view(5, 5)
    assert smooth[2, 2] == pytest.approx(0.619, abs=5e-4)
    assert smooth[1, 2] == smooth[2, 3] == pytest.approx(0.084, abs=5e-4)
    assert smooth[1, 1] == smooth[3, 1] == pytest.approx(0.011, abs=5e-4)
    assert not smooth[0].any()
    constant = torch.full((25,), -3.0)
    torch.testing.assert_close(smooth_in_space(constant, batch, 0.5, 1.5), constant)  # no leak at the border
    model = model_of(sigma_steps=0.0).double().eval()
    far = [Bag(bag.features, 10 * torch.arange(bag.n)[:, None].expand(-1, 2), bag.id) for bag in bags()]
    torch.testing.assert_close(
        model(PackedBags.of(bags())).tile_scores, model_of().double().eval()(PackedBags.of(far)).tile_scores
    )


def test_evaluation_is_the_mean_of_training() -> None:
    model = model_of(dropout=0.0).double()
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, VariationalLinear):
                layer.log_alpha.fill_(-40)  # weights are certain, attention is not
        model.tile_logits.moments.bias[1] = 1.5
        drawn = model(PackedBags.of(1500 * bags())).tile_scores.sigmoid().view(1500, -1)
        scores = model.eval()(PackedBags.of(bags())).tile_scores
    assert drawn.std(0).min() > 0.1
    torch.testing.assert_close(scores.sigmoid(), drawn.mean(0), rtol=0, atol=0.04)


def test_the_prior_of_a_negative_bag_lowers_its_attention() -> None:
    batch = PackedBags.of(bags(torch.float32)[:1])
    lowered = []
    for label in (0, 1):
        model = model_of(attention_kl=1.0, weights_kl=0.0, dropout=0.0)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(80):
            optimizer.zero_grad()
            model(batch, torch.tensor([label])).auxiliary_losses["attention"].backward()
            optimizer.step()
        with torch.no_grad():
            lowered.append(float(model.eval()(batch).tile_scores.mean()))
    assert lowered[0] < -3
    assert abs(lowered[1]) < 0.5


def test_one_time_bin_is_no_negative_class() -> None:
    model, batch, first = model_of(), PackedBags.of(bags()), torch.zeros(5, dtype=torch.long)
    of_classes = model(batch, first).auxiliary_losses["attention"]
    model.exclusive = False
    of_bins = model(batch, first).auxiliary_losses["attention"]
    torch.testing.assert_close(of_bins, model(batch, None).auxiliary_losses["attention"])
    assert not torch.isclose(of_bins, of_classes)


def test_sizes_and_constants() -> None:
    model = create_model("bayes_mil", 1024, 2)
    bayesian = 2 * (2 * 512 * 256 + 256) + 2 * 256 * 2 + 2 + 2 * 512 * 2 + 2
    assert sum(p.numel() for p in model.parameters()) == 1024 * 512 + 512 + bayesian
    assert model.head.theta.std().item() == pytest.approx(0.01, rel=0.1)
    assert {float(model.head.log_alpha.detach().mean())} == {-3.0}
    assert {
        float(layer.log_alpha.detach().mean()) for layer in model.tile_logits.children() if hasattr(layer, "kl")
    } == {-4.0}
    assert (model.weights_kl, model.attention_kl, model.embed.dropout.p) == (1e-8, 1e-6, 0.25)


def test_promises_with_other_options() -> None:
    check_model("bayes_mil", n_out=2, hidden=16, attention_dim=8, sigma_steps=1.0, radius_steps=2.5, dropout=0.5)


def test_mixed_precision() -> None:
    model, batch = model_of(2).eval(), PackedBags.of(bags(torch.float32))
    full = model(batch).logits
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(batch).logits.float(), full, rtol=0.05, atol=0.05)
        out = model.train()(batch)
    out.logits.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_errors() -> None:
    with pytest.raises(OptionError, match="dropout in"):
        model_of(dropout=1.0)
    with pytest.raises(OptionError, match="hidden and attention_dim must be at least 1"):
        model_of(hidden=0)
    with pytest.raises(OptionError, match=r"sigma_steps must not be negative, got -1\.0"):
        model_of(sigma_steps=-1.0)
