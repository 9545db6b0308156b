r"""Evidence of tiles in their surroundings: posterior attention, then a quadratic form, then a soft maximum.

    x_i = W (f_i - m)                          whitened features, few of them: from the training slides, not learned
    o_i = PSA(A x)_i                           what is around tile i, by heads with learned radii; no residual
    e_i = sum_r c_r (u_r . o_i + b_r)^2        evidence, for each output
    logit = b + sum_i softmax_i(gamma e_i) e_i    gamma > 0, learned

The evidence of a tile is signed, adds to the logit with the weight that the tile has, and can be compared across
slides: it is the tile's score. (With several outputs, that of the one it speaks for most, over their mean.)

Why a quadratic form: where an arrangement of tiles decides, not how many there are, the mean of whatever is linear in
the tiles tells nothing. The first thing that tells is how much the surroundings of tiles *vary* over a slide, a second
moment, and a sum over tiles of quadratic forms is that. Layers that normalise each tile, as those of a transformer
block do, hide exactly this. Nothing but the surroundings goes in, because a tile itself tells nothing; and gamma
begins small, near the mean over tiles, whose gradient reaches all of them, and grows towards the maximum. Whitening
lets kinds of tiles that differ strongly speak first; a model of so few numbers learns from some dozens of slides.

Time O(n K^2), memory O(n). Before ``start_epoch`` has seen the training bags, x is the first features themselves.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from psamil.bag import PackedBags
from psamil.errors import OptionError, one_of
from psamil.models.output import ModelOutput
from psamil.models.psa import SpatialAttention
from psamil.models.registry import register_model
from psamil.models.tiles import output_scores, soft_maximum
from psamil.models.trunk import layout_of
from psamil.spatial import Decay, DistancePrior, diversity_entropy

FLOOR = 0.1  # of the largest standard deviation, added to all when whitening: noise is not blown up
FIRST_SHARPNESS = 0.2  # gamma
FIRST_LIKELIHOOD = 0.1  # factor of the initial query and key weights: heads begin as plain means of what is around


class Whitening(nn.Module):
    """x = W (f - m): the leading principal components of the training tiles, scaled to a variance near 1.

    W = diag(1 / (s_k + FLOOR s_1)) V_k^T, with standard deviations s and directions V of the features.
    """

    mean: Tensor
    matrix: Tensor

    def __init__(self, in_dim: int, components: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(in_dim))
        self.register_buffer("matrix", torch.eye(components, in_dim))

    @torch.no_grad()
    def fit(self, batches: Iterable[PackedBags]) -> None:
        """From sums over all tiles in float64. Nothing changes if there are fewer than two."""
        n, total = 0, torch.zeros_like(self.mean, dtype=torch.float64)
        squares = total[:, None] * total
        for batch in batches:
            features = batch.features.double()
            n += len(features)
            total += features.sum(0)
            squares += features.T @ features
        if n < 2:
            return
        mean = total / n
        values, directions = torch.linalg.eigh(squares / n - mean[:, None] * mean)
        deviation = values.clamp_min(0).sqrt().flip(0)[: len(self.matrix)]
        leading = directions.flip(1)[:, : len(self.matrix)]
        leading = leading * leading.gather(0, leading.abs().argmax(0, keepdim=True)).sign()  # not of both signs
        scale = deviation + FLOOR * deviation[0]
        if not bool(scale[0] > 0):
            return
        self.mean.copy_(mean)
        self.matrix.copy_((leading / scale).T)

    def forward(self, features: Tensor) -> Tensor:
        return (features.to(self.mean.dtype) - self.mean) @ self.matrix.T


class PSAEvidence(nn.Module):
    """See the module.

    Args:
        in_dim: width of the tile features.
        n_out: number of raw outputs.
        components: of the whitened features; all features if there are fewer.
        heads, head_dim: attention heads and the width of each.
        rank: of the quadratic form.
        dropout: of what goes into the attention and of what comes out.
        decay, tau, k_min, k_max, k_init, alpha: see :class:`psamil.models.psa.PSAMIL`.
        context: "psa"; or "none", the tile itself instead of what is around it, to see what positions are worth.
    """

    needs_layout = True

    def __init__(
        self,
        in_dim: int,
        n_out: int,
        *,
        components: int = 32,
        heads: int = 3,
        head_dim: int = 8,
        rank: int = 16,
        dropout: float = 0.1,
        decay: str | Decay = "gaussian",
        tau: float = 1e-3,
        k_min: float = 1.0,
        k_max: float = 25.0,
        k_init: float | Sequence[float] = 7.0,
        alpha: float = 1e-3,
        context: str = "psa",
    ) -> None:
        super().__init__()
        for name, value in (("components", components), ("heads", heads), ("head_dim", head_dim), ("rank", rank)):
            if value < 1:
                raise OptionError(f"{name} must be at least 1, got {value}")
        if context not in ("psa", "none"):
            raise one_of("context", context, ("psa", "none"))
        width = heads * head_dim
        self.alpha = alpha
        self.whitening = Whitening(in_dim, min(components, in_dim))
        self.embedding = nn.Linear(min(components, in_dim), width)
        self.attention = None
        if context == "psa":
            prior = DistancePrior(heads, decay, tau=tau, k_min=k_min, k_max=k_max, k_init=k_init)
            self.attention = SpatialAttention(width, heads, prior)
            with torch.no_grad():
                self.attention.qkv.weight[: 2 * width] *= FIRST_LIKELIHOOD
        self.dropout = nn.Dropout(dropout)
        self.forms = nn.Linear(width, rank)
        self.evidence = nn.Linear(rank, n_out)
        self.log_sharpness = nn.Parameter(torch.tensor(FIRST_SHARPNESS).log())
        self.bias = nn.Parameter(torch.zeros(n_out))

    @property
    def priors(self) -> list[DistancePrior]:
        """The learnable prior of the attention, if there is one."""
        return [] if self.attention is None else [self.attention.prior]

    @torch.no_grad()
    def start_epoch(self, epoch: int, epochs: int, batches: Callable[[], Iterable[PackedBags]]) -> None:
        """Whitens by the training bags, once."""
        if epoch == 0:
            self.whitening.fit(batches())

    def attention_layers(self, batch: PackedBags) -> Iterator[tuple[SpatialAttention, Tensor]]:
        """The attention, if there is one, and the (n, width) tokens that it is given."""
        if self.attention is not None:
            yield self.attention, self._embedded(batch)

    def _embedded(self, batch: PackedBags) -> Tensor:
        """(n, width) A x."""
        whitened = self.whitening(batch.features).to(self.embedding.weight.dtype)
        embedded: Tensor = self.dropout(self.embedding(whitened))
        return embedded

    def tile_evidence(self, batch: PackedBags) -> Tensor:
        """(n, n_out) e."""
        x = self._embedded(batch)
        if self.attention is not None:
            x = self.dropout(self.attention(x, batch.xy, layout_of(batch)))
        evidence: Tensor = self.evidence(self.forms(x).square())
        return evidence.float() if evidence.dtype in (torch.float16, torch.bfloat16) else evidence

    def forward(self, batch: PackedBags) -> ModelOutput:
        evidence = self.tile_evidence(batch)
        logits = soft_maximum(evidence, self.log_sharpness.exp(), batch) + self.bias
        losses, radii = {}, None
        if self.attention is not None:
            losses["diversity"] = -self.alpha * diversity_entropy(self.attention.prior.rate)
            radii = self.attention.prior.radius_steps.detach()[None]
        return ModelOutput(
            logits, output_scores(self, evidence), losses, radii_steps=radii, tile_evidence=evidence + self.bias
        )


@register_model
def psa_evidence(in_dim: int, n_out: int, **options: Any) -> PSAEvidence:
    """Evidence of tiles in their surroundings, by posterior attention; options of :class:`PSAEvidence`."""
    return PSAEvidence(in_dim, n_out, **options)
