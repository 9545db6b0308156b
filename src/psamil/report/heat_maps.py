"""What models say of the tiles of a slide, as a picture: every tile is one square of one colour in its place.

Nothing is smoothed or moved. On an exact lattice a map is an image of one pixel per lattice cell, drawn without
interpolation, so that 200,000 tiles take no longer than 200. Elsewhere tiles are drawn as squares one by one. Where
tiles overlap, each is drawn in the middle of its own square, as large as the step to the next one.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from psamil.errors import MissingExtraError, OptionError, ShapeError, one_of
from psamil.explain.explaining import percentiles
from psamil.files import atomic_write
from psamil.readers import TilePlaces
from psamil.report.drawing import Figure, shortened, styled
from psamil.report.map_panels import Window, draw_colour_bar, draw_frames, draw_overview, draw_scale_bar, draw_tiles
from psamil.report.overviews import Overview

SCALES = ("raw", "percentile")
LABELS = {"raw": "score of a tile", "percentile": "percentile of a tile"}
FORMATS = (".png", ".svg")
COLOURS = "viridis"
CLIPPED = 0.005  # share of the tiles at either end that share one colour: a single odd tile does not darken a map
MAX_COLUMNS = 4  # panels side by side, the slide among them
PANEL_IN = 2.6  # width
LEAST_HEIGHT, MOST_HEIGHT = 0.5, 1.5  # of a panel, over its width
ROOM_FOR_SCALE = 0.09  # of the height, below tiles that have no slide around them
GAP_IN, TITLE_IN, LINE_IN, BAR_IN = 0.22, 0.34, 0.17, 0.42
LETTERS_PER_IN = 14
DPI, FILE_DPI, MOST_DPI = 170, 300, 600  # in a page, and in a file of its own
TILE_PX = 2  # that a tile gets in a file of its own, where MOST_DPI allows it


@dataclass(frozen=True, eq=False)
class ScoredPicture:
    """A slide, where its tiles are, and their scores by each run, model or head."""

    title: str
    places: TilePlaces
    scores: Mapping[str, NDArray[np.floating]]  # (n,) by the name of a run or head
    overview: Overview | None = None  # without one, tiles are drawn on white
    labelled: NDArray[np.bool_] | None = None  # (n,) tiles that an annotation covers; they get a frame
    notes: Mapping[str, str] = field(default_factory=dict)  # a line over the map of a run or head

    def __post_init__(self) -> None:
        n = len(self.places.corners)
        labels = {} if self.labelled is None else {"labels": self.labelled}
        for name, values in {**self.scores, **labels}.items():
            if np.shape(values) != (n,):
                raise ShapeError(f"{self.title}: {name!r} must be ({n},), one for each tile, got {np.shape(values)}")
        if self.overview is not None and not self.overview.has_place_in(self.places.unit):
            raise OptionError(f"{self.title}: tiles in {self.places.unit!r} have no known place on the slide")

    @property
    def um_per_unit(self) -> float | None:
        """Micrometres per unit of the places, where it is known."""
        known = self.places.um_per_unit
        return self.overview.mpp if known is None and self.overview is not None else known

    def window(self) -> Window:
        """What is drawn, in the unit of the places: all tiles, and the scanned area of the slide."""
        corners, size = self.places.corners, self.places.size
        ends = np.concatenate([corners.min(0), corners.max(0) + size]) if len(corners) else np.array([0, 0, size, size])
        if self.overview is not None:
            scanned = np.array(self.overview.extent_in(self.places.unit))
            ends = np.concatenate([np.minimum(ends, scanned)[:2], np.maximum(ends, scanned)[2:]])
        left, top, right, bottom = ends.tolist()
        if self.overview is None and self.um_per_unit is not None:
            bottom += ROOM_FOR_SCALE * (bottom - top)
        return left, top, right, bottom


def heat_maps(
    slides: Sequence[ScoredPicture],
    caption: str,
    *,
    title: str = "Slides and tile scores",
    scale: str = "raw",
    opacity: float | None = None,
) -> Figure:
    """One picture per slide: the slide, then a map per run. Colours of a run mean the same score in all of them.

    Args:
        slides: with scores by the same runs.
        caption: of all.
        title: of all.
        scale: "raw", or "percentile": the rank of a score among the tiles of its slide.
        opacity: 0 to 1, of tiles that are drawn over the slide, in grey; by default they are drawn on white.
    """
    limits = colour_limits(slides, scale)
    elements = []
    for slide in slides:
        drawn, kind = io.BytesIO(), "png" if slide.overview is None else "jpeg"
        with styled():
            canvas = _drawn(slide, limits, scale, opacity)
            canvas.savefig(drawn, dpi=DPI, format=kind, pil_kwargs={"quality": 88} if kind == "jpeg" else {})
        data = base64.b64encode(drawn.getvalue()).decode()
        width_px, alt = f"{canvas.get_figwidth() * 96:.0f}", html.escape(slide.title)
        elements.append(f'<img alt="{alt}" width="{width_px}" src="data:image/{kind};base64,{data}">')
    return Figure(title, caption, "\n".join(elements))


def save_heat_map(slide: ScoredPicture, path: Path, *, scale: str = "raw", opacity: float | None = None) -> None:
    """The same of one slide as a file, larger: ``.png``, or ``.svg`` in which texts stay texts."""
    if path.suffix.lower() not in FORMATS:
        raise OptionError(f"{path}: heat maps are files {' or '.join(FORMATS)}")
    limits = colour_limits([slide], scale)
    with styled(), atomic_write(path) as temporary:
        canvas = _drawn(slide, limits, scale, opacity)
        left, top, right, bottom = slide.window()
        tiles_across = max(right - left, bottom - top) / slide.places.size
        dpi = min(MOST_DPI, max(FILE_DPI, TILE_PX * tiles_across / PANEL_IN))
        canvas.savefig(temporary, dpi=dpi, format=path.suffix[1:].lower())


def colour_limits(slides: Sequence[ScoredPicture], scale: str = "raw") -> dict[str, tuple[float, float]]:
    """By run: the scores that get the first and the last colour. All but a few tiles lie between them."""
    if scale not in SCALES:
        raise one_of("scale", scale, SCALES)
    if scale == "percentile":
        return {run: (0.0, 100.0) for slide in slides for run in slide.scores}
    limits = {}
    for run in dict.fromkeys(run for slide in slides for run in slide.scores):
        every = np.concatenate([slide.scores[run] for slide in slides if run in slide.scores])
        finite = every[np.isfinite(every)]
        if not len(finite):
            limits[run] = (0.0, 1.0)
            continue
        low = float(np.quantile(finite, CLIPPED, method="lower"))
        high = float(np.quantile(finite, 1 - CLIPPED, method="higher"))
        limits[run] = (low, high) if low < high else (float(finite.min()), float(finite.max()))
    return limits


def _drawn(
    slide: ScoredPicture,
    limits: Mapping[str, tuple[float, float]],
    scale: str,
    opacity: float | None,
) -> Any:
    """On a canvas of matplotlib: panels in lines, each with its name above and its colour bar below."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot", "heat maps") from error
    if opacity is not None and not 0 <= opacity <= 1:
        raise OptionError(f"opacity must be between 0 and 1, got {opacity}")
    page = _Page(slide)
    canvas = Canvas(figsize=(page.width_in, page.height_in))
    FigureCanvasAgg(canvas)
    page.write(canvas, slide.title, GAP_IN, 0.08, size=10)
    for i, name in enumerate(page.names):
        x_in, y_in = page.corner_in(i)
        page.write(canvas, name or "slide", x_in, y_in)
        page.write(canvas, slide.notes.get(name or "", ""), x_in, y_in + LINE_IN, color="#5b616b")
        axis = page.axis(canvas, x_in, y_in + page.head_in, PANEL_IN, page.panel_height_in)
        left, top, right, bottom = page.window
        if slide.overview is not None and (name is None or opacity is not None):
            draw_overview(axis, slide.overview, slide.places.unit, under_tiles=name is not None)
        if name is not None:
            shown = slide.scores[name]
            if scale == "percentile":
                shown = percentiles(torch.from_numpy(np.asarray(shown))).numpy()
            colours = ScalarMappable(Normalize(*limits[name], clip=True), COLOURS)
            alpha = opacity if slide.overview is not None and opacity is not None else 1.0
            draw_tiles(axis, slide.places, colours.to_rgba(shown, alpha=alpha))
            bar = page.axis(canvas, x_in, y_in + page.head_in + page.panel_height_in + 0.17, PANEL_IN, 0.09)
            draw_colour_bar(bar, colours, LABELS[scale])
        if slide.labelled is not None:
            draw_frames(axis, slide.places, slide.labelled)
        if slide.um_per_unit is not None:
            draw_scale_bar(axis, page.window, slide.um_per_unit)
        axis.set(xlim=(left, right), ylim=(bottom, top), aspect="equal", anchor="NW")
        axis.set_axis_off()
    return canvas


