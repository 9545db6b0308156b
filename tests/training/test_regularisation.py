import pytest
import torch

from psamil.bag import PackedBags
from psamil.training.regularisation import drop_features


def ones(n: int, width: int) -> PackedBags:
    return PackedBags(torch.ones(n, width), torch.zeros(n, 2), torch.tensor([0, n]), torch.tensor([0, n]), ("slide",))


def test_dropped_features_keep_their_mean():
    torch.manual_seed(0)
    batch = ones(1000, 50)
    dropped = drop_features(batch, 0.25)
    assert dropped.features.unique().tolist() == pytest.approx([0, 4 / 3])
    assert float((dropped.features == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert float(dropped.features.mean()) == pytest.approx(1.0, abs=0.01)
    assert torch.equal(batch.features, torch.ones(1000, 50))  # a cached bag must not change
    assert dropped.xy is batch.xy


def test_nothing_is_dropped_by_default():
    batch = ones(3, 2)
    assert drop_features(batch, 0.0) is batch
