"""What a model sees in a bag: a score for each tile; for models with posterior attention, what each head looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from psamil.bag import Bag
from psamil.spatial import Decay


@dataclass(frozen=True, eq=False)
class Head:
    """One head of posterior attention on one bag."""

    layer: int  # from 0
    head: int  # from 0, inside its layer
    decay: Decay
    theta: float
    tau: float
    radius_steps: float
    received: Tensor  # (n,) sum over queries i of p_ij: what tile j gets from all tiles of its slide; 1 on average
    neighbourhood: Tensor  # (n,) exp of the entropy of p_i: how many tiles tile i effectively looks at


@dataclass(frozen=True, eq=False)
class Explanation:
    """What one model says about one bag, and why."""

    bag: Bag
    model: str  # name in the registry
    values: Mapping[str, float]  # the prediction, as psamil.evaluation.predictor.Prediction.values has it
    tile_scores: Tensor  # (n,) raw: how much the prediction rests on each tile
    percentiles: Tensor  # (n,) 0 to 100: share of the tiles of the bag with a lower score; ties share their mean
    heads: tuple[Head, ...] = ()  # of all layers; none for models without posterior attention
    similarity: Tensor | None = None  # (layers, heads, heads) of what the heads make of the tiles, as in Figure 3
