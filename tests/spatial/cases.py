"""Positions, inputs and the comparison that the tests of the attention share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from psamil.spatial import Layout, get_decay, posterior_attention, posterior_attention_reference

KINDS = ("lattice", "two phases", "continuous", "duplicates", "collinear", "subsampled")


def positions(kind: str, n: int, seed: int = 0) -> Tensor:
    """(n, 2) float64 tile positions in steps: about half of a square filled, in random order."""
    generator = torch.Generator().manual_seed(seed)
    side = max(2, int((n / 0.6) ** 0.5) + 1)
    cells = torch.cartesian_prod(torch.arange(side), torch.arange(side)).double()
    xy = cells[torch.randperm(len(cells), generator=generator)[:n]]
    if kind == "two phases":
        xy[: n // 2] += torch.tensor([0.37, 0.81], dtype=torch.float64)
    elif kind == "continuous":
        xy = torch.rand(n, 2, generator=generator, dtype=torch.float64) * side
    elif kind == "duplicates":
        xy[: n // 3] = xy[n // 3 : 2 * (n // 3)]
    elif kind == "collinear":
        xy = torch.stack((torch.arange(n).double(), torch.zeros(n, dtype=torch.float64)), 1)
    elif kind == "subsampled":
        xy = xy * 3
    return xy - 5  # positions may be negative


def inputs(n: int, heads: int, d: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed + 1)
    return [torch.randn(n, heads, d, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]


def thetas(decay: str, radii: list[float], tau: float = 1e-3) -> Tensor:
    return get_decay(decay).theta_of_radius(torch.tensor(radii, dtype=torch.float64), tau)


def gradients(function, tensors: list[Tensor], theta: Tensor, xy: Tensor, grad: Tensor, **options) -> list[Tensor]:
    """Output and gradients of q, k, v, theta."""
    leaves = [t.detach().clone().requires_grad_() for t in (*tensors, theta)]
    out = function(*leaves[:3], xy, leaves[3], **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def assert_same(actual: list[Tensor], expected: list[Tensor], tolerance: float, context: str) -> None:
    for name, a, e in zip(("output", "dq", "dk", "dv", "dtheta"), actual, expected, strict=True):
        error = (a.double() - e).abs()
        scale = e.abs().max().clamp_min(1.0)  # that of the inputs: a gradient can be exactly zero, e.g. for one tile
        assert error.max() <= tolerance * scale, (
            f"{context}: {name} differs by {error.max():.2e} (mean {error.mean():.2e}) at scale {scale:.2e}"
        )


def compare(
    xy: Tensor,
    decay: str,
    radii: list[float],
    *,
    d: int = 8,
    tau: float = 1e-3,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-10,
    bags: Tensor | None = None,
    paths: Sequence[str | None] = (None,),
    seed: int = 0,
) -> None:
    """Output and gradients of some paths against the dense reference in float64 on the same numbers."""
    q, k, v, grad = inputs(len(xy), len(radii), d, dtype, seed)
    theta = thetas(decay, radii).to(dtype)
    wide = [t.double() for t in (q, k, v)]
    reference = gradients(
        posterior_attention_reference, wide, theta.double(), xy, grad.double(), decay=decay, tau=tau, bags=bags
    )
    for path in paths:
        layout = Layout.of(xy, bags, path=path)
        fast = gradients(posterior_attention, [q, k, v], theta, xy, grad, decay=decay, tau=tau, layout=layout)
        context = f"{decay}, radii {radii}, n={len(xy)}, {dtype}, tau={tau}, path {path or layout.choose(radii)}"
        assert_same(fast, reference, tolerance, context)
