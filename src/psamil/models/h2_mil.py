r"""H2-MIL: a slide as a tree of three scales, whose graph is pooled level by level.

Bags have one scale, so that the coarser ones are made: level 2 are the tiles, level 1 the means of 2 x 2 tiles (10x to
5x), level 0 the mean of the slide in place of its thumbnail. They are not seen at lower magnification: see
:mod:`psamil.models.scales`. Nodes are joined to the nodes around them in their level, and to their parents.

Attention (RAConv). The neighbours of node i, itself included, have types t: their levels. With N_t those of type t,

    out_i = sum_t b_it sum_{j in N_t} p_ij W x_j + bias,
    b_i. = softmax_t LeakyReLU(c . W' mean_{j in N_t} x_j + c' . W' x_i)        over types that i has neighbours of,
    p_ij = softmax_{j in N_t} LeakyReLU(a . W x_j + a' . W x_i).

Pooling (IHPool). Every node has a fitness f_i = tanh(x_i . w / |w|). In each slide, level 1 is sorted by fitness, every
k-th node is a centre, and each node joins the centre with the smallest |xy_i - xy_c| + |f_i - f_c|. The level-2 nodes
under each cluster of level 1 are clustered among themselves in the same way. Clusters are the nodes of the pooled
graph, with mean features and positions, joined where any of their members were. k is 10 in the first pooling; the
second leaves at most 4 clusters of level 1, and 2 of level 2 under each.

    LN, RAConv, ReLU, LN, dropout, IHPool -> r1 = mean of nodes; RAConv, ReLU, LN, dropout, IHPool -> r2
    logits = C LN(ReLU(B (r1 + r2)))        (biases and dropout left out)

LN of nodes is over all nodes and channels of a slide, with a scale and a shift that are single numbers.

No score of tiles is defined by the authors; the fitness cannot be one, as w is never learned (below). The score of a
tile is the largest logit that the head gives to the tile and its cluster in place of r1 and r2 (of three classes and
more, over their mean).

Time and memory O(n): nearest centres are looked for in cells of space, and distances to them taken in chunks.

On purpose: raw logits come out (the authors take the cross-entropy of a softmax of a softmax); the sums go along edges,
without a dense adjacency. w decides only who is in which cluster, through which no gradient goes: it stays the random
direction it begins as, and is a buffer. Our reading where the sources are silent: a node is its own neighbour, as in
GAT; positions are scaled by the longer side of the tissue to [-1, 1].

Hou, Yu, Lin, Huang, Yu, Qin, Wang: H2-MIL: Exploring Hierarchical Representation with Heterogeneous Multiple Instance
Learning for Whole Slide Image Analysis. AAAI 2022.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from psamil.bag import PackedBags
from psamil.errors import OptionError
from psamil.models.adjacency import Adjacency
from psamil.models.graph_attention import NEGATIVE_SLOPE, with_loops
from psamil.models.output import ModelOutput
from psamil.models.registry import register_model
from psamil.models.scales import squares_of, tree_pairs
from psamil.models.segments import segment_mean, segment_softmax
from psamil.models.tiles import output_scores, tile_features
from psamil.spatial.blocks import position_in_group
from psamil.spatial.neighbours import neighbour_pairs

LEVELS = 3
LAST_CLUSTERS = (4, 2)
"""The second pooling leaves so many clusters of level 1, and of level 2 under each, at most."""
PAIRS_AT_ONCE = 2**20
"""Distances to centres that are held at once."""


@dataclass(frozen=True)
class Tree:
    """Nodes of all slides of a batch: first those of level 0, then of level 1, then of level 2.

    Slides are counted as those that have tiles; each has one node of level 0, so that its index is that of the slide.
    """

    x: Tensor  # (n, width)
    place: Tensor  # (n, 2) positions in [-1, 1]
    parent: Tensor  # (n,) node; level 0: itself
    level: Tensor  # (n,)
    slide: Tensor  # (n,)
    pairs: Tensor  # (2, m) edges in both directions, without those of a node to itself

    @staticmethod
    def of(x: Tensor, batch: PackedBags, side_steps: int) -> Tree:
        """Tiles (n, width), their squares and their slides."""
        squares = squares_of(batch.xy, batch.slides, side_steps)
        sizes = batch.slides.diff()
        slide = torch.repeat_interleave(sizes[sizes > 0]).to(x.device)
        slide_of_square = squares.of_any_tile(slide)
        s, m = int((sizes > 0).sum()), len(squares)
        precision = torch.promote_types(x.dtype, torch.float32)  # of places
        xy = batch.xy.to(torch.promote_types(batch.xy.dtype, precision))  # whole numbers are allowed
        place = _places(xy, slide, s).to(precision)
        near = neighbour_pairs(squares.cell, squares.slides) + s, neighbour_pairs(batch.xy, batch.slides) + s + m
        trees = tree_pairs(slide_of_square, first_child=s), tree_pairs(squares.of_tile + s, first_child=s + m)
        return Tree(
            x=torch.cat((segment_mean(x, slide, s), squares.mean(x), x)).to(x.dtype),
            place=torch.cat((segment_mean(place, slide, s), squares.mean(place), place)),
            parent=torch.cat((torch.arange(s, device=x.device), slide_of_square, squares.of_tile + s)),
            level=torch.repeat_interleave(torch.tensor([s, m, len(x)])).to(x.device),
            slide=torch.cat((torch.arange(s, device=x.device), slide_of_square, slide)),
            pairs=torch.cat((*near, *trees), 1),
        )


def _places(xy: Tensor, slide: Tensor, n_slides: int) -> Tensor:
    """(n, 2) positions from -1 to 1 along the longer side of the tiles of a slide, its middle at 0."""
    index = slide[:, None].expand(-1, 2)
    low = xy.new_full((n_slides, 2), torch.inf).scatter_reduce(0, index, xy, "amin")
    high = xy.new_full((n_slides, 2), -torch.inf).scatter_reduce(0, index, xy, "amax")
    side = (high - low).amax(1).clamp(min=1)
    return (xy - ((low + high) / 2)[slide]) / (side[slide, None] / 2)


class TypedAttention(nn.Module):
    """RAConv, see the module."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.project = nn.Linear(in_dim, out_dim, bias=False)  # W
        self.project_type = nn.Linear(in_dim, out_dim, bias=False)  # W'
        self.of_nodes = nn.Parameter(torch.empty(2, out_dim))  # a, a'
        self.of_types = nn.Parameter(torch.empty(2, out_dim))  # c, c'
        self.bias = nn.Parameter(torch.zeros(out_dim))
        for weight in (self.project.weight, self.project_type.weight, self.of_nodes, self.of_types):
            nn.init.xavier_uniform_(weight)

    def forward(self, x: Tensor, level: Tensor, pairs: Tensor) -> Tensor:
        """(n, out_dim) of nodes (n, in_dim), their levels (n,) and edges (2, m)."""
        n = len(x)
        pairs = with_loops(pairs, n)
        i, j = pairs
        values = self.project(x)
        sender, receiver = (values @ self.of_nodes.T).unbind(1)
        group = LEVELS * i + level[j]  # neighbours of i of one type
        groups, group = group.unique(return_inverse=True)
        node_weight = segment_softmax(leaky_relu(sender[j] + receiver[i], NEGATIVE_SLOPE), group, len(groups))
        sender, receiver = (x @ (self.project_type.weight.T @ self.of_types.T)).unbind(
            1
        )  # c . W' x: W' x is not needed
        type_score = segment_mean(sender[j], group, len(groups)) + receiver[groups // LEVELS]
        type_weight = segment_softmax(leaky_relu(type_score, NEGATIVE_SLOPE), groups // LEVELS, n)
        return (Adjacency(pairs, n).sum(values, type_weight[group] * node_weight) + self.bias).to(x.dtype)


class GraphNorm(nn.Module):
    """(x - mean) / (standard deviation) g + b over all nodes and channels of a slide; g and b are numbers."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1)), eps

    def forward(self, x: Tensor, slide: Tensor) -> Tensor:
        n_slides = int(slide.amax()) + 1 if len(slide) else 0
        centred = x - segment_mean(x.mean(1), slide, n_slides)[slide, None]
        variance = segment_mean(centred.square().mean(1), slide, n_slides)[slide, None]
        return (centred / (variance + self.eps).sqrt() * self.weight + self.bias).to(x.dtype)


class ClusterPooling(nn.Module):
    """IHPool, see the module.

    Args:
        width: of the nodes.
        keep: for level 1 and for level 2, the share of the nodes of a group that are centres, below 1, or else the
            largest number of them.
    """

    direction: Tensor

    def __init__(self, width: int, keep: tuple[float, float]) -> None:
        super().__init__()
        self.keep = keep
        self.register_buffer("direction", nn.functional.normalize(torch.randn(width), dim=0))  # w / |w|

    def forward(self, tree: Tree) -> tuple[Tree, Tensor]:
        """The tree of clusters, and the cluster (n,) of each node."""
        with torch.autocast(tree.x.device.type, enabled=False):  # rounding would make equals of different nodes
            fitness = (tree.x.detach().to(tree.place.dtype) @ self.direction.to(tree.place.dtype)).tanh()
        cluster = tree.parent.clone()  # of nodes of level 0: themselves
        parents = [cluster[tree.level == 0]]
        for level, keep in enumerate(self.keep, 1):
            members = (tree.level == level).nonzero().squeeze(1)
            group = cluster[tree.parent[members]]
            own, group_of_cluster = clusters(group, fitness[members], tree.place[members], keep)
            cluster[members] = own + sum(map(len, parents))
            parents.append(group_of_cluster)
        n = sum(map(len, parents))
        edge = (cluster[tree.pairs] * torch.tensor([[n], [1]], device=cluster.device)).sum(0).unique()
        edge = edge[edge // max(n, 1) != edge % max(n, 1)]
        pooled = Tree(
            x=segment_mean(tree.x, cluster, n).to(tree.x.dtype),
            place=segment_mean(tree.place, cluster, n),
            parent=torch.cat(parents),
            level=torch.repeat_interleave(torch.tensor([len(part) for part in parents])).to(cluster.device),
            slide=cluster.new_empty(n).index_copy(0, cluster, tree.slide),
            pairs=torch.stack((edge // max(n, 1), edge % max(n, 1))),
        )
        return pooled, cluster


@torch.no_grad()
def clusters(group: Tensor, fitness: Tensor, place: Tensor, keep: float) -> tuple[Tensor, Tensor]:
    """Clusters nodes inside each group around nodes of evenly spread ranks of fitness.

    Args:
        group: (n,) of each node.
        fitness: (n,).
        place: (n, 2).
        keep: share of the nodes that are centres, below 1, or else the largest number of them in a group.

    Returns:
        (n,) cluster of each node and (c,) group of each cluster.
    """
    order = torch.arange(len(group), device=group.device)
    for key in (place[:, 0], place[:, 1], -fitness, group):  # the last one decides first
        order = order[key[order].argsort(stable=True)]
    size = group[order].unique_consecutive(return_counts=True)[1]
    stride = torch.full_like(size, round(1 / keep)) if keep < 1 else (size + int(keep) - 1) // int(keep)
    group_at = torch.repeat_interleave(size)  # (n,) of the nodes in this order, groups counted from 0
    centre = order[position_in_group(size) % stride[group_at] == 0]
    point = torch.cat((place, fitness.nan_to_num()[:, None]), 1)  # lost numbers are seen in the logits
    nearest = nearest_centres(point, torch.empty_like(group).index_copy(0, order, group_at), centre)
    used, nearest = nearest.unique(return_inverse=True)  # a centre can be the twin of another, and stay alone
    return nearest, group[centre[used]]


def nearest_centres(point: Tensor, group: Tensor, centre: Tensor) -> Tensor:
    """(n,) the nearest centre to each point in its group, as an index of ``centre``; the first of several.

    Space is cut into cells of some side, so that all centres within this distance of a point are in the 27 cells around
    it. Points that find none so near look again in cells of twice the side. At first there is about one centre in a
    cell, so that time is O(n) unless most centres are in few places.

    Args:
        point: (n, 3) x, y and fitness. Two of them are as far apart as their x and y, plus as their fitness.
        group: (n,) from 0, each with a centre.
        centre: (c,) points.
    """
    nearest = torch.empty_like(group)
    if not len(point):
        return nearest
    n_centres = torch.bincount(group[centre])
    index, bounds = group[:, None].expand(-1, 3), point.new_full((len(n_centres), 3), torch.inf)
    low, high = bounds.scatter_reduce(0, index, point, "amin"), (-bounds).scatter_reduce(0, index, point, "amax")
    side = ((high - low).sum(1) / n_centres ** (1 / 3)).clamp(min=torch.finfo(point.dtype).smallest_normal)
    around = torch.cartesian_prod(*[torch.arange(-1, 2, device=point.device)] * 2)  # (9, 2) columns of three cells
    left = torch.arange(len(point), device=point.device)
    while len(left):
        cell = ((point - low[group]) / side[group, None]).long() + 1  # (n, 3), the cells around them not negative
        edge = int(cell.amax()) + 2
        scale = torch.tensor([edge**2, edge, 1], device=point.device)
        key = group * edge**3 + (cell * scale).sum(1)
        centre_key, by_key = key[centre].sort(stable=True)
        column = key[left, None] + (around * scale[:2]).sum(1)
        first = torch.searchsorted(centre_key, column - 1)  # (left, 9)
        count = torch.searchsorted(centre_key, column + 1, right=True) - first
        chunk = (count.sum(1).cumsum(0) - 1).clamp(min=0) // PAIRS_AT_ONCE
        found = []
        for at in torch.arange(len(left), device=point.device).split(torch.bincount(chunk).tolist()):
            options = count[at].flatten()
            row = torch.repeat_interleave(options) // len(around)
            option = by_key[torch.repeat_interleave(first[at].flatten(), options) + position_in_group(options)]
            away = point[left[at[row]]] - point[centre[option]]
            cost = torch.linalg.vector_norm(away[:, :2], dim=1) + away[:, 2].abs()
            lowest = cost.new_full((len(at),), torch.inf).scatter_reduce(0, row, cost, "amin")
            option = torch.where(cost == lowest[row], option, len(centre))
            nearest[left[at]] = option.new_full((len(at),), len(centre)).scatter_reduce(0, row, option, "amin")
            found.append(lowest <= 0.999 * side[group[left[at]]])  # at 1, rounding could put it one cell further
        left, side = left[~torch.cat(found)], 2 * side
    return nearest


class H2MIL(nn.Module):
    """See the module.

    Args:
        in_dim: width of the tile features.
        n_out: number of raw outputs.
        hidden: width of the nodes.
        head_dim: width of the layer before the logits.
        dropout: share that is dropped in training after each layer.
        parent_steps: side of the square of tiles that makes a node of level 1, in tile steps.
        keep_share: share of the nodes that are centres in the first pooling.
    """

    exceptions: ClassVar[dict[str, str]] = {"half weights": "rounding changes which nodes form a cluster"}

    def __init__(
        self,
        in_dim: int,
        n_out: int,
        *,
        hidden: int = 256,
        head_dim: int = 128,
        dropout: float = 0.3,
        parent_steps: int = 2,
        keep_share: float = 0.1,
    ) -> None:
        super().__init__()
        if min(in_dim, n_out, hidden, head_dim, parent_steps) < 1:
            raise OptionError("in_dim, n_out, hidden, head_dim and parent_steps must be at least 1")
        if not (0 <= dropout < 1 and 0 < keep_share < 1):
            raise OptionError("dropout must be in [0, 1) and keep_share in (0, 1)")
        self.in_dim, self.parent_steps = in_dim, parent_steps
        self.norm = GraphNorm()
        self.attention1, self.norm1 = TypedAttention(in_dim, hidden), GraphNorm()
        self.pool1 = ClusterPooling(hidden, (keep_share, keep_share))
        self.attention2, self.norm2 = TypedAttention(hidden, hidden), GraphNorm()
        self.pool2 = ClusterPooling(hidden, LAST_CLUSTERS)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Sequential(
            nn.Linear(hidden, head_dim),
            nn.ReLU(),
            nn.LayerNorm(head_dim),
            nn.Dropout(dropout),
            nn.Linear(head_dim, n_out),
        )

    def forward(self, batch: PackedBags) -> ModelOutput:
        x = tile_features(batch, self.in_dim, self.norm.weight.dtype)
        sizes = batch.slides.diff()
        bag_of_slide = torch.searchsorted(batch.offsets, batch.slides[:-1][sizes > 0], right=True).to(x.device) - 1

        def readout(tree: Tree) -> Tensor:
            return segment_mean(tree.x, bag_of_slide[tree.slide], len(batch)).to(x.dtype)

        tree = Tree.of(x, batch, self.parent_steps)
        tree = replace(tree, x=self.norm(tree.x, tree.slide))
        fine = self._attend(self.attention1, self.norm1, tree)
        pooled, cluster = self.pool1(fine)
        coarse = self._attend(self.attention2, self.norm2, pooled)
        last, _ = self.pool2(coarse)
        is_tile = tree.level == LEVELS - 1
        tile_logits = self.head(fine.x[is_tile] + coarse.x[cluster[is_tile]])
        return ModelOutput(
            logits=self.head(readout(pooled) + readout(last)), tile_scores=output_scores(self, tile_logits)
        )

    def _attend(self, attention: TypedAttention, norm: GraphNorm, tree: Tree) -> Tree:
        x = attention(tree.x, tree.level, tree.pairs).relu()
        return replace(tree, x=self.dropout(norm(x, tree.slide)))


@register_model
def h2_mil(in_dim: int, n_out: int, **options: Any) -> H2MIL:
    """A tree of three scales, pooled level by level; options of :class:`H2MIL`."""
    return H2MIL(in_dim, n_out, **options)
