r"""What a tile gives and what it gets: sums over the rows and columns of the posterior, without an n x n array.

With the posterior p_ij of tile i over the tiles j within the radius (:mod:`psamil.spatial.attention`),

    received_j      = sum_i p_ij                      what tile j gets from all tiles of its slide, 1 on average
    neighbourhood_i = exp(-sum_j p_ij log p_ij)       how many tiles tile i effectively looks at

Pairs are taken in chunks that are forgotten: exact, in float64 on the CPU, time O(n K^2), memory O(n).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from psamil.spatial import Decay, Layout
from psamil.spatial.plan import Chunk, Plan
from psamil.spatial.reference import squared_radius

PAIRS_PER_CHUNK = 1 << 19


@torch.no_grad()
def posterior_sums(
    q: Tensor, k: Tensor, theta: Tensor, *, decay: Decay, tau: float, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Received and neighbourhood, (n, heads) float64 each.

    Args:
        q, k: (n, heads, d).
        theta: (heads,) parameters of the prior.
        decay, tau: of the prior.
        layout: of the positions of the tiles.
    """
    q, k, theta = (tensor.detach().cpu() for tensor in (q, k, theta))
    blocks = layout.to("cpu").blocks("scattered", range(len(layout.bags)))
    received = torch.zeros(q.shape[1], len(q), dtype=torch.float64)
    neighbourhood = torch.zeros_like(received)
    for h, keep_d2 in enumerate(squared_radius(decay, theta, tau).tolist()):
        plan = Plan(blocks, math.sqrt(keep_d2), window=0)
        for chunk in plan.chunks(PAIRS_PER_CHUNK):
            keys, queries, log_p = _log_posterior(q[:, h], k[:, h], theta[h].double(), decay, keep_d2, plan, chunk)
            p = log_p.exp()
            received[h].index_add_(0, keys.flatten(), p.sum(1).flatten())
            entropy = -(p * log_p.nan_to_num(neginf=0.0)).sum(2)
            there = queries < len(q)
            neighbourhood[h, queries[there]] = entropy[there].exp()
    return received.T, neighbourhood.T


def _log_posterior(
    q: Tensor, k: Tensor, theta: Tensor, decay: Decay, keep_d2: float, plan: Plan, chunk: Chunk
) -> tuple[Tensor, Tensor, Tensor]:
    """Tiles (c, L) that are looked at, tiles (c, slots) that look (n: none), and log p (c, slots, L) between them."""
    n, d = q.shape
    blocks, own = plan.blocks, plan.order[chunk.first : chunk.last]
    sorted_keys = chunk.keys.view(-1, chunk.length)
    padding = sorted_keys == n
    sorted_keys = sorted_keys.masked_fill(padding, 0)
    keys, queries = blocks.order[sorted_keys], plan.queries[chunk.first : chunk.last]
    key, query = k[keys].double(), q[queries.clamp(max=n - 1)].double()  # (c, L, d), (c, slots, d)
    # ||q||^2 is the same for all j
    likelihood = (query @ key.mT - key.square().sum(-1)[:, None] / 2) / math.sqrt(d)
    d2 = (blocks.query_xy[own][:, :, None] - blocks.xy[sorted_keys][:, None]).square().sum(-1)
    pruned = (d2 > keep_d2) | padding[:, None]
    score = (likelihood + decay.log_prior(d2, theta)).masked_fill_(pruned, -math.inf)
    log_p = score - score.logsumexp(2, keepdim=True)
    return keys, queries, log_p.masked_fill_((queries == n)[..., None], -math.inf)
