r"""The learnable prior of an attention layer: one radius per head, free to move, never stuck.

Each head has one free scalar u. It is mapped to a rate r in (0, 1), the rate to a radius K in tile steps, and the
radius to the parameter theta of the decay:

    r = 1/2 + arctan(pi u) / pi,     K = K_min + (K_max - K_min) r,     theta = theta_of_radius(K, tau).

The rate moves like u itself in the middle (slope 1) and its slope falls only like 1 / (pi u)^2 towards the bounds: a
head at a bound still feels a gradient and can come back, which a clamp (slope 0) or, in float32, a sigmoid would not
allow.
Rates are linear in K for every decay, so that heads that are apart in rate are apart in what they see.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from psamil.errors import OptionError
from psamil.spatial.decays import Decay, get_decay


class DistancePrior(nn.Module):
    """Learnable radii of the heads of one attention layer.

    The initial radii are spread around ``k_init`` as the authors do: thetas of K - 1 and K + 1 (closer for K below 7),
    the interval shrunk by a quarter on both sides, heads evenly spaced in theta (6.5 to 7.5 for a Gaussian around 7).
    With several ``k_init`` heads begin there, from the first to the last; if there are more heads or fewer, at equal
    distances on the way, on which radii change by equal factors: 4 heads from [2, 16] begin at 2, 4, 8 and 16.
    """

    def __init__(
        self,
        heads: int,
        decay: str | Decay = "gaussian",
        *,
        tau: float = 1e-3,
        k_min: float = 1.0,
        k_max: float = 25.0,
        k_init: float | Sequence[float] = 7.0,
    ) -> None:
        super().__init__()
        if not 0 < tau < 1:
            raise OptionError(f"tau must be in (0, 1), got {tau}: it defines the radius of a head")
        each = [k_init] if isinstance(k_init, int | float) else list(k_init)
        if not each or not all(0 < k_min < radius < k_max for radius in each):
            raise OptionError(f"radii must satisfy 0 < k_min < k_init < k_max, got {k_min}, {k_init}, {k_max}")
        self.decay = get_decay(decay)
        self.tau, self.k_min, self.k_max, self.k_init = tau, k_min, k_max, k_init
        self.free = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if isinstance(self.k_init, Sequence):
            self.set_radii(_on_the_way(self.k_init, len(self.free)))
            return
        step = min(1.0, self.k_init / 7)
        around = max(self.k_min, self.k_init - step), min(self.k_max, self.k_init + step)
        ends = self.decay.theta_of_radius(torch.tensor(around, dtype=torch.float64), self.tau).tolist()
        spread = torch.linspace(0.25, 0.75, len(self.free)) if len(self.free) > 1 else torch.tensor([0.5])
        theta = ends[0] + (ends[1] - ends[0]) * spread.double()
        self.set_radii(self.decay.radius(theta, self.tau))

    @torch.no_grad()
    def set_radii(self, radii_steps: Tensor) -> None:
        """Places every head at a radius strictly between k_min and k_max."""
        if not ((radii_steps > self.k_min) & (radii_steps < self.k_max)).all():
            raise OptionError(f"radii must lie strictly between {self.k_min} and {self.k_max}: {radii_steps.tolist()}")
        rate = (radii_steps.double() - self.k_min) / (self.k_max - self.k_min)
        self.free.copy_(torch.tan(math.pi * (rate - 0.5)) / math.pi)

    @property
    def rate(self) -> Tensor:
        """(heads,) in (0, 1), linear in the radius."""
        return 0.5 + torch.atan(math.pi * self.free) / math.pi

    @property
    def radius_steps(self) -> Tensor:
        """(heads,) K in tile steps."""
        return self.k_min + (self.k_max - self.k_min) * self.rate

    @property
    def theta(self) -> Tensor:
        """(heads,) parameter of the decay."""
        return self.decay.theta_of_radius(self.radius_steps, self.tau)

    def extra_repr(self) -> str:
        radii = ", ".join(f"{k:.1f}" for k in self.radius_steps.tolist())
        return f"decay={self.decay.name}, tau={self.tau:g}, radii of {radii} steps in [{self.k_min:g}, {self.k_max:g}]"


def _on_the_way(radii: Sequence[float], heads: int) -> Tensor:
    """(heads,) radii from the first to the last of the given ones, geometric between them; one head in the middle."""
    last = len(radii) - 1
    at = torch.linspace(0, last, heads, dtype=torch.float64) if heads > 1 else torch.tensor([last / 2]).double()
    low, high = at.floor().long(), at.ceil().long()
    logs = torch.tensor(radii, dtype=torch.float64).log()
    return logs[low].lerp(logs[high], at - low).exp()


def parameter_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.0, prior_lr_scale: float = 100.0
) -> list[dict[str, object]]:
    """Groups for a torch optimiser: the scalars of the priors learn at their own rate and without weight decay.

    >>> optimizer = torch.optim.Adam(parameter_groups(model, lr=1e-4, weight_decay=1e-5))
    """
    priors = {id(module.free): module.free for module in model.modules() if isinstance(module, DistancePrior)}
    others = [parameter for parameter in model.parameters() if id(parameter) not in priors]
    groups: list[dict[str, object]] = [{"params": others, "lr": lr, "weight_decay": weight_decay, "name": "weights"}]
    if priors:
        prior_group = {"params": list(priors.values()), "lr": lr * prior_lr_scale, "weight_decay": 0.0, "name": "prior"}
        groups.append(prior_group)
    return groups
