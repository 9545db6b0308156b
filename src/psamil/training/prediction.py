"""Outputs of a model for samples of a cohort."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from psamil.cohort import Cohort, Sample
from psamil.training.batches import BatchLoader

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def loader_for(model: nn.Module, cohort: Cohort, in_dim: int, device: torch.device | None = None) -> BatchLoader:
    """Loads samples as the model wants them; a layout is prepared for models that say ``needs_layout``."""
    needs_layout = bool(getattr(model, "needs_layout", False))
    return BatchLoader(cohort, device or torch.device("cpu"), in_dim, needs_layout=needs_layout)


@torch.no_grad()
def predict_logits(
    model: nn.Module, loader: BatchLoader, samples: Sequence[Sample], *, fabric: Fabric | None = None
) -> NDArray[np.float64]:
    """(samples, n_out) raw outputs. Samples go one by one, so that none depends on the others."""
    model.eval()
    rows: list[Any] = []
    for batch in loader.batches([sample] for sample in samples):
        with fabric.autocast() if fabric is not None else contextlib.nullcontext():
            rows.append(model(batch).logits[0].cpu().double().numpy())
    return np.stack(rows) if rows else np.empty((0, 0))
