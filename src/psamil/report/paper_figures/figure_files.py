"""A figure as files: PNG, SVG, and the CSV of what it shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from psamil.errors import MissingExtraError
from psamil.evaluation.experiment import write_table
from psamil.files import atomic_write

DPI = 150
UNDATED = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}  # the same runs give the same bytes


def require_matplotlib() -> None:
    """MissingExtraError without it, before anything is computed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot", "figures") from error


def save_figure(canvas: Any, rows: Sequence[dict[str, Any]], out: Path, name: str) -> list[Path]:
    """OUT/<name>.png, .svg and .csv."""
    paths = [out / f"{name}.{ending}" for ending in (*UNDATED, "csv")]
    for path in paths[:-1]:
        kind = path.suffix[1:]
        with atomic_write(path) as temporary:
            canvas.savefig(temporary, dpi=DPI, format=kind, metadata=UNDATED[kind])
    write_table(paths[-1], pd.DataFrame(rows))
    return paths
