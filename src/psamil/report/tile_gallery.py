"""Tiles side by side, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psamil.errors import MissingExtraError
from psamil.files import atomic_write
from psamil.report.drawing import shortened, styled

COLUMNS = 6
TILE_IN = 1.45
DPI = 150


def save_tiles(tiles: Sequence[tuple[NDArray[np.uint8], str]], title: str, path: Path) -> None:
    """Pictures of tiles (h, w, 3), each with a caption of one or two lines, in rows. A PNG file."""
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot", "pictures of tiles") from error
    rows = -(-len(tiles) // COLUMNS)
    with styled(), atomic_write(path) as temporary:
        size = (TILE_IN * COLUMNS, (TILE_IN + 0.42) * rows + 0.3)
        canvas: Any = Canvas(figsize=size, layout="constrained")
        canvas.suptitle(shortened(title, 90), x=0.01, ha="left", fontsize=10)
        axes = list(canvas.subplots(rows, COLUMNS, squeeze=False).flat)
        for axis in axes:
            axis.set_axis_off()
        for axis, (pixels, caption) in zip(axes, tiles, strict=False):
            axis.imshow(pixels, interpolation="antialiased")
            axis.set_title(caption, fontsize=7.5)
        canvas.savefig(temporary, dpi=DPI, format="png")
