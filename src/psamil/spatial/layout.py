r"""Where the tiles of a slide lie, prepared once so that attention finds the neighbours within *any* radius quickly.

A layout is built once per slide in O(n log n) and then serves every step, epoch, head and radius. Layouts of several
slides are joined by :meth:`Layout.pack`; a layout can be moved to a device and pickled.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from psamil.bag import check_offsets
from psamil.errors import OptionError, ShapeError, one_of
from psamil.spatial.blocks import SLOTS, Blocks, join, lattice_blocks, scattered_blocks
from psamil.spatial.compiled import SortedTiles

PATHS = ("compiled", "lattice", "scattered", "dense")
LATTICE_MAX_RADIUS = 64  # steps; a table for a larger radius no longer fits in cache

# Relative time of one query-key pair, forward and backward, with forced paths on slides of 1,000 to 10,000 tiles
PAIR_COST = {"lattice": 1.0, "scattered": 1.5, "dense": 1.5, "dense, embedded": 0.7}


@dataclass(frozen=True)
class BagLayout:
    """The geometry of one bag. What a path needs of it is made when that path is first taken, and then kept."""

    xy: Tensor  # (n, 2) float64, relative to the smallest x and y

    @staticmethod
    def build(xy: Tensor) -> BagLayout:
        device = xy.device
        xy = xy.detach().to("cpu", torch.float64)
        if not xy.isfinite().all():
            raise ShapeError(f"xy holds {int((~xy.isfinite()).any(1).sum())} tiles with NaN or infinite positions")
        return BagLayout(_move_tensor(xy - xy.amin(0), device))

    @property
    def n(self) -> int:
        return len(self.xy)

    @functools.cached_property
    def lattice(self) -> Blocks | None:
        """Blocks of lattice cells, if the tiles lie on a lattice."""
        blocks = lattice_blocks(self.xy.double().cpu())
        return None if blocks is None else _move(blocks, self.xy.device)

    @functools.cached_property
    def scattered(self) -> Blocks:
        """Blocks of tiles close together."""
        return _move(scattered_blocks(self.xy.double().cpu()), self.xy.device)

    @functools.cached_property
    def sorted_tiles(self) -> SortedTiles:
        """What the compiled path looks up; on the CPU."""
        return SortedTiles.build(self.xy.double().cpu())

    def to(self, device: torch.device | str) -> BagLayout:
        moved = BagLayout(_move_tensor(self.xy, device))
        for name in {"lattice", "scattered"} & self.__dict__.keys():
            blocks = self.__dict__[name]
            moved.__dict__[name] = None if blocks is None else _move(blocks, device)
        return moved

    @functools.cached_property
    def half_diagonal(self) -> float:
        """Upper bound of the distance of a tile from the middle of the bag."""
        return float(self.xy.amax(0).norm()) / 2

    def count_pairs(self, squared_radius: float) -> int:
        """Query-key pairs within the radius, each tile with itself included."""
        if (2 * self.half_diagonal) ** 2 <= squared_radius:
            return self.n**2
        if self.lattice is not None:  # every tile as a block of its own: its runs are then exactly its neighbours
            total = 0
            for xy in self.lattice.xy.split(1 << 14):
                single = self.lattice._replace(box=torch.cat((xy, xy), 1), bag=torch.zeros_like(xy[:, 0]).long())
                total += int(single.runs(math.sqrt(squared_radius)).size.sum())
            return total
        total = 0
        x, y = self.xy.T.contiguous()
        for qx, qy in zip(x.split(256), y.split(256), strict=True):
            d2 = (x - qx[:, None]).square_().add_((y - qy[:, None]).square_())
            total += int((d2 <= squared_radius).sum())
        return total

    def work(self, radii: Sequence[float], embedded: bool = False) -> dict[str, float]:
        """Counted work of each path: query-key pairs it computes over all heads, times the cost of one such pair."""
        work = {"dense": PAIR_COST["dense, embedded" if embedded else "dense"] * len(radii) * self.n**2}
        for path, blocks in (("lattice", self.lattice), ("scattered", self.scattered)):
            if blocks is not None and (path == "scattered" or max(radii) <= LATTICE_MAX_RADIUS):
                pairs = SLOTS * sum(int(blocks.keys_per_block(blocks.runs(radius)).sum()) for radius in radii)
                work[path] = PAIR_COST[path] * pairs
        return work


class Layout:
    """The layout of one bag, or of several bags packed one after the other.

    >>> layout = Layout.of(xy)  # one slide; xy (n, 2) in tile steps
    >>> layout.work([7.0, 15.0])  # counted work of every path for heads of these radii, per bag

    ``path`` forces one of "lattice", "scattered", "dense" where counted work would choose another.
    """

    def __init__(self, bags: Sequence[BagLayout], path: str | None = None) -> None:
        if path is not None and path not in PATHS:
            raise one_of("path", path, PATHS)
        if path == "lattice" and any(bag.lattice is None for bag in bags):
            raise OptionError('path "lattice" was asked for, but the positions of a bag do not lie on a lattice')
        self.bags = tuple(bags)
        self.path = path
        self._joined: dict[tuple[str, tuple[int, ...]], Blocks] = {}
        self._chosen: dict[tuple[tuple[float, ...], tuple[bool, ...]], tuple[str, ...]] = {}

    @staticmethod
    def of(xy: Tensor, bags: Tensor | None = None, path: str | None = None) -> Layout:
        """The layout of tiles at ``xy`` (n, 2) in tile steps; ``bags`` (b + 1,) are the offsets of packed bags."""
        if xy.ndim != 2 or xy.shape[1] != 2:
            raise ShapeError(f"xy must be (n, 2), got {tuple(xy.shape)}")
        offsets = torch.tensor([0, len(xy)]) if bags is None else bags
        check_offsets(offsets, len(xy), "bags")
        built = [
            BagLayout.build(xy[a:b]) for a, b in pairwise(offsets.tolist()) if b > a
        ]  # an empty bag has no geometry
        return Layout(built, path).to(xy.device)

    @staticmethod
    def pack(layouts: Sequence[Layout]) -> Layout:
        """One layout for bags that are packed in this order."""
        paths = {layout.path for layout in layouts}
        return Layout([bag for layout in layouts for bag in layout.bags], paths.pop() if len(paths) == 1 else None)

    @property
    def n(self) -> int:
        return sum(bag.n for bag in self.bags)

    @property
    def offsets(self) -> list[int]:
        offsets = [0]
        for bag in self.bags:
            offsets.append(offsets[-1] + bag.n)
        return offsets

    def to(self, device: torch.device | str) -> Layout:
        return Layout([bag.to(device) for bag in self.bags], self.path)

    def __reduce__(self) -> tuple[object, ...]:
        return Layout, (self.bags, self.path)

    def __repr__(self) -> str:
        on_lattice = sum(bag.lattice is not None for bag in self.bags)
        return f"Layout({len(self.bags)} bags, {on_lattice} on a lattice, {self.n} tiles, path={self.path or 'auto'})"

    def work(self, radii: Sequence[float], embedded: Sequence[bool] | None = None) -> list[dict[str, float]]:
        """Counted work per bag: for each path the pairs it would compute for heads of these radii, weighted by cost.

        ``embedded`` says for which bags the dense path can be ordinary attention on extended queries and keys.
        """
        embedded = embedded or [False] * len(self.bags)
        return [bag.work(radii, cheap) for bag, cheap in zip(self.bags, embedded, strict=True)]

    def choose(
        self, radii: Sequence[float], embedded: Sequence[bool] | None = None, *, compiled: bool = False
    ) -> tuple[str, ...]:
        """The path of each bag for heads of these radii: the forced one, or the one of least counted work."""
        if self.path == "lattice" and max(radii) > LATTICE_MAX_RADIUS:
            raise OptionError(f"path 'lattice' serves radii up to {LATTICE_MAX_RADIUS} steps, got {max(radii):.1f}")
        if self.path == "compiled" and not compiled:
            raise OptionError(
                "path 'compiled' was asked for, but it cannot be taken here: it needs a C compiler, float32 on the CPU "
                "and a decay with C expressions"
            )
        if self.path is not None or compiled:  # the compiled path is the fastest wherever it can be taken
            return (self.path or "compiled",) * len(self.bags)
        # radii move a little in every training step, counted work changes slowly: one count serves a whole step of K
        rounded = tuple(float(math.ceil(r)) if math.isfinite(r) else math.inf for r in radii)
        case = (rounded, tuple(embedded or ()))
        if case not in self._chosen:
            if len(self._chosen) >= 64:
                self._chosen.clear()
            self._chosen[case] = tuple(min(work, key=work.__getitem__) for work in self.work(rounded, embedded))
        return self._chosen[case]

    def blocks(self, path: str, bags: Sequence[int]) -> Blocks:
        """The blocks of these bags joined, tiles numbered from the first tile of the first of them."""
        key = (path, tuple(bags))
        if key not in self._joined:
            if len(self._joined) >= 8:
                self._joined.clear()
            parts = [self.bags[b].lattice if path == "lattice" else self.bags[b].scattered for b in bags]
            self._joined[key] = join([part for part in parts if part is not None])
        return self._joined[key]


def _move(blocks: Blocks, device: torch.device | str) -> Blocks:
    return Blocks(*(_move_tensor(tensor, device) for tensor in blocks))


def _move_tensor(tensor: Tensor, device: torch.device | str) -> Tensor:
    """To the device; float64 becomes float32 where the device has no float64."""
    if torch.device(device).type == "mps" and tensor.dtype == torch.float64:
        tensor = tensor.float()
    return tensor.to(device)
