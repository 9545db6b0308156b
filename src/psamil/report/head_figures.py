"""What the heads of an explanation look at: their priors, how alike they are, and where a single tile looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from psamil.bag import Bag
from psamil.errors import MissingExtraError
from psamil.explain import Explanation, Head
from psamil.files import atomic_write
from psamil.report.drawing import colour, dash, shortened, styled
from psamil.spatial import PosteriorRow

DPI = 150
PANEL_IN = 2.3
COLOURS = "viridis"
OTHER_TILE = "#e6e8ec"  # a tile in the window that is beyond the radius
MARGIN_STEPS = 1.2  # around the circle of a head
PARTS = ("prior", "likelihood", "posterior")


@dataclass(frozen=True, eq=False)
class Surroundings:
    """The slide around a tile: a square of pixels whose middle is the middle of the tile."""

    pixels: NDArray[np.uint8]  # (h, h, 3)
    half_side_steps: float


def save_priors(explanation: Explanation, path: Path) -> None:
    """A row for each layer: the learned priors with their radii, and the similarity of the heads. A PNG or SVG file."""
    layers = sorted({head.layer for head in explanation.heads})
    with styled():
        canvas = _canvas(7.6, 2.9 * len(layers))
        axes = canvas.subplots(len(layers), 2, squeeze=False, width_ratios=(2.2, 1))
        for layer, (curves, matrix) in zip(layers, axes, strict=True):
            heads = [head for head in explanation.heads if head.layer == layer]
            _draw_priors(curves, heads, explanation.bag.step_um)
            assert explanation.similarity is not None
            _draw_similarity(matrix, explanation.similarity[layer])
            if len(layers) > 1:
                curves.set_title(f"Learned prior of each head, layer {layer + 1}")
        _save(canvas, path)


def _draw_priors(axis: Any, heads: Sequence[Head], step_um: float | None) -> None:
    farthest = 1.08 * max(head.radius_steps for head in heads)
    for i, head in enumerate(heads):
        radius_um = head.radius_um(step_um)
        length = f"{head.radius_steps:.1f} steps" + ("" if radius_um is None else f" = {radius_um:.0f} µm")
        d = torch.linspace(0, head.radius_steps, 200)
        prior = head.prior_curve(d)
        name = f"head {head.head + 1}: radius {length}"
        axis.plot(d, prior, color=colour(i), linestyle=dash(i), label=name)
        axis.plot([head.radius_steps] * 2, [0, prior[-1]], color=colour(i), linewidth=1)
        axis.plot([head.radius_steps], [prior[-1]], "o", color=colour(i), markersize=4)
    axis.set(xlim=(0, farthest), ylim=(0, 1.03), xlabel="distance in tile steps", ylabel="prior of a tile")
    axis.set_title("Learned prior of each head")
    axis.legend(loc="upper right")
    if step_um is not None:
        above = axis.secondary_xaxis("top", functions=(lambda d: d * step_um, lambda um: um / step_um))
        above.tick_params(labelsize=8)
        axis.text(1.01, 1.035, "µm", transform=axis.transAxes, fontsize=8, color="#2b2f36")


def _draw_similarity(axis: Any, similarity: torch.Tensor) -> None:
    """1 / mean distance of the outputs; nothing on the diagonal, where it is infinite."""
    shown = similarity.numpy().copy()
    np.fill_diagonal(shown, np.nan)
    axis.imshow(shown, cmap="Blues", vmin=0, vmax=1.7 * np.nanmax(shown) if len(shown) > 1 else 1.0)
    names = [str(h + 1) for h in range(len(shown))]
    axis.set_xticks(range(len(shown)), names)
    axis.set_yticks(range(len(shown)), names)
    axis.set(xlabel="head", ylabel="head")
    axis.set_title("Similarity of heads")
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)
    for (a, b), value in np.ndenumerate(shown):
        text = f"{value:.2g}" if np.isfinite(value) else "–"
        axis.text(b, a, text, ha="center", va="center", color="#20242b", fontsize=8)


def save_posterior(
    explanation: Explanation, tile: int, path: Path, surroundings: Surroundings | None = None, title: str = ""
) -> None:
    """Where a tile looks: a row for each head; prior, likelihood and posterior side by side. A PNG or SVG file.

    The circle is the radius of the head. Each panel has its own colours, from 0 to its largest share.
    """
    rows = explanation.rows(tile)
    columns = len(PARTS) + (surroundings is not None)
    with styled():
        canvas = _canvas(PANEL_IN * columns, (PANEL_IN + 0.42) * len(rows) + 0.3)
        canvas.suptitle(shortened(title or f"{explanation.bag.id}, tile {tile}", 80), x=0.01, ha="left", fontsize=10)
        parts = canvas.subfigures(len(rows), 1, squeeze=False)[:, 0]
        for part, head, row in zip(parts, explanation.heads, rows, strict=True):
            part.suptitle(_about(head, row, explanation.bag), x=0.01, ha="left", fontsize=9)
            axes = list(part.subplots(1, columns))
            half = head.radius_steps + MARGIN_STEPS
            if surroundings is not None:
                _draw_surroundings(axes.pop(0), surroundings, half, head)
            for axis, name in zip(axes, PARTS, strict=True):
                _draw_row(axis, explanation.bag, row, getattr(row, name).numpy(), name, half, head)
        _save(canvas, path)


def _about(head: Head, row: PosteriorRow, bag: Bag) -> str:
    radius_um = head.radius_um(bag.step_um)
    length = f"{head.radius_steps:.1f} steps" + ("" if radius_um is None else f" = {radius_um:.0f} µm")
    return f"{head.name}: radius {length}; {len(row.neighbours)} tiles inside, effectively {row.perplexity:.1f}"


def _draw_row(
    axis: Any, bag: Bag, row: PosteriorRow, values: NDArray[np.float64], name: str, half: float, head: Head
) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    slide = int(torch.searchsorted(bag.slides, row.query, right=True)) - 1
    around = (bag.xy[bag.slides[slide] : bag.slides[slide + 1]] - bag.xy[row.query]).double().numpy()
    shown = around[(np.abs(around) <= half + 1).all(1)]
    _squares(axis, shown, OTHER_TILE)
    near = (bag.xy[row.neighbours] - bag.xy[row.query]).double().numpy()
    order = values.argsort()  # where tiles overlap, the strongest is on top
    _squares(axis, near[order], ScalarMappable(Normalize(0, values.max()), COLOURS).to_rgba(values[order]))
    axis.set_title(f"{name}, up to {100 * values.max():.2g} %", fontsize=8.5)
    _finish(axis, half, head)


def _squares(axis: Any, centres: NDArray[np.float64], colours: Any) -> None:
    """Of one step around each place."""
    from matplotlib.collections import PolyCollection

    corners = centres[:, None] + np.array([[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]])
    axis.add_collection(PolyCollection(list(corners), facecolors=colours, edgecolors="white", linewidths=0.3))


def _draw_surroundings(axis: Any, surroundings: Surroundings, half: float, head: Head) -> None:
    far = surroundings.half_side_steps
    axis.imshow(surroundings.pixels, extent=(-far, far, far, -far), interpolation="antialiased")
    axis.set_title("slide", fontsize=8.5)
    _finish(axis, half, head)


def _finish(axis: Any, half: float, head: Head) -> None:
    """The circle of the radius, the frame of the tile, and the same window in all panels of a head."""
    from matplotlib.patches import Circle, Rectangle

    axis.add_patch(Circle((0, 0), head.radius_steps, fill=False, edgecolor="#e4002b", linewidth=1.1))
    axis.add_patch(Rectangle((-0.5, -0.5), 1, 1, fill=False, edgecolor="#e4002b", linewidth=1.1))
    axis.set(xlim=(-half, half), ylim=(half, -half), aspect="equal")
    axis.set_axis_off()


def _canvas(width_in: float, height_in: float) -> Any:
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot", "pictures of heads") from error
    return Canvas(figsize=(width_in, height_in), layout="constrained")


def _save(canvas: Any, path: Path) -> None:
    with atomic_write(path) as temporary:
        canvas.savefig(temporary, dpi=DPI, format=path.suffix[1:].lower())
