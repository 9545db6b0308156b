r"""GTP: a graph convolution, min-cut pooling of the tiles to a fixed number of nodes, and a transformer over these.

With A the 0/1 matrix of neighbouring tiles (no loops, never across slides), D its degrees, and x_i the features,

    y_i = BatchNorm(u_i / ||u_i||),   u_i = (x_i + sum_j A_ij x_j) W + b                         64 numbers per tile
    S = softmax(Y W_s + b_s),   Z = S^T Y                                                       n tiles to 100 nodes
    [class token, Z_1, ..., Z_100] -> 3 pre-norm transformer blocks -> LN -> linear layer on the class token -> logits

and two auxiliary losses of each bag, averaged over bags: the cut -Tr(S^T A S) / Tr(S^T D S), in [-1, 0], which puts
neighbours into one node, and the balance || S^T S / ||S^T S||_F - I / sqrt 100 ||_F, which keeps nodes apart. The cut
of tiles without neighbours is 0; without tiles both losses are 0, and all nodes too.

**Tile scores** are the authors' GraphCAM. The relevance of the largest logit l goes through the transformer to the
nodes, and from nodes to tiles; with P_bh the attention weights of head h in block b, and 0 the class token,

    c_i = sum_k S_ik R_0k,    R = prod_b ( I + mean_h max(0, P_bh * dl/dP_bh) ), last block first,
    a_i = p (c_i - min c) / (max c - min c),    min and max over the bag,

with the probability p of l: its sigmoid, or the softmax of three classes and more, where l is taken over the mean of
all logits (what is added to all of them changes nothing). c_i alone compares tiles of one bag: the relevance of a logit
that is far from 0 does not say on which side it is. Where all c_i are equal, a_i = p. Where this differs from the
authors: for the relevance of P_bh they have a rule for each layer in place of P_bh itself.

In training, BatchNorm uses mean and variance over all tiles of the batch, so that results depend on what is packed
together, as they do in the authors' code; its running values serve where a batch has less than two tiles.

Time O(n (in_dim + 8 + 100) 64), memory O(n 100). The authors hold A as n x n numbers; here it is a list of edges, and
since the convolution is linear, x W is summed over neighbours instead of x.

Zheng, Gindra, Green, Burks, Betke, Beane, Kolachalama: A Graph-Transformer for Whole Slide Image Classification. IEEE
Transactions on Medical Imaging 2022. Min-cut pooling: Bianchi, Grattarola, Alippi: Spectral Clustering with Graph
Neural Networks for Graph Pooling. ICML 2020. Relevance: Chefer, Gur, Wolf: Generic Attention-model Explainability for
Interpreting Bi-Modal and Encoder-Decoder Transformers. ICCV 2021.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psamil.bag import PackedBags
from psamil.errors import OptionError
from psamil.models.adjacency import Adjacency
from psamil.models.output import ModelOutput
from psamil.models.registry import register_model
from psamil.models.segments import segment_sum
from psamil.models.tiles import has_classes, output_scores, tile_features
from psamil.models.transformer import TransformerBlock


class GraphConvolution(nn.Module):
    """Y = BatchNorm(normalised rows of (A X + X) W + b), (n, width)."""

    def __init__(self, in_dim: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_dim, width)
        nn.init.xavier_normal_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor, adjacency: Adjacency) -> Tensor:
        own = F.linear(x, self.linear.weight)
        norm = self.norm
        u = F.normalize(own + adjacency.sum(own) + self.linear.bias).to(norm.weight.dtype)
        if norm.training and len(u) < 2:  # which have no variance
            return F.batch_norm(u, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)
        return norm(u)


class NodeAttention(nn.Module):
    """Multi-head attention inside each of b short sequences (b, t, width); its weights (b, heads, t, t) are shown."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise OptionError(f"the width must be a multiple of the number of heads, got {width} and {heads}")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor, shown: list[Tensor]) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (b, heads, t, d)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        shown.append(weights)
        return self.mix((weights.to(v.dtype) @ v).transpose(1, 2).flatten(2))


