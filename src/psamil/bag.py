"""Bags of tiles, and several bags packed into one batch.

A bag is what a slide (or all slides of a patient) has become: one feature vector and one position per tile. Positions
are in *tile steps*: neighbouring tiles are 1 apart, whatever the magnification. A batch keeps its bags one after the
other in the same tensors, without padding, and remembers where each begins. Every model takes this packed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from psamil.errors import ShapeError


@dataclass(frozen=True)
class TileStep:
    """How positions became tile steps: the length of one step, and why we believe it.

    Args:
        length: of one tile step, in ``unit``.
        unit: "px0" (level-0 pixels), "um", "px" (pixels of an unknown level) or "steps".
        source: "metadata", "measured", "sub-sampled lattice", "common divisor", "spacing" or "given"; "single tile" and
            "no tiles" where there is no distance to measure.
        support: share of the tiles whose neighbours lie where this step says.
        mpp: micrometres per level-0 pixel, where it is known.
        overlap: share of a tile's side that the next tile covers again, where the tile's size is known.
    """

    length: float
    unit: str = "px0"
    source: str = "given"
    support: float = 1.0
    mpp: float | None = None
    overlap: float | None = None

    @property
    def um(self) -> float | None:
        """Length of one tile step in micrometres, where it is known."""
        if self.unit == "um":
            return self.length
        return self.length * self.mpp if self.unit == "px0" and self.mpp else None


@dataclass(frozen=True, eq=False)
class Bag:
    """The tiles of one slide or one patient.

    Args:
        features: (n, dim) floating point, of any precision; kept as they are. Arrays become tensors.
        xy: (n, 2) positions in tile steps; whole numbers on a lattice, any floats elsewhere.
        id: name of the slide or patient.
        slides: (s + 1,) offsets of the slides that the tiles come from. Tiles of different slides are never neighbours,
            though they are pooled into one prediction. Default: one slide.
        step_um: length of one tile step in micrometres, where it is known; by default that of ``step``.
        step: how positions became tile steps, for bags that were read from files.
        slide_ids: name of each slide.
    """

    features: Tensor
    xy: Tensor
    id: str = ""
    slides: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    step_um: float | None = None
    step: TileStep | None = None
    slide_ids: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        name = f"bag {self.id!r}"
        for part in ("features", "xy", "slides"):
            if not isinstance(getattr(self, part), Tensor):
                object.__setattr__(self, part, torch.as_tensor(getattr(self, part)))  # NumPy arrays and lists
        if self.features.ndim != 2 or not self.features.is_floating_point():
            shape, dtype = tuple(self.features.shape), self.features.dtype
            raise ShapeError(f"{name}: features must be (n, dim) floating point, got {shape} {dtype}")
        if self.xy.shape != (self.n, 2):
            raise ShapeError(f"{name}: {self.n} tiles need xy of shape ({self.n}, 2), got {tuple(self.xy.shape)}")
        if not self.xy.isfinite().all():
            raise ShapeError(f"{name}: {int((~self.xy.isfinite()).any(1).sum())} tiles have NaN or infinite positions")
        if self.step_um is None and self.step is not None:
            object.__setattr__(self, "step_um", self.step.um)
        if self.step_um is not None and not self.step_um > 0:
            raise ShapeError(f"{name}: step_um must be positive, got {self.step_um}")
        if len(self.slides) == 0:
            object.__setattr__(self, "slides", torch.tensor([0, self.n]))
        check_offsets(self.slides, self.n, f"{name}: slides")
        if self.slide_ids and len(self.slide_ids) != len(self.slides) - 1:
            raise ShapeError(f"{name}: {len(self.slides) - 1} slides have {len(self.slide_ids)} slide_ids")

    @property
    def n(self) -> int:
        return len(self.features)

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"Bag({self.id!r}, {self.n} tiles x {self.features.shape[1]}, {len(self.slides) - 1} slides)"


@dataclass(frozen=True, eq=False)
class PackedBags:
    """Several bags in one tensor; ``offsets`` (b + 1,) says where each begins.

    ``slides`` (s + 1,) are the offsets of single slides inside them: attention stays inside a slide, pooling inside a
    bag. ``layout`` can hold the prepared :class:`psamil.spatial.Layout` of the slides, so that it is not built again.
    """

    features: Tensor  # (n, dim)
    xy: Tensor  # (n, 2)
    offsets: Tensor  # (b + 1,)
    slides: Tensor  # (s + 1,)
    ids: tuple[str, ...]
    layout: Any = None

    def __post_init__(self) -> None:
        if self.xy.shape != (len(self.features), 2):
            raise ShapeError(f"{len(self.features)} tiles need xy of two columns, got {tuple(self.xy.shape)}")
        check_offsets(self.offsets, len(self.features), "offsets")
        check_offsets(self.slides, len(self.features), "slides")

    @staticmethod
    def of(bags: Bag | Sequence[Bag], layout: Any = None) -> PackedBags:
        """Packs bags in the given order. Their features must agree in width and precision; one bag is not copied."""
        bags = [bags] if isinstance(bags, Bag) else list(bags)
        if not bags:
            raise ShapeError("a batch needs at least one bag")
        filled = [bag for bag in bags if bag.n] or bags[:1]  # a slide without tiles may not know how wide features are
        kinds = {(bag.features.shape[1], bag.features.dtype) for bag in filled}
        if len(kinds) > 1:
            raise ShapeError(
                f"bags of one batch must agree in feature width and precision, got {sorted(map(str, kinds))}"
            )
        offsets = torch.tensor([0, *(bag.n for bag in bags)]).cumsum(0)
        starts = [bag.slides[:-1].cpu() + offset for bag, offset in zip(bags, offsets[:-1], strict=True)]
        with torch.autocast(bags[0].features.device.type, enabled=False):  # which would not join float16
            features = filled[0].features if len(filled) == 1 else torch.cat([bag.features for bag in filled])
        return PackedBags(
            features=features,
            xy=torch.cat([bag.xy for bag in bags]),
            offsets=offsets,
            slides=torch.cat([*starts, offsets[-1:]]),
            ids=tuple(bag.id for bag in bags),
            layout=layout,
        )

    @property
    def n(self) -> int:
        return len(self.features)

    def __len__(self) -> int:
        """Number of bags."""
        return len(self.offsets) - 1

    @property
    def bag_of_tile(self) -> Tensor:
        """(n,) index of the bag of each tile."""
        return torch.repeat_interleave(self.offsets.diff()).to(self.features.device)

    def to(self, device: torch.device | str) -> PackedBags:
        """Features, positions and layout on the device; offsets stay on the CPU, where they are read."""
        layout = None if self.layout is None else self.layout.to(device)
        return replace(self, features=self.features.to(device), xy=self.xy.to(device), layout=layout)

    def split(self, per_tile: Tensor) -> list[Tensor]:
        """Cuts any per-tile result (n, ...) into one tensor per bag."""
        return [per_tile[a:b] for a, b in pairwise(self.offsets.tolist())]


def check_offsets(offsets: Tensor, n: int, name: str) -> None:
    """Offsets are whole numbers that rise, not necessarily strictly, from 0 to n."""
    values = offsets.tolist() if offsets.ndim == 1 and not offsets.is_floating_point() else []
    if len(values) < 2 or values[0] != 0 or values[-1] != n or any(b < a for a, b in pairwise(values)):
        raise ShapeError(f"{name} must be offsets that rise from 0 to {n}, got {offsets}")
