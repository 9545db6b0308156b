"""Encoders by name, and :func:`load_encoder`, which finds every kind."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import torch
from torch import nn

from psamil.errors import DataError, OptionError, one_of
from psamil.slides.encoders.cards import EncoderCard
from psamil.slides.encoders.embedded import EFFICIENTNET_LITE0
from psamil.slides.encoders.encoder import Encoder
from psamil.slides.encoders.foundation import foundation_models
from psamil.slides.encoders.local import folder_network, python_network, timm_network
from psamil.slides.encoders.preprocessing import Preprocessing

DEFAULT_ENCODER = EFFICIENTNET_LITE0.name

_CARDS: dict[str, EncoderCard] = {}


def register_encoder(card: EncoderCard) -> EncoderCard:
    """Makes an encoder available under its name."""
    _CARDS[card.name] = card
    return card


for _card in [EFFICIENTNET_LITE0, *foundation_models()]:
    register_encoder(_card)


def list_encoders(pattern: str = "*") -> list[EncoderCard]:
    """What is known of the encoders whose names match a shell pattern, the embedded one first."""
    return [_CARDS[name] for name in fnmatch.filter(_CARDS, pattern)]


def load_encoder(
    encoder: str | Path | nn.Module,
    *,
    weights: str | Path | None = None,
    preprocessing: Preprocessing | None = None,
    device: str | torch.device = "cpu",
    precision: str = "float32",
) -> Encoder:
    """A frozen encoder, ready to use.

    Args:
        encoder: one of :func:`list_encoders`; "timm:NAME" for any network of timm; a folder with config.json and
            weights as timm writes it; "python:package.module:function" for a function that returns a module and its
            preprocessing; or a module that turns (b, 3, px, px) into (b, dim).
        weights: a file with the weights, safetensors or pickled, for an encoder by name or of timm.
        preprocessing: for a module, which does not say what it takes.
        device: as torch names it.
        precision: "float32", or "bfloat16" or "float16" for mixed precision.
    """
    path = None if weights is None else Path(weights)
    if isinstance(encoder, nn.Module):
        if preprocessing is None:
            raise OptionError("a module does not say what it takes: give preprocessing=Preprocessing(input_px, ...)")
        _refuse("weights", path, "a module has its weights")
        return Encoder(type(encoder).__name__, encoder, preprocessing, device=device, precision=precision)
    _refuse("preprocessing", preprocessing, "it is for modules; other encoders know theirs")
    reference = str(encoder)
    if reference in _CARDS:
        card = _CARDS[reference]
        return Encoder(
            card.name,
            card.build(path),
            card.preprocessing,
            licence=card.licence,
            mpp=card.mpp,
            tile_px=card.tile_px,
            faster=card.faster,
            reference=reference,
            device=device,
            precision=precision,
        )
    kind, _, rest = reference.partition(":")
    if kind == "timm":
        name, (network, how) = rest, timm_network(rest, path)
    else:
        _refuse("weights", path, "it is for encoders by name")
        if kind == "python":
            name, (network, how) = rest.rpartition(":")[2], python_network(rest)
        else:
            folder = _folder(encoder).resolve()  # found again from wherever features are made later
            name, reference, (network, how) = folder.name, str(folder), folder_network(folder)
    return Encoder(name, network, how, reference=reference, device=device, precision=precision)


def _refuse(what: str, given: object, why: str) -> None:
    if given is not None:
        raise OptionError(f"{what} cannot be given here: {why}")


def _folder(encoder: str | Path) -> Path:
    folder = Path(encoder)
    if folder.is_dir():
        return folder
    if folder.is_file():
        remedy = "name the encoder whose weights they are, and this file as its weights"
        raise DataError(folder, "is a file, which does not say what network its weights belong to", remedy)
    if isinstance(encoder, Path) or len(folder.parts) > 1:
        raise DataError(folder, "is no folder", "check the path")
    raise one_of("encoder", encoder, _CARDS)
