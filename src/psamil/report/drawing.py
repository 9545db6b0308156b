"""How figures of a report are drawn: colours, panels, and SVG that can stand inside a page."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

COLOURS = ("#0b6e99", "#d1495b", "#6a994e", "#8d6a9f", "#c98a00", "#4a4e69", "#2a9d8f", "#9c6644")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
GREY = "#8a8f98"
STYLE: dict[Any, Any] = {
    "axes.edgecolor": "#5b616b",
    "axes.grid": True,
    "axes.labelcolor": "#2b2f36",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.size": 9,
    "font.family": "sans-serif",
    "grid.color": "#e6e8ec",
    "grid.linewidth": 0.7,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",  # text stays text: small files, and readers can select it
    "svg.hashsalt": "psamil",  # the same runs give the same bytes
    "text.parse_math": False,  # names of runs may hold dollar signs
    "xtick.color": "#5b616b",
    "ytick.color": "#5b616b",
}
PANEL = (3.25, 3.1)  # inches
LEGEND_LINES, LEGEND_LINE_IN = 4, 0.18  # that a panel has room for, and the height of one
MAX_COLUMNS = 3


@dataclass(frozen=True)
class Figure:
    """An SVG or image element with what it shows."""

    title: str
    caption: str
    element: str


def panels(count: int, **options: Any) -> tuple[Any, list[Any]]:
    """A canvas with so many axes in rows."""
    from matplotlib.figure import Figure as Canvas

    columns = min(count, MAX_COLUMNS)
    rows = -(-count // columns)
    canvas = Canvas(figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained")
    axes = list(canvas.subplots(rows, columns, squeeze=False, **options).flat)
    for unused in axes[count:]:
        unused.set_axis_off()
    return canvas, axes[:count]


def legend_below(canvas: Any, axis: Any) -> None:
    """The legend of an axis, under the picture and as wide as it. The canvas grows with a long one."""
    handles, labels = axis.get_legend_handles_labels()
    width, height = canvas.get_size_inches()
    columns = max(1, min(len(labels), int(width * 14 / (max(map(len, labels)) + 6))))
    more_lines = max(0, -(-len(labels) // columns) - LEGEND_LINES)
    canvas.set_size_inches(width, height + LEGEND_LINE_IN * more_lines)
    canvas.legend(handles, labels, loc="outside lower center", ncols=columns)


def legend_label(name: str) -> str:
    """Matplotlib keeps names that begin with an underscore out of legends."""
    return "\u200b" + shortened(name) if name.startswith("_") else shortened(name)


def shortened(name: str, length: int = 44) -> str:
    """With an ellipsis, where it is longer."""
    return name if len(name) <= length else f"{name[: length - 1]}…"


def colour(i: int) -> str:
    """Of the run or head of this number."""
    return COLOURS[i % len(COLOURS)]


def dash(i: int) -> Any:
    """Lines can be told apart without colour, too."""
    return DASHES[i % len(DASHES)]


@contextmanager
def styled() -> Iterator[None]:
    """What is drawn inside has our style."""
    from matplotlib import rc_context

    with rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the browser has more fonts
        yield


def figure(title: str, caption: str, canvas: Any, prefix: str) -> Figure:
    """What was drawn, as SVG; the prefix tells its ids from those of other figures of the page."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    drawn = io.StringIO()
    FigureCanvasSVG(canvas).print_svg(drawn, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return Figure(title, caption, _inline(drawn.getvalue(), prefix, title))


def _inline(svg: str, prefix: str, title: str) -> str:
    """The element alone, without names of outside schemas, and with ids that no other figure of the page has."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", head) + f' role="img" aria-label="{title}"'
    svg = f"{head}>{rest}"
    svg = re.sub(r'(\sid=")', rf"\g<1>{prefix}-", svg)
    return re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{prefix}-", svg).replace("xlink:href", "href")
