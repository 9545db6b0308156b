r"""TransMIL: a transformer over the tiles of a bag, with linear attention and positions by convolution.

    h = [class token, ReLU(W x_1 + b), ..., ReLU(W x_n + b)],
    h <- h + Nystrom(LN h),    tiles of h <- PPEG(tiles),    h <- h + Nystrom(LN h),    logits = C LN(h_0) + c.

With ``grid="file"``, as published, the tiles of each slide are repeated from the first on until they fill a square, in
the order of the file: landmarks, the convolution in the attention and PPEG all depend on it (see
:mod:`psamil.models.nystrom` and :mod:`psamil.models.ppeg`). With ``grid="lattice"`` nothing is repeated, the tiles of a
slide are taken row by row as they lie on it, and PPEG sees their true neighbours. A bag of several slides is one
sequence; each slide has its own square.

The score of a tile is how much the class token attends to it in the last block, as a mean over the heads, times the
length of the sequence with all that is attended to (class token, repeated tiles, rows of zeros), so that 1 is an equal
share whatever the size of the bag; it can be negative. A repeated tile has the score of its first occurrence.

Time O(n m d) with m landmarks, memory O(n).

Where this differs from the authors' code: (F A^+) (B v) is computed as F (A^+ (B v)).

Shao, Bian, Chen, Wang, Zhang, Ji, Zhang: TransMIL: Transformer based Correlated Multiple Instance Learning for Whole
Slide Image Classification. NeurIPS 2021.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from psamil.bag import PackedBags
from psamil.errors import OptionError, one_of
from psamil.models.nystrom import ORDER_MATTERS, NystromAttention
from psamil.models.output import ModelOutput
from psamil.models.pooling import TileEmbedding
from psamil.models.ppeg import GRIDS, PPEG, file_cells, lattice_cells
from psamil.models.registry import register_model
from psamil.models.trunk import layout_of


class TransMIL(nn.Module):
    """See the module.

    Args:
        in_dim: width of the tile features.
        n_out: number of raw outputs.
        width: of the tokens.
        heads: of the attention.
        landmarks: of the attention; by default half the width.
        dropout: of what the attention adds.
        grid: "file" or "lattice".
    """

    def __init__(
        self,
        in_dim: int,
        n_out: int,
        *,
        width: int = 512,
        heads: int = 8,
        landmarks: int | None = None,
        dropout: float = 0.1,
        grid: str = "file",
    ) -> None:
        super().__init__()
        if min(in_dim, n_out, width, heads) < 1 or width % heads:
            raise OptionError(
                "in_dim, n_out, width and heads must be at least 1, and width a multiple of heads; "
                f"got {in_dim}, {n_out}, {width}, {heads}"
            )
        if grid not in GRIDS:
            raise one_of("grid", grid, GRIDS)
        self.grid, self.needs_layout = grid, grid == "lattice"
        slides = "the slides of a bag follow one another in the sequence"
        self.exceptions = {"permutation": ORDER_MATTERS if grid == "file" else slides}
        landmarks = max(1, width // 2) if landmarks is None else landmarks
        self.embed = TileEmbedding(in_dim, width, dropout=0.0)
        self.class_token = nn.Parameter(torch.randn(1, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attentions = nn.ModuleList(
            NystromAttention(width, heads=heads, head_dim=width // heads, landmarks=landmarks, dropout=dropout)
            for _ in range(2)
        )
        self.ppeg = PPEG(width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, n_out)

    def forward(self, batch: PackedBags) -> ModelOutput:
        x = self.embed(batch, self.head.weight.dtype)
        tiles, cells, first = (t.to(x.device) for t in self._grid(batch))
        bag_of_cell = batch.bag_of_tile[tiles]
        ends = torch.searchsorted(bag_of_cell, torch.arange(len(batch) + 1, device=x.device)).tolist()
        class_tokens, attention = zip(*(self._bag(x[tiles[a:b]], cells[a:b]) for a, b in pairwise(ends)), strict=True)
        return ModelOutput(
            logits=self.head(self.norm(torch.stack(class_tokens))), tile_scores=torch.cat(attention)[first]
        )

    def _grid(self, batch: PackedBags) -> tuple[Tensor, Tensor, Tensor]:
        """The sequence of tiles of all bags (m,), their cells (m, 2), and where each tile comes first in it (n,)."""
        if self.grid == "file":
            return file_cells(batch.slides.diff().tolist())
        cells = lattice_cells(layout_of(batch))
        by_x = batch.xy[:, 0].argsort(stable=True).to(cells.device)
        tiles = by_x[cells[by_x, 1].argsort(stable=True)]  # row by row; slides lie below one another
        return tiles, cells[tiles], tiles.argsort()

    def _bag(self, x: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
        """The class token (width,) and its attention to the tiles (m,) of one bag, over an equal share."""
        (norm1, norm2), (attention1, attention2) = self.norms, self.attentions
        assert isinstance(attention2, NystromAttention)
        h = torch.cat((self.class_token, x))
        h = h + attention1(norm1(h))
        h = torch.cat((h[:1], self.ppeg(h[1:], cells)))
        out, weights = attention2.attend(norm2(h), row=0)
        assert weights is not None
        return (h + out)[0], weights[1:] * attention2.padded(len(h))


@register_model
def transmil(in_dim: int, n_out: int, **options: Any) -> TransMIL:
    """TransMIL; options of :class:`TransMIL`."""
    return TransMIL(in_dim, n_out, **options)
