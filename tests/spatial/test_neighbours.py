"""Pairs of neighbouring tiles against all pairs, for any positions and slides."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from psamil.errors import OptionError, ShapeError
from psamil.spatial import neighbour_pairs
from psamil.spatial.reference import RADIUS_TOLERANCE
from tests.spatial.cases import KINDS, positions


def all_pairs(xy: Tensor, slides: Tensor, radius: float) -> list[tuple[int, int]]:
    slide = torch.repeat_interleave(slides.diff()).tolist()
    places = xy.double().tolist()
    return [
        (i, j)
        for i, (x, y) in enumerate(places)
        for j, (u, v) in enumerate(places)
        if i != j and slide[i] == slide[j] and (x - u) ** 2 + (y - v) ** 2 <= radius**2 * (1 + RADIUS_TOLERANCE)
    ]


def found(xy: Tensor, slides: Tensor, radius: float) -> list[tuple[int, int]]:
    pairs = neighbour_pairs(xy, slides, radius)
    assert pairs.dtype == torch.long
    return [(i, j) for i, j in pairs.T.tolist()]


@st.composite
def cases(draw) -> tuple[Tensor, Tensor]:
    n = draw(st.integers(0, 40))
    whole = st.integers(-6, 6).map(float)
    anywhere = st.floats(-8, 8, allow_nan=False)
    coordinate = draw(st.sampled_from([whole, anywhere, st.one_of(whole, anywhere)]))
    xy = torch.tensor(draw(st.lists(st.tuples(coordinate, coordinate), min_size=n, max_size=n)), dtype=torch.float64)
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=4)))  # equal cuts are slides without tiles
    far_away = draw(st.sampled_from([0.0, -1000.0, 1e5]))
    return xy.view(n, 2).to(draw(st.sampled_from([torch.float32, torch.float64]))) + far_away, torch.tensor(
        [0, *cuts, n]
    )


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from([0.3, 1.0, math.sqrt(2), 1.5, 2.0, 5.0, 100.0]))
def test_any_positions_and_slides_against_all_pairs(case: tuple[Tensor, Tensor], radius: float) -> None:
    assert found(*case, radius) == all_pairs(*case, radius)


@pytest.mark.parametrize("radius", [1.0, 1.5, 4.3])
@pytest.mark.parametrize("kind", KINDS)
def test_larger_slides_against_all_pairs(kind: str, radius: float) -> None:
    xy, slides = positions(kind, 300), torch.tensor([0, 0, 170, 170, 171, 300])
    assert found(xy, slides, radius) == all_pairs(xy, slides, radius)


def test_worked_example() -> None:
    xy = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    one_slide, two_slides = torch.tensor([0, 5]), torch.tensor([0, 3, 5])
    expected = [(0, 1), (0, 3), (0, 4), (1, 0), (1, 2), (1, 3), (1, 4), (2, 1), (3, 0), (3, 1), (3, 4)]
    assert found(xy, one_slide, 1.5) == [*expected, (4, 0), (4, 1), (4, 3)]
    assert found(xy, two_slides, 1.5) == [(0, 1), (1, 0), (1, 2), (2, 1), (3, 4), (4, 3)]


def test_a_full_lattice_has_8_neighbours_inside() -> None:
    side = 30
    xy = torch.cartesian_prod(torch.arange(side), torch.arange(side)).float()
    degree = neighbour_pairs(xy, torch.tensor([0, side**2]))[0].bincount().view(side, side)
    assert (degree[1:-1, 1:-1] == 8).all()
    assert degree[0, 0] == 3
    assert degree[0, 1] == 5


def test_no_tiles_and_one_tile() -> None:
    for n in (0, 1):
        assert neighbour_pairs(torch.zeros(n, 2), torch.tensor([0, n])).shape == (2, 0)


def test_a_hundred_thousand_tiles_need_no_array_of_pairs() -> None:
    n = 100_000
    xy = torch.stack((torch.arange(n) % 400, torch.arange(n) // 400), 1).float()
    assert neighbour_pairs(xy, torch.tensor([0, n])).shape[1] == 2 * (399 * 250 + 400 * 249 + 2 * 399 * 249)


def test_positions_get_no_gradient() -> None:
    assert not neighbour_pairs(torch.zeros(3, 2, requires_grad=True), torch.tensor([0, 3])).requires_grad


def test_errors() -> None:
    xy, slides = torch.zeros(3, 2), torch.tensor([0, 3])
    for radius in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(OptionError, match="radius_steps must be positive and finite"):
            neighbour_pairs(xy, slides, radius)
    with pytest.raises(ShapeError, match=r"xy must be \(n, 2\), got \(3, 3\)"):
        neighbour_pairs(torch.zeros(3, 3), slides)
    with pytest.raises(ShapeError, match="slides must be offsets"):
        neighbour_pairs(xy, torch.tensor([0, 2]))
    with pytest.raises(ShapeError, match="1 tiles with NaN"):
        neighbour_pairs(torch.tensor([[0.0, math.nan], [0.0, 0.0], [0.0, 0.0]]), slides)
    with pytest.raises(ShapeError, match="too far apart"):
        neighbour_pairs(torch.tensor([[0.0, 0.0], [1e12, 1e12]]), torch.tensor([0, 2]))
