r"""Diversity of the heads' radii: the entropy of their rates, to be raised (loss = -alpha H).

With rates r_h in [0, 1] and a Gaussian kernel of bandwidth b, the density of a layer's heads is
p(r) = 1/H sum_h N(r; r_h, b^2), and its Shannon entropy H(p) = -E_p[log p], in nats unless said otherwise:

- ``quadrature`` (default): the integral on a fixed grid; deterministic and smooth, the paper's quantity without noise;
- ``monte-carlo``: the paper's estimate from samples drawn from p, with gradients through sample and density;
- ``binning``: the authors' released code, for comparison: one bin centre per head, soft memberships, entropy in *bits*.
  With 3 heads at their initial radii it is stationary: its gradient is below 1e-5, and it does
  nothing until the labels have moved the heads.
"""

import math

import torch
from torch import Tensor

from psamil.errors import one_of

BANDWIDTH = 0.1
FORMS = ("quadrature", "monte-carlo", "binning")


def diversity_entropy(
    rates: Tensor,
    form: str = "quadrature",
    *,
    bandwidth: float = BANDWIDTH,
    samples: int = 1000,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Entropy of the heads of one layer; ``rates`` (heads,)."""
    if form == "quadrature":
        return _quadrature_entropy(rates, bandwidth)
    if form == "monte-carlo":
        return _monte_carlo_entropy(rates, bandwidth, samples, generator)
    if form == "binning":
        return _binned_entropy(rates, bandwidth)
    raise one_of("form of diversity", form, FORMS)


def _log_density(points: Tensor, rates: Tensor, bandwidth: float) -> Tensor:
    """log p at (m,) points."""
    log_kernels = -((points[:, None] - rates) / bandwidth).square() / 2  # (m, heads)
    log_norm = math.log(len(rates)) + math.log(bandwidth) + math.log(2 * math.pi) / 2
    return log_kernels.logsumexp(1) - log_norm


def _quadrature_entropy(rates: Tensor, bandwidth: float) -> Tensor:
    # The integrand is smooth on the scale of the bandwidth: 8 points a bandwidth make the sum exact to rounding
    reach, step = 8 * bandwidth, bandwidth / 8
    points = torch.arange(-reach, 1 + reach + step, step, dtype=rates.dtype, device=rates.device)
    log_p = _log_density(points, rates, bandwidth)
    return -(log_p.exp() * log_p).sum() * step


def _monte_carlo_entropy(rates: Tensor, bandwidth: float, samples: int, generator: torch.Generator | None) -> Tensor:
    # Drawn on the CPU, so that one seed gives the same samples on every device
    heads = torch.randint(len(rates), (samples,), generator=generator)
    noise = torch.randn(samples, generator=generator)
    points = rates[heads.to(rates.device)] + bandwidth * noise.to(rates)
    return -_log_density(points, rates, bandwidth).mean()


def _binned_entropy(rates: Tensor, width: float) -> Tensor:
    centres = torch.linspace(0, 1, len(rates), dtype=rates.dtype, device=rates.device)
    membership = (-((rates[:, None] - centres) / width).square() / 2).softmax(1)  # (heads, bins)
    p = membership.mean(0)
    return torch.special.entr(p).sum() / math.log(2)
