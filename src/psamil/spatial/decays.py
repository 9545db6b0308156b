r"""Distance decays: the prior f(d | theta) of a tile at distance d, one positive parameter theta per head.

Every decay is one small object with a few methods; another one takes such an object and no other change (the attention,
its gradients and the learnable prior know decays through these methods only; ``check_decay`` tries a new one):

- ``log_prior(d2, theta)``: log f as a function of the *squared* distance, analytic, so that a far tile has a finite
  log-prior and theta a true gradient (no ``log(f + 1e-6)``);
- ``slope(d2, theta)``: its derivative in theta;
- ``radius(theta, tau)``: K = f^{-1}(tau | theta), the distance at which the prior falls to tau;
- ``theta_of_radius(K, tau)``: its inverse in theta.

A decay with log f = -||s x_i - s x_j||^2 / 2 for some scale s(theta), as the Gaussian, may have a fifth method,
``embedding_scale(theta)``: attention to a small bag is then ordinary attention on q and k extended by positions.

A decay may also say log f and its slope in C, as expressions in ``d2`` (a vector of floats) and ``theta`` with the
functions ``root`` and ``log_1_plus``: ``c_log_prior``, ``c_slope``. The compiled path then serves it as well.

The methods take tensors of any shape that broadcast. Distances are in tile steps, and so are radii.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from psamil.errors import one_of


class Decay(Protocol):
    """What the attention needs to know about a prior."""

    name: str

    def log_prior(self, d2: Tensor, theta: Tensor) -> Tensor:
        """log f(d | theta) for squared distances ``d2``; 0 at d = 0, never increasing in d."""

    def slope(self, d2: Tensor, theta: Tensor) -> Tensor:
        """d log f(d | theta) / d theta."""

    def radius(self, theta: Tensor, tau: float) -> Tensor:
        """K with f(K | theta) = tau; infinite for tau = 0."""

    def theta_of_radius(self, radius: Tensor, tau: float) -> Tensor:
        """theta with f(radius | theta) = tau, for 0 < tau < 1."""


class Exponential:
    r"""f(d | lambda) = exp(-lambda d)."""

    name = "exponential"
    c_log_prior = "-theta * root(d2)"
    c_slope = "-root(d2)"

    def log_prior(self, d2: Tensor, theta: Tensor) -> Tensor:
        return -theta * d2.sqrt()

    def slope(self, d2: Tensor, theta: Tensor) -> Tensor:
        return -d2.sqrt()

    def radius(self, theta: Tensor, tau: float) -> Tensor:
        return _log_inverse(tau) / theta

    def theta_of_radius(self, radius: Tensor, tau: float) -> Tensor:
        return _log_inverse(tau) / radius


class Gaussian:
    r"""f(d | sigma) = exp(-d^2 / (2 sigma^2))."""

    name = "gaussian"
    c_log_prior = "d2 * (-0.5f / (theta * theta))"
    c_slope = "d2 * (1 / (theta * theta * theta))"

    def log_prior(self, d2: Tensor, theta: Tensor) -> Tensor:
        return d2 * (-0.5 / theta.square())

    def slope(self, d2: Tensor, theta: Tensor) -> Tensor:
        return d2 * theta.pow(-3)

    def radius(self, theta: Tensor, tau: float) -> Tensor:
        return theta * math.sqrt(2 * _log_inverse(tau))

    def theta_of_radius(self, radius: Tensor, tau: float) -> Tensor:
        return radius / math.sqrt(2 * _log_inverse(tau))

    def embedding_scale(self, theta: Tensor) -> Tensor:
        return 1 / theta


class Cauchy:
    r"""f(d | gamma) = 1 / (1 + (d / gamma)^2)."""

    name = "cauchy"
    c_log_prior = "-log_1_plus(d2 * (1 / (theta * theta)))"
    c_slope = "d2 / (d2 + theta * theta) * (2 / theta)"

    def log_prior(self, d2: Tensor, theta: Tensor) -> Tensor:
        return -torch.log1p(d2 / theta.square())

    def slope(self, d2: Tensor, theta: Tensor) -> Tensor:
        return d2 / (d2 + theta.square()) * (2 / theta)

    def radius(self, theta: Tensor, tau: float) -> Tensor:
        return theta * (math.sqrt(1 / tau - 1) if tau > 0 else math.inf)

    def theta_of_radius(self, radius: Tensor, tau: float) -> Tensor:
        return radius / math.sqrt(1 / tau - 1)


DECAYS: dict[str, Decay] = {decay.name: decay for decay in (Exponential(), Gaussian(), Cauchy())}


def get_decay(decay: str | Decay) -> Decay:
    """The decay of that name; a decay object stands for itself."""
    if not isinstance(decay, str):
        return decay
    if decay not in DECAYS:
        raise one_of("decay", decay, DECAYS)
    return DECAYS[decay]


def check_decay(decay: Decay) -> None:
    """Raises AssertionError, naming what fails, unless the object keeps every promise the attention relies on."""
    d2 = torch.linspace(0, 40, 81, dtype=torch.float64).square()
    for tau in (1e-4, 1e-3, 1e-2):
        for radius in (1.0, 7.0, 25.0):
            theta = decay.theta_of_radius(torch.tensor(radius, dtype=torch.float64), tau).requires_grad_()
            per_distance = theta.detach().expand(len(d2)).clone().requires_grad_()
            log_f = decay.log_prior(d2, per_distance)
            (slope,) = torch.autograd.grad(log_f.sum(), per_distance)
            at_radius = decay.log_prior(torch.tensor(radius**2, dtype=torch.float64), theta).item()
            name = f"decay {decay.name!r} at tau={tau}, K={radius}"
            assert theta > 0, f"{name}: theta must be positive"
            assert log_f[0] == 0, f"{name}: log f must be 0 at distance 0"
            assert (log_f.diff() <= 0).all(), f"{name}: log f must not rise with distance"
            assert abs(decay.radius(theta, tau).item() - radius) < 1e-9 * radius, f"{name}: radius is not the inverse"
            assert abs(at_radius - math.log(tau)) < 1e-9, f"{name}: f at the radius must be tau"
            assert torch.allclose(decay.slope(d2, theta.detach()), slope, rtol=1e-9), f"{name}: slope is not d log f"
            single = decay.slope(d2.float() * 1e6, theta.detach().float())
            assert single.isfinite().all(), f"{name}: slope of a far tile is not finite in float32"
            if hasattr(decay, "embedding_scale"):
                embedded = -d2 * decay.embedding_scale(theta.detach()).square() / 2
                assert torch.allclose(log_f, embedded, rtol=1e-9), f"{name}: embedding_scale does not give log f"
    assert decay.radius(torch.tensor(1.0), 0.0).item() == math.inf, f"decay {decay.name!r}: no radius at tau = 0"


def _log_inverse(tau: float) -> float:
    return -math.log(tau) if tau > 0 else math.inf
