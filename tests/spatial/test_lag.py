"""What surrounds a tile: the fast paths against n x n arrays, those against a loop, and what must not change it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from psamil.errors import ShapeError
from psamil.spatial import DECAYS, Layout, get_decay, spatial_lag, spatial_lag_reference
from tests.spatial.cases import KINDS, inputs, positions, thetas

RADII = [1.0, 4.3, 12.0]


def with_gradients(function, v: Tensor, theta: Tensor, xy: Tensor, grad: Tensor, **options) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (v, theta)]
    out = function(leaves[0], xy, leaves[1], **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def compare(xy, decay, radii, path=None, dtype=torch.float64, tolerance=1e-10, bags=None) -> None:
    v, _, _, grad = inputs(len(xy), len(radii), 5, dtype)
    theta = thetas(decay, radii).to(dtype)
    expected = with_gradients(
        spatial_lag_reference, v.double(), theta.double(), xy, grad.double(), decay=decay, bags=bags
    )
    layout = Layout.of(xy, bags, path=path)
    actual = with_gradients(spatial_lag, v, theta, xy, grad, decay=decay, layout=layout)
    for name, a, e in zip(("lag", "dv", "dtheta"), actual, expected, strict=True):
        assert a.dtype == dtype
        assert (a.double() - e).abs().max() <= tolerance * e.abs().max().clamp_min(1.0), f"{name}, path {path}"


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_path_equals_the_reference(decay, kind):
    xy = positions(kind, 300)
    lattice = [] if Layout.of(xy).bags[0].lattice is None else ["lattice"]
    for path in ("scattered", "dense", *lattice):
        compare(xy, decay, RADII, path)
        compare(xy, decay, RADII, path, torch.float32, 2e-5)
    compare(xy, decay, RADII, None, torch.float32, 2e-5)  # compiled, where it can be


@pytest.mark.parametrize("decay", DECAYS)
def test_the_reference_equals_a_loop_written_from_the_formula(decay):
    xy = torch.cat((positions("continuous", 12), positions("lattice", 8)))
    v = inputs(20, 1, 3)[0]
    theta = thetas(decay, [3.0])
    found = spatial_lag_reference(v, xy, theta, decay=decay, bags=torch.tensor([0, 12, 20]))
    for i in range(20):
        total, others = 0.0, torch.zeros(3, dtype=torch.float64)
        for j in range(20):
            distance = math.dist(xy[i].tolist(), xy[j].tolist())
            if (i < 12) == (j < 12) and distance <= 3.0 * (1 + 1e-9):
                d2 = torch.tensor(distance**2, dtype=torch.float64)
                weight = float(get_decay(decay).log_prior(d2, theta[0]).exp())
                total += weight
                others += weight * v[j, 0] * (i != j)
        torch.testing.assert_close(found[i, 0], others / total)


def test_gradients_are_those_of_finite_differences():
    xy = positions("continuous", 15)
    tensors = [inputs(15, 2, 3)[0].requires_grad_(), thetas("gaussian", [2.5, 5.0]).requires_grad_()]
    for path in ("dense", "scattered"):
        layout = Layout.of(xy, path=path)
        assert torch.autograd.gradcheck(
            lambda v, theta, layout=layout: spatial_lag(v, xy, theta, decay="gaussian", layout=layout), tensors
        )


def test_packed_bags_do_not_see_each_other():
    parts = [positions("lattice", 200), positions("continuous", 1), positions("continuous", 90)]
    bags = torch.tensor([0, 200, 201, 291])
    compare(torch.cat(parts), "cauchy", RADII, bags=bags)


def test_a_tile_on_its_own_is_surrounded_by_nothing():
    xy = torch.tensor([[0.0, 0.0], [50.0, 0.0], [50.5, 0.0]]).double()
    v = torch.ones(3, 1, 2, dtype=torch.float64)
    lag = spatial_lag(v, xy, thetas("gaussian", [3.0]), decay="gaussian")
    assert lag[0].abs().max() < 1e-12
    assert (lag[1:] > 0.4).all()
    assert spatial_lag(v[:0], xy[:0], thetas("gaussian", [3.0]), decay="gaussian").shape == (0, 1, 2)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(KINDS), st.integers(2, 80), st.integers(0, 2**16), st.floats(0.5, 20))
def test_a_tiles_own_value_is_not_in_it(kind, n, seed, radius):
    xy = positions(kind, n, seed)
    v = inputs(n, 1, 2, seed=seed)[0]
    other = v.clone()
    other[0] += 100.0
    theta = thetas("exponential", [radius])
    before, after = (spatial_lag(t, xy, theta, decay="exponential") for t in (v, other))
    torch.testing.assert_close(before[0], after[0], rtol=0, atol=1e-9)


def test_errors():
    xy = positions("lattice", 10)
    v = inputs(10, 1, 2)[0]
    with pytest.raises(ShapeError, match="layout holds 9 tiles"):
        spatial_lag(v, xy, thetas("gaussian", [3.0]), decay="gaussian", layout=Layout.of(xy[:9]))
