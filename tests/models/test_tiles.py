"""Scores of tiles where there are several outputs."""

import pytest
import torch
from torch import nn

from psamil import Bag, PackedBags, create_model
from psamil.models.tiles import output_scores

HEADS = {"mean": "head", "longmil": "head", "h2_mil": "head.4", "gtp": "transformer.head"}
SMALL = {"mean": {"hidden": 8}, "longmil": {"width": 8, "heads": 2}, "h2_mil": {"hidden": 8, "head_dim": 4}, "gtp": {}}


def lattice() -> PackedBags:
    xy = torch.cartesian_prod(torch.arange(6), torch.arange(5)).double()
    features = torch.randn(30, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return PackedBags.of(Bag(features, xy))


@pytest.mark.parametrize("name", HEADS)
def test_what_is_added_to_all_classes_changes_no_score(name: str) -> None:
    torch.manual_seed(0)
    model = create_model(name, 6, 3, **SMALL[name]).double().eval()
    before = model(lattice())
    head = model.get_submodule(HEADS[name])
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        head.weight += torch.randn(head.in_features, dtype=torch.float64)
    after = model(lattice())
    torch.testing.assert_close(after.logits.softmax(1), before.logits.softmax(1))
    assert not torch.allclose(after.logits, before.logits)
    torch.testing.assert_close(after.tile_scores, before.tile_scores)


def test_the_highest_over_the_mean_of_classes_and_alone_otherwise() -> None:
    outputs, model = torch.tensor([[1.0, 2, 6], [0, 0, 0]]), nn.Identity()
    assert output_scores(model, outputs).tolist() == [3, 0]
    assert output_scores(model, outputs[:, 2:]).tolist() == [6, 0]
    model.exclusive = False  # type: ignore[assignment]
    assert output_scores(model, outputs).tolist() == [6, 0]
