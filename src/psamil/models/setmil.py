r"""SETMIL: a slide as a small map, read by a pyramid of windows and a transformer that knows distances.

1. Map. The tiles of a slide are written on a map of 48 x 48 cells, their bounding box in its middle. A larger slide is
   cut into squares of 2 x 2, 3 x 3, ... tiles, the smallest that fit; a cell then holds the mean of its tiles.
2. Reduction. A window of 5 x 5 cells every 2 cells becomes a token of width 128: at most 24 x 24 of them.
3. Pyramid. Windows of 3 x 3, 5 x 5 and 7 x 7 tokens around each token become 64 numbers each: width 192 together.
4. Transformer. A class token, fixed sinusoids of the place in the map (token by token, row by row), 6 pre-norm blocks
   of 16 heads with attention softmax_j(q_i . k_j / sqrt(d) + t_hg(i,j)), then LN and a linear head on the class token.
   g is the class of the distance between tokens i and j (:mod:`psamil.models.relative_position`), or one more class
   where one of them is the class token; t is learned for each block and head and begins with 0.

In 2 and 3 (token to token, T2T), with w the cells of a window one after the other, zeros where there is no tissue:

    q, k, v = W LN(w),  y = v + P softmax(q k' / sqrt(d)) v,  out = y + MLP(LN(y)).

Training turns, mirrors, scales (0.8 to 1.2) and cuts (a square of 1/8 of the side) the map at random. The score of a
tile is what the class token of the last block gives to the token over it: q . k / sqrt(d) + t, averaged over heads, and
0 for a tile that training has cut away. Slides of one bag are read one by one; the head sees the mean of their class
tokens.

Time O(n + T^2) and memory O(n + T^2) with T <= 577 tokens: attention is dense, between tokens of one slide.

Different from the authors' code on purpose: large slides are pooled to the map, not cropped to its middle; windows
without any tissue make no token, so that background takes no attention; of the table of distances only the four
reachable classes exist. The map is small because the authors' tiles are large (1120 px at 20x); with small tiles a cell
is a mean.

Zhao, Lin, Sun, Zhang, Huang, Wang, Yao: SETMIL: Spatial Encoding Transformer-Based Multiple Instance Learning for
Pathological Image Analysis. MICCAI 2022. Yuan et al.: Tokens-to-Token ViT. ICCV 2021.
"""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from psamil.bag import PackedBags
from psamil.errors import OptionError
from psamil.models.output import ModelOutput
from psamil.models.registry import register_model
from psamil.models.relative_position import BUCKETS, bucket
from psamil.models.scales import TOLERANCE_STEPS, squares_of
from psamil.models.segments import segment_mean
from psamil.models.tiles import tile_features

PYRAMID = (3, 5, 7)
"""Sides of the windows of tokens."""
EMPTY = -1
"""Where a map of row numbers has no row."""


