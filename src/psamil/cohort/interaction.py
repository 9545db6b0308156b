r"""Slides of two phenotypes that interact within a known range, or do not: nothing else tells these two classes apart.

Every slide has tiles of two rare phenotypes, A and B, in a tissue of others. In positive slides every A has a B within
``range_steps`` = r; in negative slides no A has one within 1.5 r + 0.5. All else is the same by construction:

- The outline, the number of tiles, a set p of positions, a near displacement 0.7 r < |v| <= r and another displacement
  w are drawn without looking at the label. p, p + v, p + w and p + v + w all lie in the tissue.
- A is p or p + w, and B is p + v or p + v + w, by the toss of a coin. In positive slides it is the same coin for both,
  in negative ones the opposite. So A alone, and B alone, are distributed in exactly the same way in both classes:
  relative to themselves and to the tissue. Only the displacement from A to B tells: v, or v + w or v - w.
- No A and B are nearer than r / 2 in positive slides: what sees less sees nothing.
- How many tiles of each phenotype a slide has depends on the number of its tiles alone.

A slide may have several such interactions, each of its own two phenotypes and with a range of its own, present or not.
Places that one of them could take, whatever its coins say, are not taken by another: the interactions are independent.

Slides are not matched in pairs: a model that remembers one of two twins would be wrong about the other, and a model
without spatial context would end below chance instead of at chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from psamil.errors import OptionError

NEAREST = 0.5  # distance that every A and B exceed, in ranges
SHORTEST = 0.7  # length that the displacement of interacting tiles exceeds, in ranges
OTHERS = (0.4, 0.3, 0.2, 0.1)  # shares of the phenotypes of the tissue around A and B
HOLES = 0.03  # share of the tissue that has no tile
ATTEMPTS = 30  # at least, and more for small tissues, where most of them fail but cost little
STRETCH = 2.2  # length of the smallest tissue in far distances

Cells = NDArray[np.int64]  # (n, 2) x and y of lattice cells


class Interaction(NamedTuple):
    """Of two phenotypes, in one slide."""

    range_steps: float
    present: bool


def draw_slide(
    n: int, interactions: Sequence[Interaction], phenotype_share: float, random: np.random.Generator
) -> tuple[Cells, NDArray[np.int64]]:
    """Lattice cells (n, 2) in rows, and the phenotype (n,) of each.

    A and B of the first interaction are 0 and 1, those of the second 2 and 3; other phenotypes follow.
    """
    count = max(1, round(phenotype_share * n))
    longest = max(interaction.range_steps for interaction in interactions)
    for _ in range(max(ATTEMPTS, 10_000 * ATTEMPTS // n)):
        cells = _tissue(n, longest, random)
        placed = _place_all(cells, count, interactions, random)
        if placed is None:
            continue
        where = _raster(cells)
        phenotypes = np.full(n, -1)
        for i, ((p, v, w), interaction) in enumerate(zip(placed, interactions, strict=True)):
            moved = int(random.integers(2))
            a, b = p + moved * w, p + v + (moved if interaction.present else 1 - moved) * w
            phenotypes[where[a[:, 1], a[:, 0]]] = 2 * i
            phenotypes[where[b[:, 1], b[:, 0]]] = 2 * i + 1
        rest = np.flatnonzero(phenotypes < 0)
        bounds = (np.cumsum(OTHERS)[:-1] * len(rest)).round()
        order = np.argsort(_smooth_field(cells, random)[rest])
        phenotypes[rest[order]] = 2 * len(interactions) + np.searchsorted(bounds, np.arange(len(rest)), side="right")
        return cells, phenotypes
    ranges = " and ".join(f"{interaction.range_steps:g}" for interaction in interactions)
    raise OptionError(
        f"{count} tiles of each phenotype do not fit on {n} tiles with a range of {ranges} steps; "
        "simulate more tiles, a smaller range_steps or a smaller phenotype_share"
    )


def _tissue(n: int, range_steps: float, random: np.random.Generator) -> Cells:
    """n cells of a smooth outline with some holes; long like a needle biopsy if it must be, to hold the distances."""
    radius = math.sqrt(n / math.pi)
    stretch = max(random.uniform(1, 1.3), STRETCH * _far(range_steps) / (2 * radius))
    size = math.ceil(1.6 * radius * stretch) + 2
    y, x = (axis.ravel() for axis in np.mgrid[-size : size + 1, -size : size + 1])
    turn = random.uniform(0, math.pi)
    along, across = x * math.cos(turn) + y * math.sin(turn), y * math.cos(turn) - x * math.sin(turn)
    angle, distance = np.arctan2(across * stretch, along / stretch), np.hypot(along / stretch, across * stretch)
    waves, phase = np.arange(2, 7), random.uniform(0, 2 * math.pi, 5)
    outline = 1 + (random.uniform(0, 0.3, 5) / waves * np.cos(waves * angle[:, None] + phase)).sum(1)
    inside = np.where(random.random(len(x)) < HOLES, np.inf, distance / outline)  # infinite in holes
    cells = np.stack([x, y], 1)[np.argsort(inside, kind="stable")[:n]]
    cells = cells[np.lexsort((cells[:, 0], cells[:, 1]))]
    return cells - cells.min(0)


def _place_all(
    cells: Cells, count: int, interactions: Sequence[Interaction], random: np.random.Generator
) -> list[tuple[Cells, Cells, Cells]] | None:
    """p, v and w of each interaction, in cells that no other can take; None if they do not fit."""
    placed: list[tuple[Cells, Cells, Cells]] = []
    for interaction in interactions:
        found = _place(cells, count, interaction.range_steps, random)
        if found is None:
            return None
        placed.append(found)
        p, v, w = found
        x, y = np.concatenate([p, p + v, p + w, p + v + w]).T
        cells = np.delete(cells, _raster(cells)[y, x], axis=0)
    return placed


def _place(
    cells: Cells, count: int, range_steps: float, random: np.random.Generator
) -> tuple[Cells, Cells, Cells] | None:
    """Positions p and the displacements v and w; None if all that is asked of them does not fit into the tissue."""
    near, far = NEAREST * range_steps, _far(range_steps)
    around = cells - random.choice(cells)  # displacements from some cell, so that they fit
    v_choices = around[_is_between(around, SHORTEST * range_steps, range_steps)]
    if not len(v_choices):
        return None
    v = random.choice(v_choices)
    w_choices = around[_is_between(around + v, far, 2 * far) & _is_between(around - v, far, 2 * far)]
    if not len(w_choices):
        return None
    across = abs(w_choices[:, 0] * v[1] - w_choices[:, 1] * v[0])
    w = random.choice(w_choices[across >= np.quantile(across, 0.8)])  # more positions fit if w is long and across v
    pad = math.ceil(4 * far) + 1
    tissue = np.pad(_raster(cells) >= 0, pad)
    free = np.logical_and.reduce([np.roll(tissue, -move[::-1], (0, 1)) for move in (0 * v, v, w, v + w)])
    discs = [_disc(near) + v, _disc(near) - v, *(_disc(far) + move for move in (v + w, v - w, -v - w, w - v))]
    too_close = np.unique(np.concatenate(discs), axis=0)
    placed: list[Cells] = []
    for cell in random.permutation(cells):
        x, y = cell + pad
        if free[y, x]:
            placed.append(cell)
            free[y, x] = False
            free[too_close[:, 1] + y, too_close[:, 0] + x] = False
            if len(placed) == count:
                return np.stack(placed), v, w
    return None


def _far(range_steps: float) -> float:
    """Distance that A and B exceed in negative slides."""
    return 1.5 * range_steps + 0.5


def _is_between(displacements: Cells, beyond: float, limit: float) -> NDArray[np.bool_]:
    length = np.hypot(*displacements.T)
    return np.asarray((length > beyond) & (length <= limit))


def _disc(radius: float) -> Cells:
    """All displacements that are not longer than the radius."""
    side = np.arange(-math.floor(radius), math.floor(radius) + 1)
    every = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
    return every[np.hypot(*every.T) <= radius]


def _raster(cells: Cells) -> Cells:
    """(height, width) index of the tile at each place, -1 where there is none."""
    raster = np.full(cells.max(0)[::-1] + 1, -1)
    raster[cells[:, 1], cells[:, 0]] = np.arange(len(cells))
    return raster


def _smooth_field(cells: Cells, random: np.random.Generator) -> NDArray[np.float64]:
    """(n,) values that differ little between neighbours."""
    width, height = cells.max(0) + 1
    field = gaussian_filter(random.standard_normal((height, width)), 2.0)
    return np.asarray(field[cells[:, 1], cells[:, 0]], dtype=np.float64)
