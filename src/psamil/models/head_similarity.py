r"""How alike the heads of an attention layer are, as in Figure 3 (c-d) of the paper."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from psamil.models.trunk import MultiHeadAttention


def head_similarity(outputs: Tensor) -> Tensor:
    r"""(heads, heads): s_hh' = 1 / mean_i ||x_i^(h) - x_i^(h')||_2 for outputs x (n, heads, d) of the heads.

    The more two heads make the same of every tile, the larger; infinite for a head and itself. It depends on the scale
    of the outputs: compare it inside a model, or over the training of one.
    """
    similarity = torch.full((outputs.shape[1],) * 2, torch.inf, dtype=torch.float64)
    for a in range(outputs.shape[1]):
        for b in range(a):
            distance = (outputs[:, a].double() - outputs[:, b].double()).square().sum(1).sqrt().mean()
            similarity[a, b] = similarity[b, a] = 1 / distance
    return similarity


@contextmanager
def watched_heads(model: nn.Module) -> Iterator[list[float]]:
    """A list that gets a number from each pass through the model: the mean similarity of two heads of a layer.

    It needs no pass of its own. The list stays empty for a model without a layer of several heads in the form of
    :class:`psamil.models.trunk.MultiHeadAttention`. The number is NaN for a pass without tiles, and infinite if two
    heads made the same of all of them.
    """
    layers = [module for module in model.modules() if isinstance(module, MultiHeadAttention) and module.heads > 1]
    of_layers: list[Tensor] = []  # of the pass that goes on
    of_passes: list[float] = []

    def look(heads: int, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        similarity = head_similarity(arguments[0].detach().cpu().unflatten(1, (heads, -1)))
        of_layers.append(similarity[tuple(torch.tril_indices(heads, heads, -1))].mean())

    def end(*_: Any) -> None:
        of_passes.append(float(torch.stack(of_layers).mean()) if of_layers else math.nan)
        of_layers.clear()

    # what goes into the last projection of a layer is what its heads made, side by side
    hooks = [layer.proj.register_forward_pre_hook(partial(look, layer.heads)) for layer in layers]
    hooks += [model.register_forward_hook(end)] if layers else []
    try:
        yield of_passes
    finally:
        for hook in hooks:
            hook.remove()
