r"""Coordinates of a file become positions in tile steps: neighbouring tiles are 1 apart.

What metadata say about the distance of neighbouring tiles is often absent or wrong (an overlap that was not written
down, a size at another magnification), so the tiles themselves are asked. The first rule that holds decides:

1. "metadata": half of the tiles have a neighbour where the metadata say, and no finer lattice lies between them;
2. "measured": half of the tiles have a neighbour at one and the same distance, other neighbours lie at multiples of it,
   and rows go on;
3. "sub-sampled lattice": tiles lie whole steps of the metadata apart, though few are direct neighbours; with a warning
   if there are so few tiles that this can be chance;
4. "metadata": the tiles are too few to speak against the metadata; with a warning;
5. "common divisor": all differences of whole-number coordinates are multiples of one length; with a warning;
6. "measured": as 2, without rows; else the bag is refused, and the user can give the step.

Notable:

- Distance is the larger of \|dx\| and \|dy\|, since tiles are squares along the axes: a checkerboard or a diagonal
  shows the step of its lattice.
- Positions are not rounded. Tools that tile each piece of tissue from its own corner make several lattices of different
  phase, and distances between pieces need the phase. Where pieces touch, tiles are nearer than a step; rows tell this
  from a finer lattice, since they go on at a step but not at the distance of two phases.
- Only the rounding that a file itself has done is undone: if all tiles lie within rounding of a single lattice (steps
  of 511 and 512 px by turns), positions are whole numbers and the length of the step is fitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial import KDTree

from psamil.bag import TileStep
from psamil.errors import DataError, OptionError

MAX_ASKED = 20_000  # tiles that are asked for their neighbours, drawn from larger bags
NEIGHBOURS = 12  # per tile; those on its own lattice are among them even where three phases overlap
TOLERANCE = 0.02  # of a step, for a distance to count as this step
MIN_SUPPORT = 0.5  # share of the tiles with a neighbour at the step
MIN_WHOLE = 0.4  # share of all neighbours that lie whole steps apart: 1/2 with two phases, 1/4 at twice the true step
MIN_WHOLE_NEAREST = 0.9  # the same of the nearest neighbours, in a sub-sampled bag
MIN_ROWS = 0.05  # share of the tiles at the step whose row goes on; none does at the distance of two phases
FEW_TILES = 16  # fewer agree on a wrong distance by chance
MIN_STEP_PX = 32  # shorter lengths divide whole pixels by chance
UNITS = {"px0": "level-0 px", "um": "µm", "px": "px", "steps": "steps"}

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Positions:
    """Where the tiles of a bag are, and how that was found out."""

    xy: Array  # (n, 2) in tile steps, from the smallest x and y; whole numbers on a single lattice
    step: TileStep
    duplicates: int = 0  # tiles that share their position with an earlier one
    phases: int | None = None  # distinct offsets of the lattices of tissue pieces; None: no lattice was looked for
    warnings: tuple[str, ...] = ()  # whole sentences that a user can act on


class _Found(NamedTuple):
    length: float
    source: str
    support: float = 1.0
    warning: str = ""


def place_tiles(
    coords: ArrayLike,
    *,
    name: object,
    unit: str = "px0",
    nominal_step: float | None = None,
    tile_size: float | None = None,
    mpp: float | None = None,
    continuous: bool = False,
    given_step: float | None = None,
    um_per_step: float | None = None,
) -> Positions:
    """Positions of tiles in tile steps.

    Args:
        coords: (n, 2) x, y of one point of each tile (always its corner, or always its centre), in ``unit``.
        name: of the file, for errors.
        unit: of all lengths: "px0" (level-0 pixels), "um", "px" (pixels of an unknown level) or "steps".
        nominal_step: distance of neighbouring tiles that the metadata imply; default: ``tile_size``.
        tile_size: side of a tile.
        mpp: micrometres per level-0 pixel.
        continuous: cells or spots anywhere: one step is ``nominal_step``, or the median distance to the nearest.
        given_step: the user's word for the step; it is obeyed.
        um_per_step: physical positions: one step is this many micrometres, whatever the distance of the tiles.

    Raises:
        DataError: coordinates that are not finite, a step that cannot be found, micrometres without mpp.
    """
    for option, value in (("step", given_step), ("um_per_step", um_per_step)):
        if value is not None and not _is_length(value):
            raise OptionError(f"{option} must be a positive length, got {value}")
    if given_step is not None and um_per_step is not None:
        raise OptionError("step and um_per_step cannot both be given; um_per_step alone defines physical positions")
    coords = _checked(coords, name)
    distinct = np.unique(coords.view(np.complex128)).view(np.float64).reshape(-1, 2)  # much faster than by rows
    duplicates, warnings = len(coords) - len(distinct), []
    if duplicates > 0.1 * len(coords):
        share = f"{duplicates} of {len(coords)} tiles share a position with an earlier tile"
        warnings.append(f"{share}; check that the features were not written twice.")

    if um_per_step is not None:
        step = TileStep(um_per_step, "um", "given", mpp=mpp)
        xy = _from_corner(_micrometres(coords, unit, mpp, name)) / um_per_step
        return Positions(xy, step, duplicates, warnings=tuple(warnings))

    nominal = tile_size if nominal_step is None and not continuous else nominal_step
    nominal = 1.0 if nominal is None and unit == "steps" else nominal
    if nominal is not None and not _is_length(nominal):
        warnings.append(f"The metadata give {nominal} as distance of neighbouring tiles, which is ignored.")
        nominal = None
    if given_step is not None:
        found = _given(distinct, given_step, unit, continuous)
    elif len(distinct) < 2:
        found = _single_tile(len(coords), nominal)
        unit = unit if nominal else "steps"  # so that nobody reads micrometres from it
    elif continuous:
        found = _Found(nominal, "metadata") if nominal else _spacing(distinct)
    else:
        found = _lattice_step(distinct, nominal, unit, name)

    xy, length = _from_corner(coords) / found.length, found.length
    if not continuous and given_step is None and len(distinct) > 1:
        xy, length = _without_rounding(coords, length)
    overlap = 1 - length / tile_size if tile_size and _is_length(tile_size) and not continuous else None
    step = TileStep(float(length), unit, found.source, found.support, mpp, overlap)
    warnings += [found.warning] if found.warning else []
    return Positions(xy, step, duplicates, None if continuous else _count_phases(xy), tuple(warnings))


def _lattice_step(xy: Array, nominal: float | None, unit: str, name: object) -> _Found:
    """The step by the rules above, for two or more distinct tiles."""
    nearby = _Neighbours(xy)
    measured = nearby.measured_step()
    said = "do not say it" if nominal is None else f"say {_text(nominal, unit)}"
    if nominal is not None and nearby.agree_on(nominal):
        confirmed = nearby.median_near(nominal)
        if measured is None or measured > (1 - TOLERANCE) * confirmed:
            return _Found(confirmed, "metadata", nearby.support(nominal))
    if nominal is not None and measured is None:
        share, length = nearby.sub_sampled(nominal)
        warning = (
            f"{len(xy)} tiles are too few to check the distance of neighbouring tiles: the metadata {said}, which is "
            "used; give it with `step=` if that is wrong."
        )
        if share >= MIN_WHOLE_NEAREST and (nominal >= MIN_STEP_PX or unit not in ("px", "px0")):
            return _Found(length, "sub-sampled lattice", share, warning if len(xy) < FEW_TILES else "")
        if len(xy) < FEW_TILES:
            return _Found(nominal, "metadata", nearby.support(nominal), warning)
    if measured is None and (divisor := _common_divisor(xy)) >= max(nominal or 0, MIN_STEP_PX):
        warning = (
            f"The distance of neighbouring tiles was taken as {_text(divisor, unit)}, the largest length that divides "
            f"all differences of coordinates (the metadata {said}); give it with `step=` if that is wrong."
        )
        return _Found(divisor, "common divisor", warning=warning)
    measured = measured or nearby.measured_step(min_rows=0.0)
    if measured is not None:
        support = nearby.support(measured)
        warning = (
            f"{support:.0%} of the tiles have a neighbour at {_text(measured, unit)}, which is taken as the tile step, "
            f"but the metadata {said}; give it with `step=` if that is wrong."
        )
        return _Found(measured, "measured", support, warning if nominal is not None else "")
    common = nearby.common_distances(3, nearest_only=True)
    seen = ", ".join(f"{_text(length, unit)} ({nearby.support(length):.0%} of the tiles)" for length in common)
    raise DataError(
        name,
        f"the distance of neighbouring tiles is unclear: {len(xy)} tiles, most often at {seen}; the metadata {said}",
        "give it with `step=`, or say `continuous=True` if these are cells or spots rather than tiles",
    )


class _Neighbours:
    """The nearest tiles of each tile, and what they say about a step; ``xy`` (n, 2) are distinct and sorted, n > 1."""

    def __init__(self, xy: Array) -> None:
        drawn = np.random.default_rng(0).permutation(len(xy))[:MAX_ASKED]
        self.xy, self.tree = xy[drawn], KDTree(xy)
        others = list(range(2, min(NEIGHBOURS + 1, len(xy)) + 1))  # the first is the tile itself
        distances, index = self.tree.query(self.xy, k=others, p=math.inf)
        self.distances: Array = np.asarray(distances)  # (asked, neighbours), rising
        self.vectors: Array = xy[np.asarray(index)] - self.xy[:, None]  # (asked, neighbours, 2)

    def near(self, length: float) -> NDArray[np.bool_]:
        return np.abs(self.distances / length - 1) <= TOLERANCE

    def median_near(self, length: float) -> float:
        return float(np.median(self.distances[self.near(length)]))

    def support(self, length: float) -> float:
        """Share of the tiles that have a neighbour at this distance."""
        return float(self.near(length).any(1).mean())

    def whole_steps(self, length: float) -> tuple[Array, NDArray[np.bool_]]:
        """Each vector in whole steps (asked, neighbours, 2), and whether it is that, and not zero."""
        steps = np.rint(self.vectors / length)
        return steps, (np.abs(self.vectors / length - steps).max(2) <= 0.05) & (np.abs(steps).max(2) > 0)

    def agree_on(self, length: float) -> bool:
        """Whether enough tiles have a neighbour at this distance, and enough neighbours lie at multiples of it."""
        enough = self.support(length) >= MIN_SUPPORT
        return enough and bool(self.whole_steps(self.median_near(length))[1].mean() >= MIN_WHOLE)

    def rows_go_on(self, length: float) -> float:
        """Share of the tiles with a neighbour at this distance that have a third tile in line with the two."""
        near = self.near(length)
        asked = np.flatnonzero(near.any(1))
        xy, vector = self.xy[asked], self.vectors[asked, near[asked].argmax(1)]
        third = np.zeros(len(asked), dtype=bool)
        for end in (xy - vector, xy + 2 * vector):
            third |= np.isfinite(self.tree.query(end, p=math.inf, distance_upper_bound=2 * TOLERANCE * length)[0])
        return float(third.mean())

    def measured_step(self, min_rows: float = MIN_ROWS) -> float | None:
        """The shortest distance that tiles agree on and at which rows go on."""
        for nearest_only in (True, False):  # the nearest suffice unless pieces of different phase overlap
            for length in sorted(self.common_distances(8, nearest_only)):
                if self.agree_on(length) and (min_rows == 0 or self.rows_go_on(length) >= min_rows):
                    return length
        return None

    def common_distances(self, count: int, nearest_only: bool) -> list[float]:
        """The most common distances, the most common first; those within the tolerance count as one."""
        distances = self.distances[:, 0] if nearest_only else self.distances.ravel()
        middle, width = np.median(distances), math.log1p(TOLERANCE)
        bins, sizes = np.unique(np.rint(np.log(distances / middle) / width), return_counts=True)
        common: list[float] = []
        for centre in middle * np.exp(bins[np.argsort(-sizes, kind="stable")[: 2 * count]] * width):
            length = float(np.median(distances[np.abs(distances / centre - 1) <= TOLERANCE]))
            if all(abs(length / other - 1) > TOLERANCE for other in common):
                common.append(length)
        return common[:count]

    def sub_sampled(self, nominal: float) -> tuple[float, float]:
        """Share of the tiles that lie whole steps from their nearest, and the median step that these show.

        The share is 0 if all lie even steps (or threes, ...) apart, since the true step is then a longer one.
        """
        steps, whole = (nearest[:, 0] for nearest in self.whole_steps(nominal))
        vectors, steps = self.vectors[:, 0][whole], steps[whole]
        if not whole.any() or (len(self.xy) >= FEW_TILES / 2 and np.gcd.reduce(steps.astype(np.int64), axis=None) > 1):
            return 0.0, nominal
        return float(whole.mean()), float(np.median(vectors[steps != 0] / steps[steps != 0]))


def _given(xy: Array, step: float, unit: str, continuous: bool) -> _Found:
    if continuous or len(xy) < 2:
        return _Found(step, "given")
    nearby = _Neighbours(xy)
    support = max(nearby.support(step), nearby.sub_sampled(step)[0])
    common = _text(nearby.common_distances(1, nearest_only=True)[0], unit)
    warning = (
        f"{support:.0%} of the tiles have a neighbour at the given step of {_text(step, unit)}; most common: {common}."
    )
    return _Found(step, "given", support, warning if support < MIN_SUPPORT else "")


def _single_tile(n: int, nominal: float | None) -> _Found:
    if nominal is not None or n == 0:
        return _Found(nominal or 1.0, "metadata" if nominal else "no tiles")
    warning = "All tiles lie at one position and the metadata do not say how long a tile step is; no distance needs it."
    return _Found(1.0, "single tile", warning=warning)


def _spacing(xy: Array) -> _Found:
    return _Found(float(np.median(KDTree(xy).query(xy, k=[2])[0])), "spacing")


def _common_divisor(xy: Array) -> int:
    """The largest whole number that divides all differences of x and all differences of y; 0 if they are not whole."""
    if (xy != np.rint(xy)).any():
        return 0
    return math.gcd(*(int(np.gcd.reduce(np.diff(np.unique(axis)).astype(np.int64))) for axis in xy.T))


def _without_rounding(coords: Array, length: float) -> tuple[Array, float]:
    """Positions in steps and the step's length: whole numbers if all tiles lie within rounding of a single lattice.

    Steps k are counted along each axis, then coords = origin + length k is fitted with one length for both axes.
    """
    positions = _from_corner(coords) / length
    if np.abs(positions - np.rint(positions)).max() <= 1e-6:
        return np.rint(positions), length
    whole_numbers = (coords == np.rint(coords)).all()
    rounding = 0.75 if whole_numbers else 1e-7 * float(np.abs(coords).max())  # rounded pixels; float32
    steps, gaps = np.empty_like(coords), np.empty(0)
    for axis in (0, 1):
        values, place = np.unique(coords[:, axis], return_inverse=True)
        axis_gaps = np.rint(np.diff(values) / length)
        steps[:, axis] = np.cumsum([0.0, *axis_gaps])[place]
        gaps = np.append(gaps, axis_gaps)
    if not 0 < gaps.max() <= (gaps == 1).sum():  # so few steps do not tell a phase beyond the gap from rounding
        return positions, length
    k, x = steps - steps.mean(0), coords - coords.mean(0)
    fitted = float((k * x).sum() / (k * k).sum())
    on_lattice = np.abs(x - fitted * k).max() <= min(rounding, TOLERANCE * length)
    return (steps, fitted) if on_lattice else (positions, length)


def _count_phases(xy: Array) -> int:
    """Distinct offsets from whole steps; those that merge into one another (a slow drift) count as one."""
    bins_per_step = 50
    offsets = np.unique(np.rint(xy % 1 * bins_per_step) % bins_per_step, axis=0)
    pairs = KDTree(offsets, boxsize=np.full(2, bins_per_step)).query_pairs(1.5, p=math.inf, output_type="ndarray")
    graph = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(len(offsets), len(offsets)))
    return int(connected_components(graph, directed=False)[0])


def _checked(coords: ArrayLike, name: object) -> Array:
    values = np.ascontiguousarray(coords, dtype=np.float64)
    if values.size == 0:
        return np.empty((0, 2))
    if values.ndim != 2 or values.shape[1] != 2:
        raise DataError(name, f"coordinates must be (n, 2), got {values.shape}", "extract the coordinates again")
    bad = int((~np.isfinite(values)).any(1).sum())
    if bad:
        cause = f"{bad} of {len(values)} tiles have NaN or infinite coordinates"
        raise DataError(name, cause, "extract the coordinates again, or remove these tiles with their features")
    return values


def _micrometres(coords: Array, unit: str, mpp: float | None, name: object) -> Array:
    if unit == "um":
        return coords
    if unit == "px0" and mpp is not None and _is_length(mpp):
        return coords * mpp
    why = "the size of a level-0 pixel is unknown" if unit == "px0" else f"the coordinates are in {UNITS[unit]}"
    remedy = (
        "use tile steps instead" if unit == "steps" else "give micrometres per pixel with `mpp=`, or use tile steps"
    )
    raise DataError(name, f"positions in micrometres were asked for, but {why}", remedy)


def _from_corner(coords: Array) -> Array:
    return coords - coords.min(0) if len(coords) else coords


def _is_length(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _text(length: float, unit: str) -> str:
    return f"{length:.6g} {UNITS[unit]}"
