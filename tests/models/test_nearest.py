"""The authors' neighbour rule: against loops over tiles, and what the preset that brings it back does."""

import math
from itertools import pairwise

import pytest
import torch

from psamil import Bag, PackedBags, check_model, create_model
from psamil.errors import OptionError
from psamil.models import nearest as module
from psamil.models.nearest import FLOOR, nearest_attention, nearest_counts
from psamil.models.psa import PSA_PRESETS, PSAMIL
from psamil.spatial import DECAYS, DistancePrior, Layout, get_decay, posterior_attention
from tests.spatial.cases import positions

TAU = 1e-3


def tensors(n: int, heads: int = 2, d: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(n, heads, d, generator=generator, dtype=torch.float64, requires_grad=True) * 2 for _ in range(3)
    ]


def by_loops(q, k, v, theta, decay, xy, slides):
    """Tile by tile, in words of the definition: sorted by distance, then by y, then by x; the first round(pi K^2)."""
    outputs = []
    for first, last in pairwise(slides):
        for i in range(first, last):

            def rank(j, i=i):
                dx, dy = (xy[j] - xy[i]).tolist()
                return dx**2 + dy**2, dy, dx

            by_distance = sorted(range(first, last), key=rank)
            heads = []
            for h in range(q.shape[1]):
                radius = float(decay.radius(theta[h].detach(), TAU))
                near = by_distance[: round(math.pi * radius**2)]
                d2 = torch.stack([(xy[j] - xy[i]).square().sum() for j in near])
                likelihood = torch.stack([-(q[i, h] - k[j, h]).square().sum() for j in near]) / (
                    2 * math.sqrt(q.shape[2])
                )
                weights = (likelihood.exp() * (decay.log_prior(d2, theta[h]).exp() + FLOOR)).unbind()
                heads.append(sum(w * v[j, h] for w, j in zip(weights, near, strict=True)) / sum(weights))
            outputs.append(torch.stack(heads))
    return torch.stack(outputs)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("chunk", [2**20, 100])
