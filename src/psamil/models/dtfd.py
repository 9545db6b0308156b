r"""DTFD-MIL: a slide is split into pseudo-bags, which a first tier pools and a second tier compares.

With h_i = ReLU(W x_i) the embedding of tile i (and residual blocks, if any), the tiles of a bag are dealt into M
pseudo-bags of almost equal size. Both tiers pool with a gated attention of their own,
a_i = w . (tanh(V h_i) * sigmoid(U h_i)), biases left out here.

- Tier 1 pools each pseudo-bag, z_m = sum_{i in m} softmax_{i in m}(a_i) h_i, and classifies it, C z_m + c. These logits
  answer for the target of the bag (``extra_predictions``).
- Distillation makes one or a few vectors out of each pseudo-bag: "AFS" takes z_m; "MaxS" the embeddings of the k tiles
  with the highest probability of the second class; "MaxMinS" these and those of the k tiles with the lowest. The
  probability of tile i is the softmax of its class activation softmax_{i in m}(a_i) h_i . C_c.
- Tier 2 pools the distilled vectors of the bag and classifies the result. Its logits are those of the model.

**Gradients.** Distilled vectors are detached: the loss of tier 2 trains the attention and classifier of tier 2, the
loss of tier 1 everything else. The tiers have no parameter in common, so that one Adam does what two would do.

**The split** is drawn anew in each pass of training. In evaluation it is dealt by a hash of the features of each tile:
it looks random, but is the same in every order of the tiles, on every device and in every batch.

The score of a tile is its class activation with the whole bag as one pseudo-bag, n softmax_i(a_i) h_i . C_k, the
largest over the outputs k (over the mean of three classes and more), with C_1 - C_0 for two classes. The factor n makes
slides of different sizes comparable.

One output, n_out = 1, means two classes, with the logit s_1 - s_0. "MaxS" and "MaxMinS" need a class that a tile speaks
for, and exist for one output only. A bag of fewer than M tiles has as many pseudo-bags as tiles; one without tiles gets
the bias of tier 2. Positions are not used. Time O(n in_dim hidden), memory O(n hidden).

Where this differs from the authors' code: there, tier 2 is back-propagated through tier 1 and the result thrown away
(or an error, with "AFS" and PyTorch since 1.5), the split is random in evaluation too, and the probability of a tile,
which the factor softmax_i(a_i) ~ 1/n leaves close to 1/2, is its score.

Zhang, Meng, Zhao, Qiao, Yang, Coupland, Zheng: DTFD-MIL: Double-Tier Feature Distillation Multiple Instance Learning
for Histopathology Whole Slide Image Classification. CVPR 2022.
"""

from typing import Any

import torch
from torch import Tensor, nn

from psamil.bag import PackedBags
from psamil.errors import OptionError, one_of
from psamil.models.output import ExtraPrediction, ModelOutput
from psamil.models.registry import register_model
from psamil.models.segments import segment_softmax
from psamil.models.tiles import GatedScore, attention_pooling, output_scores, tile_features
from psamil.models.trunk import Adapter
from psamil.models.two_classes import class_count, outputs_of_classes

DISTILLATIONS = ("AFS", "MaxS", "MaxMinS")


def feature_hash(features: Tensor) -> Tensor:
    """(n,) a whole number per row that depends on its bits alone; computed without rounding, so the same everywhere."""
    bits = features.float().view(torch.int32)
    draw = torch.Generator().manual_seed(0)
    factors = torch.randint(2**62, (bits.shape[1],), generator=draw).to(bits.device)
    return torch.cat([(rows * factors).sum(1) for rows in bits.split(4096)])  # the products take 8 bytes per number


def ranks_in_segments(keys: Tensor, segment: Tensor, n_segments: int) -> Tensor:
    """(n,) rank of each row, from 0, by rising key among the rows of its segment; equal keys in the order of rows."""
    order = keys.argsort(stable=True)
    order = order[segment[order].argsort(stable=True)]  # by segment, then by key
    sizes = torch.bincount(segment, minlength=n_segments)
    first = sizes.cumsum(0) - sizes
    ranks = torch.empty_like(segment)
    ranks[order] = torch.arange(len(order), device=order.device) - first[segment[order]]
    return ranks


class Tier(nn.Module):
    """Gated attention pooling and a classifier."""

    def __init__(self, width: int, attention_dim: int, n_out: int) -> None:
        super().__init__()
        self.n_out = n_out
        self.score = GatedScore(width, attention_dim)
        self.head = nn.Linear(width, class_count(n_out))

    def classify(self, pooled: Tensor) -> Tensor:
        """(m, n_out) logits of pooled vectors (m, width)."""
        return outputs_of_classes(self.head(pooled.to(self.head.weight.dtype)), self.n_out)

    def activations(self, h: Tensor) -> Tensor:
        """(n, n_out) class activations h_i . C_k, without the attention."""
        return outputs_of_classes(nn.functional.linear(h, self.head.weight), self.n_out)


