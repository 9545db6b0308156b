"""The fast paths against the dense reference, that against a plain loop, and what must not change the result."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from psamil.errors import OptionError, ShapeError
from psamil.spatial import DECAYS, Layout, kernels, posterior_attention, posterior_attention_reference
from tests.spatial.cases import KINDS, compare, inputs, positions, thetas
from tests.spatial.loop_oracle import posterior_attention_loop

PATHS = ("lattice", "scattered", "dense")
RADII = ([0.5, 1.0, 1.5], [2.0, 7.0, 4.3], [15.0, 25.0, 9.9])


def paths_of(xy: torch.Tensor) -> list[str]:
    return [path for path in PATHS if path != "lattice" or Layout.of(xy).bags[0].lattice is not None]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("radii", RADII, ids=str)
def test_every_path_equals_the_reference_in_float64(decay, kind, radii):
    xy = positions(kind, 400)
    compare(xy, decay, radii, paths=paths_of(xy))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("radii", RADII, ids=str)
def test_every_path_equals_the_reference_in_float32(decay, kind, radii):
    xy = positions(kind, 400)
    compare(xy, decay, radii, d=16, paths=paths_of(xy), dtype=torch.float32, tolerance=2e-5)


def test_any_radius_on_a_lattice():
    """Radii just below a whole number are where a tile one step too far could slip in."""
    xy = positions("lattice", 150)
    for radius in [*torch.linspace(0.5, 12, 93).tolist(), 4.98, 4.999, 5.0, 5.001]:
        compare(xy, "cauchy", [radius], d=2, paths=["lattice"])


@pytest.mark.parametrize("n", [1, 2, 3, 65, 1000, 3000])
@pytest.mark.parametrize("kind", ["lattice", "continuous"])
def test_sizes(n, kind):
    xy = positions(kind, n)
    compare(xy, "gaussian", [1.0, 6.0], d=2, paths=paths_of(xy))


def test_unpruned_attention():
    for kind in ("lattice", "continuous"):
        xy = positions(kind, 300)
        for decay in DECAYS:
            compare(xy, decay, [3.0, 9.0], tau=0.0, paths=("scattered", "dense", None))


@pytest.mark.parametrize("n_bags", [1, 2, 5])
def test_packed_bags(n_bags):
    kinds = ["lattice", "continuous", "two phases", "lattice", "duplicates"][:n_bags]
    parts = [
        positions(kind, size, seed=i)
        for i, (kind, size) in enumerate(zip(kinds, (400, 1, 90, 230, 65)[:n_bags], strict=True))
    ]
    bags = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    for decay in DECAYS:
        compare(torch.cat(parts), decay, [2.0, 7.0, 20.0], bags=bags, paths=(None, "scattered", "dense"))


def test_bags_on_different_paths_share_a_call():
    parts = [
        positions("lattice", 1500),
        positions("continuous", 40),
        positions("continuous", 1200),
        positions("lattice", 9),
    ]
    bags = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    xy = torch.cat(parts)
    chosen = Layout.of(xy, bags).choose([3.0, 5.0])
    assert set(chosen) == {"lattice", "scattered", "dense"}
    compare(xy, "exponential", [3.0, 5.0], d=2, bags=bags)


def test_empty_bags_and_no_tiles():
    xy = positions("lattice", 30)
    q, k, v, _ = inputs(30, 2, 4)
    theta = thetas("gaussian", [3.0, 5.0])
    with_empty = posterior_attention(q, k, v, xy, theta, decay="gaussian", bags=torch.tensor([0, 0, 30, 30]))
    torch.testing.assert_close(with_empty, posterior_attention(q, k, v, xy, theta, decay="gaussian"))
    none = torch.empty(0, 2, 4)
    assert posterior_attention(none, none, none, torch.empty(0, 2), theta, decay="gaussian").shape == (0, 2, 4)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("path", PATHS)
def test_gradcheck(decay, path):
    xy = positions("lattice", 23)
    q, k, v, _ = inputs(23, 2, 3)
    tensors = [t.requires_grad_() for t in (q, k, v, thetas(decay, [2.5, 4.1]))]
    layout = Layout.of(xy, path=path)
    assert torch.autograd.gradcheck(
        lambda q, k, v, theta: posterior_attention(q, k, v, xy, theta, decay=decay, layout=layout), tensors
    )


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("tau", [0.0, 1e-3, 0.2])
def test_the_reference_equals_a_loop_written_from_the_formula(decay, tau):
    parts = [positions("lattice", 20), positions("continuous", 15), positions("duplicates", 9)]
    xy, bags = torch.cat(parts), torch.tensor([0, 20, 35, 44])
    q, k, v, _ = inputs(44, 2, 5)
    theta = thetas(decay, [2.0, 6.0])
    loop = posterior_attention_loop(
        *(t.numpy() for t in (q, k, v, xy, theta)), decay=decay, tau=tau, offsets=bags.numpy()
    )
    reference = posterior_attention_reference(q, k, v, xy, theta, decay=decay, tau=tau, bags=bags)
    torch.testing.assert_close(reference, torch.from_numpy(loop), rtol=1e-11, atol=1e-12)
    fast = posterior_attention(q, k, v, xy, theta, decay=decay, tau=tau, bags=bags)
    torch.testing.assert_close(fast, torch.from_numpy(loop), rtol=1e-11, atol=1e-12)


def test_plain_self_attention_is_the_special_case():
    """Assumptions 1 to 3 of the paper: unit queries and keys, a uniform prior, variance sqrt(d)."""

    class Uniform:
        name = "uniform"

        def log_prior(self, d2, theta):
            return 0 * d2 * theta

        slope = log_prior

        def radius(self, theta, tau):
            return theta * math.inf

    xy = positions("lattice", 200)
    q, k, v, _ = inputs(200, 2, 16)
    q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    out = posterior_attention(q, k, v, xy, torch.ones(2, dtype=torch.float64), decay=Uniform())
    plain = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, k, v))).transpose(0, 1)
    torch.testing.assert_close(out, plain, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("tau", [0.0, 1e-3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_the_gaussian_dense_path_is_plain_attention_on_extended_queries_and_keys(tau, dtype, tolerance):
    xy = positions("lattice", 150)
    q, k, v, grad = inputs(150, 1, 16, dtype)
    theta = thetas("gaussian", [9.0]).to(dtype)

    def extended(q, k, v, theta):
        place = ((xy - xy.mean(0)) / theta).to(dtype)
        d2 = torch.cdist(xy, xy).square()
        keep = d2 <= 81 * (1 + 1e-6) if tau else torch.ones_like(d2, dtype=torch.bool)
        query = torch.cat((q[:, 0] / 4**0.5 / 4**0.5, place), 1)  # sqrt(d) = 4
        key = torch.cat((k[:, 0], place), 1)
        bias = -(k[:, 0].square().sum(1) / 8 + place.square().sum(1) / 2)
        score = (query @ key.T + bias).masked_fill(~keep, -math.inf)
        return (score.softmax(1) @ v[:, 0])[:, None]

    leaves = [t.clone().requires_grad_() for t in (q, k, v, theta)]
    expected = extended(*leaves)
    expected_grads = torch.autograd.grad(expected, leaves, grad)
    layout = Layout.of(xy, path="dense")
    out = posterior_attention(*leaves[:3], xy, leaves[3], decay="gaussian", tau=tau, layout=layout)
    for actual, wanted in zip((out, *torch.autograd.grad(out, leaves, grad)), (expected, *expected_grads), strict=True):
        assert (actual - wanted).abs().max() <= tolerance * wanted.abs().max()


bag_of_tiles = st.builds(
    positions, st.sampled_from(KINDS), st.integers(1, 150), st.integers(0, 2**16)
)  # small: Hypothesis tries many
radii_of_heads = st.lists(st.floats(0.5, 25), min_size=1, max_size=3)
some_decay = st.sampled_from(sorted(DECAYS))
some_path = st.sampled_from([None, "lattice", "scattered", "dense"])


def possible(path, *parts):
    return None if path == "lattice" and any("lattice" not in paths_of(part) for part in parts) else path


def attend(xy, decay, radii, path=None, order=None, bags=None):
    q, k, v, _ = inputs(len(xy), len(radii), 4)
    path = path if bags is not None else possible(path, xy)
    if order is not None:
        q, k, v, xy = q[order], k[order], v[order], xy[order]
    layout = Layout.of(xy, bags, path=path)
    return posterior_attention(q, k, v, xy, thetas(decay, radii), decay=decay, layout=layout)


@settings(max_examples=60, deadline=None)
@given(bag_of_tiles, some_decay, radii_of_heads, some_path)
def test_any_bag_equals_the_reference(xy, decay, radii, path):
    compare(xy, decay, radii, d=4, paths=[possible(path, xy)])


@settings(max_examples=40, deadline=None)
@given(bag_of_tiles, some_decay, radii_of_heads, some_path, st.randoms(use_true_random=False))
def test_order_of_tiles_does_not_matter(xy, decay, radii, path, random):
    order = torch.tensor(random.sample(range(len(xy)), len(xy)))
    permuted = attend(xy, decay, radii, path, order)
    torch.testing.assert_close(permuted, attend(xy, decay, radii, path)[order], rtol=1e-10, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(bag_of_tiles, some_decay, radii_of_heads, some_path, st.integers(-1000, 1000), st.integers(-1000, 1000))
def test_translation_does_not_matter(xy, decay, radii, path, dx, dy):
    moved = attend(xy + torch.tensor([dx, dy]), decay, radii, path)
    torch.testing.assert_close(moved, attend(xy, decay, radii, path), rtol=1e-8, atol=1e-10)


@settings(max_examples=40, deadline=None)
@given(bag_of_tiles, some_decay, radii_of_heads, some_path)
def test_rotation_by_90_degrees_does_not_matter(xy, decay, radii, path):
    rotated = torch.stack((-xy[:, 1], xy[:, 0]), 1)
    torch.testing.assert_close(
        attend(rotated, decay, radii, path), attend(xy, decay, radii, path), rtol=1e-8, atol=1e-10
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(bag_of_tiles, min_size=2, max_size=5), some_decay, radii_of_heads, some_path)
def test_a_packed_batch_equals_its_bags(parts, decay, radii, path):
    bags = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    xy = torch.cat(parts)
    packed = attend(xy, decay, radii, possible(path, *parts), bags=bags)
    q, k, v, _ = inputs(len(xy), len(radii), 4)
    for part, a, b in zip(parts, bags[:-1], bags[1:], strict=True):
        single = posterior_attention(q[a:b], k[a:b], v[a:b], part, thetas(decay, radii), decay=decay)
        torch.testing.assert_close(packed[a:b], single, rtol=1e-10, atol=1e-12)


def test_isolated_tiles_keep_themselves():
    xy = torch.tensor([[0.0, 0.0], [1e4, 0.0], [3.0, -1e4]])
    q, k, v, _ = inputs(3, 1, 4)
    out = posterior_attention(q, k, v, xy, thetas("cauchy", [2.0]), decay="cauchy")
    torch.testing.assert_close(out, v)


@pytest.mark.parametrize("gap", [1e2, 1e4, 1e6])
def test_pieces_far_apart_are_exact_in_float32(gap):
    """A block of scattered tiles may span the gap between two pieces of tissue."""
    xy = torch.cat((positions("continuous", 150), positions("continuous", 170, seed=1) + gap))
    compare(xy, "gaussian", [5.0, 2.0], dtype=torch.float32, tolerance=2e-5, paths=("scattered", "dense"))


def test_the_embedded_dense_path_stays_small(monkeypatch):
    """Its mask is n x n: a large bag must not take it, a small one may."""
    monkeypatch.setenv("PSAMIL_COMPILED", "0")
    crowd = torch.rand(6000, 2, dtype=torch.float64) * 30
    q, k, v, _ = inputs(6000, 1, 2, torch.float32)
    theta = thetas("gaussian", [25.0]).float()
    names = []
    original = kernels.pruning_mask
    monkeypatch.setattr(kernels, "pruning_mask", lambda xy, keep: names.append(len(xy)) or original(xy, keep))
    posterior_attention(q, k, v, crowd, theta, decay="gaussian")
    assert names == []
    posterior_attention(q[:900], k[:900], v[:900], crowd[:900], theta, decay="gaussian")
    assert names == [900]


def test_large_norms_stay_finite_and_exact():
    xy = positions("lattice", 200)
    q, k, v, _ = inputs(200, 1, 8)
    q, k = q * 30 + 100, k * 30 + 100
    theta = thetas("gaussian", [5.0])
    expected = posterior_attention_reference(q, k, v, xy, theta, decay="gaussian")
    for path in PATHS:
        out = posterior_attention(q, k, v, xy, theta, decay="gaussian", layout=Layout.of(xy, path=path))
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
        low = posterior_attention(
            *(t.float() for t in (q, k, v)), xy, theta.float(), decay="gaussian", layout=Layout.of(xy, path=path)
        )
        assert low.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(dtype):
    xy = positions("lattice", 100)
    q, k, v, _ = inputs(100, 2, 8, dtype)
    theta = thetas("gaussian", [4.0, 6.0]).float()
    out = posterior_attention(q, k, v, xy, theta, decay="gaussian")
    full = posterior_attention(q.float(), k.float(), v.float(), xy, theta, decay="gaussian")
    assert out.dtype == dtype
    torch.testing.assert_close(out, full.to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        inside = posterior_attention(q.float(), k.float(), v.float(), xy, theta, decay="gaussian")
    torch.testing.assert_close(inside, full)


@pytest.mark.parametrize("path", ["lattice", "scattered"])
def test_flops_are_those_of_the_kept_pairs(path):
    xy = positions("lattice", 400)
    q, k, v, grad = inputs(400, 2, 8)
    theta = thetas("gaussian", [3.0, 6.0])
    d2 = torch.cdist(xy, xy).square().round()
    pairs = sum(int((d2 <= radius**2).sum()) for radius in (3, 6))
    q.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        posterior_attention(q, k, v, xy, theta, decay="gaussian", layout=Layout.of(xy, path=path)).backward(grad)
    assert counter.get_total_flops() == (4 + 10) * 8 * pairs


def test_flops_of_the_dense_path():
    """All pairs; the Gaussian as plain attention, three columns wider."""
    xy = positions("lattice", 60)
    q, k, v, grad = inputs(60, 2, 8)
    q.requires_grad_()
    for decay, width in (("exponential", 8), ("gaussian", 8 + 3)):
        theta = thetas(decay, [30.0, 20.0])
        with FlopCounterMode(display=False) as counter:
            posterior_attention(q, k, v, xy, theta, decay=decay, layout=Layout.of(xy, path="dense")).backward(grad)
        assert counter.get_total_flops() == (4 + 10) * width * 2 * 60**2


def test_errors_name_what_is_wrong():
    q, k, v, _ = inputs(10, 2, 4)
    xy, theta = positions("lattice", 10), thetas("gaussian", [3.0, 4.0])
    with pytest.raises(ShapeError, match=r"xy must be \(10, 2\).*got \(9, 2\)"):
        posterior_attention(q, k, v, xy[:9], theta, decay="gaussian")
    with pytest.raises(ShapeError, match="q, k, v must be"):
        posterior_attention(q, k[:, :1], v, xy, theta, decay="gaussian")
    with pytest.raises(ShapeError, match="one per head"):
        posterior_attention(q, k, v, xy, theta[:1], decay="gaussian")
    with pytest.raises(ShapeError, match="layout holds 5 tiles"):
        posterior_attention(q, k, v, xy, theta, decay="gaussian", layout=Layout.of(xy[:5]))
    with pytest.raises(OptionError, match="unknown decay 'gauss'; known: 'cauchy', 'exponential', 'gaussian'"):
        posterior_attention(q, k, v, xy, theta, decay="gauss")
    for bad in (math.nan, math.inf, 0.0, -1.0):
        with pytest.raises(OptionError, match="theta must be positive and finite"):
            posterior_attention(q, k, v, xy, theta * bad, decay="exponential")
    with pytest.raises(ShapeError, match="floating point"):
        posterior_attention(q.long(), k.long(), v.long(), xy, theta, decay="gaussian")
    with pytest.raises(ShapeError, match="bags must be offsets that rise from 0 to 10"):
        posterior_attention(q, k, v, xy, theta, decay="gaussian", bags=torch.tensor([]))
    with pytest.raises(OptionError, match="tau"):
        posterior_attention(q, k, v, xy, theta, decay="gaussian", tau=1.0)