def test_it_is_the_loop_over_tiles_with_its_gradients(decay, chunk, monkeypatch):
    """Two slides on a lattice with gaps, one anywhere, one of a single tile; chunks of 16 queries."""
    monkeypatch.setattr(module, "PAIRS_PER_CHUNK", chunk)
    decay = get_decay(decay)
    anywhere = (positions("continuous", 20, seed=2).double() * 64).round() / 64
    xy = torch.cat((positions("lattice", 33).double(), positions("lattice", 18, seed=1).double(), anywhere, xy_of(1)))
    slides = torch.tensor([0, 33, 51, 71, 72])
    q, k, v = tensors(72)
    theta = decay.theta_of_radius(torch.tensor([1.3, 2.6], dtype=torch.float64), TAU).requires_grad_()
    fast = nearest_attention(q, k, v, theta, decay=decay, tau=TAU, layout=Layout.of(xy, slides))
    slow = by_loops(q, k, v, theta, decay, xy, slides.tolist())
    torch.testing.assert_close(fast, slow)
    upstream = torch.randn(72, 2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for actual, wanted in zip(*(torch.autograd.grad(o, (q, k, v, theta), upstream) for o in (fast, slow)), strict=True):
        assert wanted.abs().max() > 0
        torch.testing.assert_close(actual, wanted)


def xy_of(n: int) -> torch.Tensor:
    return torch.zeros(n, 2, dtype=torch.float64)


def test_counts_of_the_authors():
    """Their smallest and largest radius, and the one at the beginning."""
    gaussian = get_decay("gaussian")
    theta = gaussian.theta_of_radius(torch.tensor([1.0, 7.0, 25.0], dtype=torch.float64), TAU)
    assert nearest_counts(theta, gaussian, TAU) == [3, 154, 1963]


def test_equal_distances_are_told_apart_by_place_not_by_order():
    """Three of the five tiles of a cross: the middle, the one above, the one to the left, however they are listed."""
    cross = torch.tensor([[0, 0], [0, 1], [1, 0], [-1, 0], [0, -1]], dtype=torch.float64) / 3  # no whole steps
    for order in ([0, 1, 2, 3, 4], [4, 2, 1, 3, 0], [3, 4, 0, 2, 1]):
        xy = cross[order] + torch.tensor([0.1, 7.7])
        bag = Layout.of(xy).bags[0]
        rounded = (bag.xy / module.GRAIN_STEPS).round() * module.GRAIN_STEPS
        by_row = rounded[module._row_by_row(rounded)]
        kept = module.nearest((by_row - rounded[order.index(0)]).square().sum(-1)[None], 3)[0]
        assert [tuple(place) for place in ((by_row[kept] - rounded[order.index(0)]) * 3).round().tolist()] == [
            (0, -1),
            (-1, 0),
            (0, 0),
        ]


def test_on_a_small_slide_it_is_dense_and_the_floor_all_that_differs_from_a_disc():
    gaussian = get_decay("gaussian")
    xy = torch.cartesian_prod(torch.arange(5.0), torch.arange(5.0)).double()
    q, k, v = tensors(25)
    theta = gaussian.theta_of_radius(torch.tensor([9.0, 11.0], dtype=torch.float64), TAU)
    layout = Layout.of(xy)
    found = nearest_attention(q, k, v, theta, decay=gaussian, tau=TAU, layout=layout)
    disc = posterior_attention(q, k, v, xy, theta, decay=gaussian, tau=TAU, layout=layout)
    torch.testing.assert_close(found, disc, rtol=1e-3, atol=1e-4)
    assert not torch.equal(found, disc)


def test_a_fragment_looks_across_the_slide_and_a_disc_does_not():
    """What the rule is known for: a tile on its own attends to tiles far beyond K, at the floor of the prior."""
    xy = torch.cat((torch.tensor([[60.0, 0.0]]), torch.cartesian_prod(torch.arange(6.0), torch.arange(6.0)))).double()
    q = torch.zeros(37, 1, 2, dtype=torch.float64)
    v = torch.arange(37, dtype=torch.float64)[:, None, None].expand(37, 1, 2)
    gaussian = get_decay("gaussian")
    theta = gaussian.theta_of_radius(torch.tensor([2.0], dtype=torch.float64), TAU)
    layout = Layout.of(xy)
    far = nearest_attention(q, q, v, theta, decay=gaussian, tau=TAU, layout=layout)[0]
    disc = posterior_attention(q, q, v, xy, theta, decay=gaussian, tau=TAU, layout=layout)[0]
    assert (disc == 0).all()
    assert far[0, 0] == pytest.approx(far[0, 1].item())
    assert 1e-6 < far[0, 0] < 1e-3


def test_memory_does_not_hold_all_pairs(monkeypatch):
    """What the forward pass keeps for the backward pass: not a number per pair of tiles."""
    monkeypatch.setattr(module, "PAIRS_PER_CHUNK", 2**14)
    n = 900
    q, k, v = (t.detach().requires_grad_() for t in tensors(n))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        gaussian = get_decay("gaussian")
        theta = DistancePrior(2).double().theta
        layout = Layout.of(positions("lattice", n))
        nearest_attention(q, k, v, theta, decay=gaussian, tau=TAU, layout=layout).sum().backward()
    assert max(kept) <= 2 * n * 8


def test_the_model_keeps_what_models_promise():
    result = check_model("psa", head_dim=8, preset="legacy")
    assert not result.exceptions


def test_presets_hold_the_configurations_of_the_authors():
    assert PSA_PRESETS.keys() == {"paper-crc", "paper-stad", "paper-camelyon16", "paper-demo", "legacy"}
    for name, options in PSA_PRESETS.items():
        model = create_model("psa", 384, 1, preset=name)
        (prior,) = model.priors
        assert (prior.tau, prior.k_min, prior.k_max, prior.k_init, model.alpha) == (1e-3, 1, 25, 7, 1e-3)
        assert len(prior.free) == 3
        assert type(model.blocks[0].attention) is module_of(options.get("neighbours", "disc"))
        assert model.diversity == ("binning" if name == "legacy" else "quadrature")
    assert create_model("psa", 384, 1, preset="legacy", diversity="quadrature").diversity == "quadrature"
    with pytest.raises(OptionError, match="unknown preset 'legacy'"):
        create_model("msa", 384, 1, preset="legacy")


def module_of(neighbours: str) -> type:
    return type(PSAMIL(6, 1, heads=1, head_dim=4, neighbours=neighbours).blocks[0].attention)


def test_the_diversity_loss_of_legacy_has_no_gradient_to_speak_of():
    gradients = {}
    for preset in ("legacy", "paper-crc"):
        model = create_model("psa", 6, 1, preset=preset).double()
        model(PackedBags.of(Bag(torch.randn(9, 6), positions("lattice", 9)))).auxiliary_losses["diversity"].backward()
        gradients[preset] = float(model.priors[0].free.grad.abs().max()) / model.alpha
    assert gradients["legacy"] < 1e-6
    assert gradients["paper-crc"] > 0.1


def test_what_it_refuses():
    with pytest.raises(OptionError, match="unknown neighbours 'square'"):
        create_model("psa", 6, 1, neighbours="square")
    model = create_model("psa", 6, 1, heads=2, head_dim=4, neighbours="nearest")
    batch = PackedBags.of(Bag(torch.randn(9, 6), positions("lattice", 9)))
    with pytest.raises(OptionError, match="rows of the posterior are those of discs"):
        model.posterior_rows(batch, [0])
