"""A slide beside what models say of its tiles: every tile is one square of one colour, nothing is smoothed."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psamil.errors import MissingExtraError
from psamil.report.drawing import Figure, shortened, styled

PANEL_IN = 2.9
DPI = 170
COLOURS = "viridis"
SCALE_BAR_SHARE = 0.3  # of the width of a slide, at most


@dataclass(frozen=True, eq=False)
class ScoredPicture:
    """A slide, where its tiles are, and their scores by each run."""

    title: str
    overview: NDArray[np.uint8]  # (h, w, 3) the whole slide
    size_um: tuple[float, float]  # width and height of what the overview shows
    corners_um: NDArray[np.float64]  # (n, 2) upper left corners of the tiles
    tile_um: float
    scores: Mapping[str, NDArray[np.floating]]  # (n,) by the name of a run
    labelled: NDArray[np.bool_] | None = None  # (n,) tiles that an annotation covers; they get a frame


def heat_maps(slides: Sequence[ScoredPicture], caption: str) -> Figure:
    """One row per slide: the slide, then a heat map per run. Colours of a run mean the same score in all rows."""
    with styled():
        canvas = _drawn(slides)
        drawn = io.BytesIO()
        canvas.savefig(drawn, dpi=DPI, format="jpeg", pil_kwargs={"quality": 88})
    picture = base64.b64encode(drawn.getvalue()).decode()
    title = "Slides and tile scores"
    width_px = f"{canvas.get_figwidth() * 96:.0f}"
    return Figure(title, caption, f'<img alt="{title}" width="{width_px}" src="data:image/jpeg;base64,{picture}">')


def save_heat_map(slide: ScoredPicture, path: Path) -> None:
    """The same of one slide, as a PNG file, larger."""
    with styled():
        _drawn([slide], panel_in=2 * PANEL_IN).savefig(path, dpi=DPI, format="png")


def _drawn(slides: Sequence[ScoredPicture], panel_in: float = PANEL_IN) -> Any:
    """On a canvas of matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot", "heat maps") from error
    runs = list(slides[0].scores)
    canvas = Canvas(figsize=(panel_in * (1 + 1.12 * len(runs)), panel_in * 1.05 * len(slides)), layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.subplots(len(slides), 1 + len(runs), squeeze=False)
    for row, slide in zip(axes, slides, strict=True):
        width, height = slide.size_um
        row[0].imshow(slide.overview, extent=(0, width, height, 0), interpolation="antialiased")
        row[0].set_title(shortened(slide.title))
        _scale_bar(row[0], width, height)
        for axis in row:
            axis.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
            axis.set_axis_off()
    for i, run in enumerate(runs, start=1):
        every = np.concatenate([slide.scores[run] for slide in slides])
        colours = ScalarMappable(Normalize(float(every.min()), float(every.max())), COLOURS)
        for row, slide in zip(axes, slides, strict=True):
            _draw_tiles(row[i], slide, colours.to_rgba(slide.scores[run]))
        axes[0, i].set_title(shortened(run))
        bar = canvas.colorbar(colours, ax=list(axes[:, i]), shrink=0.6, aspect=40)
        bar.set_label("score of a tile")
        bar.outline.set_visible(False)
    for row, slide in zip(axes, slides, strict=True):
        if slide.labelled is not None:
            for axis in row:
                _outline(axis, slide)
    return canvas


def _draw_tiles(axis: Any, slide: ScoredPicture, colours: Any) -> None:
    from matplotlib.collections import PolyCollection

    square = np.array([[0, 0], [1, 0], [1, 1], [0, 1]]) * slide.tile_um
    squares = slide.corners_um[:, None] + square  # (n, 4, 2)
    axis.add_collection(PolyCollection(list(squares), facecolors=colours, edgecolors="none", antialiaseds=False))


def _outline(axis: Any, slide: ScoredPicture) -> None:
    """The edges of labelled tiles that no two of them share."""
    assert slide.labelled is not None
    size = slide.tile_um
    lattice = {tuple(corner) for corner in np.round(slide.corners_um[slide.labelled] / size, 3).tolist()}
    for x, y in lattice:
        for (u, v), (start, end) in {
            (0, -1): ((0, 0), (1, 0)),
            (0, 1): ((0, 1), (1, 1)),
            (-1, 0): ((0, 0), (0, 1)),
            (1, 0): ((1, 0), (1, 1)),
        }.items():
            if (round(x + u, 3), round(y + v, 3)) not in lattice:
                across = [(x + start[0]) * size, (x + end[0]) * size]
                down = [(y + start[1]) * size, (y + end[1]) * size]
                axis.plot(across, down, color="#d1495b", linewidth=1.2, solid_capstyle="projecting")


def _scale_bar(axis: Any, width_um: float, height_um: float) -> None:
    """Of 1, 2 or 5 times a power of ten of millimetres."""
    largest_mm = SCALE_BAR_SHARE * width_um / 1000
    power = 10.0 ** math.floor(math.log10(largest_mm))
    length_mm = power * max(step for step in (1, 2, 5) if step * power <= largest_mm)
    left, bottom = 0.04 * width_um, 0.965 * height_um
    axis.plot([left, left + 1000 * length_mm], [bottom, bottom], color="#20242b", linewidth=2, solid_capstyle="butt")
    axis.text(left, bottom - 0.015 * height_um, f"{length_mm:g} mm", fontsize=8, va="bottom")
