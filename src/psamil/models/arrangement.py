r"""How kinds of tiles are arranged, whatever a slide consists of: how much more often two kinds meet than by chance.

For features that say of which kind a tile is, such as types of cells: one of them 1, the others 0. (Shares are as good;
what is below 0 counts as 0, and features are divided by their mean sum in the slide.) With x_i the features of tile i
and, by the prior of head h,

    l_i = sum_{j != i} f(d_ij | theta_h) x_j / sum_j f(d_ij | theta_h),

what surrounds it without the tile itself (:func:`psamil.spatial.spatial_lag`), and s_i the same with 1 instead of x_j,
the table of kinds that meet in a slide, its margins and the enrichment are

    N_ab = n sum_i x_ia l_ib / S,   r_a = sum_i x_ia s_i / S,   c_b = sum_i l_ib / S,   S = sum_i s_i,
    E_ab = log(N_ab + 5) - log(n r_a c_b + 5)

of the n tiles with s_i > 0, each of which has one surroundings. That is the pointwise mutual information of a tile and
its surroundings, the neighbourhood enrichment of single-cell analysis, with a radius that is learned. Where tiles
exchange their places, N_ab is about n r_a c_b and E_ab about 0, whatever a slide consists of; how far from 0 kinds that
are arranged can come does depend on their numbers. The 5, which tables need by a rule of thumb, keeps down what few
meetings say: the logarithm of their number is on average lower than that of its mean. The logits are linear in the
enrichment, on the scale that it has over the training slides by the first radii,

    logits = sum_h sum_ab W_hab (E_hab - mean_hab) / deviation_hab + b,

of a bag of several slides their mean; of one without tiles 0. W begins at 0: no meeting means anything before slides
have said so. Attention gives means of surroundings; it would have to learn the product, what to take off, and the
logarithm, from few slides.

It learns from logits / GAIN, a loss of its own, and stops before it fits: W then points to what the classes differ in
on average, as under a strong penalty, and is too short beside logits that fit. Hence the gain.

The evidence of a tile adds up to that: with the logarithmic mean L of two numbers, L(p, q) = (p - q) / (log p - log q),

    E_ab = (N_ab - n r_a c_b) / L_ab = n sum_i (x_ia - r_a) (l_ib - s_i c_b) / (S L_ab).

It is for whole slides: one of which tiles are left out has other neighbours. Time O(n K^2), memory O(n). Before
``measure`` has seen the training slides, the scale is 1.

Church, Hanks: Word association norms, mutual information, and lexicography. Computational Linguistics 1990. Schapiro et
al.: histoCAT: analysis of cell phenotypes and interactions in multiplex image cytometry data. Nature Methods 2017.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from psamil.bag import PackedBags
from psamil.errors import OptionError
from psamil.models.segments import segment_mean
from psamil.models.tiles import tile_features
from psamil.models.trunk import layout_of
from psamil.spatial import DistancePrior, Layout, spatial_lag

MOST_KINDS = 64
COUNT = 5.0  # of meetings from which on they tell something
FEW = 1e-12  # features or neighbours of which there is nothing to tell
LEAST_DEVIATION = 0.05  # of the enrichment over slides: kinds that hardly any of them has do not count the more for it
GAIN = 4.0  # of the logits over those that have learned by themselves


@dataclass(frozen=True)
class Meetings:
    """Who meets whom in one slide of n tiles."""

    x: Tensor  # (n, kinds)
    lag: Tensor  # (n, heads, kinds) l / S
    weight: Tensor  # (n, heads) s_i / S
    n: Tensor  # (heads,) tiles that have others around them
    rows: Tensor  # (heads, kinds) r
    columns: Tensor  # (heads, kinds) c
    counts: Tensor  # (heads, kinds, kinds) N

    @staticmethod
    def of(x: Tensor, lag: Tensor) -> "Meetings":
        """From (n, kinds) features, and (n, heads, kinds + 1) what surrounds them, the last column being s."""
        shares = lag / lag[..., -1:].sum(0).clamp(min=FEW)
        weight, lag = shares[..., -1], shares[..., :-1]
        n = (weight > 0).sum(0)
        counts = n[:, None, None] * torch.einsum("na,nhb->hab", x, lag)
        return Meetings(x, lag, weight, n, weight.T @ x, lag.sum(0), counts)

    @property
    def chance(self) -> Tensor:
        """(heads, kinds, kinds) n r_a c_b."""
        return self.n[:, None, None] * self.rows[:, :, None] * self.columns[:, None, :]

    def enrichment(self) -> Tensor:
        """(heads, kinds, kinds) E."""
        return (self.counts + COUNT).log() - (self.chance + COUNT).log()

    def parts(self, weight: Tensor) -> Tensor:
        """(n, n_out) what each tile adds to sum_hab w_hab E_hab, for weights (n_out, heads, kinds, kinds)."""
        per_share = self.n[:, None, None] / logarithmic_mean(self.counts + COUNT, self.chance + COUNT)
        inside = self.x[:, None] - self.rows
        outside = self.lag - self.weight[..., None] * self.columns
        return torch.einsum("nha,ohab,nhb->no", inside, weight * per_share, outside)


def logarithmic_mean(p: Tensor, q: Tensor) -> Tensor:
    """(p - q) / (log p - log q) of positive numbers; p where they are equal."""
    ratio = p / q - 1
    near = ratio.abs() < 1e-4
    return q * torch.where(near, 1 + ratio / 2, ratio / torch.where(near, 1.0, ratio).log1p())


def weight_of_tiles(batch: PackedBags, dtype: torch.dtype) -> Tensor:
    """(n,) with which all slides of a bag count the same, however many tiles they have; its mean over a bag is 1."""
    sizes, bag = batch.slides.diff().to(batch.features.device), batch.bag_of_tile
    weight = 1 / torch.repeat_interleave(sizes, sizes).to(dtype)
    return weight / segment_mean(weight, bag, len(batch))[bag]


class Arrangement(nn.Module):
    """Logits of a bag by the kinds of its tiles that meet, and what each tile adds to them.

    Args:
        kinds: number of features.
        n_out: number of raw outputs.
        heads: of the prior.
    """

    mean: Tensor  # (heads, kinds, kinds) of E over the training slides
    deviation: Tensor

    def __init__(self, kinds: int, n_out: int, heads: int) -> None:
        super().__init__()
        if kinds > MOST_KINDS:
            raise OptionError(
                f"arrangement compares every pair of features, such as types of cells: {MOST_KINDS} features at most, "
                f"got {kinds}; leave it out with the option arrangement: false"
            )
        self.kinds, self.heads = kinds, heads
        self.learned = nn.Parameter(torch.zeros(n_out, heads, kinds, kinds))  # W / GAIN
        self.bias = nn.Parameter(torch.zeros(n_out))  # b / GAIN
        self.register_buffer("mean", torch.zeros(heads, kinds, kinds))
        self.register_buffer("deviation", torch.ones(heads, kinds, kinds))

    @property
    def weight(self) -> Tensor:
        """(n_out, heads, kinds, kinds) W: what it says that a tile of one kind is surrounded by another."""
        return GAIN * self.learned

    @torch.no_grad()
    def measure(self, batches: Iterable[PackedBags], prior: DistancePrior) -> None:
        """Takes the scale of the enrichment from the slides of these batches, by the radii as they are."""
        slides = (slide for batch in batches for slide in self.meetings(batch, layout_of(batch), prior))
        found = torch.stack([slide.enrichment() for slide in slides if len(slide.x)])
        self.mean.copy_(found.mean(0))
        self.deviation.copy_(found.std(0, correction=0).clamp(min=LEAST_DEVIATION))

    def forward(self, batch: PackedBags, layout: Layout, prior: DistancePrior) -> tuple[Tensor, Tensor]:
        """(bags, n_out) logits and (n, n_out) evidence of tiles, whose mean over a bag the logits are."""
        with torch.autocast(batch.features.device.type, enabled=False):  # sums over many tiles, as measure takes them
            wide = torch.promote_types(self.learned.dtype, torch.float32)
            weight = (self.weight / self.deviation).to(wide)
            neutral = GAIN * self.bias - torch.einsum("ohab,hab->o", weight, self.mean.to(wide))
            parts = [len(slide.x) * slide.parts(weight) for slide in self.meetings(batch, layout, prior)]
            evidence = weight_of_tiles(batch, wide)[:, None] * (neutral + torch.cat(parts))
            return segment_mean(evidence, batch.bag_of_tile, len(batch)), evidence

    def meetings(self, batch: PackedBags, layout: Layout, prior: DistancePrior) -> Iterator[Meetings]:
        """Of each slide of the batch."""
        dtype = torch.promote_types(self.learned.dtype, torch.float32)
        x = tile_features(batch, self.kinds, dtype).clamp(min=0)
        offsets = batch.slides.tolist()
        total = torch.cat([x[a:b].sum(1).mean().expand(b - a) for a, b in pairwise(offsets)])
        x = x / total.clamp(min=FEW)[:, None]
        with_one = torch.nn.functional.pad(x, (0, 1), value=1.0)[:, None].expand(-1, self.heads, -1).contiguous()
        lag = spatial_lag(with_one, batch.xy, prior.theta, decay=prior.decay, tau=prior.tau, layout=layout)
        for a, b in pairwise(offsets):
            yield Meetings.of(x[a:b], lag[a:b])
