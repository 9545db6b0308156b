"""A frozen network that turns tiles into feature vectors."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from psamil.errors import OptionError, ShapeError, one_of
from psamil.slides.encoders.preprocessing import Preprocessing

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


class NonFiniteFeaturesError(OptionError):
    """Of some tiles: the others may be well."""


class Encoder:
    """Tiles to features. Made by :func:`psamil.slides.encoders.load_encoder`.

    Args:
        name: as it is recorded with the features.
        network: (b, 3, input_px, input_px) float32 to (b, dim). It is frozen and set to evaluation.
        preprocessing: what it takes.
        licence: of its weights, in a few words.
        mpp: micrometres per pixel of the tiles it was trained on, where known.
        tile_px: width of these tiles; input_px where not said.
        faster: the same network in a form that computes faster, made after its weights were hashed.
        reference: what :func:`load_encoder` takes to load it again; None for a module.
        device: as torch names it.
        precision: "float32", or "bfloat16" or "float16" for mixed precision.
    """

    def __init__(
        self,
        name: str,
        network: nn.Module,
        preprocessing: Preprocessing,
        *,
        licence: str = "unknown",
        mpp: float | None = None,
        tile_px: int | None = None,
        faster: Callable[[nn.Module], nn.Module] | None = None,
        reference: str | None = None,
        device: str | torch.device = "cpu",
        precision: str = "float32",
    ) -> None:
        self.name, self.preprocessing, self.licence, self.mpp = name, preprocessing, licence, mpp
        self.reference = reference
        self.input_px = preprocessing.input_px
        self.tile_px = tile_px or self.input_px
        self.device, self.precision = checked_device(device), precision
        if precision not in PRECISIONS:
            raise one_of("precision", precision, PRECISIONS)
        if precision == "float16" and self.device.type == "cpu":
            raise OptionError("precision 'float16' cannot be used on a CPU; take 'bfloat16' or 'float32'")
        network = network.eval().requires_grad_(False)
        weights = network.state_dict()  # as published, whatever the faster form makes of them
        self._network = (faster(network) if faster else network).to(self.device)
        self.dim = self._width()
        self.fingerprint = fingerprint(weights, preprocessing, self.dim)

    def encode(self, tiles: Tensor | NDArray[np.uint8]) -> Tensor:
        """Features of tiles of any one size: (b, h, w, 3) uint8 to (b, dim) float32 on the CPU."""
        tiles = torch.as_tensor(tiles)
        if tiles.ndim != 4 or tiles.shape[3] != 3 or tiles.dtype != torch.uint8:
            raise ShapeError(f"tiles must be (b, h, w, 3) uint8; these are {tuple(tiles.shape)} {tiles.dtype}")
        if not len(tiles):
            return torch.empty(0, self.dim)
        features = self._forward(tiles)
        if not bool(features.isfinite().all()):
            raise NonFiniteFeaturesError(
                f"encoder {self.name!r} gave features that are not finite in {self.precision}; take float32"
            )
        return features

    @torch.inference_mode()
    def _forward(self, tiles: Tensor) -> Tensor:
        dtype = PRECISIONS[self.precision]
        mixed = torch.autocast(self.device.type, dtype) if dtype else contextlib.nullcontext()
        with mixed:
            features = self._network(self.preprocessing(tiles.to(self.device, non_blocking=True)))
        return features.float().cpu()

    def _width(self) -> int:
        """Of the features, found by a white tile: a network that fails fails before slides are read."""
        white = torch.full((1, self.input_px, self.input_px, 3), 255, dtype=torch.uint8)
        features = self._forward(white)
        if features.ndim != 2 or len(features) != 1:
            shape = f"(1, 3, {self.input_px}, {self.input_px}) to {tuple(features.shape)}"
            raise ShapeError(f"encoder {self.name!r} turns {shape}; it must give one vector per tile, (b, dim)")
        return features.shape[1]


def checked_device(device: str | torch.device) -> torch.device:
    """OptionError where this computer does not have it."""
    try:
        checked = torch.device(device)
        torch.empty(0, device=checked)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise OptionError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return checked


def fingerprint(weights: Mapping[str, Tensor], preprocessing: Preprocessing, dim: int) -> str:
    """SHA-256 of what decides the features: names, shapes and bytes of the weights, preprocessing, width.

    The width tells encoders apart that read the same network in two ways. Device and precision are not part of it.
    """
    digest = hashlib.sha256(json.dumps(preprocessing.facts() | {"dim": dim}, sort_keys=True).encode())
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
