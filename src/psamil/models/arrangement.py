r"""How kinds of tiles are arranged, whatever a slide consists of: bivariate Moran's I of each pair of features.

For features that say of which kind a tile is, such as types of cells. With u_i the features of tile i, their mean over
the slide taken off and divided by how much they deviate from it in the training slides, and

    l_i = sum_{j != i} f(d_ij | theta_h) u_j / sum_j f(d_ij | theta_h)

what surrounds it by the prior of head h, without the tile itself (:func:`psamil.spatial.spatial_lag`), the evidence of
tile i for an output and the logits of a bag are

    e_i = sum_h u_i^T W_h l_i + b,    logits = 1/n sum_i e_i.

So the logits are linear in the covariance of tiles with their surroundings, (1/n) sum_i u_i l_i^T: how much more often
two kinds meet than their shares would have it, and W_h says what it means that they do. What a slide consists of, and
how many tiles it has, is not in it: where tiles exchange their places, its expectation is 0 but for terms of 1/n.
Attention gives means of surroundings; it would have to learn the product, and to take off what the shares explain,
from few slides.

All kinds are on one scale, rare ones too, and W begins at 0, so that few slides suffice: no pair means anything before
a slide has said so. Before ``look_at`` has seen the training bags, features are taken as they are.

Time O(n K^2), memory O(n).

Moran: Notes on continuous stochastic phenomena. Biometrika 1950. Anselin: Local indicators of spatial association.
Geographical Analysis 1995.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from psamil.bag import PackedBags
from psamil.errors import OptionError
from psamil.models.segments import segment_mean
from psamil.models.tiles import tile_features
from psamil.spatial import DistancePrior, Layout, spatial_lag

MOST_KINDS = 64
PACE = 10.0  # of the weights of meetings, which sum up small covariances, beside those of a network
LEAST_VARIANCE = 1e-6  # of features that never differ


class Arrangement(nn.Module):
    """Evidence of every tile in its surroundings, whose mean over a bag are the logits of the arrangement.

    Args:
        kinds: number of features.
        n_out: number of raw outputs.
        heads: of the prior.
    """

    deviation: Tensor

    def __init__(self, kinds: int, n_out: int, heads: int) -> None:
        super().__init__()
        if kinds > MOST_KINDS:
            raise OptionError(
                f"arrangement compares every pair of features, such as types of cells: {MOST_KINDS} at most, got {kinds}"
            )
        self.kinds, self.heads = kinds, heads
        self.register_buffer("deviation", torch.ones(kinds))
        self.meetings = nn.Parameter(torch.zeros(n_out, heads, kinds, kinds))  # W / PACE
        self.bias = nn.Parameter(torch.zeros(n_out))

    @property
    def weight(self) -> Tensor:
        """(n_out, heads, kinds, kinds) W: what it says that a tile of one kind is surrounded by another."""
        return PACE * self.meetings

    @torch.no_grad()
    def look_at(self, batches: Iterable[PackedBags]) -> None:
        """Takes the deviations of the features within slides: roots of their mean square over slides."""
        total, slides = torch.zeros_like(self.deviation, dtype=torch.float64), 0
        for batch in batches:
            centred, slide = self._centred(batch, torch.float64)
            n_slides = len(batch.slides) - 1
            total += segment_mean(centred.square(), slide, n_slides).sum(0)
            slides += n_slides
        self.deviation.copy_((total / max(slides, 1)).clamp_min(LEAST_VARIANCE).sqrt())

    def _centred(self, batch: PackedBags, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(n, kinds) features less their mean over the slide, and the slide of each tile."""
        x = tile_features(batch, self.kinds, dtype)
        sizes = batch.slides.diff()
        slide = torch.repeat_interleave(sizes).to(x.device)
        return x - segment_mean(x, slide, len(sizes)).to(dtype)[slide], slide

    def forward(self, batch: PackedBags, layout: Layout, prior: DistancePrior) -> tuple[Tensor, Tensor]:
        """(bags, n_out) logits and (n, n_out) evidence of tiles."""
        centred, _ = self._centred(batch, self.meetings.dtype)
        u = (centred / self.deviation)[:, None].expand(-1, self.heads, -1).contiguous()
        lag = spatial_lag(u, batch.xy, prior.theta, decay=prior.decay, tau=prior.tau, layout=layout)
        evidence = torch.einsum("nhc,ohcd,nhd->no", u, self.weight, lag) + self.bias
        logits = segment_mean(evidence, batch.bag_of_tile, len(batch)).to(evidence.dtype)
        return logits, evidence
