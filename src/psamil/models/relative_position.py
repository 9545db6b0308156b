r"""Classes of relative positions, after which attention can be biased (iRPE).

The Euclidean distance between two places, rounded to r = round(sqrt(dx^2 + dy^2)), falls into the class

    g(r) = r                                                        for r <= a,
    g(r) = min(b, round(a + ln(r / a) / ln(c / a) (b - a)))         beyond, cut to a whole number,

with a = 1.9, b = 3.8 and c = 15.2, the constants of SETMIL. There are four classes: 0, 1, 2 to 3, and 4 or more.

Wu, Peng, Chen, Fu, Chao: Rethinking and Improving Relative Position Encoding for Vision Transformer. ICCV 2021.
"""

import math

import torch
from torch import Tensor

ALPHA, BETA, GAMMA = 1.9, 3.8, 15.2
BUCKETS = math.floor(BETA) + 1
"""Number of classes."""


def bucket(dx: Tensor, dy: Tensor) -> Tensor:
    """Class g(r) of each offset in cells or tile steps: whole numbers from 0 to :data:`BUCKETS` - 1."""
    r = (dx**2 + dy**2).sqrt().round()
    far = ALPHA + (r / ALPHA).clamp(min=1).log() / math.log(GAMMA / ALPHA) * (BETA - ALPHA)
    return torch.where(r <= ALPHA, r, far.round()).clamp(max=BUCKETS - 1).long()
