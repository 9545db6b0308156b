"""Sums and softmaxes inside each bag of a packed batch."""

import torch
from torch import Tensor


def segment_sum(values: Tensor, segment: Tensor, n_segments: int) -> Tensor:
    """(n_segments, ...): sum of the rows of ``values`` (n, ...) that belong to each segment; 0 where there is none."""
    return values.new_zeros(n_segments, *values.shape[1:]).index_add(0, segment, values)


def segment_softmax(logits: Tensor, segment: Tensor, n_segments: int) -> Tensor:
    """Softmax of ``logits`` (n,) over the members of each segment."""
    top = logits.new_full((n_segments,), -torch.inf).scatter_reduce(0, segment, logits.detach(), "amax")
    weights = (logits - top[segment]).exp()
    return weights / segment_sum(weights, segment, n_segments)[segment]
