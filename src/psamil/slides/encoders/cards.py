"""What is known of an encoder before its weights are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from psamil.slides.encoders.preprocessing import Preprocessing


@dataclass(frozen=True)
class EncoderCard:
    """An encoder by name. :func:`psamil.slides.encoders.register_encoder` takes one."""

    name: str
    dim: int
    preprocessing: Preprocessing
    build: Callable[[Path | None], nn.Module]
    """The network with the weights of this file or folder, or with those from where they are kept."""
    source: str
    """Where the weights come from."""
    licence: str
    gated: bool = False
    """Whether the weights are given only to those who ask for them and log in."""
    mpp: float | None = None
    """Micrometres per pixel of the tiles it was trained on."""
    tile_px: int = 224
    """Width of the tiles its authors cut."""
    precision: str = "float32"
    """What its authors compute with on a GPU."""
    faster: Callable[[nn.Module], nn.Module] | None = None
    """The same network in a form that computes faster, made after its weights were hashed."""
