"""Scores, evidence and probabilities of tiles by several models: their mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from psamil.models.output import ModelOutput


def mean_scores(outputs: Sequence[ModelOutput]) -> Tensor:
    """(n,) of the tiles of a batch."""
    return torch.stack([output.tile_scores.float().cpu() for output in outputs]).mean(0)


def mean_evidence(outputs: Sequence[ModelOutput]) -> Tensor | None:
    """(n, n_out) of the tiles of a batch; None of models that give none, or whose outputs differ (bins of time)."""
    given = [output.tile_evidence.float().cpu() for output in outputs if output.tile_evidence is not None]
    return torch.stack(given).mean(0) if len({evidence.shape[1] for evidence in given}) == 1 else None


def evidence_for_second_class(evidence: Tensor | None) -> Tensor | None:
    """(n,) of models of two classes, which have one output; None of others: which class is the lesion is not known."""
    return None if evidence is None or evidence.shape[1] != 1 else evidence[:, 0]


def mean_log_probability(outputs: Sequence[ModelOutput]) -> Tensor | None:
    r"""(n,) of the tiles of one bag: log of the probability that the bag is of the second class and the tile shows it,

        log sigma(z) + log sigma(e_i)    of a model,

    z being the logit of the bag and e_i the evidence of the tile, which is the logit that it would have alone. Inside a
    bag it ranks tiles as their evidence does; between bags the prediction comes in, which has seen all tiles: those
    that happen to look like a lesion, in a bag that is none, come last. None where :func:`evidence_for_second_class`
    is.
    """
    found = []
    for output in outputs:
        evidence = evidence_for_second_class(output.tile_evidence)
        if evidence is None:
            return None
        found.append(logsigmoid(evidence.double().cpu()) + logsigmoid(output.logits[0, 0].double().cpu()))
    return torch.stack(found).mean(0)
