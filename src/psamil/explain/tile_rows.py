r"""Where a single tile looks, without computing the rest of the slide.

Posterior attention does not see beyond its radius. What layer l does with tile i therefore depends on the tiles within
R = sum over the layers of max_h K_h of it, and on no others: the model is run on these alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from psamil.bag import Bag, PackedBags
from psamil.errors import OptionError
from psamil.models.psa import NearestAttention
from psamil.spatial import PosteriorRow, posterior_rows
from psamil.spatial.reference import squared_radius


def has_discs(model: Any) -> bool:
    """Whether a model has heads that can be shown: those of posterior attention within discs, not of nearest tiles."""
    looks_at_nearest = any(isinstance(module, NearestAttention) for module in model.modules())
    return bool(getattr(model, "priors", ())) and hasattr(model, "attention_layers") and not looks_at_nearest


@torch.no_grad()
def rows_of_tile(model: Any, bag: Bag, tile: int) -> list[PosteriorRow]:
    """The rows of the posterior of a tile, for all heads of all layers; none if the model has no such attention."""
    if not 0 <= tile < bag.n:
        raise OptionError(f"tile must be from 0 to {bag.n - 1}, got {tile}: {bag.id!r} has {bag.n} tiles")
    if not has_discs(model):
        return []
    near = _tiles_around(bag, tile, _reach_steps(model))
    batch = PackedBags.of(Bag(bag.features[near], bag.xy[near])).to(next(model.parameters()).device)
    query = torch.searchsorted(near, tile)
    rows = []
    for attention, tokens in model.eval().attention_layers(batch):
        q, k, _ = attention.project(tokens)
        prior = attention.prior
        (of_layer,) = posterior_rows(q, k, batch.xy, prior.theta, query, decay=prior.decay, tau=prior.tau)
        rows += [_in_bag(row, near) for row in of_layer]
    return rows


def _reach_steps(model: Any) -> float:
    """R: how far what is said about a tile can come from."""
    radii = [squared_radius(prior.decay, prior.theta, prior.tau).amax().sqrt() for prior in model.priors]
    return float(sum(radii))


def _tiles_around(bag: Bag, tile: int, reach_steps: float) -> Tensor:
    """Ascending, of the same slide."""
    slide = int(torch.searchsorted(bag.slides, tile, right=True)) - 1
    first, last = bag.slides[slide].item(), bag.slides[slide + 1].item()
    distance = (bag.xy[first:last].double() - bag.xy[tile].double()).square().sum(1).sqrt()
    return (distance <= reach_steps).nonzero()[:, 0] + first


def _in_bag(row: PosteriorRow, tiles: Tensor) -> PosteriorRow:
    """With the indices that the tiles have in the bag, on the CPU."""
    numbers = {name: getattr(row, name).cpu() for name in ("distance_steps", "prior", "likelihood", "posterior")}
    return replace(row, query=int(tiles[row.query]), neighbours=tiles[row.neighbours.cpu()], **numbers)
