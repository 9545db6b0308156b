r"""LongMIL: a transformer whose attention falls with distance at fixed rates (ALiBi in two dimensions).

    h_i = ReLU(W x_i + b);   3 x [ h <- h + Attention(LN h);  h <- h + MLP(LN h) ];   logits = C LN(mean_i h_i) + c

With slopes m_h = 2^(-8h / H) for the heads h = 1 .. H, and R = 10 tile steps, tile i attends by a softmax over j of

- the first two blocks, local:  q_i . k_j / sqrt d - m_h d_ij  for d_ij <= R, nothing beyond. O(n R^2) time;
- the last block, global:  the same for d_ij <= R,  q_i . k_j / sqrt d - 100 m_h  beyond. O(n^2) time.

The score of a tile is its own largest logit, C LN(h_i) + c (of three classes and more, over their mean). The mean of
the tiles' logits is not quite that of the bag, because the norm comes after the mean. Memory is O(n).

Where this differs from the authors' code on purpose: distances are not cut to whole numbers; all heads of a local block
are local (theirs mask only the head with the steepest slope); cells are tiles, never groups of 2 x 2; dropout
falls on what the attention adds rather than on single weights; no table of distances between all cells.

Li, Zhang, Zhu, Cai, Zheng, Yang: Long-MIL: Scaling Long Contextual Multiple Instance Learning for Histopathology Whole
Slide Image Analysis. 2023; Li et al.: Rethinking Transformer for Long Contextual Histopathology Whole Slide Image
Analysis. NeurIPS 2024.
"""

from typing import Any

import torch
from torch import Tensor, nn

from psamil.bag import PackedBags
from psamil.errors import OptionError
from psamil.models.output import ModelOutput
from psamil.models.pooling import TileEmbedding
from psamil.models.registry import register_model
from psamil.models.segments import segment_sum
from psamil.models.tiles import output_scores
from psamil.models.transformer import TransformerBlock
from psamil.models.trunk import MultiHeadAttention, layout_of
from psamil.spatial import Decay, Layout
from psamil.spatial.dot_product import GlobalAlibi, LocalAlibi, local_attention

FAR_STEPS = 100.0  # what tiles beyond the radius count as in the global block


class AlibiAttention(MultiHeadAttention):
    """Attention under a prior that falls with distance as its fixed slopes say."""

    slopes: Tensor

    def __init__(self, width: int, heads: int, prior: Decay) -> None:
        super().__init__(width, heads, qkv_bias=False)
        self.prior = prior
        slopes = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)
        self.register_buffer("slopes", slopes, persistent=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, xy: Tensor, layout: Layout) -> Tensor:
        return local_attention(q, k, v, xy, self.slopes, self.prior, layout)


class LongMIL(nn.Module):
    """See the module.

    Args:
        in_dim: width of the tile features.
        n_out: number of raw outputs.
        width: of the tokens, a multiple of ``heads``.
        heads: of the attention.
        local_blocks: blocks with local attention, before the global one.
        radius_steps: R, in tile steps.
        dropout: of what the attention adds.
    """

    needs_layout = True

    def __init__(
        self,
        in_dim: int,
        n_out: int,
        *,
        width: int = 384,
        heads: int = 4,
        local_blocks: int = 2,
        radius_steps: float = 10.0,
        dropout: float = 0.05,
    ) -> None:
        super().__init__()
        if min(in_dim, n_out, width, heads) < 1 or width % heads or local_blocks < 0 or not 0 <= dropout < 1:
            raise OptionError(
                "in_dim, n_out, width and heads must be at least 1, width a multiple of heads, local_blocks at least "
                f"0, dropout in [0, 1); got {in_dim}, {n_out}, {width}, {heads}, {local_blocks}, {dropout}"
            )
        if not 0 < radius_steps <= FAR_STEPS:
            raise OptionError(f"radius_steps must be positive and at most {FAR_STEPS:g}, got {radius_steps}")
        self.embed = TileEmbedding(in_dim, width, dropout=0.0)
        priors = [LocalAlibi(radius_steps)] * local_blocks + [GlobalAlibi(radius_steps, FAR_STEPS)]
        self.blocks = nn.ModuleList(
            TransformerBlock(
                width, AlibiAttention(width, heads, prior), mlp_ratio=4, dropout=dropout, recompute_mlp=True
            )
            for prior in priors
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, n_out)

    def forward(self, batch: PackedBags) -> ModelOutput:
        h = self.embed(batch, self.head.weight.dtype)
        layout = layout_of(batch)
        for block in self.blocks:
            h = block(h, batch.xy, layout)
        sizes = batch.offsets.diff().clamp(min=1).to(h.device)
        mean = segment_sum(h, batch.bag_of_tile, len(batch)) / sizes[:, None]
        return ModelOutput(
            logits=self.head(self.norm(mean.to(self.head.weight.dtype))),
            tile_scores=output_scores(self, self.head(self.norm(h))),
        )


@register_model
def longmil(in_dim: int, n_out: int, **options: Any) -> LongMIL:
    """LongMIL; options of :class:`LongMIL`."""
    return LongMIL(in_dim, n_out, **options)
