r"""The trunk of PSA-MIL with an exchangeable spatial part, so that spatial parts can be compared like for like.

    features --adapter--> x [--position encoding--> x] --depth x [ x + Attention(LN x); x + MLP(LN x) ]-->
             LN --attention pooling--> head --> logits

Pooling is z = sum_i softmax_i(a_i) x_i with a_i linear in x_i, as in the authors' code, or gated; a_i is returned as
the score of tile i, and as its evidence the logits that it would have alone, head(x_i): those of the bag are
sum_i softmax_i(a_i) head(x_i). With the pooling "evidence" there is no a_i: the weights are softmax_i(gamma head(x_i)),
for each logit its own, with gamma > 0 learned, between the mean (0) and the maximum; the evidence is the score.
Attention is free to look at tiles that speak against the class, and then its scores point away from a lesion.

Weights by evidence magnify whatever the first weights happen to take for evidence, which is as often the lack of
something as the thing itself. With the pooling "opposed" there are two, e_i = W x_i and o_i = V x_i, where the head is
W x + b and V = -W in the beginning, each pooled by itself with the same gamma:

    logits = sum_i softmax_i(gamma e_i) e_i + sum_i softmax_i(gamma o_i) o_i + b

The evidence of a tile is e_i + o_i + b, the logits that it would have alone, and its score e_i + o_i. In the beginning
the evidence is b for all tiles, and the logits, 2 gamma var(e) + b to first order in gamma with the variance over the
tiles of the bag, see how much these differ, whichever way: which way it is, is learned. The logits are a sum of two
means of the tiles then, and no single mean of their evidence: they can lie above that of every tile, never below its
mean.

By both poolings the evidence of a tile knows no more of the slide than its attention sees. Of two tiles with the same
evidence, the one in a slide that is all but certainly normal is less likely to be lesion. With ``slide_share`` s > 0
the score of a tile is e_i + o_i + s (z - b), where z are the logits of its bag: inside a bag the order of tiles stays
the same, between bags the prediction comes in. It is a score alone: evidence, logits and training are what they were.

Attention whose first weights are random begins as a random mixture of what it looks at, on axes that have nothing to
do with the tile's own. With first_attention="mean" it begins as twice the mean of what it looks at (by the prior, where
there is one; without prior and radius that is the whole slide), on the axes of the tile:

    x + Attention(LN x) = x + 2 mean(LN x)    about, with values LN x, output 2 v, queries and keys a tenth of random

so that what tells tiles apart is learned once for a tile and for what lies around it. How much the latter counts at
first depends on the scale of the features, as x is not normalised. All of it goes on to learn.

What differs between models of this trunk is the attention, and whether positions are encoded before it: see
:mod:`psamil.models.psa` and :mod:`psamil.models.variants`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from psamil.bag import PackedBags
from psamil.errors import OptionError, ShapeError, one_of
from psamil.models.output import ModelOutput
from psamil.models.tiles import GatedScore, attention_pooling, output_scores, soft_maximum, tile_features
from psamil.models.transformer import TransformerBlock
from psamil.spatial import Layout

_AUTHORS = {"heads": 3, "depth": 1, "adapter_layers": 2, "mlp_ratio": 4, "pooling": "linear"}  # for all cohorts

POOLINGS_BY_EVIDENCE = ("evidence", "opposed")
POOLINGS = ("linear", "gated", *POOLINGS_BY_EVIDENCE)
TWO_MEANS = "logits are the sum of two means of the tiles"
FIRST_ATTENTIONS = ("random", "mean")
MEAN_GAIN = 2.0  # of the mean of what surrounds a tile
FIRST_LIKELIHOOD = 0.1  # queries and keys over random ones; their products are a hundredth
FIRST_SHARPNESS = 1.0  # gamma; nearer to the mean, what a slide lacks is evidence as good as what it has

PRESETS: dict[str, dict[str, Any]] = {
    "paper-crc": {**_AUTHORS, "head_dim": 96},
    "paper-stad": {**_AUTHORS, "head_dim": 96},
    "paper-camelyon16": {**_AUTHORS, "head_dim": 192},
    "paper-demo": {**_AUTHORS, "head_dim": 32},
}
"""The trunk in the authors' published configurations, whose cohorts differ in ``head_dim`` alone."""


