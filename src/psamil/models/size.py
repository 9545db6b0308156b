"""A control: what the number of tiles alone tells.

    logits = C log10(n / 1000) + c

Where this does well, the size of the tissue is confounded with the label, and a model that sums or takes a maximum over
tiles may have learned nothing else. n is the number of tiles of the bag; their features are not looked at.
C and c begin at zero: a first weight of the wrong sign would say the opposite until it has turned, which a short
training may not reach.
"""

import torch
from torch import nn

from psamil.bag import PackedBags
from psamil.models.output import ModelOutput
from psamil.models.registry import register_model


class SizeControl(nn.Module):
    """See the module. Tiles have no score: it is 0 for all."""

    def __init__(self, in_dim: int, n_out: int) -> None:
        super().__init__()
        self.head = nn.Linear(1, n_out)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: PackedBags) -> ModelOutput:
        weight = self.head.weight
        n = batch.offsets.diff().clamp(min=1).to(device=weight.device, dtype=weight.dtype)
        return ModelOutput(self.head(torch.log10(n / 1000)[:, None]), tile_scores=weight.new_zeros(batch.n))


@register_model
def size(in_dim: int, n_out: int) -> SizeControl:
    """The number of tiles alone, as a control."""
    return SizeControl(in_dim, n_out)
