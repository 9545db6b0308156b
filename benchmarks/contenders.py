"""What benchmarks/attention.py compares: one slide, and the ways to attend over it, all with the same two methods.

- ``prepare()``: what is done once per slide;
- ``step(theta)``: one forward and one backward pass, with gradients of q, k, v and (where there is a prior) theta.

The contenders:

- ``lattice`` and ``continuous``: :func:`psamil.spatial.posterior_attention` on tiles of a lattice, and on the same
  tiles moved by up to half a step;
- ``pytorch``: the same as ``lattice``, without the compiled path;
- ``gather``: the authors' algorithm, re-expressed from its description: all distances, every row sorted, the keys and
  values of the pi K^2 nearest tiles gathered;
- ``biased``: torch's attention with the prior and the pruning as an n x n bias per head;
- ``flash``: torch's attention without prior and pruning, that is, another and simpler function of q, k and v;
- ``gemm``: no attention but a square matrix product, for the arithmetic this machine can do.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from psamil.spatial import Gaussian, Layout, posterior_attention

HEADS, DIMS = 3, 32
TAU = 1e-3
FILL = 0.45  # share of the bounding box that is tissue
GEMM_SIDE = 1024
DECAY = Gaussian()


@dataclass(frozen=True)
class Slide:
    """Tiles of a made-up tissue, in row-major order, with random features."""

    xy: Tensor  # (n, 2) whole tile steps
    jitter: Tensor  # (n, 2) in [-0.5, 0.5): added to xy it makes continuous positions
    q: Tensor  # (n, heads, d), as are k, v and the gradient of the output
    k: Tensor
    v: Tensor
    grad: Tensor

    @staticmethod
    def random(n: int, seed: int = 0) -> "Slide":
        generator = torch.Generator().manual_seed(seed)
        side = math.ceil(math.sqrt(n / FILL))
        noise = torch.randn(2, side, side, generator=generator)
        # large pieces with ragged edges: the n highest cells of noise smoothed over a tenth of the side and over a step
        relief = _smooth(noise[0], side / 10) + 0.25 * _smooth(noise[1], 1.0)
        cells = relief.flatten().topk(n).indices.sort().values
        xy = torch.stack((cells % side, cells // side), 1).double()
        jitter = torch.rand(n, 2, generator=generator, dtype=torch.float64) - 0.5
        return Slide(xy, jitter, *torch.randn(4, n, HEADS, DIMS, generator=generator).unbind())

    def count_pairs(self, keep_d2: Sequence[float], continuous: bool) -> int:
        """Query-key pairs within the radii, over all heads."""
        if not continuous:
            bag = Layout.of(self.xy).bags[0]
            return sum(bag.count_pairs(d2) for d2 in keep_d2)
        xy = self.xy + self.jitter
        row = self.xy[:, 1].contiguous()  # ascending: tiles within reach of a group of queries lie in a slice
        reach = math.ceil(math.sqrt(max(keep_d2))) + 1
        total = 0
        for start in range(0, len(xy), 256):
            query = xy[start : start + 256]
            low, high = row[start] - reach, row[start + len(query) - 1] + reach
            near = xy[int(torch.searchsorted(row, low)) : int(torch.searchsorted(row, high, right=True))]
            d2 = (near[:, None] - query).square().sum(-1)
            total += sum(int((d2 <= keep).sum()) for keep in keep_d2)
        return total


def _smooth(noise: Tensor, sigma_steps: float) -> Tensor:
    """Gaussian smoothing, periodic, to unit variance."""
    frequency = torch.fft.fftfreq(noise.shape[0]).square()
    response = torch.exp(-2 * (math.pi * sigma_steps) ** 2 * (frequency[:, None] + frequency))
    smooth = torch.fft.ifft2(torch.fft.fft2(noise) * response).real
    return (smooth - smooth.mean()) / smooth.std()


def thetas(radius_steps: float, call: int = 1) -> Tensor:
    """(heads,) parameters for radii of K - 0.3, K, K + 0.3: alike in cost, with nothing to share between heads.

    They move by a thousandth from call to call, as in training, so that no call can use what another one made.
    """
    radii = torch.linspace(radius_steps - 0.3, radius_steps + 0.3, HEADS)
    return DECAY.theta_of_radius(radii, TAU) * (1 + 1e-3 * (call % 3 - 1))


class Contender(Protocol):
    def prepare(self) -> None:
        """Done once per slide; what an earlier call made is dropped first."""

    def step(self, theta: Tensor) -> tuple[Tensor, ...]:
        """Gradients after one forward and one backward pass."""


class Psamil:
    def __init__(self, slide: Slide, continuous: bool = False, compiled: bool = True) -> None:
        self.environment = {"PSAMIL_COMPILED": str(int(compiled))}
        self.xy = slide.xy + slide.jitter if continuous else slide.xy
        self.q, self.k, self.v = (t.clone().requires_grad_() for t in (slide.q, slide.k, slide.v))
        self.grad = slide.grad

    def prepare(self) -> None:
        """The layout, with all that is kept of it after a first step."""
        self.layout = Layout.of(self.xy)
        (bag,) = self.layout.bags
        _ = bag.sorted_tiles, bag.lattice, bag.scattered

    def step(self, theta: Tensor) -> tuple[Tensor, ...]:
        os.environ |= self.environment
        theta.requires_grad_()
        out = posterior_attention(self.q, self.k, self.v, self.xy, theta, decay=DECAY, tau=TAU, layout=self.layout)
        return torch.autograd.grad(out, (self.q, self.k, self.v, theta), self.grad)


class _HeadsFirst:
    """q, k, v and the gradient as (heads, n, d): what serves the other contenders best."""

    def __init__(self, slide: Slide) -> None:
        first = (t.transpose(0, 1).contiguous() for t in (slide.q, slide.k, slide.v, slide.grad))
        self.q, self.k, self.v, self.grad = first
        self.xy = slide.xy.float()
        for tensor in (self.q, self.k, self.v):
            tensor.requires_grad_()

    def prepare(self) -> None:
        pass


class Gather(_HeadsFirst):
    """p_i. = softmax over the m = pi K^2 nearest j of -||q_i - k_j||^2 / (2 sqrt d) + log(f(d_ij) + 1e-6)."""

    def prepare(self) -> None:
        self.distance = self.nearest = torch.empty(0)
        self.distance = torch.cdist(self.xy, self.xy)
        self.nearest = self.distance.argsort(1)  # (n, n)

    def step(self, theta: Tensor) -> tuple[Tensor, ...]:
        theta.requires_grad_()
        out = gathered_attention(self.q, self.k, self.v, self.distance, self.nearest, theta)
        return torch.autograd.grad(out, (self.q, self.k, self.v, theta), self.grad)


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, distance: Tensor, nearest: Tensor, theta: Tensor) -> Tensor:
    """(heads, n, d) posterior means of ``gather``, head by head.

    Args:
        q, k, v: (heads, n, d).
        distance, nearest: (n, n) distances in tile steps, and for each tile all tiles from near to far.
        theta: (heads,) sigma of the prior.
    """
    counts = neighbours(theta, len(nearest))
    heads = zip(q, k, v, theta, counts, strict=True)
    return torch.stack([_gathered_head(*head, distance, nearest[:, :m]) for *head, m in heads])


def _gathered_head(q: Tensor, k: Tensor, v: Tensor, sigma: Tensor, distance: Tensor, nearest: Tensor) -> Tensor:
    key, value = k[nearest], v[nearest]  # (n, m, d)
    q_norm, k_norm = q.square().sum(-1, keepdim=True), k.square().sum(-1)
    product = torch.bmm(key, q[:, :, None])[:, :, 0]  # (n, m)
    log_likelihood = -(q_norm + k_norm[nearest] - 2 * product) / (2 * math.sqrt(q.shape[-1]))
    prior = torch.exp(-distance.gather(1, nearest).square() / (2 * sigma.square()))
    p = (log_likelihood + torch.log(prior + 1e-6)).softmax(-1)
    return torch.bmm(p[:, None], value)[:, 0]


class Biased(_HeadsFirst):
    """The term -||q_i||^2 / (2 sqrt d) of the definition is the same for all keys and left out."""

    def prepare(self) -> None:
        self.d2 = torch.empty(0)
        self.d2 = torch.cdist(self.xy, self.xy).square_()

    def step(self, theta: Tensor) -> tuple[Tensor, ...]:
        theta.requires_grad_()
        keep_d2 = DECAY.radius(theta.detach(), TAU).square()[:, None, None]
        k_norm = self.k.square().sum(-1)[:, None] / (2 * math.sqrt(DIMS))
        bias = (DECAY.log_prior(self.d2, theta[:, None, None]) - k_norm).masked_fill(self.d2 > keep_d2, -math.inf)
        out = scaled_dot_product_attention(self.q[None], self.k[None], self.v[None], bias[None])[0]
        return torch.autograd.grad(out, (self.q, self.k, self.v, theta), self.grad)


class Flash(_HeadsFirst):
    def step(self, theta: Tensor) -> tuple[Tensor, ...]:
        out = scaled_dot_product_attention(self.q[None], self.k[None], self.v[None])[0]
        return torch.autograd.grad(out, (self.q, self.k, self.v), self.grad)


class Gemm:
    def __init__(self) -> None:
        self.a, self.b = torch.randn(2, GEMM_SIDE, GEMM_SIDE, generator=torch.Generator().manual_seed(0))

    def prepare(self) -> None:
        pass

    def step(self, theta: Tensor) -> tuple[Tensor, ...]:
        return (self.a @ self.b,)


CONTENDERS: dict[str, Callable[[Slide], Contender]] = {
    "lattice": Psamil,
    "continuous": lambda slide: Psamil(slide, continuous=True),
    "pytorch": lambda slide: Psamil(slide, compiled=False),
    "gather": Gather,
    "biased": Biased,
    "flash": Flash,
    "gemm": lambda slide: Gemm(),
}


def neighbours(theta: Tensor, n: int) -> list[int]:
    """Tiles that a query of ``gather`` looks at, per head: as many as a disc of radius K holds."""
    return [min(n, round(math.pi * radius**2)) for radius in DECAY.radius(theta.detach(), TAU).tolist()]


def expected_bytes(contender: str, n: int, radius_steps: float) -> float:
    """Rough peak memory of the contenders that may not fit, float32 and int64; 0 for the others."""
    if contender == "gather":
        m = neighbours(thetas(radius_steps), n)
        # distances, order and, while sorting, sorted distances; keys and values of every head, gradients of one
        return max(16 * n**2, 12 * n**2 + 4 * DIMS * n * (2 * sum(m) + 2 * max(m)))
    if contender == "biased":
        return 4 * n**2 * (2 + 4 * HEADS)  # distances; bias, scores, softmax and a gradient
    return 0.0
