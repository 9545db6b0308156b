"""A picture of where the tiles of some slides lie: unit mistakes and broken lattices show at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from psamil.errors import MissingExtraError
from psamil.files import atomic_write
from psamil.readers import BagSummary

COLUMNS = 3
MAX_SLIDES = 6
CLOSE_UP_STEPS = 12


def choose_slides(bags: Sequence[BagSummary]) -> list[BagSummary]:
    """A few slides with positions, spread over the range of sizes, odd ones first."""
    shown = sorted((bag for bag in bags if bag.xy is not None and bag.n), key=lambda bag: bag.n)
    if not shown:
        return []
    odd = [bag for bag in shown if bag.warnings or bag.duplicates or (bag.phases or 1) > 1][: MAX_SLIDES // 2]
    spread = np.linspace(0, len(shown) - 1, MAX_SLIDES).round().astype(int)
    others = [shown[i] for i in dict.fromkeys(spread.tolist()) if not any(shown[i] is bag for bag in odd)]
    return sorted([*odd, *others][:MAX_SLIDES], key=lambda bag: bag.ref.id)


def draw_lattices(bags: Sequence[BagSummary], path: Path) -> None:
    """Every slide twice: as a whole, and its crowded middle with tiles drawn as squares of one step."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PatchCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot", "a picture") from error
    rows = -(-len(bags) // COLUMNS)
    figure = Figure(figsize=(5.2 * COLUMNS, 3.0 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 2 * COLUMNS, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for i, bag in enumerate(bags):
        whole, close = axes[i // COLUMNS, 2 * (i % COLUMNS) : 2 * (i % COLUMNS) + 2]
        xy = bag.xy
        assert xy is not None
        assert bag.step is not None
        whole.scatter(*xy.T, s=min(6.0, 9000 / max(len(xy), 1)), color="0.35", linewidths=0, marker="s")
        middle = xy[np.argmin(np.abs(xy - np.median(xy, 0)).sum(1))]
        low = middle - CLOSE_UP_STEPS / 2
        near = xy[(np.abs(xy - middle) <= CLOSE_UP_STEPS / 2 + 1).all(1)]
        squares = PatchCollection(
            [Rectangle((x, y), 1, 1) for x, y in near], facecolor="C0", edgecolor="C0", alpha=0.35
        )
        close.add_collection(squares)
        close.set(xlim=(low[0], low[0] + CLOSE_UP_STEPS), ylim=(low[1] + CLOSE_UP_STEPS, low[1]), aspect="equal")
        frame = Rectangle(tuple(low), CLOSE_UP_STEPS, CLOSE_UP_STEPS, fill=False, edgecolor="C0")
        whole.add_patch(frame)
        whole.set_aspect("equal")
        whole.invert_yaxis()
        um = "" if bag.step.um is None else f" = {bag.step.um:.4g} um"
        name = bag.ref.id if len(bag.ref.id) <= 28 else f"{bag.ref.id[:25]}..."
        whole.set_title(f"{name}\n{bag.n:,} tiles", fontsize=9)
        close.set_title(
            f"{CLOSE_UP_STEPS} x {CLOSE_UP_STEPS} steps\nstep {bag.step.length:.4g} {bag.step.unit}{um}", fontsize=9
        )
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=120, format=path.suffix.lstrip(".") or "png")
