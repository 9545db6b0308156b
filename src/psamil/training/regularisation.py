"""What keeps a model from learning its training slides by heart, whatever the model."""

from dataclasses import replace

import torch

from psamil.bag import PackedBags


def drop_features(batch: PackedBags, share: float) -> PackedBags:
    """The batch with this share of all numbers set to 0 and the others divided by 1 - share, which keeps the mean."""
    if share == 0:
        return batch
    return replace(batch, features=torch.nn.functional.dropout(batch.features, share))
