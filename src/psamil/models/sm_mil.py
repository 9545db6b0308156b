r"""Sm-MIL: attention pooling, alone or after a transformer, smoothed over neighbouring tiles by the Sm operator.

With h_i = ReLU(W_0 x_i + b_0) the embedding of tile i (the features themselves for ``hidden=0``) and Sm as in
:mod:`psamil.models.smoothing`:

- ``sm_abmil``: a_i = w . tanh(W h_i + b), z = sum_i softmax_i(a_i) h_i, logits = C z + c, where Sm is applied *early*
  to h, which is then also what is pooled, *mid* to W h + b, or *late* to a.
- ``sm_transformer``: before that pooling, depth times h <- y + MLP(LN y) + h_0 with y = h + Sm(attention(LN h)) and h_0
  the embedding; then LN. Attention is softmax(q . k / sqrt d) over all tiles of the bag, blind to their positions.

The score of a tile is a_i, after smoothing. As in the paper, the linear layers of a_i behind the operator are divided
by their largest singular value, so that they do not undo its work. A bag without tiles has z = 0.

Time O(T n hidden) for ``sm_abmil``, and next to nothing beyond ABMIL when late; O(n^2 hidden) more for
``sm_transformer``. Memory O(n hidden).

Where this differs from torchmil, which is by the paper's first author: alpha stays between 0 and 1 while it is learned,
a fixed alpha is not taken for 1 - alpha in the approximate mode, tiles without neighbours keep their values, layers are
normalised unless ``spectral_norm=False``, there is an embedding in front, and any number of outputs.

Castro-Macias, Morales-Alvarez, Wu, Molina, Katsaggelos: Sm: enhanced localization in Multiple Instance Learning for
medical imaging classification. NeurIPS 2024.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm as normalised

from psamil.bag import PackedBags
from psamil.errors import OptionError, one_of
from psamil.models.adjacency import Adjacency
from psamil.models.output import ModelOutput
from psamil.models.pooling import PoolingModel, attention_pooling
from psamil.models.registry import register_model
from psamil.models.smoothing import Smooth
from psamil.models.transformer import SelfAttention, TransformerBlock

PLACES = ("early", "mid", "late")


class SmoothedScore(nn.Module):
    """a_i = w . tanh(W h_i + b) with Sm in one place; gives h, smoothed where that is the place, and a (n,)."""

    def __init__(self, width: int, attention_dim: int, where: str, spectral_norm: bool, smooth: Smooth) -> None:
        super().__init__()
        self.where, self.smooth = where, smooth
        self.project, self.score = nn.Linear(width, attention_dim), nn.Linear(attention_dim, 1, bias=False)
        if spectral_norm and where == "early":
            normalised(self.project)
        if spectral_norm and where != "late":
            normalised(self.score)

    def forward(self, h: Tensor, adjacency: Adjacency) -> tuple[Tensor, Tensor]:
        if self.where == "early":
            h = self.smooth(h, adjacency).to(h.dtype)
        hidden = self.project(h)
        if self.where == "mid":
            hidden = self.smooth(hidden, adjacency).to(h.dtype)
        scores = self.score(hidden.tanh())
        if self.where == "late":
            scores = self.smooth(scores, adjacency)
        return h, scores.squeeze(1)


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
        self.score = SmoothedScore(self.embed.width, attention_dim, where, spectral_norm, Smooth(**smoothing))

    def with_context(self, h: Tensor, batch: PackedBags, adjacency: Adjacency) -> Tensor:
        """(n, width) what is pooled, of embeddings (n, width)."""
        return h

    def forward(self, batch: PackedBags) -> ModelOutput:
        h = self.tiles(batch)
        adjacency = Adjacency.of(batch, self.radius_steps)
        h, scores = self.score(self.with_context(h, batch, adjacency), adjacency)
        pooled = attention_pooling(scores, h, batch.bag_of_tile, len(batch))
        return ModelOutput(logits=self.classify(pooled), tile_scores=scores)


class SmoothedAttention(nn.Module):
    """Sm(attention(x))."""

    def __init__(self, width: int, heads: int, smooth: Smooth) -> None:
        super().__init__()
        self.attention, self.smooth = SelfAttention(width, heads), smooth

    def forward(self, x: Tensor, offsets: list[int], adjacency: Adjacency) -> Tensor:
        return self.smooth(self.attention(x, offsets), adjacency).to(x.dtype)


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
        self.blocks = nn.ModuleList(
            TransformerBlock(width, SmoothedAttention(width, heads, Smooth(**smoothing)), mlp_ratio=4)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)

    def with_context(self, h: Tensor, batch: PackedBags, adjacency: Adjacency) -> Tensor:
        x = h
        for block in self.blocks:
            x = block(x, batch.offsets.tolist(), adjacency) + h
        return self.norm(x)


@register_model
def sm_abmil(in_dim: int, n_out: int, **options: Any) -> SmABMIL:
    """Attention pooling with Sm; options of :class:`SmABMIL`."""
    return SmABMIL(in_dim, n_out, **options)


@register_model
def sm_transformer(in_dim: int, n_out: int, **options: Any) -> SmTransformer:
    """Transformer and attention pooling with Sm; options of :class:`SmTransformer`."""
    return SmTransformer(in_dim, n_out, **options)
