"""What a model sees in a bag: a score for each tile; for models with posterior attention, what each head looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from psamil.bag import Bag
from psamil.explain.tile_rows import rows_of_tile
from psamil.spatial import Decay, PosteriorRow
from psamil.spatial.reference import squared_radius
from psamil.training.saved_model import SavedModel


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
    of_layers: int = 1  # how many layers the model has

    @property
    def name(self) -> str:
        """For people, who count from 1: "head 1", or "layer 1 head 1" where there are several layers."""
        return f"layer {self.layer + 1} head {self.head + 1}" if self.of_layers > 1 else f"head {self.head + 1}"

    def radius_um(self, step_um: float | None) -> float | None:
        """The radius in micrometres, where the length of a tile step is known."""
        return None if step_um is None else self.radius_steps * step_um

    def prior_curve(self, distances_steps: Tensor) -> Tensor:
        """f(d | theta): how much a tile at distance d counts before anybody has looked at it.

        It is 1 at 0, tau at the radius, and 0 beyond it, where tiles are pruned.
        """
        d2, theta = distances_steps.double().square(), torch.tensor(self.theta, dtype=torch.float64)
        return torch.where(
            d2 <= squared_radius(self.decay, theta, self.tau), self.decay.log_prior(d2, theta).exp(), 0.0
        )


@dataclass(frozen=True, eq=False)
class Explanation:
    """What one model says about one bag, and why. Made by :func:`psamil.explain.explain_bag`."""

    bag: Bag
    saved: SavedModel
    values: Mapping[str, float]  # the prediction, as psamil.evaluation.predictor.Prediction.values has it
    tile_scores: Tensor  # (n,) raw: how much the prediction rests on each tile
    percentiles: Tensor  # (n,) 0 to 100: rank of the score among the tiles of the bag; ties share their mean
    shares: Tensor | None = None  # (n,) weights of the tiles in the pooled bag, sum 1; None for other kinds of pooling
    evidence: Tensor | None = None  # (n, outputs) for and against each, see psamil.models.output; None if there is none
    heads: tuple[Head, ...] = ()  # of all layers; none for models without posterior attention
    similarity: Tensor | None = None  # (layers, heads, heads) of what the heads make of the tiles, as in Figure 3

    @property
    def model(self) -> str:
        """Its name in the registry."""
        return str(self.saved.about["settings"]["model"])

    def top_tiles(self, k: int) -> list[int]:
        """The k tiles of the highest score, the highest first; of equal ones, the first of the bag."""
        return self.tile_scores.argsort(descending=True, stable=True)[:k].tolist()

    def rows(self, tile: int) -> list[PosteriorRow]:
        """Where a tile looks, by each of ``heads``: the posterior over its neighbours, split into prior and likelihood.

        Indices are tiles of the bag. Time does not depend on the size of the bag, but for finding the neighbours.
        """
        return rows_of_tile(self.saved.model, self.bag, tile)
