"""Runs a model on a bag and keeps what it saw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from psamil.bag import Bag, PackedBags
from psamil.errors import DataError
from psamil.explain.explanation import Explanation, Head
from psamil.explain.posterior_sums import posterior_sums
from psamil.explain.tile_rows import has_discs
from psamil.models.camil import CAMIL
from psamil.models.clam import CLAM
from psamil.models.head_similarity import head_similarity
from psamil.models.ibmil import IBMIL
from psamil.models.pooling import ABMIL
from psamil.models.sm_mil import SmABMIL
from psamil.models.trunk import Trunk
from psamil.spatial import Layout
from psamil.training.saved_model import SavedModel

POOLED_BY_SOFTMAX = (Trunk, ABMIL, CAMIL, CLAM, IBMIL, SmABMIL)  # of their tile score


@torch.no_grad()
def explain_bag(saved: SavedModel, bag: Bag, *, temperature: float = 1.0) -> Explanation:
    """What a model says about a bag, and why. Time O(n K^2) and memory O(n) for models with posterior attention.

    Any registered model has tile scores. One with posterior attention also has heads, if it offers its layers as
    :meth:`psamil.models.psa.PSAMIL.attention_layers` does, and ``priors``; not one that looks at the nearest tiles.

    Args:
        saved: the model; computed where its parameters are.
        bag: with at least one tile.
        temperature: by which logits are divided before they become probabilities, as calibrated on the validation part.
    """
    if bag.n == 0:
        raise DataError(f"bag {bag.id!r}", "has no tiles, so there is nothing to explain")
    model = saved.model.eval()
    layout = Layout.of(bag.xy, bag.slides)
    parameter = next(model.parameters())
    batch = PackedBags.of(bag, layout).to(parameter.device)
    output = model(batch)
    columns = saved.task.predictions(output.logits.double().cpu().numpy() / temperature)
    scores = output.tile_scores.cpu()
    heads, similarity = _heads(model, batch)
    return Explanation(
        bag=bag,
        saved=saved,
        values={name: float(column[0]) for name, column in columns.items()},
        tile_scores=scores,
        percentiles=percentiles(scores),
        shares=_shares(model, scores, output.logits.shape[1]),
        evidence=None if output.tile_evidence is None else output.tile_evidence.cpu(),
        heads=heads,
        similarity=similarity,
    )


def percentiles(scores: Tensor) -> Tensor:
    """(n,) 100 r / (n - 1) with the rank r of each score from 0 on; ties share their mean, a single tile is at 50."""
    if len(scores) == 1:
        return torch.full((1,), 50.0, dtype=torch.float64)
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    rank = counts.cumsum(0) - counts + (counts.double() - 1) / 2  # mean rank of each distinct score
    return 100 * rank[place] / (len(scores) - 1)


def _shares(model: nn.Module, scores: Tensor, outputs: int) -> Tensor | None:
    """Weights of the tiles in the pooled bag, of models that pool by a softmax of the score, the same for all."""
    if getattr(model, "opposed", None) is not None:
        return None  # two weights for each tile
    log_sharpness = getattr(model, "log_sharpness", None)  # of those that pool by evidence
    if isinstance(log_sharpness, Tensor):
        return (scores.double() * float(log_sharpness.double().exp())).softmax(0) if outputs == 1 else None
    return scores.double().softmax(0) if isinstance(model, POOLED_BY_SOFTMAX) else None


def _heads(model: Any, batch: PackedBags) -> tuple[tuple[Head, ...], Tensor | None]:
    """Those of all layers, and how alike they are, (layers, heads, heads); nothing if there is no such attention."""
    if not has_discs(model):
        return (), None
    heads: list[Head] = []
    similarities = []
    for layer, (attention, tokens) in enumerate(model.attention_layers(batch)):
        q, k, v = attention.project(tokens)
        prior = attention.prior
        similarities.append(head_similarity(attention.attend(q, k, v, batch.xy, batch.layout).cpu()))
        sums = posterior_sums(q, k, prior.theta, decay=prior.decay, tau=prior.tau, layout=batch.layout)
        columns = zip(prior.theta.tolist(), prior.radius_steps.tolist(), *(of.unbind(1) for of in sums), strict=True)
        heads += [
            Head(layer, h, prior.decay, theta, prior.tau, radius, received, neighbourhood, len(model.priors))
            for h, (theta, radius, received, neighbourhood) in enumerate(columns)
        ]
    return tuple(heads), torch.stack(similarities)
