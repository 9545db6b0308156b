"""Tiles in and bags out: features of a batch as a model takes them, and their pooling."""

import torch
from torch import Tensor, nn

from psamil.bag import PackedBags
from psamil.errors import ShapeError
from psamil.models.segments import segment_softmax, segment_sum


def tile_features(batch: PackedBags, in_dim: int, dtype: torch.dtype) -> Tensor:
    """(n, in_dim) features of the batch in the precision of the model; ShapeError where they are of another width."""
    if not isinstance(batch, PackedBags):
        raise ShapeError(f"the model takes PackedBags, got {type(batch).__name__}; use PackedBags.of(...)")
    if batch.features.shape[1] != in_dim:
        raise ShapeError(f"the model takes features of width {in_dim}, got {batch.features.shape[1]}")
    return batch.features.to(dtype)


def attention_pooling(scores: Tensor, values: Tensor, segment: Tensor, n_segments: int) -> Tensor:
    """(n_segments, width): z = sum_i softmax_i(a_i) v_i over the members of each segment; 0 where there is none.

    Args:
        scores: (n,) a.
        values: (n, width) v.
        segment: (n,) index of the segment of each row, such as its bag.
    """
    return segment_sum(segment_softmax(scores, segment, n_segments)[:, None] * values, segment, n_segments)


class GatedScore(nn.Module):
    """a_i = w . (tanh(V x_i) * sigmoid(U x_i))."""

    def __init__(self, width: int, hidden: int = 128) -> None:
        super().__init__()
        self.tanh, self.gate, self.score = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.tanh(x).tanh() * self.gate(x).sigmoid())


def soft_maximum(evidence: Tensor, sharpness: Tensor, batch: PackedBags) -> Tensor:
    """(bags, outputs) sum_i softmax_i(gamma e_i) e_i of (n, outputs) evidence: its mean for gamma = 0, then more."""
    bag, bags = batch.bag_of_tile, len(batch)
    columns = (evidence * sharpness.to(evidence.dtype)).unbind(1)
    weights = torch.stack([segment_softmax(column, bag, bags) for column in columns], 1)
    return segment_sum(weights * evidence, bag, bags)


def output_scores(model: nn.Module, outputs: Tensor) -> Tensor:
    """(n,) one score per row of logits or evidence (n, outputs): the highest.

    Where outputs are classes of which one holds (``model.exclusive``, see :mod:`psamil.models.output`), over their
    mean: a softmax does not see what is added to all of them, so that training leaves it to chance.
    """
    return outputs.amax(1) - (outputs.mean(1) if outputs.shape[1] > 1 and has_classes(model) else 0.0)


def has_classes(model: nn.Module) -> bool:
    """Whether the outputs of a model are classes of which one holds."""
    return getattr(model, "exclusive", True)
