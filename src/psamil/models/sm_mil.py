r"""Sm-MIL: attention pooling, alone or after a transformer, smoothed over neighbouring tiles by the Sm operator.

With h_i = ReLU(W_0 x_i + b_0) the embedding of tile i (the features themselves for ``hidden=0``) and Sm as in
:mod:`psamil.models.smoothing`:

- ``sm_abmil``: a_i = w . tanh(W h_i + b), z = sum_i softmax_i(a_i) h_i, logits = C z + c, where Sm is applied *early*
  to h, which is then also what is pooled, *mid* to W h + b, or *late* to a.
- ``sm_transformer``: before that pooling, depth times h <- y + MLP(LN y) + h_0 with y = h + Sm(attention(LN h)) and h_0
  the embedding; then LN. Attention is softmax(q . k / sqrt d) over all tiles of the bag, blind to their positions.

The score of a tile is a_i, after smoothing. As in the paper, the linear layers of a_i behind the operator are divided
by their largest singular value, so that they do not undo its work. A bag without tiles has z = 0.

Time O(T n attention_dim) beyond ABMIL for ``sm_abmil``, and next to nothing when late; O(n^2 hidden) more for
``sm_transformer``. Memory O(n attention_dim) and O(n hidden): embeddings are computed again wherever they are needed.

Where this differs from torchmil, which is by the paper's first author: alpha stays between 0 and 1 while it is learned,
a fixed alpha is not taken for 1 - alpha in the approximate mode, tiles without neighbours keep their values, layers are
normalised unless ``spectral_norm=False``, there is an embedding in front, and any number of outputs.

Castro-Macias, Morales-Alvarez, Wu, Molina, Katsaggelos: Sm: enhanced localization in Multiple Instance Learning for
medical imaging classification. NeurIPS 2024.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.parametrizations import spectral_norm as normalised

from psamil.bag import PackedBags
from psamil.errors import OptionError, one_of
from psamil.models.adjacency import Adjacency
from psamil.models.output import ModelOutput
from psamil.models.pooling import PoolingModel
from psamil.models.recompute import by_rows, in_parts, recomputed, sum_by_rows
from psamil.models.registry import register_model
from psamil.models.segments import segment_softmax, segment_sum
from psamil.models.smoothing import Smooth
from psamil.models.tiles import tile_features
from psamil.models.transformer import SelfAttention, two_layers

PLACES = ("early", "mid", "late")


class SmoothedPooling(nn.Module):
    """z = sum_i softmax_i(a_i) h_i with a_i = w . tanh(W h_i + b) and Sm in one place.

    Sm is linear, symmetric and does not mix columns. So W Sm(H) = Sm(W H), and the sum over Sm(H) with the weights
    softmax(a) is the sum over H with the weights Sm(softmax(a)): Sm(H) itself is not needed.
    """

    def __init__(self, width: int, attention_dim: int, where: str, spectral_norm: bool, smooth: Smooth) -> None:
        super().__init__()
        self.where, self.smooth = where, smooth
        self.project, self.score = nn.Linear(width, attention_dim), nn.Linear(attention_dim, 1, bias=False)
        if spectral_norm and where == "early":
            normalised(self.project)
        if spectral_norm and where != "late":
            normalised(self.score)

    def forward(
        self, embed: Callable[[Tensor], Tensor], x: Sequence[Tensor], batch: PackedBags, adjacency: Adjacency
    ) -> tuple[Tensor, Tensor]:
        """z (b, width) and a (n,) of tiles H = embed(x), x in parts, which is done anew wherever H is needed."""
        bag, bags = batch.bag_of_tile, len(batch)
        weight, bias, score = self.project.weight, self.project.bias, self.score.weight  # normalised once
        early = self.where == "early"
        hidden = by_rows(lambda x: linear(embed(x), weight, None if early else bias), x)
        if self.where != "late":
            hidden = self.smooth(hidden, adjacency)

        def scored(hidden: Tensor) -> Tensor:
            return linear((hidden + bias if early else hidden).to(score.dtype).tanh(), score)

        scores = by_rows(scored, hidden)
        if self.where == "late":
            scores = self.smooth(scores, adjacency)
        scores = scores.squeeze(1)
        shares = segment_softmax(scores, bag, bags)
        if self.where == "early":
            shares = self.smooth(shares[:, None], adjacency).squeeze(1)

        def pooled(x: Tensor, shares: Tensor, bag: Tensor) -> Tensor:
            return segment_sum(shares[:, None] * embed(x), bag, bags)

        return sum_by_rows(pooled, x, shares, bag), scores


class SmABMIL(PoolingModel):
    """Attention pooling with Sm.

    Args:
        where: "early", "mid" or "late".
        attention_dim: rows of W.
        spectral_norm: whether the layers behind the operator are normalised.
        radius_steps: within which tiles are neighbours, in tile steps.
        alpha, learn_alpha, mode, steps: of Sm, see :class:`psamil.models.smoothing.Smooth`.
        others: see :class:`psamil.models.pooling.PoolingModel`.
    """

    def __init__(
        self,
        in_dim: int,
        n_out: int,
        *,
        hidden: int = 512,
        dropout: float = 0.0,
        where: str = "early",
        attention_dim: int = 128,
        spectral_norm: bool = True,
        radius_steps: float = 1.5,
        **smoothing: Any,
    ) -> None:
        super().__init__(in_dim, n_out, hidden=hidden, dropout=dropout)
        if where not in PLACES:
            raise one_of("place of Sm", where, PLACES)
        if attention_dim < 1:
            raise OptionError(f"attention_dim must be at least 1, got {attention_dim}")
        self.radius_steps = radius_steps
        self.score = SmoothedPooling(self.embed.width, attention_dim, where, spectral_norm, Smooth(**smoothing))

    def forward(self, batch: PackedBags) -> ModelOutput:
        adjacency = Adjacency.of(batch, self.radius_steps)
        if self.training and self.embed.dropout.p > 0:  # which is drawn once
            pooled, scores = self.score(nn.Identity(), in_parts(self.tiles(batch)), batch, adjacency)
        else:
            x = tile_features(batch, self.embed.in_dim, self.head.weight.dtype)
            pooled, scores = self.score(self.embed.project, in_parts(x), batch, adjacency)
        return ModelOutput(logits=self.classify(pooled), tile_scores=scores)


class SmoothedAttention(nn.Module):
    """Sm(attention(norm(x)))."""

    def __init__(self, width: int, heads: int, smooth: Smooth) -> None:
        super().__init__()
        self.attention, self.smooth = SelfAttention(width, heads), smooth

    def forward(self, x: Sequence[Tensor], norm: nn.Module, offsets: list[int], adjacency: Adjacency) -> Tensor:
        """(n, width) of tokens x in parts."""
        heads = self.attention(x, norm, offsets)  # Sm does not mix columns
        return torch.cat([self.smooth(head, adjacency).to(x[0].dtype) for head in heads], 1)


class SmoothedBlock(nn.Module):
    """x -> y + MLP(LN y) + h_0, y = x + Sm(attention(LN x)): of tokens in parts, so that their gradients are too."""

    def __init__(self, width: int, heads: int, smooth: Smooth) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), SmoothedAttention(width, heads, smooth)
        self.norm2, self.mlp = nn.LayerNorm(width), two_layers(width, mlp_ratio=4)

    def forward(
        self, x: Sequence[Tensor], h: Sequence[Tensor], offsets: list[int], adjacency: Adjacency
    ) -> list[Tensor]:
        added = in_parts(self.attention(x, self.norm1, offsets, adjacency))
        y = [one + more for one, more in zip(x, added, strict=True)]
        return [recomputed(self._with_mlp, one) + h_0 for one, h_0 in zip(y, h, strict=True)]

    def _with_mlp(self, y: Tensor) -> Tensor:
        return y + self.mlp(self.norm2(y))


class SmTransformer(SmABMIL):
    """A transformer with Sm before the pooling of :class:`SmABMIL`.

    Args:
        depth: number of blocks; each has its own alpha.
        heads: of the attention; the width ``hidden`` is a multiple of it.
        others: see :class:`SmABMIL`.
    """

    def __init__(self, in_dim: int, n_out: int, *, depth: int = 1, heads: int = 4, **options: Any) -> None:
        super().__init__(in_dim, n_out, **options)
        if depth < 1:
            raise OptionError(f"depth must be at least 1, got {depth}")
        smoothing = {name: options[name] for name in ("alpha", "learn_alpha", "mode", "steps") if name in options}
        width = self.embed.width
        self.blocks = nn.ModuleList(SmoothedBlock(width, heads, Smooth(**smoothing)) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, batch: PackedBags) -> ModelOutput:
        adjacency = Adjacency.of(batch, self.radius_steps)
        h = x = in_parts(self.tiles(batch))
        for block in self.blocks:
            x = block(x, h, batch.offsets.tolist(), adjacency)
        pooled, scores = self.score(self.norm, x, batch, adjacency)
        return ModelOutput(logits=self.classify(pooled), tile_scores=scores)


@register_model
def sm_abmil(in_dim: int, n_out: int, **options: Any) -> SmABMIL:
    """Attention pooling with Sm; options of :class:`SmABMIL`."""
    return SmABMIL(in_dim, n_out, **options)


@register_model
def sm_transformer(in_dim: int, n_out: int, **options: Any) -> SmTransformer:
    """Transformer and attention pooling with Sm; options of :class:`SmTransformer`."""
    return SmTransformer(in_dim, n_out, **options)
