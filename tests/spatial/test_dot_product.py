"""Attention by products of queries and keys against its definition in n x n arrays."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from psamil.spatial import Layout, dot_product
from psamil.spatial.dot_product import (
    Disc,
    GlobalAlibi,
    LocalAlibi,
    dense_attention,
    local_attention,
    tabled_attention,
)
from tests.spatial.cases import inputs, positions

SLIDES = torch.tensor([0, 40, 41, 90])
PRIORS = {
    "disc": (Disc(), [1.0, 3.0]),
    "local": (LocalAlibi(3.0), [0.5, 0.1]),
    "global": (GlobalAlibi(3.0, 9.0), [0.5, 0.1]),
}


def slides_xy(kind: str) -> Tensor:
    return torch.cat([positions(kind, b - a, seed=a) for a, b in pairwise(SLIDES.tolist())])


def by_definition(q: Tensor, k: Tensor, v: Tensor, xy: Tensor, bias) -> Tensor:
    """``bias(d, head)`` is added to q . k / sqrt d; tiles of other slides are not there."""
    slide = torch.repeat_interleave(SLIDES.diff())
    d = torch.cdist(xy, xy, compute_mode="donot_use_mm_for_euclid_dist")
    heads = []
    for head in range(q.shape[1]):
        score = q[:, head] @ k[:, head].T / math.sqrt(q.shape[2]) + bias(d, head)
        weights = score.masked_fill(slide[:, None] != slide, -math.inf).softmax(1)
        heads.append(weights @ v[:, head])
    return torch.stack(heads, 1)


def assert_same(actual, expected, leaves: list[Tensor], others: list[Tensor], grad: Tensor, tolerance: float) -> None:
    """Values, and gradients by the leaves and the leaves of the definition."""
    results = [actual, *torch.autograd.grad(actual, leaves, grad)]
    wanted = [expected, *torch.autograd.grad(expected, others, grad.double())]
    for a, e in zip(results, wanted, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=tolerance, atol=tolerance)


def leaves_of(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """q, k, v in a precision, the same numbers in float64, and a gradient."""
    *qkv, grad = inputs(90, 2, 5, dtype)
    return [t.requires_grad_() for t in qkv], [t.detach().double().requires_grad_() for t in qkv], grad


@pytest.mark.parametrize("kind", ["lattice", "continuous", "duplicates"])
@pytest.mark.parametrize("name", PRIORS)
def test_fixed_priors(name: str, kind: str) -> None:
    prior, theta = PRIORS[name]
    xy = slides_xy(kind)

    def bias(d: Tensor, head: int) -> Tensor:
        near = d <= (theta[head] if name == "disc" else 3.0) + 1e-9
        inside = torch.zeros_like(d) if name == "disc" else -theta[head] * d
        return torch.where(near, inside, -theta[head] * 9.0 if name == "global" else -math.inf)

    paths = [None, "scattered", "dense"] + ["lattice"] * (kind != "continuous" and name != "global")
    for path in paths:
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
            leaves, wide, grad = leaves_of(dtype)
            layout = Layout.of(xy, SLIDES, path)
            actual = local_attention(*leaves, xy, torch.tensor(theta, dtype=dtype), prior, layout)
            assert_same(actual, by_definition(*wide, xy, bias), leaves, wide, grad, tolerance)


@pytest.mark.parametrize("factor", [0.0, 1e-3, 30.0])
def test_norms_of_keys(factor: float) -> None:
    """Keys are lifted onto a sphere: nothing of it may be seen, whatever their length."""
    xy = slides_xy("lattice")
    (q, k, v), _, grad = leaves_of(torch.float64)
    k = (factor * k).detach().requires_grad_()
    actual = local_attention(q, k, v, xy, torch.tensor([2.0, 3.0]), Disc(), Layout.of(xy, SLIDES))
    expected = by_definition(q, k, v, xy, lambda d, head: torch.where(d <= 2.0 + head, 0.0, -math.inf))
    assert_same(actual, expected, [q, k, v], [q, k, v], grad, 1e-9)


def test_dense_attention() -> None:
    leaves, wide, grad = leaves_of(torch.float64)
    xy = slides_xy("lattice")
    actual = dense_attention(*leaves, Layout.of(xy, SLIDES))
    assert_same(actual, by_definition(*wide, xy, lambda d, head: 0.0), leaves, wide, grad, 1e-10)


@pytest.mark.parametrize("kind", ["lattice", "continuous"])
@pytest.mark.parametrize("pairs", [100, 2**21])
def test_tabled_attention(monkeypatch: pytest.MonkeyPatch, pairs: int, kind: str) -> None:
    monkeypatch.setattr(dot_product, "PAIRS_PER_CHUNK", pairs)
    leaves, wide, grad = leaves_of(torch.float64)
    xy = slides_xy(kind)
    table = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    actual = tabled_attention(*leaves, table, (1.0, 2.0, 5.0), Layout.of(xy, SLIDES))

    def bias(d: Tensor, head: int) -> Tensor:
        classes = (d >= 1).long() + (d >= 2).long() + (d >= 5).long()
        return table[head][classes]

    assert_same(actual, by_definition(*wide, xy, bias), [*leaves, table], [*wide, table], grad, 1e-10)


def test_no_tiles() -> None:
    empty = torch.zeros(0, 2, 5, requires_grad=True)
    xy = torch.zeros(0, 2)
    layout = Layout.of(xy)
    table = torch.zeros(2, 3)
    for out in (
        local_attention(empty, empty, empty, xy, torch.ones(2), Disc(), layout),
        dense_attention(empty, empty, empty, layout),
        tabled_attention(empty, empty, empty, table, (1.0, 2.0), layout),
    ):
        assert out.shape == (0, 2, 5)
        out.sum().backward()
