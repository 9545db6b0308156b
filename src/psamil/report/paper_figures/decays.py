r"""The decays f(d | theta): with the same radius K, where they are cut, and with the same theta."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from psamil.report.drawing import GREY, colour, dash, legend_below, panels, styled
from psamil.report.paper_figures.figure_files import require_matplotlib, save_figure
from psamil.report.paper_figures.log_axis import write_powers
from psamil.spatial.decays import DECAYS

TAU = 1e-3
RADIUS_STEPS, THETA = 7.0, 1.0
POINTS = 281
FORMULAS = {"exponential": "exp(−λd)", "gaussian": "exp(−d²/2σ²)", "cauchy": "1/(1+d²/γ²)"}


def draw_decays(runs: Mapping[str, Path], out: Path, *, tau: float = TAU) -> list[Path]:
    """Writes figure-decays. It needs no runs."""
    require_matplotlib()
    same_k = [("same K", name, float(DECAYS[name].theta_of_radius(_number(RADIUS_STEPS), tau))) for name in DECAYS]
    same_theta = [("same θ", name, THETA) for name in DECAYS]
    rows: list[dict[str, Any]] = []
    with styled():
        canvas, (linear, logarithmic, other) = panels(3)
        for axes, curves in (((linear, logarithmic), same_k), ((other,), same_theta)):
            for i, (which, name, theta) in enumerate(curves):
                radius = float(DECAYS[name].radius(_number(theta), tau))
                d = torch.linspace(0, radius, POINTS, dtype=torch.float64)
                prior = DECAYS[name].log_prior(d.square(), _number(theta)).exp()
                label = f"{name}: {FORMULAS[name]}"
                for axis in axes:
                    axis.plot(d, prior, color=colour(i), linestyle=dash(i), label=label)
                    axis.plot([radius], [tau], "o", color=colour(i), markersize=4)
                rows += [
                    {"panel": which, "decay": name, "theta": theta, "radius_steps": radius, "d_steps": x, "prior": y}
                    for x, y in zip(d.tolist(), prior.tolist(), strict=True)
                ]
        for axis in (logarithmic, other):
            axis.axhline(tau, color=GREY, linewidth=0.8)
            axis.set_yscale("log")
            write_powers(axis.yaxis)
        linear.set_title(f"Same radius K = {RADIUS_STEPS:g}")
        logarithmic.set_title(f"The same, down to τ = {tau:g}")
        other.set_title(f"Same λ = σ = γ = {THETA:g}")
        for axis in (linear, logarithmic, other):
            axis.set(xlabel="distance d (tile steps)", ylabel="prior f(d)", xlim=(0, None))
        legend_below(canvas, linear)
        return save_figure(canvas, rows, out, "figure-decays")


def _number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
