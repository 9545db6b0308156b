r"""How the tiles of a slide are arranged, whatever they are: bivariate Moran's I of learned values.

With u_i = V x_i the values of tile i, a few channels for each head h, their mean over the slide taken off, and

    l_i = sum_{j != i} f(d_ij | theta_h) u_j / sum_j f(d_ij | theta_h)

what surrounds it by the prior of the head, without the tile itself (:func:`psamil.spatial.spatial_lag`), the evidence
of tile i for an output and the logits of a bag are

    e_i = sum_h u_i^T W_h l_i + b,    logits = 1/n sum_i e_i.

So the logits are linear in the covariance of tiles with their surroundings, (1/n) sum_i u_i l_i^T: how much more often
kinds of tiles meet than their shares would have it. What a slide consists of, and how many tiles it has, is not in
it: where tiles exchange their places, its expectation is 0 but for terms of 1/n. Attention gives means of surroundings;
it would have to learn the product, and to take off what the shares explain, from few slides.

Time O(n K^2), memory O(n).

Moran: Notes on continuous stochastic phenomena. Biometrika 1950. Anselin: Local indicators of spatial association.
Geographical Analysis 1995.
"""

import torch
from torch import Tensor, nn

from psamil.bag import PackedBags
from psamil.models.segments import segment_mean
from psamil.spatial import DistancePrior, Layout, spatial_lag


class Arrangement(nn.Module):
    """Evidence of every tile in its surroundings, whose mean over a bag are the logits of the arrangement.

    Args:
        width: of the tiles.
        n_out: number of raw outputs.
        heads: of the prior.
        channels: values per head.
    """

    def __init__(self, width: int, n_out: int, heads: int, channels: int) -> None:
        super().__init__()
        self.heads, self.channels = heads, channels
        self.values = nn.Linear(width, heads * channels, bias=False)
        self.meetings = nn.Linear(heads * channels**2, n_out)  # W and b

    def forward(self, x: Tensor, batch: PackedBags, layout: Layout, prior: DistancePrior) -> tuple[Tensor, Tensor]:
        """(bags, n_out) logits and (n, n_out) evidence of tiles x (n, width)."""
        sizes = batch.slides.diff()
        slide = torch.repeat_interleave(sizes).to(x.device)
        u = self.values(x)
        u = u - segment_mean(u, slide, len(sizes)).to(u.dtype)[slide]
        u = u.unflatten(1, (self.heads, self.channels))
        lag = spatial_lag(u, batch.xy, prior.theta, decay=prior.decay, tau=prior.tau, layout=layout)
        weight = self.meetings.weight.unflatten(1, (self.heads, self.channels, self.channels))
        evidence = torch.einsum("nhc,ohcd,nhd->no", u, weight, lag) + self.meetings.bias
        logits = segment_mean(evidence, batch.bag_of_tile, len(batch)).to(evidence.dtype)
        return logits, evidence
