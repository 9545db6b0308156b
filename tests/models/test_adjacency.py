"""Sums over neighbours against dense matrices."""

import pytest
import torch

from psamil import Bag, PackedBags
from psamil.errors import ShapeError
from psamil.models.adjacency import Adjacency

PAIRS = torch.tensor([[0, 0, 1, 1, 1, 3, 5], [1, 4, 0, 3, 4, 1, 5]])  # not symmetric; tiles 2 and 4 have no row


def dense(adjacency: Adjacency, weights: torch.Tensor | None = None) -> torch.Tensor:
    weights = torch.ones(len(adjacency.rows)) if weights is None else weights
    matrix = torch.zeros(adjacency.n, adjacency.n, dtype=weights.dtype)
    return matrix.index_put((adjacency.rows, adjacency.columns), weights)


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 3), (6, 2, 3)], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_and_gradients(shape: tuple[int, ...], weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psamil.models.adjacency.CHUNK_NUMBERS", 8)  # several chunks
    torch.manual_seed(0)
    adjacency = Adjacency(PAIRS, 6)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    w = torch.randn(7, dtype=torch.float64, requires_grad=True) if weighted else None
    expected = torch.einsum("ij,j...->i...", dense(adjacency, w).double(), x)
    torch.testing.assert_close(adjacency.sum(x, w), expected)
    inputs = (x, w) if weighted else (x,)
    assert torch.autograd.gradcheck(lambda *args: adjacency.sum(*args), inputs)


def test_columns_of_any_layout_and_precision() -> None:
    adjacency, x = Adjacency(PAIRS, 6), torch.randn(3, 6, dtype=torch.float64).T
    torch.testing.assert_close(adjacency.sum(x), dense(adjacency).double() @ x)
    half = adjacency.sum(x.half())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, dense(adjacency) @ x.half().float())


def test_no_pairs_and_no_tiles() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    out = Adjacency(torch.zeros(2, 0, dtype=torch.long), 4).sum(x, torch.zeros(0))
    assert torch.equal(out, torch.zeros(4, 3))
    out.sum().backward()
    assert torch.equal(x.grad, torch.zeros(4, 3))
    assert Adjacency(torch.zeros(2, 0, dtype=torch.long), 0).sum(torch.zeros(0, 3)).shape == (0, 3)


def test_neighbours_of_a_batch_stay_in_their_slide() -> None:
    xy = torch.tensor([[0.0, 0], [1, 1], [0, 0], [1, 0], [3, 0]])
    batch = PackedBags.of(Bag(torch.zeros(5, 1), xy, slides=torch.tensor([0, 2, 5])))
    adjacency = Adjacency.of(batch)
    expected = torch.zeros(5, 5)
    expected[0, 1] = expected[1, 0] = expected[2, 3] = expected[3, 2] = 1
    assert torch.equal(dense(adjacency), expected)
    assert adjacency.degree.tolist() == [1, 1, 1, 1, 0]
    assert Adjacency.of(batch, radius_steps=2.0).degree.tolist() == [1, 1, 1, 2, 1]


def test_normalised_weights() -> None:
    xy = torch.tensor([[0.0, 0], [1, 0], [2, 0]])  # a path: degrees 1, 2, 1
    adjacency = Adjacency.of(PackedBags.of(Bag(torch.zeros(3, 1), xy)))
    torch.testing.assert_close(adjacency.normalised_weights(torch.float64), torch.full((4,), 0.5**0.5).double())


def test_pairs_must_be_sorted() -> None:
    with pytest.raises(ShapeError, match="sorted by their first row"):
        Adjacency(PAIRS.flip(1), 6)