def with_preset(
    preset: str | None, options: dict[str, Any], presets: Mapping[str, dict[str, Any]] = PRESETS
) -> dict[str, Any]:
    """The options of a model, and what they leave open, as the preset has it."""
    if preset is None:
        return options
    if preset not in presets:
        raise one_of("preset", preset, presets)
    return {**presets[preset], **options}


def layout_of(batch: PackedBags) -> Layout:
    """The layout that comes with a batch, if it is one of its slides; a new one where there is none."""
    if batch.layout is None:
        return Layout.of(batch.xy, batch.slides)
    expected = sorted(set(batch.slides.tolist()))  # empty slides have no geometry
    if not isinstance(batch.layout, Layout) or batch.layout.offsets != expected:
        raise ShapeError(
            f"the layout of the batch must be a psamil.spatial.Layout of its slides, which begin at {expected[:8]}"
            + (f"; its bags begin at {batch.layout.offsets[:8]}" if isinstance(batch.layout, Layout) else "")
        )
    return batch.layout


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


class MultiHeadAttention(nn.Module):
    """Projections around what a subclass does with queries, keys and values: :meth:`attend`."""

    def __init__(self, width: int, heads: int, *, qkv_bias: bool = True) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)

    @torch.no_grad()
    def begin_as_mean(self) -> None:
        """Takes first weights by which this is :data:`MEAN_GAIN` times the mean of the tokens that are looked at."""
        identity = torch.eye(self.proj.in_features)
        content, values = self.qkv.weight.split([2 * len(identity), len(identity)])
        content.mul_(FIRST_LIKELIHOOD)
        values.copy_(identity)
        self.proj.weight.copy_(MEAN_GAIN * identity)
        for bias in (self.qkv.bias, self.proj.bias):
            if bias is not None:
                bias.zero_()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (n, heads, d) each."""
        q, k, v = self.qkv(x).unflatten(1, (3, self.heads, self.head_dim)).unbind(1)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, xy: Tensor, layout: Layout) -> Tensor:
        """(n, heads, d); never across the slides of the layout."""
        raise NotImplementedError

    def forward(self, x: Tensor, xy: Tensor, layout: Layout) -> Tensor:
        return self.proj(self.attend(*self.project(x), xy, layout).flatten(1))


class Trunk(nn.Module):
    """See the module.

    Args:
        in_dim: width of the tile features.
        n_out: number of raw outputs.
        attention: makes the attention of a block from the model's width and the number of heads.
        position: makes, from the model's width, a module that adds positions to the tiles (x, layout) before the first
            block.
        heads, head_dim: attention heads and the width of each; the model's width is their product.
        depth: transformer blocks.
        adapter_layers: 1 projects the features, every further layer adds a residual block.
        mlp_ratio: hidden width of the MLPs in model widths.
        pooling: "linear" as the authors, "gated", "evidence" or "opposed".
        first_attention: what attention is before training, "random" as the authors, or the "mean" of what it looks at.
        slide_share: how much of the logits of its bag the score of a tile has; of "evidence" and "opposed" alone.
    """

    needs_layout = True

    def __init__(
        self,
        in_dim: int,
        n_out: int,
        attention: Callable[[int, int], MultiHeadAttention],
        position: Callable[[int], nn.Module] | None = None,
        *,
        heads: int = 3,
        head_dim: int = 96,
        depth: int = 1,
        adapter_layers: int = 2,
        mlp_ratio: int = 4,
        pooling: str = "linear",
        first_attention: str = "random",
        slide_share: float = 0.0,
    ) -> None:
        super().__init__()
        if min(in_dim, n_out, heads, head_dim, depth, adapter_layers, mlp_ratio) < 1:
            raise OptionError("in_dim, n_out, heads, head_dim, depth, adapter_layers and mlp_ratio must be at least 1")
        if pooling not in POOLINGS:
            raise one_of("pooling", pooling, POOLINGS)
        if first_attention not in FIRST_ATTENTIONS:
            raise one_of("first_attention", first_attention, FIRST_ATTENTIONS)
        if not 0 <= slide_share < math.inf:
            raise OptionError(f"slide_share must be a number from 0 on, got {slide_share}")
        width = heads * head_dim
        self.in_dim, self.slide_share = in_dim, slide_share
        self.adapter = Adapter(in_dim, width, adapter_layers)
        self.position = None if position is None else position(width)
        self.exceptions: dict[str, str] = getattr(self.position, "exceptions", {})  # see psamil.models.check
        self.blocks = nn.ModuleList(TransformerBlock(width, attention(width, heads), mlp_ratio) for _ in range(depth))
        if first_attention == "mean":
            for module in self.blocks.modules():
                if isinstance(module, MultiHeadAttention):
                    module.begin_as_mean()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.score: nn.Module | None = None
        self.log_sharpness: nn.Parameter | None = None
        self.opposed: nn.Linear | None = None
        if pooling in POOLINGS_BY_EVIDENCE:
            self.log_sharpness = nn.Parameter(torch.tensor(FIRST_SHARPNESS).log())
        else:
            self.score = nn.Linear(width, 1) if pooling == "linear" else GatedScore(width)
        self.head = nn.Linear(width, n_out)
        if pooling == "opposed":
            self.opposed = nn.Linear(width, n_out, bias=False)
            with torch.no_grad():
                self.opposed.weight.copy_(-self.head.weight)
            self.exceptions = {**self.exceptions, "evidence": TWO_MEANS}

    def tiles(self, batch: PackedBags) -> tuple[Tensor, Layout]:
        """(n, width) tiles as they enter the first block, and their layout."""
        features = tile_features(batch, self.in_dim, self.head.weight.dtype)
        layout = layout_of(batch)
        x = self.adapter(features)
        return x if self.position is None else self.position(x, layout), layout

    def forward(self, batch: PackedBags) -> ModelOutput:
        return self.predict(*self.tiles(batch), batch)

    def predict(self, x: Tensor, layout: Layout, batch: PackedBags) -> ModelOutput:
        """From the tiles as they enter the first block."""
        for block in self.blocks:
            x = block(x, batch.xy, layout)
        x = self.norm(x)
        if self.score is None:
            return self._pooled_by_evidence(x, batch)
        scores = self.score(x).squeeze(-1)
        pooled = attention_pooling(scores, x, batch.bag_of_tile, len(batch))
        return ModelOutput(
            logits=self.head(pooled.to(self.head.weight.dtype)),
            tile_scores=scores,
            tile_evidence=self.head(x),
        )

    def _pooled_by_evidence(self, x: Tensor, batch: PackedBags) -> ModelOutput:
        assert self.log_sharpness is not None
        heads = [self.head] if self.opposed is None else [self.head, self.opposed]
        kinds = [nn.functional.linear(x, head.weight) for head in heads]
        kinds = [evidence.to(torch.promote_types(evidence.dtype, torch.float32)) for evidence in kinds]
        pooled = torch.stack([soft_maximum(evidence, self.log_sharpness.exp(), batch) for evidence in kinds]).sum(0)
        evidence = torch.stack(kinds).sum(0)
        scores = evidence + self.slide_share * pooled[batch.bag_of_tile]
        return ModelOutput(
            pooled + self.head.bias, output_scores(self, scores), tile_evidence=evidence + self.head.bias
        )
