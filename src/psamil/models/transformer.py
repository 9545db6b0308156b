r"""Self-attention over whole sequences that are packed one after the other, and the block around it.

    block(x) = y + MLP(LN y),    y = x + attention(LN x),    attention = [softmax(q_h k_h^T / sqrt d) v_h]_h

q, k and v are linear in x, without biases; the outputs of the heads stand side by side. A sequence is a bag. Time
O(sum of squared lengths x width), memory O(n width): the fused attention of torch holds no matrix of pairs.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from psamil.errors import OptionError
from psamil.models.recompute import by_rows, recomputed


class SelfAttention(nn.Module):
    """Multi-head attention inside each sequence.

    Args:
        width: of the tokens; a multiple of ``heads``.
        heads: number of attention heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if min(width, heads) < 1 or width % heads:
            raise OptionError(f"the width must be a multiple of the number of heads, got {width} and {heads}")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)

    def forward(self, x: Sequence[Tensor], norm: nn.Module, offsets: Sequence[int]) -> list[Tensor]:
        """(n, d) for each head, of tokens norm(x) (n, width).

        Norm, queries, keys and values are computed again in the backward pass.

        Args:
            x: the tokens, :func:`~psamil.models.recompute.in_parts`.
            norm: of each token.
            offsets: (s + 1) where each sequence begins.
        """
        weights = self.qkv.weight.unflatten(0, (3, self.heads, -1)).unbind(1)  # (3, d, width) each
        return [recomputed(_head, x, norm, offsets, weight, keep_attention=True) for weight in weights]


def _head(x: Sequence[Tensor], norm: nn.Module, offsets: Sequence[int], weight: Tensor) -> Tensor:
    """(n, d) of the head with the weights (3, d, width) of queries, keys and values."""

    def project(x: Tensor) -> Tensor:
        tokens = norm(x)
        return torch.stack([linear(tokens, one) for one in weight], 1)

    qkv = by_rows(project, x).transpose(0, 1)  # (3, n, d)
    sequences = [
        scaled_dot_product_attention(q[None, None], k[None, None], v[None, None]).flatten(0, 2)
        for q, k, v in (qkv[:, a:b] for a, b in pairwise(offsets) if b > a)
    ]
    if len(sequences) == 1:
        return sequences[0]
    return torch.cat(sequences) if sequences else qkv[2]


def two_layers(width: int, mlp_ratio: int) -> nn.Sequential:
    """The MLP of a block."""
    return nn.Sequential(nn.Linear(width, mlp_ratio * width), nn.GELU(), nn.Linear(mlp_ratio * width, width))


class TransformerBlock(nn.Module):
    """Pre-norm block. ``attention`` is called with the normalised tokens and whatever follows them in ``forward``.

    Args:
        width: of the tokens.
        attention: between them.
        mlp_ratio: hidden width of the MLP in widths of tokens.
        dropout: of what the attention adds.
        recompute_mlp: compute the MLP again in the backward pass, which needs less memory.
    """

    def __init__(
        self,
        width: int,
        attention: nn.Module,
        mlp_ratio: int,
        *,
        dropout: float = 0.0,
        recompute_mlp: bool = False,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width)
        self.mlp = two_layers(width, mlp_ratio)
        self.dropout = nn.Dropout(dropout)
        self.recompute_mlp = recompute_mlp

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), *context))
        return by_rows(self._with_mlp, x) if self.recompute_mlp else self._with_mlp(x)

    def _with_mlp(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm2(x))
