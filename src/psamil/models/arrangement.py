r"""How kinds of tiles are arranged, whatever a slide consists of: how much more often two kinds meet than by chance.

For features that say of which kind a tile is, such as types of cells: 0 or 1, or shares. (What is below 0 counts as 0,
and features are divided by their mean sum in the slide.) With x_i the features of tile i and, by the prior of head h,

    l_i = sum_{j != i} f(d_ij | theta_h) x_j / sum_j f(d_ij | theta_h),

what surrounds it without the tile itself (:func:`psamil.spatial.spatial_lag`), and s_i the same with 1 instead of x_j,
the table of kinds that meet in a slide, its margins and the enrichment are

    N_ab = n sum_i x_ia l_ib / S,   r_a = sum_i x_ia s_i / S,   c_b = sum_i l_ib / S,   S = sum_i s_i,
    E_ab = log(N_ab + 5) - log(n r_a c_b + 5)

of n tiles, each of which has one surroundings. That is the pointwise mutual information of a tile and its surroundings,
the neighbourhood enrichment of single-cell analysis with a radius that is learned. What a slide consists of, and how
many tiles it has, is not in it: where tiles exchange their places, N_ab is n r_a c_b on average. (The logarithm of few
meetings is lower than that of their mean; hence the 5, from the rule of thumb that tables need counts of five. What is
left of it falls with 1/n.) The logits are linear in the enrichment on the scale of the training slides,

    logits = sum_h sum_ab W_hab (E_hab - mean_hab) / deviation_hab + b,

of a bag of several slides their mean. W begins at 0: no meeting means anything before slides have said so. Attention
gives means of surroundings; it would have to learn the product, what to take off, and the logarithm, from few slides.

It learns from logits / GAIN, a loss of its own, and stops before it fits: W then points to what the classes differ in
on average, as under a strong penalty, and is too short beside logits that fit. Hence the gain.

The evidence of a tile adds up to that: with the logarithmic mean L of two numbers, L(p, q) = (p - q) / (log p - log q),

    E_ab = (N_ab - n r_a c_b) / L_ab = n sum_i (x_ia - r_a) (l_ib - s_i c_b) / (S L_ab).

Time O(n K^2), memory O(n). Before ``measure`` has seen the training slides, the scale is 1.

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
FEW = 1e-6  # features or neighbours of which there is nothing to tell
SAME = 1e-6  # deviation over slides that is none
GAIN = 4.0  # of the logits over those that have learned by themselves


@dataclass(frozen=True)
class Meetings:
    """Who meets whom in one slide of n tiles."""

    x: Tensor  # (n, kinds)
    lag: Tensor  # (n, heads, kinds) l / S
    weight: Tensor  # (n, heads) s_i / S
    rows: Tensor  # (heads, kinds) r
    columns: Tensor  # (heads, kinds) c
    counts: Tensor  # (heads, kinds, kinds) N

    @staticmethod
    def of(x: Tensor, lag: Tensor) -> "Meetings":
        """From (n, kinds) features, and (n, heads, kinds + 1) what surrounds them, the last column being s."""
        shares = lag / lag[..., -1:].sum(0).clamp(min=FEW)
        weight, lag = shares[..., -1], shares[..., :-1]
        return Meetings(x, lag, weight, weight.T @ x, lag.sum(0), len(x) * torch.einsum("na,nhb->hab", x, lag))

    @property
    def chance(self) -> Tensor:
        """(heads, kinds, kinds) n r_a c_b."""
        return len(self.x) * self.rows[:, :, None] * self.columns[:, None, :]

    def enrichment(self) -> Tensor:
        """(heads, kinds, kinds) E."""
        return (self.counts + COUNT).log() - (self.chance + COUNT).log()

    def parts(self, weight: Tensor) -> Tensor:
        """(n, n_out) what each tile adds to sum_hab w_hab E_hab, for weights (n_out, heads, kinds, kinds)."""
        by_difference = len(self.x) * weight / logarithmic_mean(self.counts + COUNT, self.chance + COUNT)
        inside = self.x[:, None] - self.rows
        outside = self.lag - self.weight[..., None] * self.columns
        return torch.einsum("nha,ohab,nhb->no", inside, by_difference, outside)


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
        slides = [slide for batch in batches for slide in self.meetings(batch, layout_of(batch), prior)]
        found = torch.stack([slide.enrichment() for slide in slides if len(slide.x)])
        deviation = found.std(0, correction=0)
        self.mean.copy_(found.mean(0))
        self.deviation.copy_(torch.where(deviation > SAME, deviation, 1.0))

    def forward(self, batch: PackedBags, layout: Layout, prior: DistancePrior) -> tuple[Tensor, Tensor]:
        """(bags, n_out) logits and (n, n_out) evidence of tiles, whose mean over a bag the logits are."""
        wide = torch.promote_types(self.learned.dtype, torch.float32)
        weight = (self.weight / self.deviation).to(wide)
        neutral = GAIN * self.bias - torch.einsum("ohab,hab->o", weight, self.mean.to(wide))
        parts = [len(slide.x) * slide.parts(weight) for slide in self.meetings(batch, layout, prior)]
        evidence = weight_of_tiles(batch, wide)[:, None] * (neutral + torch.cat(parts))
        return segment_mean(evidence, batch.bag_of_tile, len(batch)), evidence

    def meetings(self, batch: PackedBags, layout: Layout, prior: DistancePrior) -> Iterator[Meetings]:
        """Of each slide of the batch."""
        dtype = torch.promote_types(self.learned.dtype, torch.float32)  # sums over many tiles
        x = tile_features(batch, self.kinds, dtype).clamp(min=0)
        offsets = batch.slides.tolist()
        total = torch.cat([x[a:b].sum(1).mean().expand(b - a) for a, b in pairwise(offsets)])
        x = x / total.clamp(min=FEW)[:, None]
        with_one = torch.nn.functional.pad(x, (0, 1), value=1.0)[:, None].expand(-1, self.heads, -1).contiguous()
        lag = spatial_lag(with_one, batch.xy, prior.theta, decay=prior.decay, tau=prior.tau, layout=layout)
        for a, b in pairwise(offsets):
            yield Meetings.of(x[a:b], lag[a:b])
