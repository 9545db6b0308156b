r"""Why a tile attends where it attends: rows of the posterior, split into prior and likelihood.

For tile i and head h the posterior over the tiles j within the radius is

    p_ij = prior_ij * likelihood_ij / evidence,   prior_ij ~ f(d_ij | theta_h),   likelihood_ij ~ N(q_i | k_j, sqrt d)

with prior and likelihood each normalised over the same tiles, so that the three can be shown side by side.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from psamil.spatial.decays import Decay, get_decay
from psamil.spatial.reference import squared_radius


@dataclass(frozen=True)
class PosteriorRow:
    """What one head of one query tile looks at. All tensors have one entry per neighbour; the last three sum to 1."""

    query: int
    head: int
    neighbours: Tensor  # tile indices, ascending
    distance_steps: Tensor
    prior: Tensor
    likelihood: Tensor
    posterior: Tensor

    @property
    def perplexity(self) -> float:
        """Effective number of tiles that the posterior spreads over: exp of its entropy."""
        return float(torch.special.entr(self.posterior).sum().exp())


@torch.no_grad()
def posterior_rows(
    q: Tensor,
    k: Tensor,
    xy: Tensor,
    theta: Tensor,
    queries: Tensor,
    *,
    decay: str | Decay,
    tau: float = 1e-3,
    bags: Tensor | None = None,
) -> list[list[PosteriorRow]]:
    """Rows of the posterior for some query tiles: ``rows[i][h]`` is head h of tile ``queries[i]``.

    Arguments as in :func:`psamil.spatial.posterior_attention`; O(n) time and memory per row.
    """
    decay = get_decay(decay)
    offsets = torch.tensor([0, len(q)]) if bags is None else bags.cpu()
    keep_d2 = squared_radius(decay, theta, tau).tolist()
    s2 = math.sqrt(q.shape[2])
    rows = []
    for query in queries.reshape(-1).tolist():
        if not 0 <= query < len(q):
            raise IndexError(f"query tile {query} is not among the {len(q)} tiles")
        bag = int(torch.searchsorted(offsets, query, right=True)) - 1
        tiles = torch.arange(int(offsets[bag]), int(offsets[bag + 1]), device=q.device)
        d2 = (xy[tiles].double() - xy[query].double()).square().sum(-1)
        heads = []
        for head, keep in enumerate(keep_d2):
            near = tiles[d2 <= keep]
            near_d2 = d2[d2 <= keep]
            log_prior = decay.log_prior(near_d2, theta[head].double())
            log_likelihood = -(q[query, head].double() - k[near, head].double()).square().sum(-1) / (2 * s2)
            heads.append(
                PosteriorRow(
                    query,
                    head,
                    neighbours=near,
                    distance_steps=near_d2.sqrt(),
                    prior=log_prior.softmax(0),
                    likelihood=log_likelihood.softmax(0),
                    posterior=(log_prior + log_likelihood).softmax(0),
                )
            )
        rows.append(heads)
    return rows
