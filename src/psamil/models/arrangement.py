r"""How kinds of tiles are arranged, whatever a slide consists of: bivariate Moran's I of each pair of features.

For features that say of which kind a tile is, such as types of cells. With x_i the features of tile i, m their mean
and s their mean square over the slide (both the share of a kind, where features are 0 or 1),

    u_i = (x_i - m) / sqrt(s + epsilon),    l_i = sum_{j != i} f(d_ij | theta_h) u_j / sum_j f(d_ij | theta_h),

the latter what surrounds it by the prior of head h, without the tile itself (:func:`psamil.spatial.spatial_lag`), the
evidence of tile i for an output and the logits of a bag are

    e_i = sum_h u_i^T W_h l_i + b,    logits = 1/n sum_i e_i.

So the logits are linear in (1/n) sum_i u_i l_i^T, the Pearson residuals of the table of kinds that meet: how much more
often two of them do than their shares would have it, over the root of what these would have; W_h says what it means
that they do. What a slide consists of, and how many tiles it has, is not in it: where tiles exchange their places, its
expectation is 0 but for terms of 1/n. Attention gives means of surroundings; it would have to learn the product, and to
take off what the shares explain, from few slides. W begins at 0: no meeting means anything before slides have said so.

It learns from logits / GAIN, a loss of its own, and stops long before it fits: then W points to what the classes differ
in on average, as under a strong penalty, and pairs that few slides have in common stay small. How far it has come by
then says nothing, so that the gain puts the logits on the scale of others.

Time O(n K^2), memory O(n).

Moran: Notes on continuous stochastic phenomena. Biometrika 1950. Anselin: Local indicators of spatial association.
Geographical Analysis 1995.
"""

import torch
from torch import Tensor, nn

from psamil.bag import PackedBags
from psamil.errors import OptionError
from psamil.models.segments import segment_mean
from psamil.models.tiles import tile_features
from psamil.spatial import DistancePrior, Layout, spatial_lag

MOST_KINDS = 64
RARE = 0.01  # epsilon: kinds with smaller shares count for less
GAIN = 30.0  # of the logits over those that have learned by themselves


class Arrangement(nn.Module):
    """Evidence of every tile in its surroundings, whose mean over a bag are the logits of the arrangement.

    Args:
        kinds: number of features.
        n_out: number of raw outputs.
        heads: of the prior.
    """

    def __init__(self, kinds: int, n_out: int, heads: int) -> None:
        super().__init__()
        if kinds > MOST_KINDS:
            raise OptionError(
                f"arrangement compares every pair of features, such as types of cells: {MOST_KINDS} features at most, "
                f"got {kinds}; leave it out with the option arrangement: false"
            )
        self.kinds, self.heads = kinds, heads
        self.meetings = nn.Parameter(torch.zeros(n_out, heads, kinds, kinds))  # W / GAIN
        self.bias = nn.Parameter(torch.zeros(n_out))  # b / GAIN

    @property
    def weight(self) -> Tensor:
        """(n_out, heads, kinds, kinds) W: what it says that a tile of one kind is surrounded by another."""
        return GAIN * self.meetings

    def forward(self, batch: PackedBags, layout: Layout, prior: DistancePrior) -> tuple[Tensor, Tensor]:
        """(bags, n_out) logits and (n, n_out) evidence of tiles."""
        x = tile_features(batch, self.kinds, self.meetings.dtype)
        sizes = batch.slides.diff()
        slide = torch.repeat_interleave(sizes).to(x.device)
        mean = segment_mean(x, slide, len(sizes)).to(x.dtype)
        scale = segment_mean(x.square(), slide, len(sizes)).to(x.dtype).add(RARE).sqrt()
        u = ((x - mean[slide]) / scale[slide])[:, None].expand(-1, self.heads, -1).contiguous()
        lag = spatial_lag(u, batch.xy, prior.theta, decay=prior.decay, tau=prior.tau, layout=layout)
        evidence = torch.einsum("nhc,ohcd,nhd->no", u, self.weight, lag) + GAIN * self.bias
        logits = segment_mean(evidence, batch.bag_of_tile, len(batch)).to(evidence.dtype)
        return logits, evidence
