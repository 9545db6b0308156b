r"""Models without spatial context: each tile is embedded alone, then the bag is pooled.

With h_i = ReLU(W x_i + b) the embedding of tile i (the features themselves for ``hidden=0``):

- ``mean``: z = 1/n sum_i h_i, logits = C z + c. The score of a tile is its own largest logit, C h_i + c; of three
  classes and more, over their mean.
- ``max``: logit k = max_i (C h_i + c)_k: the most striking tile decides. Scores as for ``mean``.
- ``abmil``: z = sum_i softmax_i(a_i) h_i, logits = C z + c, with a_i = w . tanh(V h_i) or, gated,
  a_i = w . (tanh(V h_i) * sigmoid(U h_i)), biases left out here. The score of a tile is a_i.

The evidence of a tile is the logits that it would have alone, C h_i + c.

Positions are not used. A bag without tiles gets the logits c. Time O(n in_dim hidden), memory O(n hidden).

Where ABMIL differs from the authors' code: they train a small CNN on image patches in front of it, here features are
given; their probability, cut to [1e-5, 1 - 1e-5] before the logarithm, is a logit here, whose loss needs no cut.

Ilse, Tomczak, Welling: Attention-based Deep Multiple Instance Learning. ICML 2018 (which also compares mean and max).
"""

from typing import Any

import torch
from torch import Tensor, nn

from psamil.bag import PackedBags
from psamil.errors import OptionError
from psamil.models.output import ModelOutput
from psamil.models.registry import register_model
from psamil.models.segments import segment_sum
from psamil.models.tiles import GatedScore, attention_pooling, output_scores, tile_features


class TileEmbedding(nn.Module):
    """h_i = ReLU(W x_i + b) with dropout, (n, width); for ``hidden=0`` the features, with dropout."""

    def __init__(self, in_dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.in_dim, self.width = in_dim, hidden or in_dim
        self.project = nn.Sequential(nn.Linear(in_dim, hidden), nn.ReLU(inplace=True)) if hidden else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, batch: PackedBags, dtype: torch.dtype) -> Tensor:
        return self.dropout(self.project(tile_features(batch, self.in_dim, dtype)))


class PoolingModel(nn.Module):
    """Embedding of tiles and head, which the models of this module share.

    Args:
        in_dim: width of the tile features.
        n_out: number of raw outputs.
        hidden: width of the embedding; 0 takes the features as they are.
        dropout: share of the embedding that is dropped in training.
    """

    def __init__(self, in_dim: int, n_out: int, *, hidden: int = 512, dropout: float = 0.0) -> None:
        super().__init__()
        if min(in_dim, n_out) < 1 or hidden < 0 or not 0 <= dropout < 1:
            raise OptionError("in_dim and n_out must be at least 1, hidden at least 0 and dropout in [0, 1)")
        self.embed = TileEmbedding(in_dim, hidden, dropout)
        self.head = nn.Linear(self.embed.width, n_out)

    def tiles(self, batch: PackedBags) -> Tensor:
        """(n, width) embedded tiles."""
        return self.embed(batch, self.head.weight.dtype)

    def classify(self, pooled: Tensor) -> Tensor:
        """(b, n_out) logits of pooled embeddings (b, width)."""
        return self.head(pooled.to(self.head.weight.dtype))


class MeanPooling(PoolingModel):
    """logits = C (1/n sum_i h_i) + c."""

    def forward(self, batch: PackedBags) -> ModelOutput:
        h = self.tiles(batch)
        sizes = batch.offsets.diff().clamp(min=1).to(h.device)
        pooled = segment_sum(h, batch.bag_of_tile, len(batch)) / sizes[:, None]
        evidence = self.head(h)
        return ModelOutput(self.classify(pooled), output_scores(self, evidence), tile_evidence=evidence)


class MaxPooling(PoolingModel):
    """logit k = max_i (C h_i + c)_k; equal tiles share the gradient."""

    def forward(self, batch: PackedBags) -> ModelOutput:
        tile_logits = self.head(self.tiles(batch))  # (n, n_out)
        n_out = tile_logits.shape[1]
        lowest = tile_logits.new_full((len(batch), n_out), -torch.inf)
        highest = lowest.scatter_reduce(0, batch.bag_of_tile[:, None].expand(-1, n_out), tile_logits, "amax")
        empty = (batch.offsets.diff() == 0).to(highest.device)[:, None]
        logits = torch.where(empty, self.head.bias.to(highest.dtype), highest)
        return ModelOutput(logits, output_scores(self, tile_logits), tile_evidence=tile_logits)


class ABMIL(PoolingModel):
    """z = sum_i softmax_i(a_i) h_i, logits = C z + c.

    Args:
        gated: a_i = w . (tanh(V h_i) * sigmoid(U h_i)); otherwise a_i = w . tanh(V h_i).
        attention_dim: rows of V and U.
        others: see :class:`PoolingModel`.
    """

    def __init__(
        self,
        in_dim: int,
        n_out: int,
        *,
        hidden: int = 512,
        dropout: float = 0.0,
        gated: bool = True,
        attention_dim: int = 128,
    ) -> None:
        super().__init__(in_dim, n_out, hidden=hidden, dropout=dropout)
        if attention_dim < 1:
            raise OptionError(f"attention_dim must be at least 1, got {attention_dim}")
        width = self.embed.width
        plain = nn.Sequential(nn.Linear(width, attention_dim), nn.Tanh(), nn.Linear(attention_dim, 1))
        self.score = GatedScore(width, attention_dim) if gated else plain

    def pool(self, batch: PackedBags) -> tuple[Tensor, Tensor]:
        """Scores a of the tiles, (n,), and pooled embeddings z of the bags, (b, width)."""
        return self._pool(self.tiles(batch), batch)

    def _pool(self, h: Tensor, batch: PackedBags) -> tuple[Tensor, Tensor]:
        scores = self.score(h).squeeze(-1)
        return scores, attention_pooling(scores, h, batch.bag_of_tile, len(batch)).to(self.head.weight.dtype)

    def forward(self, batch: PackedBags) -> ModelOutput:
        h = self.tiles(batch)
        scores, pooled = self._pool(h, batch)
        return ModelOutput(self.classify(pooled), scores, tile_evidence=self.evidence(h))

    def evidence(self, h: Tensor) -> Tensor | None:
        """(n, n_out) logits that each embedded tile would have alone; None where those of bags are no mean of them."""
        return self.head(h)


@register_model
def mean(in_dim: int, n_out: int, **options: Any) -> MeanPooling:
    """The mean of the tiles; options of :class:`PoolingModel`."""
    return MeanPooling(in_dim, n_out, **options)


@register_model
def max(in_dim: int, n_out: int, **options: Any) -> MaxPooling:
    """The tile with the largest logit; options of :class:`PoolingModel`."""
    return MaxPooling(in_dim, n_out, **options)


@register_model
def abmil(in_dim: int, n_out: int, **options: Any) -> ABMIL:
    """Attention-based pooling; options of :class:`ABMIL`."""
    return ABMIL(in_dim, n_out, **options)
