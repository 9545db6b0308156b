r"""PSA-MIL: multiple instance learning with probabilistic spatial attention.

    features --adapter--> x --depth x [ x + PSA(LN x); x + MLP(LN x) ]--> LN --attention pooling--> head --> logits

PSA reads self-attention as a posterior over tiles whose prior decays with distance at a rate that each head learns
(:mod:`psamil.spatial`). Pooling is z = sum_i softmax_i(a_i) x_i with a_i linear in x_i, as in the authors' code, or
gated; a_i is returned as the score of tile i. The diversity loss -alpha H(rates), summed over layers, keeps the radii
of the heads apart.

Time O(n K^2), memory O(n). Where this differs from the authors' code on purpose: exact discs instead of the nearest
round(pi K^2) tiles, raw logits out, no floor under the prior, radii that cannot get stuck at their bounds, a diversity
loss that has a gradient.

Peled, Maruvka, Freiman: PSA-MIL: A Probabilistic Spatial Attention-Based Multiple Instance Learning for Whole Slide
Image Classification. WACV 2026.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from psamil.bag import PackedBags
from psamil.errors import OptionError, ShapeError, one_of
from psamil.models.output import ModelOutput
from psamil.models.registry import register_model
from psamil.models.segments import segment_softmax, segment_sum
from psamil.spatial import (
    Decay,
    DistancePrior,
    Layout,
    PosteriorRow,
    diversity_entropy,
    posterior_attention,
    posterior_rows,
)
from psamil.spatial.diversity import FORMS

PRESETS: dict[str, dict[str, int]] = {
    "paper-crc": {"heads": 3, "head_dim": 96},
    "paper-stad": {"heads": 3, "head_dim": 96},
    "paper-camelyon16": {"heads": 3, "head_dim": 192},
    "paper-demo": {"heads": 3, "head_dim": 32},
}
"""Sizes of the authors' published configurations."""


class Adapter(nn.Module):
    """Projection to the model's width, then residual blocks x + ReLU(L2 ReLU(L1 x)); no biases."""

    def __init__(self, in_dim: int, width: int, layers: int) -> None:
        super().__init__()
        self.project = nn.Linear(in_dim, width, bias=False)
        self.residuals = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, width, bias=False), nn.ReLU()
            )
            for _ in range(layers - 1)
        )

    def forward(self, features: Tensor) -> Tensor:
        x = self.project(features).relu()
        for residual in self.residuals:
            x = x + residual(x)
        return x


