r"""IBMIL: attention pooling that is told what bags look like in general, so that labels need not explain it.

Three stages, in one training run:

1. The **base**, in the first half of the epochs (rounded down), is attention pooling without an embedding: with x_i the
   features and V square, a_i = w . tanh(V x_i), m = sum_i softmax_i(a_i) x_i, logits C m + c.
2. The **dictionary**, between two epochs: the vectors m of all training bags are scaled to length 1 and clustered by
   k-means. Row b_j of the dictionary B is the mean of the unscaled m of cluster j. It stands for a stratum of the
   confounders, is the same for all classes, and stays as it is.
3. The **deconfounded** model, in the other half: new weights of a new base, and

       alpha = softmax_j( W_q m . W_k b_j / sqrt(128) ),    u = sum_j alpha_j b_j,    logits = C [m, u] + c

   which approximates P(Y | do(X)) = sum_j P(Y | X, b_j) P(b_j) with equal P(b_j), the average being moved into the
   model (the normalised weighted geometric mean).

The score of a tile is a_i, of the base at first and of the deconfounded model later.

**In one run.** Base and deconfounded model are different parameters of one module, and each has gradients in its stage
only. An optimiser that leaves parameters without gradient alone, as those of PyTorch do, therefore keeps the base as it
was when the dictionary was made, and begins with the deconfounded model afresh. Both stages share one schedule of the
learning rate: the base has its rise, the deconfounded model its fall. The stage is a buffer, saved with the weights.
As long as ``preliminary`` is true, the module predicts with the base, which is not what is trained for: no epoch of it
may be kept as the best one or end the training. Whoever trains without calling ``start_epoch`` trains the base alone;
a run of one epoch has a dictionary of an untrained base, that is, of the clusters of nearly plain means.

Positions are not used. A bag without tiles has m = 0, and is left out of the dictionary. Time O(n in_dim^2), memory
O(n in_dim). Where this differs from the authors' code: k-means is ours (:mod:`psamil.models.k_means`), not that of
faiss; a cluster without bags is represented by the bag nearest to its centre; training is one run with half of the
epochs for each stage, instead of two runs of equal length; and the score of a tile is not alpha.

Lin, Yu, Hu, Xu, Chen: Interventional Bag Multi-Instance Learning on Whole-Slide Pathological Images. CVPR 2023.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psamil.bag import PackedBags
from psamil.errors import OptionError
from psamil.models.k_means import k_means
from psamil.models.output import ModelOutput
from psamil.models.pooling import ABMIL
from psamil.models.registry import register_model
from psamil.models.segments import segment_sum

MATCH_DIM = 128
"""Width in which bags and confounders are compared."""


def confounder_dictionary(bag_vectors: Tensor, k: int) -> Tensor:
    """(k, dim) mean of the bag vectors (bags, dim) of each of k clusters of their directions."""
    vectors = bag_vectors.double().cpu()  # few and small: here they become the same clusters whatever the device
    cluster, distances = k_means(F.normalize(vectors), k)
    sizes = torch.bincount(cluster, minlength=k)[:, None]
    means = segment_sum(vectors, cluster, k) / sizes.clamp(min=1)
    return torch.where(sizes > 0, means, vectors[distances.argmin(0)]).to(bag_vectors)


class DeconfoundedABMIL(ABMIL):
    """logits = C [m, u] + c, with u the confounders that resemble m."""

    dictionary: Tensor  # (confounders, in_dim) B

    def __init__(self, in_dim: int, n_out: int, confounders: int) -> None:
        super().__init__(in_dim, n_out, hidden=0, gated=False, attention_dim=in_dim)
        self.query, self.key = nn.Linear(in_dim, MATCH_DIM), nn.Linear(in_dim, MATCH_DIM)
        self.head = nn.Linear(2 * in_dim, n_out)
        self.register_buffer("dictionary", torch.zeros(confounders, in_dim))

    def match(self, pooled: Tensor) -> Tensor:
        """(b, confounders) alpha of bag vectors m (b, in_dim)."""
        return (self.query(pooled) @ self.key(self.dictionary).T / math.sqrt(MATCH_DIM)).softmax(1)

    def classify(self, pooled: Tensor) -> Tensor:
        return self.head(torch.cat((pooled, self.match(pooled) @ self.dictionary), 1))

    def evidence(self, h: Tensor) -> Tensor | None:
        return None  # u is of the bag


class IBMIL(nn.Module):
    """The base, then the deconfounded model.

    Args:
        in_dim: width of the tile features.
        n_out: number of raw outputs.
        confounders: rows of the dictionary; the authors try 2, 4, 8 and 16.
    """

    has_dictionary: Tensor  # () whether stage 3 has begun

    def __init__(self, in_dim: int, n_out: int, *, confounders: int = 8) -> None:
        super().__init__()
        if confounders < 1:
            raise OptionError(f"confounders must be at least 1, got {confounders}")
        self.base = ABMIL(in_dim, n_out, hidden=0, gated=False, attention_dim=in_dim)
        self.deconfounded = DeconfoundedABMIL(in_dim, n_out, confounders)
        self.register_buffer("has_dictionary", torch.tensor(False))

    @property
    def preliminary(self) -> bool:
        """Whether predictions are still those of the base, not of the model that training is for."""
        return not bool(self.has_dictionary)

    @torch.no_grad()
    def start_epoch(self, epoch: int, epochs: int, batches: Callable[[], Iterable[PackedBags]]) -> None:
        """Makes the dictionary out of the training bags when the first half of the epochs is over."""
        self.has_dictionary.fill_(epoch >= epochs // 2)
        if epoch == epochs // 2:
            filled = [self.base.pool(batch)[1][batch.offsets.diff() > 0] for batch in batches()]
            self.deconfounded.dictionary.copy_(confounder_dictionary(torch.cat(filled), len(self.dictionary)))

    @property
    def dictionary(self) -> Tensor:
        """(confounders, in_dim) B; 0 before there is one."""
        return self.deconfounded.dictionary

    @torch.no_grad()
    def confounder_attention(self, batch: PackedBags) -> Tensor:
        """(b, confounders) alpha: which confounders each bag resembles."""
        return self.deconfounded.match(self.deconfounded.pool(batch)[1])

    def forward(self, batch: PackedBags) -> ModelOutput:
        return self.base(batch) if self.preliminary else self.deconfounded(batch)


@register_model
def ibmil(in_dim: int, n_out: int, **options: Any) -> IBMIL:
    """Interventional bag multi-instance learning on attention pooling; options of :class:`IBMIL`."""
    return IBMIL(in_dim, n_out, **options)
