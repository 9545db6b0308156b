r"""The Sm operator: values of tiles, made smooth over the slide.

G = Sm(U) is the minimum of alpha E(G) + (1 - alpha) ||G - U||^2, where E(G) = Tr(G^T L G) is the Dirichlet energy of
the neighbour graph, L = I - A_hat and A_hat = D^(-1/2) A D^(-1/2):

    exact:        G = (I + gamma L)^(-1) U = (1 - alpha) (I - alpha A_hat)^(-1) U,     gamma = alpha / (1 - alpha)
    approximate:  G_0 = U,   G_t = alpha A_hat G_(t-1) + (1 - alpha) U,   G = G_T

alpha in (0, 1) is the logistic function of a parameter, which may be learned. A tile without neighbours would shrink to
(1 - alpha) u; its row of A_hat is set to that of I, so that it keeps its value.

The exact solution is found without a matrix, by Chebyshev's acceleration of the same recurrence,

    G_(t+1) = G_(t-1) + omega_(t+1) (alpha A_hat G_t + (1 - alpha) U - G_(t-1)),
    omega_1 = 2,   omega_(t+1) = 1 / (1 - alpha^2 omega_t / 4).

As the eigenvalues of A_hat lie in [-1, 1], its error falls to 1 / cosh(t arccosh(1 / alpha)) of that of G_0 = U. The
number of steps depends on alpha alone (13 for alpha = 0.5 in float32), so that a bag does not depend on what it is
packed with.

Gradients need no intermediate G_t. Sm is symmetric in both modes: dl/dU = V = Sm(dl/dG). For alpha, the logistic
function of rho, dl/drho is <V, G - U> in the exact mode and alpha (1 - alpha) <D_T, U> in the approximate mode. There
D_t = dV_t/dalpha = A_hat V_(t-1) - V_0 + alpha A_hat D_(t-1), D_0 = 0, goes along with V_t, V_0 = dl/dG, V_T = V, and
is symmetric in V_0 and U too.

Time O(T m width) for m pairs of neighbours, memory O(n width + m).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from psamil.errors import OptionError, one_of
from psamil.models.adjacency import Adjacency

MODES = ("approximate", "exact")
COLUMNS_AT_ONCE = 32
"""Columns of U that are smoothed together."""


class Smooth(nn.Module):
    """Sm with one alpha.

    Args:
        alpha: its initial value, between 0 (nothing is changed) and 1 (nothing but smoothness counts).
        learn_alpha: whether alpha is learned.
        mode: "approximate" or "exact".
        steps: T of the approximate mode.
    """

    def __init__(
        self, *, alpha: float = 0.5, learn_alpha: bool = True, mode: str = "approximate", steps: int = 10
    ) -> None:
        super().__init__()
        if not 0 < alpha < 1:
            raise OptionError(f"alpha must lie between 0 and 1, got {alpha}")
        if mode not in MODES:
            raise one_of("mode", mode, MODES)
        if steps < 1:
            raise OptionError(f"steps must be at least 1, got {steps}")
        self.mode, self.steps = mode, steps
        self.alpha_logit = nn.Parameter(torch.tensor(math.log(alpha / (1 - alpha))), requires_grad=learn_alpha)

    @property
    def alpha(self) -> Tensor:
        return self.alpha_logit.sigmoid()

    def forward(self, u: Tensor, adjacency: Adjacency) -> Tensor:
        """(n, width) in float32 at least, for values (n, width)."""
        u = u.to(torch.promote_types(u.dtype, torch.float32))
        steps = None if self.mode == "exact" else self.steps
        g: Tensor = _Sm.apply(u, self.alpha_logit, adjacency, steps)
        return g


def _normalised(adjacency: Adjacency, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The product with A_hat."""
    weights = adjacency.normalised_weights(dtype)
    alone = (adjacency.degree == 0).to(dtype)[:, None]
    return lambda g: adjacency.sum(g, weights).addcmul_(alone, g)


def _solve(u: Tensor, alpha: float, a_hat: Callable[[Tensor], Tensor]) -> Tensor:
    """(1 - alpha) (I - alpha A_hat)^(-1) U up to rounding."""
    decay = math.acosh(1 / min(alpha, 1 - 1e-6))  # of the logarithm of the error in each step
    steps = math.ceil(math.log(2 / torch.finfo(u.dtype).eps) / decay)
    previous, g, omega = u, a_hat(u).mul_(alpha).add_(u, alpha=1 - alpha), 2.0
    for _ in range(steps - 1):
        omega = 1 / (1 - alpha**2 * omega / 4)
        change = a_hat(g).mul_(alpha).add_(u, alpha=1 - alpha).sub_(previous)
        previous, g = g, change.mul_(omega).add_(previous)
    return g


def _iterate(
    u: Tensor, alpha: float, a_hat: Callable[[Tensor], Tensor], steps: int, derive: bool
) -> tuple[Tensor, Tensor | None]:
    """G_T and, where it is asked for, D_T."""
    g, d = u, None
    for _ in range(steps):
        g = a_hat(g)
        if derive:
            d = g - u if d is None else a_hat(d).mul_(alpha).add_(g).sub_(u)
        g.mul_(alpha).add_(u, alpha=1 - alpha)
    return g, d


class _Sm(torch.autograd.Function):
    """Sm in its exact mode, or with a number of steps; columns do not depend on each other, and are done in turn."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, alpha_logit: Tensor, adjacency: Adjacency, steps: int | None) -> Tensor:
        ctx.alpha, ctx.steps = float(alpha_logit.detach().double().sigmoid()), steps
        ctx.a_hat = _normalised(adjacency, u.dtype)
        g = torch.empty_like(u)
        for of_g, of_u in zip(_columns(g), _columns(u), strict=True):
            if steps is None:
                of_g.copy_(_solve(of_u, ctx.alpha, ctx.a_hat))
            else:
                of_g.copy_(_iterate(of_u, ctx.alpha, ctx.a_hat, steps, derive=False)[0])
        derive = ctx.needs_input_grad[1]
        ctx.save_for_backward(u if derive else None, g if derive and steps is None else None, alpha_logit)
        return g

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        u, g, alpha_logit = ctx.saved_tensors
        v = torch.empty_like(gradient)
        of_logit = None if u is None else gradient.new_zeros(())
        for i, (of_v, part) in enumerate(zip(_columns(v), _columns(gradient), strict=True)):
            if ctx.steps is None:
                of_v.copy_(_solve(part, ctx.alpha, ctx.a_hat))
                if of_logit is not None:
                    of_logit += (of_v * (_columns(g)[i] - _columns(u)[i])).sum()
            else:
                of_part, derivative = _iterate(part, ctx.alpha, ctx.a_hat, ctx.steps, derive=of_logit is not None)
                of_v.copy_(of_part)
                if of_logit is not None and derivative is not None:
                    of_logit += ctx.alpha * (1 - ctx.alpha) * (derivative * _columns(u)[i]).sum()
                del of_part, derivative  # before the next columns need as much
        return v, None if of_logit is None else of_logit.to(alpha_logit.dtype), None, None


def _columns(values: Tensor) -> tuple[Tensor, ...]:
    return values.split(COLUMNS_AT_ONCE, dim=1)