class SpatialAttention(nn.Module):
    """Multi-head posterior attention with a learnable prior per head."""

    def __init__(self, width: int, heads: int, prior: DistancePrior) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.prior = prior

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, (n, heads, d) each."""
        return self.qkv(x).unflatten(1, (3, self.heads, self.head_dim)).unbind(1)

    def forward(self, x: Tensor, xy: Tensor, layout: Layout) -> Tensor:
        q, k, v = self.project(x)
        prior = self.prior
        out = posterior_attention(q, k, v, xy, prior.theta, decay=prior.decay, tau=prior.tau, layout=layout)
        return self.proj(out.flatten(1))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, attention: SpatialAttention, mlp_ratio: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, mlp_ratio * width), nn.GELU(), nn.Linear(mlp_ratio * width, width))

    def forward(self, x: Tensor, xy: Tensor, layout: Layout) -> Tensor:
        x = x + self.attention(self.norm1(x), xy, layout)
        return x + self.mlp(self.norm2(x))


class GatedScore(nn.Module):
    """a_i = w . (tanh(V x_i) * sigmoid(U x_i))."""

    def __init__(self, width: int, hidden: int = 128) -> None:
        super().__init__()
        self.tanh, self.gate, self.score = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.tanh(x).tanh() * self.gate(x).sigmoid())


class PSAMIL(nn.Module):
    """The model of the paper.

    Args:
        in_dim: width of the tile features.
        n_out: number of raw outputs.
        heads, head_dim: attention heads and the width of each; the model's width is their product.
        depth: transformer blocks.
        adapter_layers: 1 projects the features, every further layer adds a residual block.
        mlp_ratio: hidden width of the MLPs in model widths.
        decay: "exponential", "gaussian", "cauchy" or a decay object.
        tau: prior below which a tile is pruned.
        k_min, k_max, k_init: bounds and initial value of the radii, in tile steps.
        pooling: "linear" as the authors, or "gated".
        alpha: weight of the diversity loss.
        diversity: form of its entropy, see :mod:`psamil.spatial.diversity`.
    """

    needs_layout = True

    def __init__(
        self,
        in_dim: int,
        n_out: int,
        *,
        heads: int = 3,
        head_dim: int = 96,
        depth: int = 1,
        adapter_layers: int = 2,
        mlp_ratio: int = 4,
        decay: str | Decay = "gaussian",
        tau: float = 1e-3,
        k_min: float = 1.0,
        k_max: float = 25.0,
        k_init: float = 7.0,
        pooling: str = "linear",
        alpha: float = 1e-3,
        diversity: str = "quadrature",
    ) -> None:
        super().__init__()
        if min(in_dim, n_out, heads, head_dim, depth, adapter_layers, mlp_ratio) < 1:
            raise OptionError("in_dim, n_out, heads, head_dim, depth, adapter_layers and mlp_ratio must be at least 1")
        if pooling not in ("linear", "gated"):
            raise one_of("pooling", pooling, ("linear", "gated"))
        if diversity not in FORMS:
            raise one_of("form of diversity", diversity, FORMS)
        width = heads * head_dim
        self.in_dim, self.alpha, self.diversity = in_dim, alpha, diversity
        self.adapter = Adapter(in_dim, width, adapter_layers)
        priors = [DistancePrior(heads, decay, tau=tau, k_min=k_min, k_max=k_max, k_init=k_init) for _ in range(depth)]
        self.blocks = nn.ModuleList(Block(width, SpatialAttention(width, heads, prior), mlp_ratio) for prior in priors)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.score = nn.Linear(width, 1) if pooling == "linear" else GatedScore(width)
        self.head = nn.Linear(width, n_out)

    @property
    def priors(self) -> list[DistancePrior]:
        """The learnable prior of each layer."""
        return [module for module in self.modules() if isinstance(module, DistancePrior)]

    @staticmethod
    def _layout(batch: PackedBags) -> Layout:
        if batch.layout is None:
            return Layout.of(batch.xy, batch.slides)
        expected = sorted(set(batch.slides.tolist()))  # empty slides have no geometry
        if not isinstance(batch.layout, Layout) or batch.layout.offsets != expected:
            raise ShapeError(
                f"the layout of the batch must be a psamil.spatial.Layout of its slides, which begin at {expected[:8]}"
                + (f"; its bags begin at {batch.layout.offsets[:8]}" if isinstance(batch.layout, Layout) else "")
            )
        return batch.layout

    @torch.no_grad()
    def posterior_rows(self, batch: PackedBags, tiles: Sequence[int], layer: int = 0) -> list[list[PosteriorRow]]:
        """Why tiles attend where they attend: ``rows[i][h]`` is head h of tile ``tiles[i]`` of the batch."""
        layout = self._layout(batch)
        x = self.adapter(batch.features.to(self.head.weight.dtype))
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        for block in blocks[:layer]:
            x = block(x, batch.xy, layout)
        attention, norm = blocks[layer].attention, blocks[layer].norm1
        q, k, _ = attention.project(norm(x))
        prior = attention.prior
        queries = torch.as_tensor(tiles)
        return posterior_rows(q, k, batch.xy, prior.theta, queries, decay=prior.decay, tau=prior.tau, bags=batch.slides)

    def forward(self, batch: PackedBags) -> ModelOutput:
        if not isinstance(batch, PackedBags):
            raise ShapeError(f"the model takes PackedBags, got {type(batch).__name__}; use PackedBags.of(...)")
        if batch.features.shape[1] != self.in_dim:
            raise ShapeError(f"the model takes features of width {self.in_dim}, got {batch.features.shape[1]}")
        layout = self._layout(batch)
        x = self.adapter(batch.features.to(self.head.weight.dtype))
        for block in self.blocks:
            x = block(x, batch.xy, layout)
        x = self.norm(x)
        scores = self.score(x).squeeze(-1)
        bag = batch.bag_of_tile
        pooled = segment_sum(segment_softmax(scores, bag, len(batch))[:, None] * x, bag, len(batch))  # (b, width)
        rates = [prior.rate for prior in self.priors]
        entropy = torch.stack([diversity_entropy(rate, self.diversity) for rate in rates]).sum()
        return ModelOutput(
            logits=self.head(pooled.to(self.head.weight.dtype)),
            tile_scores=scores,
            auxiliary_losses={"diversity": -self.alpha * entropy},
            radii_steps=torch.stack([prior.radius_steps.detach() for prior in self.priors]),
        )


@register_model
def psa(in_dim: int, n_out: int, *, preset: str | None = None, **options: Any) -> PSAMIL:
    """PSA-MIL; ``preset`` names the sizes of one of the authors' configurations (:data:`PRESETS`)."""
    if preset is not None:
        if preset not in PRESETS:
            raise one_of("preset", preset, PRESETS)
        options = {**PRESETS[preset], **options}
    return PSAMIL(in_dim, n_out, **options)
