r"""Attention between the nodes of a graph, given as a list of edges.

For node i, its neighbours j and itself (GAT), with head h and vectors a_h, a'_h,

    out_i = 1/H sum_h sum_j p_ijh W_h x_j + b,    p_i.h = softmax_j LeakyReLU(a_h . W_h x_j + a'_h . W_h x_i).

O(m H d) time for m edges, O(n H d + m H) memory: the messages of single edges are never held all at once.

Velickovic, Cucurull, Casanova, Romero, Lio, Bengio: Graph Attention Networks. ICLR 2018.
"""

import torch
from torch import Tensor, nn

from psamil.models.adjacency import Adjacency
from psamil.models.segments import segment_softmax

NEGATIVE_SLOPE = 0.2
"""Of the LeakyReLU in graph attention."""


def with_loops(pairs: Tensor, n_nodes: int) -> Tensor:
    """Edges (2, m) and one from every node to itself, sorted by the node that receives (the first row)."""
    pairs = torch.cat((pairs, torch.arange(n_nodes, device=pairs.device).expand(2, -1)), 1)
    return pairs[:, pairs[0].argsort(stable=True)]


class GraphAttention(nn.Module):
    """See the module.

    Args:
        in_dim, out_dim: width of the nodes before and after.
        heads: their outputs are averaged.
        dropout: share of the weights p_ijh that is dropped in training.
    """

    def __init__(self, in_dim: int, out_dim: int, *, heads: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.out_dim = heads, out_dim
        self.project = nn.Linear(in_dim, heads * out_dim, bias=False)
        self.sender, self.receiver = (nn.Parameter(torch.empty(heads, out_dim)) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(out_dim))
        self.dropout = nn.Dropout(dropout)
        for weight in (self.project.weight, self.sender, self.receiver):
            nn.init.xavier_uniform_(weight)

    def forward(self, x: Tensor, pairs: Tensor) -> Tensor:
        """(n, out_dim) of nodes (n, in_dim) and edges (2, m): receiver above sender, none from a node to itself."""
        n = len(x)
        pairs = with_loops(pairs, n)
        adjacency, (i, j) = Adjacency(pairs, n), pairs
        out = x.new_zeros(n, self.out_dim)
        values = self.project(x).unflatten(1, (self.heads, self.out_dim))
        for value, sender, receiver in zip(values.unbind(1), self.sender, self.receiver, strict=True):
            scores = nn.functional.leaky_relu((value @ sender)[j] + (value @ receiver)[i], NEGATIVE_SLOPE)
            out = out + adjacency.sum(value, self.dropout(segment_softmax(scores, i, n)))
        return (out / self.heads + self.bias).to(x.dtype)
