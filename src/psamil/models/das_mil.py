r"""DAS-MIL: a graph over two scales, the finer of which teaches the coarser.

Bags have one scale, so that the coarser one is made: a parent is the mean of the tiles in a square of ``parent_steps``
x ``parent_steps`` tile steps (4: 20x to 5x). It is not a tile seen at lower magnification: see
:mod:`psamil.models.scales`.

Tiles are joined to the tiles around them, parents to the parents around them, each tile to its parent. With one graph
attention (GAT, heads averaged, no activation after it) per scale and one over the joint graph,

    h = GAT([GAT_tiles(x); GAT_parents(mean x)])    (joint edges; 384 -> 384 -> 256 for features of 384)

a head per scale (DSMIL; C = n_out) looks at its nodes i and at the critical node m of a bag for each output c:

    s_i = S h_i,  u_i = ReLU(F h_i),  q_i = tanh(Q u_i),  v_i = V u_i,  m(c) = argmax_i s_ic,
    z_c = sum_i softmax_i(q_i . q_m(c) / sqrt(128)) v_i,  logits = B [z_1; ...; z_C]        (biases left out).

The logits of the tiles' head are those of the bag. Beside the loss L of these, training minimises, with logits l of the
tiles' head and l' of the parents' head,

    L(max_i s_i) + L(max_i s'_i) + (1 - lambda) L(l') + beta MSE(s'_p, max of s over the tiles of p)
        + lambda sum_c KL(sigmoid(l_c / T) || sigmoid(l'_c / T)),

in which what the tiles' head says as a teacher (s and l in the last two) has no gradient. In training, each graph
attention leaves out the edges of a random half of the nodes.

The score of a tile is its own largest logit, max_c s_ic (of three classes and more, over their mean). The authors show
the attention softmax_i(...) instead, min-max scaled and set to zero on slides that are predicted negative: it compares
tiles with the critical tile of their own slide, and means nothing across slides.

Time and memory O(n): all sums go along edges.

Bontempo, Porrello, Bolelli, Calderara, Ficarra: DAS-MIL: Distilling Across Scales for MIL Classification of
Histological WSIs. MICCAI 2023.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from psamil.bag import PackedBags
from psamil.errors import OptionError
from psamil.models.graph_attention import GraphAttention
from psamil.models.output import ExtraPrediction, ModelOutput
from psamil.models.registry import register_model
from psamil.models.scales import squares_of, tree_pairs
from psamil.models.segments import segment_mean
from psamil.models.tiles import attention_pooling, output_scores, tile_features
from psamil.spatial.neighbours import neighbour_pairs


def segment_max(values: Tensor, segment: Tensor, n_segments: int) -> Tensor:
    """(n_segments, c): largest value in each column (n, c); -inf without rows. Equals share the gradient."""
    lowest = values.new_full((n_segments, values.shape[1]), -torch.inf)
    return lowest.scatter_reduce(0, segment[:, None].expand_as(values), values, "amax")


class DualStreamHead(nn.Module):
    """Logits of nodes and of bags, see the module."""

    def __init__(self, width: int, n_out: int, query_dim: int) -> None:
        super().__init__()
        self.node = nn.Linear(width, n_out)
        self.hidden = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        self.query = nn.Sequential(nn.Linear(width, query_dim), nn.Tanh())
        self.value = nn.Linear(width, width)
        self.bag = nn.Linear(n_out * width, n_out)

    def forward(self, h: Tensor, bag: Tensor, n_bags: int) -> tuple[Tensor, Tensor]:
        """Logits (n, n_out) of nodes (n, width) and (n_bags, n_out) of bags; ``bag`` (n,) is that of each node."""
        node_logits = self.node(h)
        u = self.hidden(h)
        q, v = self.query(u), self.value(u)
        critical = _first_of_highest(node_logits, bag, n_bags)  # (n_bags, n_out)
        pooled = []
        for place in critical.unbind(1):
            similarity = (q * q.index_select(0, place[bag])).sum(1) / math.sqrt(q.shape[1])
            pooled.append(attention_pooling(similarity, v, bag, n_bags))
        return node_logits, self.bag(torch.cat(pooled, 1).to(self.bag.weight.dtype))


@torch.no_grad()
def _first_of_highest(values: Tensor, segment: Tensor, n_segments: int) -> Tensor:
    """(n_segments, c) row of the largest value in each column (n, c); n where a segment has no rows."""
    n = len(values)
    row = torch.arange(n, device=values.device)[:, None]
    of_highest = torch.where(values == segment_max(values, segment, n_segments)[segment], row, n)
    return row.new_full((n_segments, values.shape[1]), n).scatter_reduce(
        0, segment[:, None].expand_as(values), of_highest, "amin"
    )


class DASMIL(nn.Module):
    """See the module.

    Args:
        in_dim: width of the tile features.
        n_out: number of raw outputs.
        hidden: width of the nodes of the joint graph.
        heads: of each graph attention.
        query_dim: width of q.
        parent_steps: side of the square of tiles that makes a parent, in tile steps.
        attention_dropout: share of the weights of graph attention that is dropped in training.
        node_dropout: share of the nodes whose edges are left out in training.
        distil_bag: lambda, weight of the distillation of bags.
        distil_tiles: beta, weight of the distillation of tiles.
        temperature: T.
    """

    def __init__(
        self,
        in_dim: int,
        n_out: int,
        *,
        hidden: int = 256,
        heads: int = 3,
        query_dim: int = 128,
        parent_steps: int = 4,
        attention_dropout: float = 0.2,
        node_dropout: float = 0.5,
        distil_bag: float = 1.0,
        distil_tiles: float = 1.0,
        temperature: float = 1.5,
    ) -> None:
        super().__init__()
        if min(in_dim, n_out, hidden, heads, query_dim, parent_steps) < 1:
            raise OptionError("in_dim, n_out, hidden, heads, query_dim and parent_steps must be at least 1")
        if not (0 <= attention_dropout < 1 and 0 <= node_dropout < 1):
            raise OptionError("attention_dropout and node_dropout must be in [0, 1)")
        if not (0 <= distil_bag <= 1 and distil_tiles >= 0 and temperature > 0):
            raise OptionError("distil_bag must be in [0, 1], distil_tiles at least 0 and temperature positive")
        self.in_dim, self.parent_steps, self.node_dropout = in_dim, parent_steps, node_dropout
        self.distil_bag, self.distil_tiles, self.temperature = distil_bag, distil_tiles, temperature
        self.tile_graph = GraphAttention(in_dim, in_dim, heads=heads, dropout=attention_dropout)
        self.parent_graph = GraphAttention(in_dim, in_dim, heads=heads, dropout=attention_dropout)
        self.joint_graph = GraphAttention(in_dim, hidden, heads=heads, dropout=attention_dropout)
        self.tile_head = DualStreamHead(hidden, n_out, query_dim)
        self.parent_head = DualStreamHead(hidden, n_out, query_dim)

    def _attend(self, graph: GraphAttention, x: Tensor, pairs: Tensor) -> Tensor:
        if self.training and self.node_dropout:
            kept = torch.rand(len(x), device=x.device) >= self.node_dropout
            pairs = pairs[:, kept[pairs].all(0)]
        out: Tensor = graph(x, pairs)
        return out

    def forward(self, batch: PackedBags) -> ModelOutput:
        x = tile_features(batch, self.in_dim, self.tile_head.node.weight.dtype)
        parents = squares_of(batch.xy, batch.slides, self.parent_steps)
        n, m, bag = len(x), len(parents), batch.bag_of_tile
        bag_of_parent = parents.of_any_tile(bag)
        tile_pairs = neighbour_pairs(batch.xy, batch.slides)
        parent_pairs = neighbour_pairs(parents.cell, parents.slides)
        tiles = self._attend(self.tile_graph, x, tile_pairs)
        coarse = self._attend(self.parent_graph, parents.mean(x).to(x.dtype), parent_pairs)
        joint_pairs = torch.cat((parent_pairs, tile_pairs + m, tree_pairs(parents.of_tile, first_child=m)), 1)
        coarse, tiles = self._attend(self.joint_graph, torch.cat((coarse, tiles)), joint_pairs).split((m, n))
        tile_logits, logits = self.tile_head(tiles, bag, len(batch))
        parent_logits, coarse_logits = self.parent_head(coarse, bag_of_parent, len(batch))

        filled = (batch.offsets.diff() > 0).nonzero().squeeze(1).to(x.device)
        extra = {
            "highest tile": ExtraPrediction(segment_max(tile_logits, bag, len(batch))[filled], filled),
            "highest parent": ExtraPrediction(segment_max(parent_logits, bag_of_parent, len(batch))[filled], filled),
            "parents": ExtraPrediction(coarse_logits[filled], filled, weight=1 - self.distil_bag),
        }
        teacher = segment_max(tile_logits.detach(), parents.of_tile, m)
        error = segment_mean((parent_logits - teacher).square().mean(1), bag_of_parent, len(batch)).mean()
        divergence = bernoulli_divergence(logits.detach() / self.temperature, coarse_logits / self.temperature)
        return ModelOutput(
            logits=logits,
            tile_scores=output_scores(self, tile_logits),
            auxiliary_losses={
                "distil tiles": self.distil_tiles * error,
                "distil bag": self.distil_bag * divergence.sum(1).mean(),
            },
            extra_predictions={name: one for name, one in extra.items() if one.weight > 0 and len(filled)},
        )


def bernoulli_divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(p || q) of yes or no with log-odds ``teacher`` (p) and ``student`` (q), element by element."""
    yes = logsigmoid(teacher) - logsigmoid(student)
    no = logsigmoid(-teacher) - logsigmoid(-student)
    return teacher.sigmoid() * yes + (-teacher).sigmoid() * no


@register_model
def das_mil(in_dim: int, n_out: int, **options: Any) -> DASMIL:
    """A graph over two scales with distillation between them; options of :class:`DASMIL`."""
    return DASMIL(in_dim, n_out, **options)