def windows(rows: Tensor, side: int, stride: int = 1) -> Tensor:
    """(h', w', side^2) rows in the window around every ``stride``-th place of a map (h, w) of row numbers."""
    padded = pad(rows, [side // 2] * 4, value=EMPTY)
    return padded.unfold(0, side, stride).unfold(1, side, stride).flatten(2)


def numbered(present: Tensor) -> Tensor:
    """A map of row numbers: places that are present are counted row by row."""
    return torch.where(present, present.flatten().cumsum(0).view_as(present) - 1, EMPTY)


class WindowTokens(nn.Module):
    """Token to token, see the module."""

    def __init__(self, in_dim: int, side: int, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(side**2 * in_dim)
        self.qkv = nn.Linear(side**2 * in_dim, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """(t, width) tokens of windows (t, side^2) of rows of ``x`` (n, in_dim)."""
        with_zeros = pad(x, (0, 0, 0, 1))  # the last row, which EMPTY means
        window = with_zeros.index_select(0, (rows % len(with_zeros)).flatten()).view(len(rows), -1)
        q, k, v = self.qkv(self.norm1(window)).chunk(3, 1)
        y = v + self.proj(scaled_dot_product_attention(q[None], k[None], v[None])[0])
        return y + self.mlp(self.norm2(y))


class DistanceBlock(nn.Module):
    """Pre-norm transformer block whose attention is biased after classes of distance."""

    def __init__(self, width: int, heads: int, mlp_ratio: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(heads, BUCKETS + 1))
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, mlp_ratio * width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(mlp_ratio * width, width),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (t, width), the first of which is the class token, and what that gives to each of the others (t - 1,).

        ``classes`` (BUCKETS + 1, t, t) is 1 where a pair has the class and 0 elsewhere.
        """
        q, k, v = self.qkv(self.norm1(x)).unflatten(1, (3, self.heads, -1)).permute(1, 2, 0, 3)  # (heads, t, d)
        bias = torch.tensordot(self.bias, classes, 1).to(q.dtype)  # not by index: its gradient would be slow
        dropout = self.dropout.p if self.training else 0.0
        out = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=bias[None], dropout_p=dropout)[0]
        given = (k[:, 1:] @ q[:, 0, :, None]).squeeze(2) / math.sqrt(q.shape[2]) + bias[:, 0, 1:]  # (heads, t - 1)
        x = x + self.dropout(self.proj(out.transpose(0, 1).flatten(1)))
        return x + self.dropout(self.mlp(self.norm2(x))), given.mean(0)


class SETMIL(nn.Module):
    """See the module.

    Args:
        in_dim: width of the tile features.
        n_out: number of raw outputs.
        map_side: cells along each side of the map.
        token_width: width of a token after the reduction.
        branch_width: width of a token after each of the three branches of the pyramid.
        depth, heads, mlp_ratio: of the transformer.
        dropout: share that its blocks drop in training, of attention too.
        augment: whether training changes the map at random.
    """

    def __init__(
        self,
        in_dim: int,
        n_out: int,
        *,
        map_side: int = 48,
        token_width: int = 128,
        branch_width: int = 64,
        depth: int = 6,
        heads: int = 16,
        mlp_ratio: int = 4,
        dropout: float = 0.2,
        augment: bool = True,
    ) -> None:
        super().__init__()
        width = len(PYRAMID) * branch_width
        if min(in_dim, n_out, map_side, token_width, branch_width, depth, heads, mlp_ratio) < 1:
            raise OptionError("in_dim, n_out, map_side, widths, depth, heads and mlp_ratio must be at least 1")
        if not 0 <= dropout < 1:
            raise OptionError(f"dropout must be in [0, 1), got {dropout}")
        if width % heads:
            raise OptionError(f"{len(PYRAMID)} x branch_width = {width} must be a multiple of heads = {heads}")
        self.in_dim, self.map_side, self.augment = in_dim, map_side, augment
        self.reduce = WindowTokens(in_dim, 5, token_width)
        self.pyramid = nn.ModuleList(WindowTokens(token_width, side, branch_width) for side in PYRAMID)
        self.class_token = nn.Parameter(torch.empty(1, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(DistanceBlock(width, heads, mlp_ratio, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, n_out)
        nn.init.trunc_normal_(self.class_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, batch: PackedBags) -> ModelOutput:
        x = tile_features(batch, self.in_dim, self.head.weight.dtype)
        scores = [x.new_zeros(0)]
        class_tokens: list[list[Tensor]] = [[] for _ in range(len(batch))]
        for first, end in pairwise(batch.slides.tolist()):
            if first < end:
                bag = int(torch.searchsorted(batch.offsets, first, right=True)) - 1
                class_token, of_tiles = self._read_slide(x[first:end], batch.xy[first:end])
                class_tokens[bag].append(class_token)
                scores.append(of_tiles)
        for of_bag in class_tokens:
            if not of_bag:  # no tile: the class token has only itself to look at
                of_bag.append(self._transform(self.class_token[:0], torch.zeros(0, 2, device=x.device))[0])
        means = torch.stack([torch.stack(of_bag).mean(0) for of_bag in class_tokens])
        return ModelOutput(logits=self.head(means), tile_scores=torch.cat(scores))

    def _read_slide(self, x: Tensor, xy: Tensor) -> tuple[Tensor, Tensor]:
        """Class token (width,) and tile scores (n,) of one slide."""
        precise = xy.cpu().double()
        across = math.floor(float((precise.amax(0) - precise.amin(0)).max()) + TOLERANCE_STEPS) + 1
        cells = squares_of(xy, torch.tensor([0, len(x)]), side_steps=math.ceil(across / self.map_side))
        drawn = self._draw(cells.cell)
        around = windows(drawn, 5, stride=2)  # (h, w, 25)
        tokens = numbered((around != EMPTY).any(2))
        place = (tokens != EMPTY).nonzero()  # (t, 2) row and column
        x_tokens = self.reduce(cells.mean(x).to(x.dtype), around[place[:, 0], place[:, 1]])
        branches = [
            branch(x_tokens, windows(tokens, side)[place[:, 0], place[:, 1]])
            for branch, side in zip(self.pyramid, PYRAMID, strict=True)
        ]
        class_token, given = self._transform(torch.cat(branches, 1), place)
        row, column = (drawn != EMPTY).nonzero().unbind(1)
        cell_scores = segment_mean(given[tokens[row // 2, column // 2]], drawn[row, column], len(cells))
        return class_token, cell_scores[cells.of_tile].to(x.dtype)

    def _draw(self, cell: Tensor) -> Tensor:
        """(map_side, map_side) row number of each cell (m, 2: column and row), in the middle of the map."""
        column, row = (cell + (self.map_side - 1 - cell.amax(0)) // 2).unbind(1)
        drawn = cell.new_full((self.map_side, self.map_side), EMPTY)
        drawn[row, column] = torch.arange(len(cell), device=cell.device)
        return changed_at_random(drawn) if self.training and self.augment else drawn

    def _transform(self, tokens: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Class token (width,) and what it gives to the tokens (t, width) at rows and columns ``place`` (t, 2)."""
        x = torch.cat((self.class_token, tokens))
        order = torch.cat((place.new_zeros(1), 1 + place[:, 0] * ((self.map_side + 1) // 2) + place[:, 1]))
        x = self.dropout(x + sinusoids(order, x.shape[1], x.dtype))
        dy, dx = (place[:, None] - place).float().unbind(2)
        class_of_pair = pad(bucket(dx, dy), (1, 0, 1, 0), value=BUCKETS)
        classes = (class_of_pair == torch.arange(BUCKETS + 1, device=x.device)[:, None, None]).to(x.dtype)
        given = tokens.new_zeros(0)
        for block in self.blocks:
            x, given = block(x, classes)
        return self.norm(x[0]), given


def sinusoids(position: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """(t, width): sin(p / 10000^(2k/width)) and cos of the same in turns, for positions p (t,) and k = 0, 1, ..."""
    rate = 10000 ** (-torch.arange(0, width, 2, device=position.device, dtype=dtype) / width)
    angle = position[:, None] * rate
    return torch.stack((angle.sin(), angle.cos()), 2).flatten(1)[:, :width]


def changed_at_random(drawn: Tensor) -> Tensor:
    """A square map turned, mirrored, scaled and cut at random; as it was where nothing would be left."""
    side = len(drawn)
    changed = torch.rot90(drawn, int(torch.randint(4, ())))
    changed = changed.flip(0) if torch.rand(()) < 0.5 else changed
    scale, middle = 0.8 + 0.4 * float(torch.rand(())), (side - 1) / 2
    source = ((torch.arange(side, device=drawn.device) - middle) / scale + middle).round().long() + 1
    source = source.clamp(0, side + 1)
    changed = pad(changed, (1, 1, 1, 1), value=EMPTY)[source[:, None], source]
    hole = side // 8
    top, left = torch.randint(side - hole + 1, (2,)).tolist()
    changed[top : top + hole, left : left + hole] = EMPTY
    return changed if bool((changed != EMPTY).any()) else drawn


@register_model
def setmil(in_dim: int, n_out: int, **options: Any) -> SETMIL:
    """A small map of the slide, a pyramid of windows and a transformer; options of :class:`SETMIL`."""
    return SETMIL(in_dim, n_out, **options)
