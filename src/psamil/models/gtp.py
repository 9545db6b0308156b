r"""GTP: a graph convolution, min-cut pooling of the tiles to a fixed number of nodes, and a transformer over these.

With A the 0/1 matrix of neighbouring tiles (no loops, never across slides), D its degrees, and x_i the features,

    y_i = BatchNorm(u_i / ||u_i||),   u_i = (x_i + sum_j A_ij x_j) W + b                         64 numbers per tile
    S = softmax(Y W_s + b_s),   Z = S^T Y                                                       n tiles to 100 nodes
    [class token, Z_1, ..., Z_100] -> 3 pre-norm transformer blocks -> LN -> linear layer on the class token -> logits

and two auxiliary losses of each bag, averaged over bags: the cut -Tr(S^T A S) / Tr(S^T D S), in [-1, 0], which puts
neighbours into one node, and the balance || S^T S / ||S^T S||_F - I / sqrt 100 ||_F, which keeps nodes apart. The cut
of tiles without neighbours is 0; without tiles both losses are 0, and all nodes too.

**Tile scores.** The authors' GraphCAM follows the relevance of a logit through the transformer to the nodes (a rule for
each layer), and from nodes to tiles by S. Here the relevance of a node is gradient times activation, the cheaper of the
two readings:  a_i = sum_k S_ik r_k,  r_k = Z_k . dl/dZ_k,  with l the largest logit. It is not scaled per slide.

In training, BatchNorm uses mean and variance over all tiles of the batch, so that results depend on what is packed
together, as they do in the authors' code; its running values serve where a batch has less than two tiles.

Time O(n (in_dim + 8 + 100) 64), memory O(n 100). The authors hold A as n x n numbers; here it is a list of edges, and
since the convolution is linear, x W is summed over neighbours instead of x.

Zheng, Gindra, Green, Burks, Betke, Beane, Kolachalama: A Graph-Transformer for Whole Slide Image Classification. IEEE
Transactions on Medical Imaging 2022. Min-cut pooling: Bianchi, Grattarola, Alippi: Spectral Clustering with Graph
Neural Networks for Graph Pooling. ICML 2020.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psamil.bag import PackedBags
from psamil.errors import OptionError
from psamil.models.adjacency import Adjacency
from psamil.models.output import ModelOutput
from psamil.models.pooling import tile_features
from psamil.models.registry import register_model
from psamil.models.segments import segment_sum
from psamil.models.transformer import SelfAttention, TransformerBlock


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


class NodeTransformer(nn.Module):
    """Logits (b, n_out) of nodes (b, k, width): a class token attends to them, without positions."""

    def __init__(self, width: int, n_out: int, depth: int, heads: int, mlp_ratio: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(
            TransformerBlock(width, SelfAttention(width, heads), mlp_ratio) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, n_out)

    def forward(self, nodes: Tensor) -> Tensor:
        bags, k, width = nodes.shape
        x = torch.cat((self.token.expand(bags, 1, width).to(nodes.dtype), nodes), 1).flatten(0, 1)
        for block in self.blocks:
            x = block(x, range(0, len(x) + 1, k + 1))
        return self.head(self.norm(x[:: k + 1]))


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
        cut, balance = min_cut_losses(shares, adjacency, batch)
        return ModelOutput(
            logits=self.transformer(nodes),
            tile_scores=(shares.detach() * self._relevance(nodes)[batch.bag_of_tile]).sum(1),
            auxiliary_losses={"cut": cut.mean(), "balance": balance.mean()},
        )

    def _relevance(self, nodes: Tensor) -> Tensor:
        """(b, k) gradient times activation of the largest logit, also where gradients are off."""
        with torch.inference_mode(False), torch.enable_grad():
            leaf = nodes.detach().clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.transformer(leaf).amax(1).sum(), leaf)
        return (gradient * leaf.detach()).sum(2)


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
