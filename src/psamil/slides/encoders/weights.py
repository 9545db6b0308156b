"""Weights from a file into a network: nothing in the file is run, and every tensor must find its place."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from psamil.errors import DataError

Weights = dict[str, Tensor]


def read_weights(path: Path) -> Weights:
    """Tensors by name, from safetensors or from what ``torch.save`` pickled."""
    try:
        content: dict[str, Any] = load_file(path) if path.suffix == ".safetensors" else _unpickled(path)
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror or error}", "check the path") from error
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(path, f"holds no weights that can be read safely ({cause})", "download it again") from error
    for part in ("model", "state_dict"):  # training code saves weights beside other things
        content = content[part] if isinstance(content.get(part), dict) else content
    weights = {str(name): tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}
    if not weights:
        raise DataError(path, "holds no tensors by name", "name the file with the weights of the network")
    return weights


def _unpickled(path: Path) -> dict[str, Any]:
    content = torch.load(path, map_location="cpu", weights_only=True)
    return content if isinstance(content, dict) else {}


def fill(network: nn.Module, weights: Weights) -> nn.Module:
    """The network with these weights. ValueError where they are not exactly those of the network.

    The network may have been made on torch's device "meta", where a billion parameters cost nothing.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    given = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    wrong = sorted(name for name in expected.keys() | given.keys() if expected.get(name) != given.get(name))
    if wrong:
        name = wrong[0]
        found = f"{given[name]}" if name in given else "missing"
        wanted = f"{expected[name]}" if name in expected else "unknown to the network"
        raise ValueError(f"{len(wrong)} of {len(expected)} tensors do not fit; {name!r} is {found}, expected: {wanted}")
    network.load_state_dict(weights, assign=True)
    return network.float()
