r"""The definition of posterior attention, written to be read: dense, O(n^2), the oracle of every fast path.

For tile i and head h, over the tiles j of the same bag with d_ij <= K_h = f^{-1}(tau | theta_h):

.. math::
    p_{ij} = \frac{f(d_{ij} | \theta_h) \, \mathcal N(q_i | k_j, s^2 I)}{\sum_{j'} f(d_{ij'} | \theta_h) \,
             \mathcal N(q_i | k_{j'}, s^2 I)}, \qquad s^2 = \sqrt d, \qquad o_i = \sum_j p_{ij} v_j

that is, a softmax over j of  -||q_i - k_j||^2 / (2 sqrt d) + log f(d_ij | theta_h).
"""

import math

import torch
from torch import Tensor

from psamil.spatial.decays import Decay, get_decay

RADIUS_TOLERANCE = 1e-5
"""A tile is kept when d^2 <= K^2 (1 + RADIUS_TOLERANCE), so that rounding does not drop a tile at exactly K."""


def squared_radius(decay: Decay, theta: Tensor, tau: float) -> Tensor:
    """The largest squared distance that is kept, per head, in float64 and without gradient."""
    return decay.radius(theta.detach().double().cpu(), tau).square() * (1 + RADIUS_TOLERANCE)


def posterior_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    xy: Tensor,
    theta: Tensor,
    *,
    decay: str | Decay,
    tau: float = 1e-3,
    bags: Tensor | None = None,
) -> Tensor:
    """Same arguments and result as :func:`psamil.spatial.posterior_attention`, in n x n arrays and autograd."""
    decay = get_decay(decay)
    d = q.shape[2]
    keep, d2 = _kept(xy, bags, squared_radius(decay, theta, tau))
    outputs = []
    for head in range(q.shape[1]):
        log_likelihood = -(q[:, None, head] - k[None, :, head]).square().sum(-1) / (2 * math.sqrt(d))  # (n, n)
        log_prior = decay.log_prior(d2.to(q.dtype), theta[head])
        posterior = (log_likelihood + log_prior).masked_fill(~keep[head], -math.inf).softmax(-1)
        outputs.append(posterior @ v[:, head])
    return torch.stack(outputs, dim=1)


def spatial_lag_reference(
    v: Tensor, xy: Tensor, theta: Tensor, *, decay: str | Decay, tau: float = 1e-3, bags: Tensor | None = None
) -> Tensor:
    """Same arguments and result as :func:`psamil.spatial.spatial_lag`, in n x n arrays and autograd."""
    decay = get_decay(decay)
    keep, d2 = _kept(xy, bags, squared_radius(decay, theta, tau))
    lags = []
    for head in range(v.shape[1]):
        prior = decay.log_prior(d2.to(v.dtype), theta[head]).exp() * keep[head]
        others = prior - torch.diag(prior.diagonal())
        lags.append(others @ v[:, head] / prior.sum(1, keepdim=True))
    return torch.stack(lags, dim=1)


def _kept(xy: Tensor, bags: Tensor | None, keep_d2: Tensor) -> tuple[Tensor, Tensor]:
    """(heads, n, n) whether tile i looks at tile j, and their squared distance (n, n)."""
    n = len(xy)
    bag = torch.zeros(n) if bags is None else torch.repeat_interleave(bags.diff().cpu())  # bag of each tile
    same_bag = (bag[:, None] == bag[None, :]).to(xy.device)
    xy = xy.double()
    d2 = (xy[:, None] - xy[None, :]).square().sum(-1)
    return torch.stack([same_bag & (d2 <= keep) for keep in keep_d2.tolist()]), d2
