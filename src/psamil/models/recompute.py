"""Values that the backward pass computes again instead of keeping them.

A training step that keeps every intermediate value of every tile needs many times the memory of the tiles. Most of
these values are cheap to compute again. What costs O(n^2) to compute, the output of fused attention, is kept. Random
numbers are drawn as they were the first time. Without gradients, nothing is kept anyway.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    get_device_states,
    set_device_states,
)

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


def by_rows(function: Callable[..., Tensor], *rows: Tensor, learned: Sequence[Tensor] = ()) -> Tensor:
    """``function(*rows)`` (n, ...) of tensors (n, ...), for a function in which no row depends on another.

    Args:
        function: of parts of the rows; its gradients are those of the rows, of ``learned`` and, where it is a module or
            a method of one, of the parameters of that module. Other tensors that it uses are taken as constants.
        rows: tensors of n rows each.
        learned: further tensors that it uses.
    """
    return _apply(function, rows, learned, False)


def sum_by_rows(function: Callable[..., Tensor], *rows: Tensor, learned: Sequence[Tensor] = ()) -> Tensor:
    """The same for a function that adds up over its rows: the sum of ``function`` of parts of the rows."""
    return _apply(function, rows, learned, True)


def _apply(function: Callable[..., Tensor], rows: Sequence[Tensor], learned: Sequence[Tensor], total: bool) -> Tensor:
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    parameters = owner.parameters() if isinstance(owner, nn.Module) else ()
    result: Tensor = _ByRows.apply(function, total, len(rows), *rows, *learned, *parameters)
    return result


class _ByRows(torch.autograd.Function):
    """One part of the rows after the other, in both passes.

    Results and gradients are written into tensors of full size, so that no list of parts lies beside them, and so that
    the only blocks of memory that come and go are alike: others leave gaps which an allocator cannot fill.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], total: bool, n_rows: int, *tensors: Tensor) -> Tensor:
        rows = tensors[:n_rows]
        ctx.function, ctx.total, ctx.n_rows = function, total, n_rows
        ctx.random, ctx.random_of_devices = torch.get_rng_state(), get_device_states(*rows)
        ctx.autocast = _autocast(rows[0].device.type)
        ctx.save_for_backward(*tensors)
        result: Tensor | None = None
        with ctx.autocast():
            for start, part in _parts(rows):
                of_part = function(*part)
                if total:
                    result = of_part if result is None else result + of_part
                else:
                    if result is None:
                        result = of_part.new_empty(len(rows[0]), *of_part.shape[1:])
                    result[start : start + len(of_part)] = of_part
        assert result is not None  # there is at least one part, if an empty one
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # once: where this is itself recomputed, they come only once
        rows, others = tensors[: ctx.n_rows], tensors[ctx.n_rows :]
        needed = ctx.needs_input_grad[3:]
        of_rows = [torch.empty_like(t) if need else None for t, need in zip(rows, needed, strict=False)]
        of_others: list[Tensor | None] = [None] * len(others)
        wanted_others = [i for i, need in enumerate(needed[ctx.n_rows :]) if need]
        devices, states = ctx.random_of_devices
        with torch.random.fork_rng(devices), torch.enable_grad(), ctx.autocast():
            torch.set_rng_state(ctx.random)
            set_device_states(devices, states)
            for start, part in _parts(rows):
                leaves = [t.detach().requires_grad_(need) for t, need in zip(part, needed, strict=False)]
                end = start + len(leaves[0])
                out = ctx.function(*leaves)
                wanted = [leaf for leaf in leaves if leaf.requires_grad] + [others[i] for i in wanted_others]
                of_out = gradient if ctx.total else gradient[start:end]
                found = iter(torch.autograd.grad(out, wanted, of_out, allow_unused=True))
                del out, leaves, wanted
                for of_row in of_rows:
                    if of_row is not None:
                        of_part = next(found)
                        of_row[start:end] = 0 if of_part is None else of_part
                for i, of_part in zip(wanted_others, found, strict=True):
                    before = of_others[i]
                    if of_part is not None:  # the first one may be a view of the gradient that came in
                        of_others[i] = of_part.clone() if before is None else before.add_(of_part)
        return None, None, None, *of_rows, *of_others


def _parts(rows: Sequence[Tensor]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """First row and rows of each part."""
    parts = zip(*(tensor.split(ROWS_AT_ONCE) for tensor in rows), strict=True)
    return zip(range(0, len(rows[0]) + 1, ROWS_AT_ONCE), parts, strict=False)


def _autocast(device_type: str) -> Callable[[], torch.autocast]:
    """Autocast as it is here and now. Without its cache, which would remember weights without their gradients."""
    return partial(
        torch.autocast,
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        cache_enabled=False,
    )
