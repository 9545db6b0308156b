"""Sums, means and softmaxes inside each bag of a packed batch, in float32 at least: a bag can have 100,000 rows."""

import torch
from torch import Tensor


def segment_sum(values: Tensor, segment: Tensor, n_segments: int) -> Tensor:
    """(n_segments, ...): sum of the rows of ``values`` (n, ...) that belong to each segment; 0 where there is none."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    return wide.new_zeros(n_segments, *values.shape[1:]).index_add(0, segment, wide)


def segment_mean(values: Tensor, segment: Tensor, n_segments: int) -> Tensor:
    """(n_segments, ...): mean of the rows of ``values`` (n, ...) that belong to each segment; 0 where there is none."""
    sizes = torch.bincount(segment, minlength=n_segments).clamp(min=1)
    return segment_sum(values, segment, n_segments) / sizes.view(-1, *[1] * (values.ndim - 1))


def segment_softmax(logits: Tensor, segment: Tensor, n_segments: int) -> Tensor:
    """Softmax of ``logits`` (n,) over the members of each segment."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = logits.new_full((n_segments,), -torch.inf).scatter_reduce(0, segment, logits.detach(), "amax")
    weights = (logits - top[segment]).exp()
    return weights / segment_sum(weights, segment, n_segments)[segment]
