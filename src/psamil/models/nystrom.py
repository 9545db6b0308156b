r"""Nystrom attention: self-attention through m landmarks, linear in the number of tokens.

With q, k, v of n tokens, q scaled by d^{-1/2}, and landmarks q~, k~ the means of m consecutive segments,

    F = softmax(q k~^T) (n, m),    A = softmax(q~ k~^T) (m, m),    B = softmax(q~ k^T) (m, n),
    out = F A^+ B v + (a convolution of v along the sequence, one kernel per head),

where the pseudo-inverse A^+ is iterated from Z_0 = A^T / (largest column sum * largest row sum, over all heads):

    Z <- 1/4 Z (13 I - A Z (15 I - A Z (7 I - A Z))).

Rows of zeros are put in front so that the length is a multiple of m; they are attended to. As q and k are linear in the
tokens, landmarks are those of means of tokens. The products with F and B are fused attention with few keys or few
queries: O(n m d) time, and O(n) memory. Heads are done in turn, and done again in the backward pass: what is kept is as
large as tokens and output.

Xiong, Zeng, Chakraborty, Tan, Fung, Li, Singh: Nystromformer: A Nystrom-Based Algorithm for Approximating
Self-Attention. AAAI 2021.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, scaled_dot_product_attention

from psamil.errors import OptionError
from psamil.models.recompute import recomputed
from psamil.models.segments import segment_sum

HEADS_AT_ONCE = 1
"""Heads whose queries, keys and values are held at the same time."""
BLOCK = 128
"""Rows of values that are convolved together."""

ORDER_MATTERS = "landmarks are means of consecutive tiles, and values are smoothed along their order"
"""Why a model with this attention depends on the order of its tiles."""


def pseudo_inverse(A: Tensor, iterations: int = 6) -> Tensor:
    """A^+ of matrices (..., m, m) without negative entries, iterated; exact only as ``iterations`` grows."""
    Z = A.mT / (A.sum(-1).amax() * A.sum(-2).amax())
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)

    def better(Z: Tensor) -> Tensor:
        AZ = A @ Z
        return Z @ (13 * identity - AZ @ (15 * identity - AZ @ (7 * identity - AZ))) / 4

    for _ in range(iterations):
        Z = recomputed(better, Z)
    return Z


def convolved(values: Tensor, kernels: Tensor) -> Tensor:
    """(heads, n, d): ``values`` convolved along n with a kernel (heads, k) per head, k odd, zeros beyond the ends.

    As products of a band matrix with overlapping windows of BLOCK rows: a library's convolution with one kernel for
    all d columns holds many times the memory of the values.
    """
    (n, _), k = values.shape[1:], kernels.shape[1]
    window = BLOCK + k - 1
    windows = pad(values, (0, 0, k // 2, k // 2 + -n % BLOCK)).unfold(1, window, BLOCK)  # (heads, blocks, d, window)
    rows = pad(kernels, (0, BLOCK)).repeat(1, BLOCK)[:, : BLOCK * window]  # each row of the band one further right
    band = rows.unflatten(1, (1, BLOCK, window))
    return (band @ windows.mT).flatten(1, 2)[:, :n]


class NystromAttention(nn.Module):
    """Tokens (n, width) of one bag -> (n, width).

    Args:
        width: of the tokens.
        heads, head_dim: attention heads and the width of each.
        landmarks: m.
        iterations: of the pseudo-inverse.
        kernel: length of the convolution of the values, odd.
        dropout: of the output.
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int = 8,
        head_dim: int = 64,
        landmarks: int = 256,
        iterations: int = 6,
        kernel: int = 33,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if min(width, heads, head_dim, landmarks, iterations) < 1 or kernel % 2 == 0 or not 0 <= dropout < 1:
            raise OptionError(
                "width, heads, head_dim, landmarks and iterations must be at least 1, kernel odd, dropout in [0, 1); "
                f"got {width}, {heads}, {head_dim}, {landmarks}, {iterations}, {kernel}, {dropout}"
            )
        self.heads, self.head_dim, self.landmarks, self.iterations = heads, head_dim, landmarks, iterations
        self.qkv = nn.Linear(width, 3 * heads * head_dim, bias=False)
        self.conv = nn.Conv2d(heads, heads, (kernel, 1), padding=(kernel // 2, 0), groups=heads, bias=False)
        self.project = nn.Linear(heads * head_dim, width)
        self.dropout = nn.Dropout(dropout)

    def padded(self, n: int) -> int:
        """Length of the sequence that n tokens become."""
        return n + -n % self.landmarks

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)[0]

    def attend(self, x: Tensor, *, row: int | None = None) -> tuple[Tensor, Tensor | None]:
        """The output and, if asked for, how much token ``row`` attends to each token: (n,), the mean of the heads.

        It is a row of F A^+ B, which can be negative, and comes without gradient.
        """
        n = len(x)
        if n == 0:
            return x, None if row is None else x.new_zeros(0)
        padding = self.padded(n) - n
        segment = torch.arange(padding, n + padding, device=x.device) // ((n + padding) // self.landmarks)
        x_landmark = segment_sum(x, segment, self.landmarks).to(x.dtype) * (self.landmarks / (n + padding))
        weight = self.qkv.weight.unflatten(0, (3, self.heads, self.head_dim))
        q_landmark, k_landmark = (self._project(x_landmark, w) for w in weight[:2])  # (heads, m, d)
        q_landmark = q_landmark / math.sqrt(self.head_dim)
        with torch.autocast(x.device.type, enabled=False):  # the iteration needs the precision
            A = (q_landmark.to(x.dtype) @ k_landmark.to(x.dtype).mT).softmax(-1)
            inverse = pseudo_inverse(A, self.iterations)
        per_head = weight.transpose(0, 1), q_landmark, k_landmark, inverse, self.conv.weight
        parts = zip(*(t.split(HEADS_AT_ONCE) for t in per_head), strict=True)
        out = torch.cat([recomputed(self._heads, x, padding, *part) for part in parts], 1)
        weights = None if row is None else self._row(x, row, padding, weight, q_landmark, k_landmark, inverse)
        return self.dropout(self.project(out)), weights

    @staticmethod
    def _project(x: Tensor, weight: Tensor) -> Tensor:
        """(heads, n, d) for tokens (n, width) and weights (heads, d, width)."""
        return linear(x, weight.flatten(0, 1)).unflatten(1, weight.shape[:2]).transpose(0, 1)

    def _heads(
        self,
        x: Tensor,
        padding: int,
        weight: Tensor,
        q_landmark: Tensor,
        k_landmark: Tensor,
        inverse: Tensor,
        conv: Tensor,
    ) -> Tensor:
        """(n, heads d) of some heads; ``weight`` is (heads, 3, d, width), of q, k and v."""
        q, k, v = self._project(x, weight.flatten(0, 1)).unflatten(0, (-1, 3)).unbind(1)  # (heads, n, d)
        smooth = convolved(v, conv.flatten(1))
        k, v = (pad(t, (0, 0, padding, 0))[None] for t in (k, v))
        Bv = scaled_dot_product_attention(q_landmark[None], k, v, scale=1.0)[0]
        out = scaled_dot_product_attention(
            q[None], k_landmark[None], (inverse @ Bv)[None], scale=1 / math.sqrt(self.head_dim)
        )
        return (out[0] + smooth).transpose(0, 1).flatten(1)

    @torch.no_grad()
    def _row(
        self, x: Tensor, row: int, padding: int, weight: Tensor, q_landmark: Tensor, k_landmark: Tensor, inverse: Tensor
    ) -> Tensor:
        """(n,) of one query; B is formed one head at a time."""
        q = self._project(x[row, None], weight[0]) / math.sqrt(self.head_dim)  # (heads, 1, d)
        through = (q @ k_landmark.mT).softmax(-1) @ inverse  # (heads, 1, m)
        rows = [
            w @ (q_l @ pad(linear(x, w_k), (0, 0, padding, 0)).T).softmax(-1)
            for w, q_l, w_k in zip(through, q_landmark, weight[1], strict=True)
        ]
        return torch.cat(rows).mean(0)[padding:]
