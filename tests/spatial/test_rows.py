import pytest
import torch

from psamil.spatial import DECAYS, posterior_attention, posterior_rows
from tests.spatial.cases import inputs, positions, thetas
from tests.spatial.loop_oracle import posterior_weights_loop


@pytest.mark.parametrize("decay", DECAYS)
def test_rows_are_the_weights_of_the_attention(decay):
    xy, bags = torch.cat((positions("lattice", 60), positions("continuous", 30))), torch.tensor([0, 60, 90])
    q, k, v, _ = inputs(90, 2, 4)
    theta = thetas(decay, [2.0, 6.0])
    rows = posterior_rows(q, k, xy, theta, torch.arange(90), decay=decay, bags=bags)
    out = posterior_attention(q, k, v, xy, theta, decay=decay, bags=bags)
    loop = posterior_weights_loop(*(t.numpy() for t in (q, k, xy, theta)), decay=decay, tau=1e-3, offsets=bags.numpy())
    for i, heads in enumerate(rows):
        for h, row in enumerate(heads):
            assert (row.query, row.head) == (i, h)
            assert row.neighbours.tolist() == list(loop[i, h][0])
            torch.testing.assert_close(row.posterior, torch.tensor(loop[i, h][1]).double())
            torch.testing.assert_close(row.posterior @ v[row.neighbours, h], out[i, h])


def test_posterior_is_prior_times_likelihood():
    xy = positions("lattice", 80)
    q, k, _, _ = inputs(80, 1, 4)
    ((row,),) = posterior_rows(q, k, xy, thetas("gaussian", [4.0]), torch.tensor([7]), decay="gaussian")
    product = row.prior * row.likelihood
    torch.testing.assert_close(row.posterior, product / product.sum())
    for part in (row.prior, row.likelihood, row.posterior):
        assert part.sum().item() == pytest.approx(1)
    nearest = row.neighbours[row.prior.argmax()]
    assert nearest == 7
    assert 1 <= row.perplexity <= len(row.neighbours)
    assert row.distance_steps.max() <= 4


def test_unknown_tile():
    q, k, _, _ = inputs(5, 1, 2)
    with pytest.raises(IndexError, match="query tile 5 is not among the 5 tiles"):
        posterior_rows(q, k, positions("lattice", 5), thetas("gaussian", [2.0]), torch.tensor([5]), decay="gaussian")
