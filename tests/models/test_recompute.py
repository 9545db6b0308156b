"""Recomputation: the same values and gradients, random numbers included, without what lies between."""

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from psamil.models import recompute
from psamil.models.recompute import by_rows, in_parts, recomputed, sum_by_rows


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "ROWS_AT_ONCE", 4)


@pytest.mark.parametrize("n", [0, 3, 4, 11])
def test_rows_and_sums_of_rows(n: int) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 2)).double()
    x, weights = (torch.randn(n, size, dtype=torch.float64, requires_grad=True) for size in (5, 1))

    def rows(x: Tensor, weights: Tensor) -> Tensor:
        return weights * layer(x)

    def total(x: Tensor, weights: Tensor) -> Tensor:
        return rows(x, weights).sum(0)

    for actual, expected in (
        (by_rows(rows, x, weights), rows(x, weights)),
        (sum_by_rows(total, x, weights), total(x, weights)),
    ):
        torch.testing.assert_close(actual, expected)
        inputs = (x, weights, *layer.parameters())
        gradients = [torch.autograd.grad(out.square().sum(), inputs) for out in (actual, expected)]
        torch.testing.assert_close(*gradients)
    with torch.no_grad():
        torch.testing.assert_close(by_rows(rows, x, weights), rows(x, weights))


@pytest.mark.parametrize("n", [0, 3, 11])
def test_rows_taken_apart_once_for_several_uses(n: int) -> None:
    torch.manual_seed(0)
    x, weights = (torch.randn(n, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    parts = in_parts(x)
    actual = by_rows(torch.mul, parts, weights).exp().sum() + sum_by_rows(lambda x: x.sin().sum(0), parts).sum()
    expected = (x * weights).exp().sum() + x.sin().sum()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*(torch.autograd.grad(out, (x, weights)) for out in (actual, expected)))


def test_dropout_is_drawn_once() -> None:
    torch.manual_seed(0)
    x = torch.randn(11, 6, requires_grad=True)
    out = by_rows(lambda x: dropout(x, 0.5).square(), x)
    state = torch.get_rng_state()
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(torch.get_rng_state(), state)
    assert 0 < (out == 0).sum() < out.numel()
    torch.testing.assert_close(gradient, torch.where(out == 0, 0, 8 * x.detach()))  # (2 x)^2 where it is kept


def test_what_lies_between_is_not_kept() -> None:
    between: list[weakref.ref[Tensor]] = []

    def function(x: Tensor) -> Tensor:
        y = x.exp()
        between.append(weakref.ref(y))
        return y.sin()

    x = torch.randn(5, requires_grad=True)
    plain = function(x)
    out = recomputed(function, x)
    assert [one() is None for one in between] == [False, True]
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), torch.autograd.grad(plain.sum(), x))


class CountedAttention(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("keep_attention", "calls"), [(True, 1), (False, 2)])
def test_attention_can_be_kept(keep_attention: bool, calls: int) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 24), torch.randn(10, 8, requires_grad=True)

    def attention(x: Tensor) -> Tensor:
        q, k, v = layer(x)[None, None].chunk(3, -1)
        return scaled_dot_product_attention(q, k, v)[0, 0].square()

    with CountedAttention() as counted:
        out = recomputed(attention, x, keep_attention=keep_attention)
        gradients = torch.autograd.grad(out.sum(), (x, *layer.parameters()))
    assert counted.calls == calls
    expected = torch.autograd.grad(attention(x).sum(), (x, *layer.parameters()))
    torch.testing.assert_close(gradients, expected)
