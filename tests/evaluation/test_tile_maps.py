"""Probabilities of tiles; means of scores and evidence are tested where they are written and predicted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from psamil.evaluation.tile_maps import mean_log_probability
from psamil.models.output import ModelOutput

NUMBERS = st.floats(-300, 300, allow_nan=False)


def output(z: float, evidence: Tensor | None) -> ModelOutput:
    return ModelOutput(torch.tensor([[z]]), torch.zeros(3), tile_evidence=evidence)


def test_of_one_model_it_is_the_product_of_two_probabilities() -> None:
    evidence = torch.tensor([[-1.0], [0.5], [2.0]])
    expected = torch.sigmoid(torch.tensor(0.7)) * torch.sigmoid(evidence[:, 0])
    torch.testing.assert_close(mean_log_probability([output(0.7, evidence)]).exp(), expected.double())


def test_of_several_models_it_is_the_mean() -> None:
    several = [output(z, torch.tensor([[z], [1.0], [-2.0]])) for z in (-3.0, 0.0, 4.0)]
    expected = torch.stack([mean_log_probability([one]) for one in several]).mean(0)
    torch.testing.assert_close(mean_log_probability(several), expected)


@given(z=NUMBERS, other=NUMBERS, evidence=st.lists(NUMBERS, min_size=3, max_size=3))
def test_tiles_of_a_bag_keep_their_order_and_a_likelier_bag_has_likelier_tiles(z, other, evidence) -> None:
    tiles = torch.tensor(evidence, dtype=torch.float64)[:, None]
    found, of_other = (mean_log_probability([output(one, tiles)]) for one in (z, other))
    assert found.isfinite().all()
    order = tiles[:, 0].argsort()
    assert (found[order].diff() >= 0).all()
    assert ((found >= of_other) == (torch.tensor(z) >= torch.tensor(other))).all() or torch.allclose(found, of_other)


@pytest.mark.parametrize("evidence", [None, torch.zeros(3, 2)])
def test_where_there_is_no_second_class_there_is_none(evidence: Tensor | None) -> None:
    assert mean_log_probability([output(0.0, torch.zeros(3, 1)), output(0.0, evidence)]) is None
