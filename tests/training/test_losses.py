"""Losses against formulas written out, and their gradients; nothing overflows."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from psamil.training.losses import (
    cross_entropy,
    huber,
    multilabel_cross_entropy,
    survival_cross_entropy,
    survival_log_probabilities,
    survival_nll,
)

BINS, EVENTS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]), torch.tensor([1, 1, 1, 1, 0, 0, 0, 0])
LABELS = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0])
YES = (LABELS[:, None] >= torch.arange(4)).long()
WEIGHTS = torch.tensor([[0.5, 2.0], [1.0, 1.0], [3.0, 0.25], [1.0, 4.0]])
LOSSES = {
    "two classes": lambda z: cross_entropy(z[:, :1], LABELS % 2, torch.tensor([0.7, 1.4])),
    "four classes": lambda z: cross_entropy(z, LABELS, torch.tensor([0.5, 1.0, 2.0, 4.0])),
    "labels": lambda z: multilabel_cross_entropy(z, YES, WEIGHTS),
    "number": lambda z: huber(z[:, :1], torch.linspace(-2, 2, 8)),
    "nll": lambda z: survival_nll(z, BINS, EVENTS, 0.3),
    "ce": lambda z: survival_cross_entropy(z, BINS, EVENTS, 0.3),
}


def some_logits(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name: str) -> None:
    assert gradcheck(LOSSES[name], some_logits(scale=2.0).requires_grad_())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [100.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_large_logits_are_finite(name: str, size: float, dtype: torch.dtype) -> None:
    for logits in (size * some_logits().sign(), torch.full((8, 4), size), torch.full((8, 4), -size)):
        logits = logits.to(dtype).requires_grad_()
        each = LOSSES[name](logits)
        assert each.shape == (8,)
        assert each.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        (slope,) = torch.autograd.grad(each.sum(), logits)
        assert each.isfinite().all()
        assert slope.isfinite().all()
        assert (each >= 0).all()


def test_two_classes_by_hand() -> None:
    weights = torch.tensor([0.6, 3.0])
    got = cross_entropy(torch.tensor([[0.0], [math.log(3)]]), torch.tensor([0, 1]), weights)
    torch.testing.assert_close(got, torch.tensor([0.6 * math.log(2), 3 * math.log(4 / 3)]))  # sigmoid(log 3) = 3/4
    two_columns = cross_entropy(torch.tensor([[0.0, 0.0], [0.0, math.log(3)]]), torch.tensor([0, 1]), weights)
    torch.testing.assert_close(two_columns, got)


def test_several_classes_against_the_formula() -> None:
    z, weights = some_logits(), torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    p = z.exp() / z.exp().sum(1, keepdim=True)
    expected = [-weights[y] * p[i, y].log() for i, y in enumerate(LABELS.tolist())]
    torch.testing.assert_close(cross_entropy(z, LABELS, weights), torch.stack(expected))


def test_weights_are_not_normalised_inside_a_batch() -> None:
    z, weights = some_logits()[:, :1], torch.tensor([0.5, 5.0])
    negatives = cross_entropy(z, torch.zeros(8, dtype=torch.long), weights)
    torch.testing.assert_close(negatives, 0.5 * cross_entropy(z, torch.zeros(8, dtype=torch.long), torch.ones(2)))


def test_labels_against_the_formula() -> None:
    z = some_logits()
    p = 1 / (1 + (-z).exp())
    weight = WEIGHTS.double()[torch.arange(4), YES]
    expected = -(weight * torch.where(YES == 1, p.log(), (1 - p).log())).mean(1)
    torch.testing.assert_close(multilabel_cross_entropy(z, YES, WEIGHTS), expected)


def test_huber_by_hand() -> None:
    got = huber(torch.tensor([[0.5], [3.0], [-1.0]]), torch.tensor([0.0, 0.0, 1.0]))
    torch.testing.assert_close(got, torch.tensor([0.125, 2.5, 1.5]))


def test_probabilities_of_bins() -> None:
    log_event, log_survival = survival_log_probabilities(some_logits())
    hazard = some_logits().sigmoid()
    torch.testing.assert_close(log_survival.exp(), (1 - hazard).cumprod(1))
    torch.testing.assert_close(log_event.exp()[:, 0], hazard[:, 0])
    torch.testing.assert_close(log_event.exp().sum(1) + log_survival.exp()[:, -1], torch.ones(8, dtype=torch.float64))


@pytest.mark.parametrize("a", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("form", ["nll", "ce"])
def test_survival_against_the_formula(form: str, a: float) -> None:
    z = some_logits()
    hazard = 1 / (1 + (-z).exp())
    survival = (1 - hazard).cumprod(1)
    expected = []
    for i, (y, event) in enumerate(zip(BINS.tolist(), EVENTS.tolist(), strict=True)):
        c = 1 - event
        before = survival[i, y - 1] if y else torch.tensor(1.0, dtype=torch.float64)
        of_event = -(1 - c) * (before.log() + hazard[i, y].log())
        seen = of_event if form == "nll" else -(1 - c) * (1 - survival[i, y]).log()
        expected.append((1 - a) * (seen - c * survival[i, y].log()) + a * of_event)
    loss = survival_nll if form == "nll" else survival_cross_entropy
    torch.testing.assert_close(loss(z, BINS, EVENTS, a), torch.stack(expected))


def test_survival_by_hand() -> None:
    even = torch.zeros(2, 3)  # all hazards 1/2: p = 1/2, 1/4, 1/8
    got = survival_nll(even, torch.tensor([1, 1]), torch.tensor([1, 0]), 0.5)
    torch.testing.assert_close(got, torch.tensor([math.log(4), 0.5 * math.log(4)]))
    got = survival_cross_entropy(even, torch.tensor([1, 1]), torch.tensor([1, 0]))
    torch.testing.assert_close(got, torch.tensor([math.log(4 / 3), math.log(4)]))


def test_cross_entropy_of_sure_survivors_keeps_its_precision() -> None:
    sure = torch.full((1, 2), -100.0)  # 1 - S = 2 exp(-100), which float32 cannot hold
    got = survival_cross_entropy(sure, torch.tensor([1]), torch.tensor([1]))
    torch.testing.assert_close(got, torch.tensor([100 - math.log(2)]))


def test_one_bin() -> None:
    z = some_logits()[:, :1]
    got = survival_nll(z, torch.zeros(8, dtype=torch.long), EVENTS)
    torch.testing.assert_close(got, cross_entropy(z, EVENTS, torch.ones(2)))
