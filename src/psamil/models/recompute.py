"""Values that the backward pass computes again instead of keeping them.

A training step that keeps every intermediate value of every tile needs many times the memory of the tiles. Most of
these values are cheap to compute again. What costs O(n^2) to compute, the output of fused attention, is kept. Random
numbers are drawn as they were the first time. Without gradients, nothing is kept anyway.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

ROWS_AT_ONCE = 512
"""Rows whose intermediate values are held at the same time: enough for fast products of matrices."""

_FUSED_ATTENTION = [
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
]


def recomputed(function: Callable[..., Any], *arguments: Any, keep_attention: bool = False) -> Any:
    """``function(*arguments)``, of which only the arguments are kept; with ``keep_attention``, fused attention too."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    if not keep_attention:
        return checkpoint(function, *arguments, use_reentrant=False)
    contexts = partial(create_selective_checkpoint_contexts, _FUSED_ATTENTION)
    return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts)


def in_parts(rows: Tensor) -> tuple[Tensor, ...]:
    """As :func:`by_rows` takes rows apart. Once for several uses: then their gradients add up part by part."""
    return rows.split(ROWS_AT_ONCE)


def by_rows(function: Callable[..., Tensor], *rows: Tensor | Sequence[Tensor]) -> Tensor:
    """``function(*rows)`` (n, ...) for a function in which no row depends on another.

    Args:
        function: of tensors (n, ...).
        rows: these tensors, whole or :func:`in_parts`.
    """
    return torch.cat(_of_parts(function, rows))


def sum_by_rows(function: Callable[..., Tensor], *rows: Tensor | Sequence[Tensor]) -> Tensor:
    """The same for a function that adds up over its rows: the sum of ``function`` of parts of the rows."""
    first, *others = _of_parts(function, rows)
    return sum(others, first)


def _of_parts(function: Callable[..., Tensor], rows: Sequence[Tensor | Sequence[Tensor]]) -> list[Tensor]:
    parts = zip(*(in_parts(one) if isinstance(one, Tensor) else one for one in rows), strict=True)
    return [recomputed(function, *part) for part in parts]
