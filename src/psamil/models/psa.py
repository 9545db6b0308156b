r"""PSA-MIL: multiple instance learning with probabilistic spatial attention.

    features --adapter--> x --depth x [ x + PSA(LN x); x + MLP(LN x) ]--> LN --attention pooling--> head --> logits

PSA reads self-attention as a posterior over tiles whose prior decays with distance at a rate that each head learns
(:mod:`psamil.spatial`). Pooling is z = sum_i softmax_i(a_i) x_i with a_i linear in x_i, as in the authors' code, or
gated; a_i is returned as the score of tile i. (Other poolings are in :mod:`psamil.models.trunk`.) The diversity loss
-alpha H(rates), summed over layers, keeps the radii of the heads apart.

The paper leaves one thing open: where one radius serves the labels as well as another, nothing decides between them. A
radius loss, off by default,

    radius_weight * mean over heads of log K, summed over layers, in the second half of training,

takes the smaller one, which costs less and says more. It sets in when heads have found what they look at, and draws
them in until the labels object. What a tenth less costs or gains is the same for all radii, so that one weight serves
narrow and wide ranges. Of epochs with equal validation scores, the one is kept whose validation loss and radius loss
together are least.

``arrangement`` adds logits of how often kinds of tiles meet, for features that are such kinds
(:mod:`psamil.models.arrangement`): those of a bag are sum_i softmax_i(a_i) head(x_i) + 1/n sum_i e_i. The evidence of
tile i is then n softmax_i(a_i) head(x_i) + e_i, whose mean the logits are. In training both learn apart, each by a loss
of its own, and the logits are those of attention alone: otherwise attention, which learns few slides by heart sooner,
would leave nothing for the arrangement to learn from, or learn to take it back. Off by default: it is not in the paper.

Time O(n K^2), memory O(n). Where this differs from the authors' code on purpose: exact discs instead of the nearest
round(pi K^2) tiles, raw logits out, no floor under the prior, radii that cannot get stuck at their bounds, a diversity
loss that has a gradient. The preset "legacy" takes their neighbours and their diversity loss for comparison; O(n^2).

Peled, Maruvka, Freiman: PSA-MIL: A Probabilistic Spatial Attention-Based Multiple Instance Learning for Whole Slide
Image Classification. WACV 2026.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from psamil.bag import PackedBags
from psamil.errors import OptionError, one_of
from psamil.models.arrangement import GAIN, Arrangement
from psamil.models.nearest import nearest_attention
from psamil.models.output import ExtraPrediction, ModelOutput
from psamil.models.registry import register_model
from psamil.models.segments import segment_softmax
from psamil.models.tiles import GatedScore
from psamil.models.transformer import TransformerBlock
from psamil.models.trunk import PRESETS, Adapter, MultiHeadAttention, Trunk, with_preset
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

__all__ = ["PRESETS", "PSAMIL", "PSA_PRESETS", "Adapter", "GatedScore", "NearestAttention", "SpatialAttention", "psa"]

_AUTHORS = {"tau": 1e-3, "k_min": 1.0, "k_max": 25.0, "k_init": 7.0, "alpha": 1e-3}  # for all cohorts

PSA_PRESETS: dict[str, dict[str, Any]] = {
    **{name: sizes | _AUTHORS for name, sizes in PRESETS.items()},
    "legacy": PRESETS["paper-crc"] | _AUTHORS | {"neighbours": "nearest", "diversity": "binning"},
}
"""The authors' published configurations of PSA; ``legacy`` also behaves as their code does, see ``docs/legacy.md``."""


class SpatialAttention(MultiHeadAttention):
    """Multi-head posterior attention with a learnable prior per head."""

    def __init__(self, width: int, heads: int, prior: DistancePrior) -> None:
        super().__init__(width, heads)
        self.prior = prior

    def attend(self, q: Tensor, k: Tensor, v: Tensor, xy: Tensor, layout: Layout) -> Tensor:
        prior = self.prior
        return posterior_attention(q, k, v, xy, prior.theta, decay=prior.decay, tau=prior.tau, layout=layout)


