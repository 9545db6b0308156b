"""The figures of the paper from finished runs: one module for each, which writes PNG, SVG and the CSV behind them.

>>> FIGURES["figure-dynamics"]({"with": Path("runs/with"), "without": Path("runs/without")}, Path("figures"))
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from psamil.report.paper_figures.ablations import draw_ablations
from psamil.report.paper_figures.cost import draw_cost
from psamil.report.paper_figures.decays import draw_decays
from psamil.report.paper_figures.dynamics import draw_dynamics
from psamil.report.paper_figures.maps import draw_maps

FIGURES: dict[str, Callable[..., list[Path]]] = {
    "figure-cost": draw_cost,
    "figure-dynamics": draw_dynamics,
    **{
        name: partial(draw_ablations, name=name)
        for name in ("figure-alpha", "figure-tau", "figure-k-max", "figure-heads")
    },
    "figure-decays": draw_decays,
    "figure-maps": draw_maps,
}
"""By the name of their recipes: a function of named run directories and a folder, which returns the files it writes, a
PNG first. That of maps wants the tile labels as well."""
