r"""How alike the heads of an attention layer are, as in Figure 3 (c-d) of the paper."""

from __future__ import annotations

import torch
from torch import Tensor


def head_similarity(outputs: Tensor) -> Tensor:
    r"""(heads, heads): s_hh' = 1 / mean_i ||x_i^(h) - x_i^(h')||_2 for outputs x (n, heads, d) of the heads.

    The more two heads make the same of every tile, the larger; infinite for a head and itself. It depends on the scale
    of the outputs: compare it inside a model, or over the training of one.
    """
    similarity = torch.full((outputs.shape[1],) * 2, torch.inf, dtype=torch.float64)
    for a in range(outputs.shape[1]):
        for b in range(a):
            distance = (outputs[:, a].double() - outputs[:, b].double()).square().sum(1).sqrt().mean()
            similarity[a, b] = similarity[b, a] = 1 / distance
    return similarity