class NodeTransformer(nn.Module):
    """Logits (b, n_out) of nodes (b, k, width): a class token attends to them, without positions.

    The weights of the attention come with them, (b, heads, 1 + k, 1 + k) per block.
    """

    def __init__(self, width: int, n_out: int, depth: int, heads: int, mlp_ratio: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(
            TransformerBlock(width, NodeAttention(width, heads), mlp_ratio) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, n_out)

    def forward(self, nodes: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = torch.cat((self.token.expand(len(nodes), 1, -1).to(nodes.dtype), nodes), 1)
        shown: list[Tensor] = []
        for block in self.blocks:
            x = block(x, shown)
        return self.head(self.norm(x[:, 0])), shown


class GTP(nn.Module):
    """The model of the paper.

    Args:
        in_dim: width of the tile features.
        n_out: number of raw outputs.
        width: of tiles after the convolution, and of the transformer.
        nodes: number of nodes that the tiles of a bag are pooled to.
        depth, heads, mlp_ratio: of the transformer.
        radius_steps: within which tiles are neighbours, in tile steps.
    """

    def __init__(
        self,
        in_dim: int,
        n_out: int,
        *,
        width: int = 64,
        nodes: int = 100,
        depth: int = 3,
        heads: int = 8,
        mlp_ratio: int = 2,
        radius_steps: float = 1.5,
    ) -> None:
        super().__init__()
        if min(in_dim, n_out, width, nodes, depth, heads, mlp_ratio) < 1:
            raise OptionError("in_dim, n_out, width, nodes, depth, heads and mlp_ratio must be at least 1")
        self.in_dim, self.radius_steps = in_dim, radius_steps
        self.convolution = GraphConvolution(in_dim, width)
        self.assign = nn.Linear(width, nodes)
        self.transformer = NodeTransformer(width, n_out, depth, heads, mlp_ratio)

    def forward(self, batch: PackedBags) -> ModelOutput:
        x = tile_features(batch, self.in_dim, self.assign.weight.dtype)
        adjacency = Adjacency.of(batch, self.radius_steps)
        y = self.convolution(x, adjacency)
        shares = self.assign(y).softmax(1)  # S
        nodes = products_in_bags(shares, y, batch).to(self.assign.weight.dtype)  # Z
        logits, _ = self.transformer(nodes)
        cut, balance = min_cut_losses(shares, adjacency, batch)
        return ModelOutput(
            logits=logits,
            tile_scores=self._tile_scores(shares.detach(), nodes, logits.detach(), batch.bag_of_tile),
            auxiliary_losses={"cut": cut.mean(), "balance": balance.mean()},
        )

    def _tile_scores(self, shares: Tensor, nodes: Tensor, logits: Tensor, bag: Tensor) -> Tensor:
        relevance = (shares * self._relevance(nodes)[bag]).sum(1)  # c
        ends = relevance.new_zeros(2, len(nodes))
        low, high = (
            end.scatter_reduce(0, bag, relevance, how, include_self=False)[bag]
            for end, how in zip(ends, ("amin", "amax"), strict=True)
        )
        span = high - low
        differ = span > 1e-5 * high  # beyond rounding
        place = torch.where(differ, (relevance - low) / torch.where(differ, span, 1), 1)
        probability = logits.softmax(1) if logits.shape[1] > 1 and has_classes(self) else logits.sigmoid()
        return probability.amax(1)[bag] * place

    def _relevance(self, nodes: Tensor) -> Tensor:
        """(b, k) R_0k of the largest logit, without gradient; also where gradients are off."""
        with torch.inference_mode(False), torch.enable_grad():
            logits, shown = self.transformer(nodes.detach().clone().requires_grad_())
            gradients = torch.autograd.grad(output_scores(self, logits).sum(), shown)
        row = torch.eye(1, 1 + nodes.shape[1], device=nodes.device)  # of the class token
        for weights, gradient in zip(reversed(shown), reversed(gradients), strict=True):
            of_block = (weights.detach() * gradient).relu().mean(1)  # (b, 1 + k, 1 + k)
            row = row + (row[..., None] * of_block).sum(1)
        return row[:, 1:]


def products_in_bags(a: Tensor, b: Tensor, batch: PackedBags) -> Tensor:
    """(bags, k, m): A^T B over the tiles of each bag, of A (n, k) and B (n, m), in float32 at least.

    These are sums over all tiles of a bag: float16 ends at 65,504.
    """
    with torch.autocast(a.device.type, enabled=False):
        a, b = (values.to(torch.promote_types(values.dtype, torch.float32)) for values in (a, b))
        return torch.stack([x.T @ y for x, y in zip(batch.split(a), batch.split(b), strict=True)])


def min_cut_losses(shares: Tensor, adjacency: Adjacency, batch: PackedBags) -> tuple[Tensor, Tensor]:
    """Cut and balance, (b,) each, of the shares S (n, k) that tiles have in nodes; see the top of this module."""
    bags, k = len(batch), shares.shape[1]
    inside = segment_sum((shares * adjacency.sum(shares)).sum(1), batch.bag_of_tile, bags)  # Tr(S^T A S)
    total = segment_sum(adjacency.degree * shares.square().sum(1), batch.bag_of_tile, bags)  # Tr(S^T D S)
    cut = -inside / torch.where(total > 0, total, 1)
    overlap = products_in_bags(shares, shares, batch)  # (b, k, k)
    filled = (batch.offsets.diff() > 0).to(shares.device)
    size = torch.where(filled, overlap.flatten(1).norm(dim=1), 1)
    distance = overlap / size[:, None, None] - torch.eye(k, device=overlap.device, dtype=overlap.dtype) / k**0.5
    return cut, distance.flatten(1).norm(dim=1) * filled


@register_model
def gtp(in_dim: int, n_out: int, **options: Any) -> GTP:
    """Graph-Transformer; options of :class:`GTP`."""
    return GTP(in_dim, n_out, **options)
