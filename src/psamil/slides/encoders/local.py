"""Encoders that have no card: networks of timm, folders on this computer, and what the user wrote."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from psamil.errors import DataError, OptionError, one_of
from psamil.files import read_json
from psamil.slides.encoders.hub import hub_file
from psamil.slides.encoders.preprocessing import Preprocessing
from psamil.slides.encoders.timm_package import import_timm

Network = tuple[nn.Module, Preprocessing]


def timm_network(name: str, weights: Path | None = None) -> Network:
    """A network of timm with its published weights, or with those of a file."""
    timm = import_timm()
    if not timm.is_model(name.split(".")[0]):
        raise one_of("network of timm", name, difflib.get_close_matches(name, timm.list_models(), n=8, cutoff=0))
    if weights is None:
        published = timm.get_pretrained_cfg(name)
        if not (published and published.hf_hub_id):
            raise OptionError(f"timm has no weights for {name!r}; name a file with its weights")
        full_name = f"{published.architecture}.{published.tag}" if published.tag else published.architecture
        repository = published.hf_hub_id + (full_name if published.hf_hub_id.endswith("/") else "")
        licence = published.license or "see that page"
        weights = hub_file(repository, "model.safetensors", licence=licence, gated=False)
    return _made(weights, name, pretrained_cfg_overlay={"file": str(weights)})


def folder_network(folder: Path) -> Network:
    """A folder with config.json and weights, as timm writes it and as it lies on the Hugging Face hub."""
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or "architecture" not in config:
        raise DataError(folder, "has a config.json without 'architecture'", "save the network with timm's save_for_hf")
    return _made(folder, f"local-dir:{folder}")


def _made(where: Path, name: str, **options: Any) -> Network:
    timm = import_timm()
    try:
        network = timm.create_model(name, pretrained=True, num_classes=0, **options)
    except (RuntimeError, OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(where, f"cannot be loaded by timm ({cause})", "check that weights and network fit") from error
    facts = network.pretrained_cfg
    bilinear = facts.get("interpolation") == "bilinear"
    input_px = facts["input_size"][-1]
    how = Preprocessing(input_px, tuple(facts["mean"]), tuple(facts["std"]), "bilinear" if bilinear else "bicubic")
    return network, how


def python_network(reference: str) -> Network:
    """What ``function()`` of ``package.module:function`` gives: a module and its :class:`Preprocessing`."""
    module_name, _, function_name = reference.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        remedy = "write python:package.module:function, with the package on PYTHONPATH"
        raise OptionError(f"encoder 'python:{reference}' is not found ({error}); {remedy}") from error
    made = function()
    if not (isinstance(made, tuple) and [type(made[-1]), len(made)] == [Preprocessing, 2]):
        raise OptionError(f"{reference} must return a torch module and its psamil.slides.encoders.Preprocessing")
    return made
