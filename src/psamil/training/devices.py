"""The device of a process, and the precision in which it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from psamil.errors import OptionError
from psamil.training.settings import TrainingSettings

if TYPE_CHECKING:
    from lightning_fabric import Fabric


def new_fabric(settings: TrainingSettings, rank: int = 0) -> Fabric:
    """The device of a rank, and the precision. OptionError where this computer does not have them."""
    kind = _fabric(settings, 1, "32-true").device.type
    if kind == "cpu" and settings.precision == "16-mixed":  # which fabric would replace
        raise OptionError("precision '16-mixed' cannot be used on a CPU; take 'bf16-mixed' or '32-true'")
    if settings.devices == 1 or kind == "cpu":
        return _fabric(settings, 1, settings.precision)
    present = torch.cuda.device_count() if kind == "cuda" else 1
    if present < settings.devices:
        raise OptionError(f"devices is {settings.devices}, but there are {present} of kind {kind!r} here")
    torch.cuda.set_device(rank)  # where processes of a group exchange tensors
    return _fabric(settings, [rank], settings.precision)


def _fabric(settings: TrainingSettings, devices: int | list[int], precision: str) -> Fabric:
    from lightning_fabric import Fabric

    try:
        return Fabric(accelerator=settings.accelerator, devices=devices, precision=precision)  # type: ignore[arg-type]
    except (ImportError, ValueError, RuntimeError) as error:
        raise OptionError(f"accelerator {settings.accelerator!r} cannot be used here: {error}") from error
