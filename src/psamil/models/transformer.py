r"""Self-attention over whole sequences that are packed one after the other, and the block around it.

    block(x) = y + MLP(LN y),    y = x + attention(LN x),    attention = [softmax(q_h k_h^T / sqrt d) v_h]_h

q, k and v are linear in x, without biases; the outputs of the heads stand side by side. A sequence is a bag. Time
O(sum of squared lengths x width), memory O(n width): the fused attention of torch holds no matrix of pairs.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from psamil.errors import OptionError


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

    def forward(self, x: Tensor, offsets: Sequence[int]) -> Tensor:
        """(n, width) for tokens (n, width); ``offsets`` (s + 1) say where each sequence begins."""
        qkv = self.qkv(x).unflatten(1, (3, self.heads, -1)).permute(1, 2, 0, 3)  # (3, heads, n, d)
        sequences = [
            scaled_dot_product_attention(q[None], k[None], v[None])[0].transpose(0, 1).flatten(1)
            for q, k, v in (qkv[:, :, a:b] for a, b in pairwise(offsets) if b > a)
        ]
        return torch.cat(sequences) if sequences else x


class TransformerBlock(nn.Module):
    """Pre-norm block. ``attention`` is called with the normalised tokens and whatever follows them in ``forward``."""

    def __init__(self, width: int, attention: nn.Module, mlp_ratio: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, mlp_ratio * width), nn.GELU(), nn.Linear(mlp_ratio * width, width))

    def forward(self, x: Tensor, *context: object) -> Tensor:
        x = x + self.attention(self.norm1(x), *context)
        return x + self.mlp(self.norm2(x))
