r"""FLOPs of a training batch of PSA-MIL by formula, part by part, to hold against the count.

For n tiles of F numbers, heads of d numbers each, width D, L blocks with MLPs of r D, an adapter of A layers, b bags
with C outputs, and P_h pairs of tiles within the radius K_h of a head, two FLOPs per multiplication and addition:

    part         forward                            backward
    adapter      2 n F D + (A - 1) 4 n D^2          2 n F D + (A - 1) 8 n D^2     (features need no gradient)
    qkv          6 n D^2 L                          12 n D^2 L
    attention    4 d sum_h P_h                      10 d sum_h P_h                (scores again, dP, dQ, dK, dV)
    projection   2 n D^2 L                          4 n D^2 L
    mlp          4 r n D^2 L                        8 r n D^2 L
    pooling      2 n D + 2 n D                      4 n D + 4 n D                 (scores, weighted sum)
    head         2 b D C                            4 b D C

P_h is the sum, over all displacements of at most K_h, of the tiles that have a tile there: about n pi K_h^2, less at
the edge of the tissue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from psamil.bag import Bag
from psamil.errors import OptionError
from psamil.models.psa import PSAMIL, NearestAttention
from psamil.models.transformer import TransformerBlock
from psamil.spatial.reference import RADIUS_TOLERANCE


@dataclass(frozen=True)
class PartFlops:
    """Of one part of the model."""

    part: str
    forward: int
    backward: int

    @property
    def both(self) -> int:
        return self.forward + self.backward


def has_formula(model: nn.Module) -> bool:
    """Whether the table above is of this model: psa with discs as neighbours and linear pooling, no arrangement."""
    if not isinstance(model, PSAMIL) or not isinstance(model.score, nn.Linear) or model.arrangement is not None:
        return False
    return not any(isinstance(module, NearestAttention) for module in model.modules())


def psa_flops(model: nn.Module, bag: Bag) -> list[PartFlops]:
    """The parts of the table above, for one bag on a lattice."""
    if not isinstance(model, PSAMIL) or not has_formula(model):
        raise OptionError(
            "there is a formula for psa with neighbours 'disc', pooling 'linear' and no arrangement alone"
        )
    n, width = bag.n, model.head.in_features
    blocks = [block for block in model.blocks if isinstance(block, TransformerBlock)]
    first = blocks[0].mlp[0]
    assert isinstance(first, nn.Linear)
    hidden = first.out_features  # r D
    residuals = len(model.adapter.residuals)
    per_pair = sum(  # d x pairs
        width // len(prior.free) * lattice_pairs(bag.xy, radius)
        for prior in model.priors
        for radius in prior.radius_steps.tolist()
    )
    project, square = 2 * n * model.in_dim * width, 2 * n * width**2
    parts = [
        PartFlops("adapter", project + residuals * 2 * square, project + residuals * 4 * square),
        _linear("qkv", len(blocks) * 3 * square),
        PartFlops("attention", 4 * per_pair, 10 * per_pair),
        _linear("projection", len(blocks) * square),
        _linear("mlp", len(blocks) * 2 * 2 * n * width * hidden),
        _linear("pooling", 2 * 2 * n * width),
        _linear("head", 2 * width * model.head.out_features),
    ]
    return parts


def _linear(part: str, forward: int) -> PartFlops:
    """Backward, one product for the weights and one for the inputs."""
    return PartFlops(part, forward, 2 * forward)


def lattice_pairs(xy: Tensor, radius_steps: float) -> int:
    """Pairs of tiles within a radius, each with itself too, by sliding the tissue over itself."""
    cells = xy.round().long() - xy.round().long().amin(0)
    if not torch.allclose(xy - xy.amin(0), cells.to(xy.dtype), atol=1e-6):
        raise OptionError("pairs are counted by formula for tiles on a lattice")
    reach = math.floor(radius_steps * (1 + RADIUS_TOLERANCE))
    width, height = (cells.amax(0) + 1).tolist()
    tissue = torch.zeros(height + 2 * reach, width + 2 * reach, dtype=torch.bool)
    tissue[cells[:, 1] + reach, cells[:, 0] + reach] = True
    middle = tissue[reach : reach + height, reach : reach + width]
    steps = range(-reach, reach + 1)
    near = [(x, y) for x in steps for y in steps if x * x + y * y <= radius_steps**2 * (1 + RADIUS_TOLERANCE)]
    return sum(
        int((middle & tissue[reach + y : reach + y + height, reach + x : reach + x + width]).sum()) for x, y in near
    )