class DTFD(nn.Module):
    """Two tiers of attention pooling.

    Args:
        in_dim: width of the tile features.
        n_out: number of raw outputs.
        hidden: width of the embedding.
        residual_blocks: h + ReLU(L2 ReLU(L1 h)), after the projection.
        attention_dim: rows of V and U, in both tiers.
        pseudo_bags: M.
        distillation: "AFS", "MaxS" or "MaxMinS".
        instances: k, tiles taken from each end of a pseudo-bag by "MaxS" and "MaxMinS".
    """

    def __init__(
        self,
        in_dim: int,
        n_out: int,
        *,
        hidden: int = 512,
        residual_blocks: int = 0,
        attention_dim: int = 128,
        pseudo_bags: int = 5,
        distillation: str = "AFS",
        instances: int = 1,
    ) -> None:
        super().__init__()
        if min(in_dim, n_out, hidden, attention_dim, pseudo_bags, instances) < 1 or residual_blocks < 0:
            raise OptionError(
                "in_dim, n_out, hidden, attention_dim, pseudo_bags and instances must be at least 1, residual_blocks 0"
            )
        if distillation not in DISTILLATIONS:
            raise one_of("distillation", distillation, DISTILLATIONS)
        if distillation != "AFS" and n_out > 1:
            raise OptionError(
                f"distillation {distillation!r} orders tiles by the probability of the second of two classes, which "
                f"{n_out} outputs do not have; use 'AFS'"
            )
        self.in_dim, self.pseudo_bags = in_dim, pseudo_bags
        self.distillation, self.instances = distillation, instances
        self.embed = Adapter(in_dim, hidden, 1 + residual_blocks)
        self.tier1, self.tier2 = Tier(hidden, attention_dim, n_out), Tier(hidden, attention_dim, n_out)

    def split(self, batch: PackedBags) -> tuple[Tensor, Tensor]:
        """Pseudo-bag of each tile, (n,), and bag of each pseudo-bag, (m,)."""
        sizes = batch.offsets.diff().clamp(max=self.pseudo_bags)
        first = (sizes.cumsum(0) - sizes).to(batch.features.device)
        bag = batch.bag_of_tile
        keys = torch.randperm(batch.n).to(bag.device) if self.training else feature_hash(batch.features)
        part = first[bag] + ranks_in_segments(keys, bag, len(batch)) % self.pseudo_bags
        return part, torch.repeat_interleave(sizes).to(bag.device)

    def distil(self, h: Tensor, scores: Tensor, part: Tensor, bag_of_part: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors that "MaxS" and "MaxMinS" give to tier 2, (v, hidden), and the bag of each, (v,)."""
        m = len(bag_of_part)
        positive = segment_softmax(scores, part, m) * self.tier1.activations(h)[:, 0]  # the logit: same order
        taken = [ranks_in_segments(-positive, part, m) < self.instances]
        if self.distillation == "MaxMinS":
            taken.append(ranks_in_segments(positive, part, m) < self.instances)
        tiles = torch.cat([chosen.nonzero()[:, 0] for chosen in taken])
        return h[tiles], bag_of_part[part[tiles]]

    def forward(self, batch: PackedBags) -> ModelOutput:
        h = self.embed(tile_features(batch, self.in_dim, self.tier2.head.weight.dtype))
        scores = self.tier1.score(h).squeeze(-1)
        part, bag_of_part = self.split(batch)
        pooled = attention_pooling(scores, h, part, len(bag_of_part))  # (m, hidden)
        vectors, bag_of_vector = pooled.detach().to(self.tier2.head.weight.dtype), bag_of_part
        if self.distillation != "AFS":
            vectors, bag_of_vector = self.distil(h.detach(), scores.detach(), part, bag_of_part)
        weights = self.tier2.score(vectors).squeeze(-1)
        slide = attention_pooling(weights, vectors, bag_of_vector, len(batch))  # (b, hidden)
        parts = ExtraPrediction(self.tier1.classify(pooled), bag_of_part)
        return ModelOutput(
            logits=self.tier2.classify(slide),
            tile_scores=self._tile_scores(h, scores, batch),
            extra_predictions={"pseudo-bags": parts} if len(bag_of_part) else {},
        )

    def _tile_scores(self, h: Tensor, scores: Tensor, batch: PackedBags) -> Tensor:
        bag = batch.bag_of_tile
        share = batch.offsets.diff().to(bag.device)[bag] * segment_softmax(scores, bag, len(batch))  # 1 on average
        return share * output_scores(self, self.tier1.activations(h))


@register_model
def dtfd(in_dim: int, n_out: int, **options: Any) -> DTFD:
    """Double-tier feature distillation; options of :class:`DTFD`."""
    return DTFD(in_dim, n_out, **options)
