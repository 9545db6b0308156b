r"""CAMIL: attention pooling in which the likeness of neighbouring tiles gates what a tile contributes.

With x_i = ReLU(W f_i + b) the embedding of the features f_i of tile i (the features themselves for ``hidden=0``, as the
authors have it), N(i) the tiles around it on its slide, and n tiles in the bag:

    T = X + Nystrom(X)                                              global context, :mod:`psamil.models.nystrom`
    s_ij = exp(-delta_ij / sqrt(sum_{k in N(i)} delta_ik^2))        delta_ij = ||f_i - f_j||, j in N(i)
    s_ii = max_{j in N(i)} s_ij
    w_i = sum_{j in N(i) and i} s_ij (W_q t_i) . (W_k t_j) / sqrt(d_a)
    l_i = softmax_i(w) W_v t_i                                      softmax over the bag
    m_i = sigmoid(l_i) * l_i + (1 - sigmoid(l_i)) * t_i
    z = sum_i softmax_i(a_i) m_i,    a_i = w . (tanh(V t_i) * sigmoid(U t_i)),    logits = C z + c

The score of a tile is a_i. A bag without tiles gets the logits c. For m landmarks, time is O(n m width) and memory
O(n width): neighbours are a list of edges, along which keys are summed before they meet the query.

The weights softmax_i(w) sum to 1 over the bag, so that l_i fades as 1 / n: in a large bag m_i is close to t_i / 2.

Where the paper and the authors' code differ, this follows the paper: values and scores are taken of t (code: of x and
m), and the fusion is the one above (code: 2 l g + 2 t (1 - g), g = sigmoid(-l)^2). On purpose,

- distances are divided by their norm over N(i), as in the code: exp(-delta^2) of the paper is 0 for any two tiles of an
  encoder of some hundred features;
- they are Euclidean as in the paper, where the code has a cosine;
- N(i) holds all tiles within 1.5 steps. The code takes the 8 nearest, i among them: of the 8 tiles around i, one is
  left out, which one depends on their order.

Fourkioti, De Vries, Bakal: CAMIL: Context-Aware Multiple Instance Learning for Cancer Detection and Subtyping in Whole
Slide Images. ICLR 2024.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from psamil.bag import PackedBags
from psamil.errors import OptionError
from psamil.models.adjacency import CHUNK_NUMBERS, Adjacency
from psamil.models.nystrom import ORDER_MATTERS, NystromAttention
from psamil.models.output import ModelOutput
from psamil.models.pooling import TileEmbedding
from psamil.models.recompute import by_rows, recomputed, sum_by_rows
from psamil.models.registry import register_model
from psamil.models.segments import segment_softmax, segment_sum
from psamil.models.tiles import GatedScore

NEIGHBOUR_RADIUS_STEPS = 1.5


class CAMIL(nn.Module):
    """The model of the paper.

    Args:
        in_dim: width of the tile features.
        n_out: number of raw outputs.
        hidden: width of the embedding; 0 takes the features as they are.
        heads, head_dim, landmarks: of the Nystrom attention.
        neighbour_dim: d_a, rows of W_q and W_k.
        attention_dim: rows of V and U.
        dropout: share of the embedding and of the output of the attention that is dropped in training.
    """

    exceptions: ClassVar[dict[str, str]] = {"permutation": ORDER_MATTERS}

    def __init__(
        self,
        in_dim: int,
        n_out: int,
        *,
        hidden: int = 512,
        heads: int = 8,
        head_dim: int = 64,
        landmarks: int = 256,
        neighbour_dim: int = 256,
        attention_dim: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if min(in_dim, n_out, neighbour_dim, attention_dim) < 1 or hidden < 0 or not 0 <= dropout < 1:
            raise OptionError("sizes must be at least 1, hidden at least 0 and dropout in [0, 1)")
        self.embed = TileEmbedding(in_dim, hidden, dropout)
        width = self.embed.width
        self.context = NystromAttention(width, heads=heads, head_dim=head_dim, landmarks=landmarks, dropout=dropout)
        self.query = nn.Linear(width, neighbour_dim, bias=False)
        self.key = nn.Linear(width, neighbour_dim, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.score = GatedScore(width, attention_dim)
        self.head = nn.Linear(width, n_out)

    def forward(self, batch: PackedBags) -> ModelOutput:
        x = self.embed(batch, self.head.weight.dtype)
        t = x + torch.cat([self.context(tiles) for tiles in batch.split(x)])
        bag, bags = batch.bag_of_tile, len(batch)
        adjacency = Adjacency.of(batch, NEIGHBOUR_RADIUS_STEPS)
        similarity = feature_similarity(batch.features.detach(), adjacency)
        weights = segment_softmax(recomputed(self.neighbour_scores, t, adjacency, *similarity), bag, bags)
        scores = by_rows(self.score, t).squeeze(-1)

        def pooled(t: Tensor, weights: Tensor, shares: Tensor, bag: Tensor) -> Tensor:
            local = weights[:, None] * self.value(t)
            gate = local.sigmoid()
            return segment_sum(shares[:, None] * (gate * local + (1 - gate) * t), bag, bags)

        z = sum_by_rows(pooled, t, weights, segment_softmax(scores, bag, bags), bag)
        return ModelOutput(logits=self.head(z.to(self.head.weight.dtype)), tile_scores=scores)

    def neighbour_scores(self, t: Tensor, adjacency: Adjacency, of_pair: Tensor, of_itself: Tensor) -> Tensor:
        """(n,) w_i: how much the neighbours of tile i are like it, which the authors draw as a second map."""
        query, key = self.query(t), self.key(t)
        around = adjacency.sum(key, of_pair) + of_itself[:, None] * key
        return (query * around).sum(1) / math.sqrt(query.shape[1])


def feature_similarity(features: Tensor, adjacency: Adjacency) -> tuple[Tensor, Tensor]:
    """s_ij of each pair, (m,), and s_ii of each tile, (n,), which is 1 for a tile without neighbours.

    In float32 at least: squared distances between features can exceed what float16 holds.
    """
    i, j, n = adjacency.rows, adjacency.columns, adjacency.n
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    chunk = max(1, CHUNK_NUMBERS // features.shape[1])
    distance = torch.cat(
        [(features[a] - features[b]).norm(dim=1) for a, b in zip(i.split(chunk), j.split(chunk), strict=True)]
    )
    norm = segment_sum(distance.square(), i, n).sqrt()
    of_pair = torch.exp(-distance / norm.clamp(min=torch.finfo(norm.dtype).tiny)[i])
    of_itself = of_pair.new_zeros(n).scatter_reduce(0, i, of_pair, "amax")
    return of_pair, torch.where(adjacency.degree > 0, of_itself, torch.ones_like(of_itself))


@register_model
def camil(in_dim: int, n_out: int, **options: Any) -> CAMIL:
    """CAMIL; options of :class:`CAMIL`."""
    return CAMIL(in_dim, n_out, **options)
