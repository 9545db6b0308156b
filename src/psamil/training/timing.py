"""What an epoch of training takes: seconds and memory, one line per epoch in a file of its own.

Times are never the same twice. All other files of a training are, whether it was stopped in between or not: that is why
these numbers are not in the history.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from psamil.files import atomic_write

TIMING_FILE = "timing.jsonl"


class Stopwatch:
    """Measures the epochs of one training in one folder, and goes on with what an earlier process measured there.

    Args:
        folder: of the training.
        device: that it trains on.
        epochs: that are finished; what the file says of later ones was never completed.
    """

    def __init__(self, folder: Path, device: torch.device, epochs: int = 0) -> None:
        self.path, self.device = folder / TIMING_FILE, device
        self._records = [record for record in read_timing(folder) if record["epoch"] < epochs]
        self.start()

    def start(self) -> None:
        """At the beginning of an epoch."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._began = time.perf_counter()

    def write(self, epoch: int) -> None:
        """At the end of an epoch, counted from 0."""
        seconds = time.perf_counter() - self._began
        self._records.append({"epoch": epoch, "seconds": seconds, "peak_memory_mb": self._peak_memory_mb()})
        with atomic_write(self.path) as temporary:
            temporary.write_text("".join(json.dumps(record) + "\n" for record in self._records))

    def _peak_memory_mb(self) -> float | None:
        """Of tensors on a GPU in this epoch; on a CPU, of this whole process since it began, where the system tells."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        try:
            import resource
        except ImportError:  # Windows
            return None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)


def read_timing(folder: Path) -> list[dict[str, Any]]:
    """One record per epoch that was measured: "epoch", "seconds", "peak_memory_mb"."""
    path = folder / TIMING_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]
