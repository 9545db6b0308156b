r"""Bayes-MIL: attention with a distribution per tile, a prior that depends on the bag's class, and smoothing in space.

Layers written B(.) are Bayesian (:class:`VariationalLinear`). With h_i = ReLU(W x_i + b) the embedding of tile i,

    (mu_i, log s_i^2) = B(tanh(B(h_i)) * sigmoid(B(h_i)))                                distribution of its logit
    m_i = sum_j k_ij mu_j / sum_j k_ij,    k_ij = exp(-d_ij^2 / (2 sigma^2))          random field: i and its neighbours
    g_i ~ N(m_i, s_i^2),    a_i = sigmoid(g_i)                                         attention, each tile for itself
    z = sum_i a_i h_i / sum_i a_i,    logits = B(z)

sigma = 0.5 tile steps: on a lattice the weights of centre, edge and corner are 0.619, 0.084 and 0.011. Two auxiliary
losses: ``weights``, 1e-8 times the KL terms of the Bayesian layers, and ``attention``, 1e-6 times

    KL(N(m_i, s_i^2) || N(mu_p, s_p^2)) = 1/2 [log(s_p^2 / s_i^2) + (s_i^2 + (m_i - mu_p)^2) / s_p^2 - 1],

averaged over the tiles of a bag and over bags. The prior is N(-5, e^-1) in a negative bag and N(0, e^3) in others. Only
two classes (n_out = 1) know a negative one, the first; more classes, survival and other outcomes use N(0, e^3) for all.

**Evaluation** draws nothing: weights take their means, and a_i its own, E a_i = sigmoid(m_i / sqrt(1 + pi s_i^2 / 8))
within 0.02. The argument of that sigmoid is the score of a tile. The authors average 16 drawn passes instead.

Time O(n in_dim hidden), memory O(n hidden). A bag without tiles has z = 0. Where this differs from the authors' code:
the KL term of the attention is the one above (there, log-variances are squared in place of variances) and counts all
tiles (there, one cell, mostly background); neighbours are those of the slide (there, rows are sheared by one cell); and
places without tissue have no weight in the random field (there, they count as attention 0.5).

Cui, Liu, Liu, Liu, Wang, Kuo, Xue, Chan: Bayes-MIL: A New Probabilistic Perspective on Attention-based Multiple
Instance Learning for Whole Slide Images. ICLR 2023.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psamil.bag import PackedBags
from psamil.errors import OptionError
from psamil.models.adjacency import Adjacency
from psamil.models.output import ModelOutput
from psamil.models.pooling import TileEmbedding
from psamil.models.registry import register_model
from psamil.models.segments import segment_sum
from psamil.models.tiles import attention_pooling, has_classes

NEGATIVE_PRIOR = (-5.0, -1.0)
"""Mean and log-variance of the attention logit of a tile in a negative bag."""
OTHER_PRIOR = (0.0, 3.0)
"""The same in any other bag."""


class VariationalLinear(nn.Module):
    r"""A linear layer whose weights are w ~ N(theta, alpha theta^2), theta and alpha being learned for each.

    In training, outputs are drawn instead of weights, which has the same distribution and less noise in the gradient:

        out ~ N(x theta^T + b, x^2 (alpha theta^2 + 1e-8)^T).

    In evaluation they are x theta^T + b. ``kl``, averaged over inputs and summed over outputs, approximates

        KL = 1/2 log(1 + 1 / alpha) - 0.6134 exp(-(0.2026 + 0.7126 log alpha)^2).
    """

    def __init__(self, in_features: int, out_features: int, log_alpha: float) -> None:
        super().__init__()
        self.theta = nn.Parameter(0.01 * torch.randn(out_features, in_features))
        self.log_alpha = nn.Parameter(torch.full((out_features, in_features), log_alpha))
        self.bias = nn.Parameter(torch.zeros(out_features))

    @property
    def kl(self) -> Tensor:
        bump = torch.exp(-((0.2026 + 0.7126 * self.log_alpha) ** 2))
        return (0.5 * F.softplus(-self.log_alpha) - 0.6134 * bump).mean(1).sum()

    def forward(self, x: Tensor) -> Tensor:
        mean = F.linear(x, self.theta, self.bias)
        if not self.training:
            return mean
        with torch.autocast(x.device.type, enabled=False):  # float16 does not reach down to these variances
            variance = F.linear(x.to(self.theta.dtype).square(), self.log_alpha.exp() * self.theta.square() + 1e-8)
        deviation = variance.clamp(min=1e-12).sqrt()  # the root of 0 has no gradient
        return mean + deviation * torch.randn_like(deviation)


class TileLogits(nn.Module):
    """mu and log s^2 of each tile, (n,) each."""

    def __init__(self, width: int, attention_dim: int, dropout: float) -> None:
        super().__init__()
        self.tanh = VariationalLinear(width, attention_dim, -4.0)
        self.gate = VariationalLinear(width, attention_dim, -4.0)
        self.moments = VariationalLinear(attention_dim, 2, -4.0)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.dropout(self.tanh(h).tanh()) * self.dropout(self.gate(h).sigmoid())
        mu, log_variance = self.moments(hidden).unbind(1)
        return mu, log_variance


class BayesMIL(nn.Module):
    """The model of the paper with all its parts.

    Args:
        in_dim: width of the tile features.
        n_out: number of raw outputs.
        hidden: width of the embedding.
        attention_dim: of the gated layers.
        dropout: share of the embedding, and of each gated layer, that is dropped in training.
        sigma_steps: width of the random field in tile steps; 0 leaves it out.
        radius_steps: within which tiles are neighbours, in tile steps.
        weights_kl, attention_kl: weights of the auxiliary losses.
    """

    wants_classes = True

    def __init__(
        self,
        in_dim: int,
        n_out: int,
        *,
        hidden: int = 512,
        attention_dim: int = 256,
        dropout: float = 0.25,
        sigma_steps: float = 0.5,
        radius_steps: float = 1.5,
        weights_kl: float = 1e-8,
        attention_kl: float = 1e-6,
    ) -> None:
        super().__init__()
        if min(in_dim, n_out, hidden, attention_dim) < 1 or not 0 <= dropout < 1:
            raise OptionError("in_dim, n_out, hidden and attention_dim must be at least 1 and dropout in [0, 1)")
        if not sigma_steps >= 0:
            raise OptionError(f"sigma_steps must not be negative, got {sigma_steps}")
        self.sigma_steps, self.radius_steps = sigma_steps, radius_steps
        self.weights_kl, self.attention_kl = weights_kl, attention_kl
        self.embed = TileEmbedding(in_dim, hidden, dropout)
        self.tile_logits = TileLogits(hidden, attention_dim, dropout)
        self.head = VariationalLinear(hidden, n_out, -3.0)

    def forward(self, batch: PackedBags, classes: Tensor | None = None) -> ModelOutput:
        h = self.embed(batch, self.head.theta.dtype)
        mu, log_variance = self.tile_logits(h)
        mean = smooth_in_space(mu, batch, self.sigma_steps, self.radius_steps) if self.sigma_steps else mu
        if self.training:
            logit = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        else:
            logit = mean / (1 + math.pi / 8 * log_variance.exp()).sqrt()
        # a_i / sum a_i is the softmax of log a_i, which does not underflow
        pooled = attention_pooling(F.logsigmoid(logit), h, batch.bag_of_tile, len(batch))
        kl = torch.stack([layer.kl for layer in self.modules() if isinstance(layer, VariationalLinear)]).sum()
        return ModelOutput(
            logits=self.head(pooled.to(self.head.theta.dtype)),
            tile_scores=logit,
            auxiliary_losses={
                "weights": self.weights_kl * kl,
                "attention": self.attention_kl * self._divergence(mean, log_variance, batch, classes).mean(),
            },
        )

    def _divergence(self, mean: Tensor, log_variance: Tensor, batch: PackedBags, classes: Tensor | None) -> Tensor:
        """(b,) KL between the logits of the tiles of each bag and their prior, averaged over tiles."""
        negative = torch.zeros(len(batch), dtype=torch.bool, device=mean.device)
        if classes is not None and self.head.theta.shape[0] == 1 and has_classes(self):
            negative = classes == 0
        priors = mean.new_tensor((OTHER_PRIOR, NEGATIVE_PRIOR))[negative.long()]  # (b, 2)
        bag = batch.bag_of_tile
        divergence = normal_divergence(mean, log_variance, *priors[bag].unbind(1))
        sizes = batch.offsets.diff().clamp(min=1).to(mean.device)
        return segment_sum(divergence, bag, len(batch)) / sizes


def smooth_in_space(mu: Tensor, batch: PackedBags, sigma_steps: float, radius_steps: float) -> Tensor:
    """(n,) mean of mu (n,) over a tile and its neighbours, with weights exp(-d^2 / (2 sigma^2)).

    One mean-field step of a random field. Where there is no tissue there is no weight either.
    """
    adjacency = Adjacency.of(batch, radius_steps)
    d2 = (batch.xy[adjacency.rows] - batch.xy[adjacency.columns]).square().sum(1)
    kernel = (-d2 / (2 * sigma_steps**2)).exp()
    total = 1 + adjacency.sum(torch.ones_like(mu), kernel)
    return (mu + adjacency.sum(mu, kernel)) / total


def normal_divergence(mean: Tensor, log_variance: Tensor, prior_mean: Tensor, prior_log_variance: Tensor) -> Tensor:
    """KL(N(mean, variance) || N(prior_mean, prior_variance)), element by element."""
    ratio = (log_variance - prior_log_variance).exp()
    distance = (mean - prior_mean).square() / prior_log_variance.exp()
    return 0.5 * (prior_log_variance - log_variance + ratio + distance - 1)


@register_model
def bayes_mil(in_dim: int, n_out: int, **options: Any) -> BayesMIL:
    """Bayes-MIL; options of :class:`BayesMIL`."""
    return BayesMIL(in_dim, n_out, **options)