class _Page:
    """Where panels lie on a canvas: in lines, each with its name above and its colour bar below."""

    def __init__(self, slide: ScoredPicture) -> None:
        self.window = left, top, right, bottom = slide.window()
        self.names: list[str | None] = [*([] if slide.overview is None else [None]), *slide.scores]  # None: the slide
        panels = max(1, len(self.names))
        self.columns = -(-panels // -(-panels // MAX_COLUMNS))  # lines of about equal length
        self.panel_height_in = PANEL_IN * min(max((bottom - top) / (right - left), LEAST_HEIGHT), MOST_HEIGHT)
        self.head_in = LINE_IN * (2 if slide.notes else 1) + 0.06
        self.line_in = self.head_in + self.panel_height_in + BAR_IN + GAP_IN
        self.width_in = GAP_IN + self.columns * (PANEL_IN + GAP_IN)
        self.height_in = TITLE_IN + -(-len(self.names) // self.columns) * self.line_in

    def corner_in(self, i: int) -> tuple[float, float]:
        """Of the place of a panel, from the upper left corner of the canvas."""
        line, column = divmod(i, self.columns)
        return GAP_IN + column * (PANEL_IN + GAP_IN), TITLE_IN + line * self.line_in

    def axis(self, canvas: Any, x_in: float, y_in: float, width_in: float, height_in: float) -> Any:
        """With this upper left corner."""
        bottom_in = self.height_in - y_in - height_in
        axis = canvas.add_axes(
            (x_in / self.width_in, bottom_in / self.height_in, width_in / self.width_in, height_in / self.height_in)
        )
        axis.grid(False)
        return axis

    def write(
        self, canvas: Any, text: str, x_in: float, y_in: float, *, size: float = 8.5, color: str = "#2b2f36"
    ) -> None:
        """As much of a line as there is room for; the title of a slide may be as wide as the canvas."""
        room_in = PANEL_IN if y_in >= TITLE_IN else self.width_in
        text = shortened(text, int(room_in * LETTERS_PER_IN))
        canvas.text(x_in / self.width_in, 1 - y_in / self.height_in, text, va="top", size=size, color=color)