class NearestAttention(SpatialAttention):
    """The same over the nearest tiles instead of a disc, as in the authors' code (:mod:`psamil.models.nearest`)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, xy: Tensor, layout: Layout) -> Tensor:
        prior = self.prior
        return nearest_attention(q, k, v, prior.theta, decay=prior.decay, tau=prior.tau, layout=layout)


NEIGHBOURS: dict[str, type[SpatialAttention]] = {"disc": SpatialAttention, "nearest": NearestAttention}


class PSAMIL(Trunk):
    """The model of the paper.

    Args:
        decay: "exponential", "gaussian", "cauchy" or a decay object.
        tau: prior below which a tile is pruned.
        neighbours: tiles that a head looks at: those within its radius K ("disc"), or the round(pi K^2) nearest
            ("nearest"), see :mod:`psamil.models.nearest`.
        k_min, k_max, k_init: bounds and initial value of the radii, in tile steps; k_init can be several,
            from the first head to the last.
        alpha: weight of the diversity loss.
        diversity: form of its entropy, see :mod:`psamil.spatial.diversity`.
        radius_weight: weight of the radius loss.
        arrangement: adds the arrangement of kinds, whose number in_dim is.
        others: sizes and pooling, see :class:`psamil.models.trunk.Trunk`.
    """

    def __init__(
        self,
        in_dim: int,
        n_out: int,
        *,
        decay: str | Decay = "gaussian",
        tau: float = 1e-3,
        neighbours: str = "disc",
        k_min: float = 1.0,
        k_max: float = 25.0,
        k_init: float | Sequence[float] = 7.0,
        alpha: float = 1e-3,
        diversity: str = "quadrature",
        radius_weight: float = 0.0,
        arrangement: bool = False,
        **others: Any,
    ) -> None:
        if diversity not in FORMS:
            raise one_of("form of diversity", diversity, FORMS)
        if neighbours not in NEIGHBOURS:
            raise one_of("neighbours", neighbours, NEIGHBOURS)

        def attention(width: int, heads: int) -> SpatialAttention:
            prior = DistancePrior(heads, decay, tau=tau, k_min=k_min, k_max=k_max, k_init=k_init)
            return NEIGHBOURS[neighbours](width, heads, prior)

        super().__init__(in_dim, n_out, attention, **others)
        if arrangement and self.score is None:
            raise OptionError("arrangement goes with the poolings 'linear' and 'gated'")
        self.arrangement = Arrangement(in_dim, n_out, len(self.priors[0].free)) if arrangement else None
        self.alpha, self.diversity, self.radius_weight = alpha, diversity, radius_weight
        self.is_late = False  # in the second half of training

    def start_epoch(self, epoch: int, epochs: int, batches: Callable[[], Iterable[PackedBags]]) -> None:
        """Tells whether radii shall be small by now; the arrangement takes its scale from the training bags, once."""
        self.is_late = epoch >= epochs / 2
        if self.arrangement is not None and epoch == 0:
            self.arrangement.measure(batches(), self.priors[0])

    def radius_loss(self) -> Tensor:
        """What the radii cost."""
        return self.radius_weight * torch.stack([prior.radius_steps.log().mean() for prior in self.priors]).sum()

    @property
    def cost(self) -> float:
        """The radius loss, for whoever chooses an epoch."""
        return float(self.radius_loss().detach())

    @property
    def priors(self) -> list[DistancePrior]:
        """The learnable prior of each layer."""
        return [module for module in self.modules() if isinstance(module, DistancePrior)]

    def attention_layers(self, batch: PackedBags) -> Iterator[tuple[SpatialAttention, Tensor]]:
        """The attention of each layer, and the (n, width) tokens that it is given."""
        x, layout = self.tiles(batch)
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            assert isinstance(block.attention, SpatialAttention)
            yield block.attention, block.norm1(x)
            x = block(x, batch.xy, layout)

    @torch.no_grad()
    def posterior_rows(self, batch: PackedBags, tiles: Sequence[int], layer: int = 0) -> list[list[PosteriorRow]]:
        """Why tiles attend where they attend: ``rows[i][h]`` is head h of tile ``tiles[i]`` of the batch."""
        attention, x = next(islice(self.attention_layers(batch), layer, None))
        if isinstance(attention, NearestAttention):
            raise OptionError('rows of the posterior are those of discs; this model has neighbours="nearest"')
        q, k, _ = attention.project(x)
        prior = attention.prior
        queries = torch.as_tensor(tiles)
        return posterior_rows(q, k, batch.xy, prior.theta, queries, decay=prior.decay, tau=prior.tau, bags=batch.slides)

    def forward(self, batch: PackedBags) -> ModelOutput:
        x, layout = self.tiles(batch)
        output = self.predict(x, layout, batch)
        if self.arrangement is not None:
            output = self._with_arrangement(output, layout, batch)
        priors = self.priors
        entropy = torch.stack([diversity_entropy(prior.rate, self.diversity) for prior in priors]).sum()
        losses = {"diversity": -self.alpha * entropy}
        if self.radius_weight and self.is_late:
            losses["radius"] = self.radius_loss()
        return replace(
            output,
            auxiliary_losses=losses,
            radii_steps=torch.stack([prior.radius_steps.detach() for prior in priors]),
        )

    def _with_arrangement(self, output: ModelOutput, layout: Layout, batch: PackedBags) -> ModelOutput:
        """In training an extra prediction; otherwise adds the logits of the arrangement, and each tile's evidence."""
        assert self.arrangement is not None
        assert output.tile_evidence is not None
        logits, evidence = self.arrangement(batch, layout, self.priors[0])
        bag = batch.bag_of_tile
        if self.training:
            alone = ExtraPrediction(logits / GAIN, torch.arange(len(batch), device=bag.device))
            return replace(output, extra_predictions={"arrangement": alone})
        sizes = batch.offsets.diff().to(bag.device)
        share = segment_softmax(output.tile_scores, bag, len(batch)) * sizes[bag]  # 1 where all tiles weigh the same
        whole = share[:, None] * output.tile_evidence + evidence
        return replace(output, logits=output.logits + logits, tile_evidence=whole)


@register_model
def psa(in_dim: int, n_out: int, *, preset: str | None = None, **options: Any) -> PSAMIL:
    """PSA-MIL; ``preset`` names one of the authors' configurations (:data:`PSA_PRESETS`)."""
    return PSAMIL(in_dim, n_out, **with_preset(preset, options, PSA_PRESETS))
