"""Scores and evidence of tiles by several models: their mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
