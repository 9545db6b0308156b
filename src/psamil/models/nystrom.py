r"""Nystrom attention: self-attention through m landmarks, linear in the number of tokens.

With q, k, v of n tokens, q scaled by d^{-1/2}, and landmarks q~, k~ the means of m consecutive segments,

    F = softmax(q k~^T) (n, m),    A = softmax(q~ k~^T) (m, m),    B = softmax(q~ k^T) (m, n),
    out = F A^+ B v + (a convolution of v along the sequence, one kernel per head),

where the pseudo-inverse A^+ is iterated from Z_0 = A^T / (largest column sum * largest row sum, over all heads):

    Z <- 1/4 Z (13 I - A Z (15 I - A Z (7 I - A Z))).

Rows of zeros are put in front so that the length is a multiple of m; they are attended to. The products with F and B
are fused attention with few keys or few queries: O(n m d) time, and O(n) memory.

Xiong, Zeng, Chakraborty, Tan, Fung, Li, Singh: Nystromformer: A Nystrom-Based Algorithm for Approximating
Self-Attention. AAAI 2021.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from psamil.errors import OptionError

ORDER_MATTERS = "landmarks are means of consecutive tiles, and values are smoothed along their order"
"""Why a model with this attention depends on the order of its tiles."""


def pseudo_inverse(A: Tensor, iterations: int = 6) -> Tensor:
    """A^+ of matrices (..., m, m) without negative entries, iterated; exact only as ``iterations`` grows."""
    Z = A.mT / (A.sum(-1).amax() * A.sum(-2).amax())
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    for _ in range(iterations):
        AZ = A @ Z
        Z = Z @ (13 * identity - AZ @ (15 * identity - AZ @ (7 * identity - AZ))) / 4
    return Z


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

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)[0]

    def attend(self, x: Tensor, *, row: int | None = None) -> tuple[Tensor, Tensor | None]:
        """The output and, if asked for, how much token ``row`` attends to each token: (n,), the mean of the heads.

        It is a row of F A^+ B, which can be negative, and comes without gradient.
        """
        n = len(x)
        if n == 0:
            return x, None if row is None else x.new_zeros(0)
        padding = -n % self.landmarks
        x = pad(x, (0, 0, padding, 0))
        q, k, v = self.qkv(x).unflatten(1, (3, self.heads, self.head_dim)).permute(1, 2, 0, 3)  # (heads, n, d)
        q = q / math.sqrt(self.head_dim)
        q_landmark, k_landmark = (t.unflatten(1, (self.landmarks, -1)).mean(2) for t in (q, k))
        with torch.autocast(x.device.type, enabled=False):  # the iteration needs the precision
            A = (q_landmark.to(x.dtype) @ k_landmark.to(x.dtype).mT).softmax(-1)
            inverse = pseudo_inverse(A, self.iterations)
        Bv = scaled_dot_product_attention(q_landmark[None], k[None], v[None], scale=1.0)[0]
        out = scaled_dot_product_attention(q[None], k_landmark[None], (inverse @ Bv)[None], scale=1.0)
        out = (out + self.conv(v[None]))[0, :, padding:]
        weights = None if row is None else self._row(q[:, padding + row], q_landmark, k, k_landmark, inverse)[padding:]
        return self.dropout(self.project(out.transpose(0, 1).flatten(1))), weights

    @torch.no_grad()
    def _row(self, q: Tensor, q_landmark: Tensor, k: Tensor, k_landmark: Tensor, inverse: Tensor) -> Tensor:
        """(n,) of one query (heads, d); B is formed one head at a time."""
        through = (q[:, None] @ k_landmark.mT).softmax(-1) @ inverse  # (heads, 1, m)
        rows = [w @ (q_l @ k_h.T).softmax(-1) for w, q_l, k_h in zip(through, q_landmark, k, strict=True)]
        return torch.cat(rows).mean(0)
