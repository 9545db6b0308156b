r"""FLOPs of a training batch: torch's own counter, with what it leaves out.

A multiplication and an addition are two FLOPs. Counted are products of matrices, convolutions and attention, forward
and backward: by torch's formulas, by those of posterior attention for the pairs within the radius
(:mod:`psamil.spatial.attention`, whichever path computes them), and by those of this module for

- products of a matrix with a vector, and of two vectors, which torch does not count;
- sums over neighbours, sum_j w_ij x_j: two FLOPs for each pair and number, as for a product with a sparse matrix;
- the gradient of a convolution whose channels are in groups, for which torch counts too much by the number of groups.

Counted as nothing, for every model: what is done number by number, or pair by pair outside of the attention
(activations, norms, softmax, pooled sums, distances of features, gradients of the weights w_ij), sorting, and the
optimiser. What a model computes again in the backward pass to save memory counts again, since it is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from psamil.bag import Bag, PackedBags
from psamil.spatial import Layout

Shape = Sequence[int]
_ATEN = torch.ops.aten


def _matrix_and_vector(matrix: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(matrix)


def _bias_matrix_and_vector(_bias: Shape, matrix: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(matrix)


def _sum_over_neighbours(values: Shape, pairs: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(pairs) * values[1]


def _convolution_backward(gradient: Shape, x: Shape, weight: Shape, *others: Any, **__: Any) -> int:
    """For the input as many products as forward, and for the weights."""
    transposed, output_mask = others[4], others[7]
    places = math.prod((x if transposed else gradient)[2:])
    return 2 * x[0] * places * math.prod(weight) * sum(output_mask[:2])


FORMULAS: dict[Any, Callable[..., int]] = {
    _ATEN.mv: _matrix_and_vector,
    _ATEN.addmv: _bias_matrix_and_vector,
    _ATEN.dot: _matrix_and_vector,
    _ATEN.vdot: _matrix_and_vector,
    _ATEN._embedding_bag: _sum_over_neighbours,
    _ATEN._embedding_bag_forward_only: _sum_over_neighbours,
    _ATEN.convolution_backward: _convolution_backward,
}


def flop_counter() -> FlopCounterMode:
    """Counts what runs inside of it: ``with flop_counter() as counter``, then ``counter.get_total_flops()``."""
    return FlopCounterMode(display=False, custom_mapping=FORMULAS)


def slide_of(tiles: int, in_dim: int) -> Bag:
    """So many tiles in full rows, twice as wide as high; the last row may be shorter. Features are noise."""
    columns = max(1, round(math.sqrt(2 * tiles)))
    place = torch.arange(tiles)
    features = torch.randn(tiles, in_dim, generator=torch.Generator().manual_seed(0))
    return Bag(features, torch.stack((place % columns, place // columns), 1))


def training_flops(model: nn.Module, bag: Bag) -> int:
    """FLOPs of the forward and backward pass of one slide in training, with all losses of the model."""
    layout = Layout.of(bag.xy, bag.slides) if getattr(model, "needs_layout", False) else None
    batch = PackedBags.of(bag, layout)
    was_training = model.training
    model.train()
    with torch.random.fork_rng(devices=[]), flop_counter() as counter:
        _loss(model, batch).backward()
    model.train(was_training)
    model.zero_grad()
    return int(counter.get_total_flops())


def _loss(model: nn.Module, batch: PackedBags) -> Tensor:
    """A number with a gradient in everything that is trained. What a task makes of the logits costs next to nothing."""
    wants_classes = getattr(model, "wants_classes", False)
    output = model(batch, torch.ones(len(batch), dtype=torch.long)) if wants_classes else model(batch)
    predictions = [output.logits, *(extra.logits for extra in output.extra_predictions.values())]
    loss: Tensor = sum(logits.sum() for logits in predictions) + sum(output.auxiliary_losses.values())
    return loss
