"""What training needs to go on as if it had never stopped: one file, tensors and JSON, no pickle.

Randomness needs no state: order, drawn tiles and dropout are seeded anew for every epoch and step. The file is written
atomically, so that there is always one whole state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from psamil.errors import DataError
from psamil.files import atomic_write


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """A safetensors file with ``about`` as JSON in its header."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    content = save(plain, metadata={"about": json.dumps(about)})  # its save_file makes files that only the owner reads
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)


def read_tensors(path: Path, remedy: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header. DataError with this remedy if the file is damaged or of another kind."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["about"])
            if not isinstance(about, dict):
                raise ValueError("its header is no mapping")
            return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError, KeyError, ValueError, RecursionError) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(path, f"is damaged, or no file of psamil ({cause})", remedy) from error


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of an optimiser as named tensors; its settings come from the settings of training."""
    state = optimizer.state_dict()["state"]
    return {f"{index}/{name}": torch.as_tensor(value) for index, of in state.items() for name, value in of.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, name = key.split("/")
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}:{name}": tensor for name, tensor in tensors.items()}


def without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(f"{prefix}:"): t for name, t in tensors.items() if name.startswith(f"{prefix}:")}
