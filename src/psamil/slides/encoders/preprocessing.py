"""From tiles as they were read to what a network takes: resized, cut out and normalised, in torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preprocessing:
    """What the network was trained to see.

    A tile is resized to ``resize_px``, with antialiasing and rounded to whole numbers as image libraries do, its centre
    of ``input_px`` is cut out, and each channel x in 0..1 becomes (x - mean) / std.
    """

    input_px: int
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    resize_px: int | None = None
    """None: the same as input_px, nothing is cut off."""

    def __call__(self, tiles: Tensor) -> Tensor:
        """(b, h, w, 3) uint8 to (b, 3, input_px, input_px) float32, on the same device."""
        images = tiles.permute(0, 3, 1, 2).float()  # in memory as before, which is torch's channels_last
        size = self.resize_px or self.input_px
        if images.shape[2:] != (size, size):
            images = F.interpolate(images, size=(size, size), mode=self.interpolation, antialias=True)
            images = images.round_().clamp_(0, 255)
        edge = (size - self.input_px) // 2
        images = images[:, :, edge : edge + self.input_px, edge : edge + self.input_px]
        mean, std = (255 * torch.tensor(x, device=images.device).view(3, 1, 1) for x in (self.mean, self.std))
        return (images - mean) / std

    def facts(self) -> dict[str, Any]:
        """All that decides what the network sees, for a fingerprint."""
        return {
            "input_px": self.input_px,
            "resize_px": self.resize_px or self.input_px,
            "interpolation": self.interpolation,
            "mean": list(self.mean),
            "std": list(self.std),
        }
