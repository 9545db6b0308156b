"""Input and weights without random numbers, and what torchmil makes of them: see make_torchmil_values.py."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# All of these tiles have neighbours: there torchmil and this package agree.
XY = torch.tensor([[0.0, 0], [1, 0], [2, 0], [2, 1], [3, 2], [0, 1], [4, 2]])
TORCHMIL_FILE = Path(__file__).with_name("torchmil_values.json")


def wave(*shape: int, k: float = 1.0) -> Tensor:
    return torch.sin(k * torch.arange(1, 1 + math.prod(shape), dtype=torch.float64)).reshape(shape)


def fill(parameters: Sequence[Tensor | None]) -> None:
    """Weights 0.5 wave(shape, k=i + 0.7), biases 0.3 wave(shape, k=i + 0.3); None is counted and left out."""
    for i, parameter in enumerate(parameters):
        if parameter is not None:
            size, shift = (0.5, 0.7) if parameter.ndim > 1 else (0.3, 0.3)
            parameter.data = size * wave(*parameter.shape, k=i + shift)


def by_torchmil(name: str) -> dict[str, Tensor]:
    stored: dict[str, dict[str, Any]] = json.loads(TORCHMIL_FILE.read_text())["values"]
    return {key: torch.tensor(value, dtype=torch.float64) for key, value in stored[name].items()}
