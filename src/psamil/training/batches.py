"""From samples of a cohort to batches on a device: in an order that a seed decides, one batch ahead."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from psamil.bag import Bag, PackedBags
from psamil.cohort import Cohort, Sample, sample_tiles
from psamil.errors import DataError
from psamil.spatial import Layout

KEPT_TILES = 10_000_000
"""Tiles whose layouts are kept: 64 bytes each on the compiled path, at most 212 on the others, so 0.6 to 2.1 GB.

The first to come stay. Samples are met in random order, so that this saves as much as any other choice.
"""


def epoch_order(n: int, *, seed: int, epoch: int, weights: Sequence[float] | None = None) -> list[int]:
    """A permutation of n samples, or as many draws by weight; it depends on seed and epoch alone."""
    random = np.random.default_rng([seed, epoch])
    if weights is None:
        return random.permutation(n).tolist()
    share = np.asarray(weights, dtype=np.float64)
    return random.choice(n, size=n, p=share / share.sum()).tolist()


class BatchLoader:
    """Loads, packs and moves samples of a cohort. Layouts are built once per sample and kept, as long as there is room.

    Args:
        cohort: of the samples.
        device: where batches go.
        in_dim: width of the features, checked for every bag.
        needs_layout: whether the model asks for a layout.
    """

    def __init__(self, cohort: Cohort, device: torch.device, in_dim: int, *, needs_layout: bool) -> None:
        self.cohort, self.device, self.in_dim, self.needs_layout = cohort, device, in_dim, needs_layout
        self.steps_um: dict[str, float | None] = {}  # of the samples loaded so far
        self._layouts: dict[str, Layout] = {}
        self._room = KEPT_TILES

    def batches(
        self, groups: Iterable[Sequence[Sample]], *, max_tiles: int | None = None, seed: int = 0, epoch: int = 0
    ) -> Generator[PackedBags, None, None]:
        """One batch per group of samples, the next one being prepared while one is worked on."""
        with ThreadPoolExecutor(1) as ahead:
            waiting = None
            for group in groups:
                following = ahead.submit(self._pack, group, max_tiles, seed, epoch)
                if waiting is not None:
                    yield waiting.result()
                waiting = following
            if waiting is not None:
                yield waiting.result()

    def _pack(self, group: Sequence[Sample], max_tiles: int | None, seed: int, epoch: int) -> PackedBags:
        bags = [self._checked(self.cohort.load(sample), sample) for sample in group]
        drawn = [bag if max_tiles is None else sample_tiles(bag, max_tiles, seed=seed, epoch=epoch) for bag in bags]
        batch = PackedBags.of(drawn).to(self.device)
        if not self.needs_layout:
            return batch
        layouts = [self._layout(bag, is_whole=bag.n == whole.n) for bag, whole in zip(drawn, bags, strict=True)]
        return replace(batch, layout=Layout.pack(layouts))  # what attention adds to a layout stays with the kept one

    def _checked(self, bag: Bag, sample: Sample) -> Bag:
        self.steps_um[sample.id] = bag.step_um
        if bag.n == 0:  # it may not know how wide features are
            return replace(bag, features=torch.empty(0, self.in_dim))
        if bag.features.shape[1] != self.in_dim:
            cause = f"features are {bag.features.shape[1]} wide, the model takes {self.in_dim}"
            raise DataError(sample.bags[0].path, cause, "use features of the encoder that the model was trained on")
        return bag

    def _layout(self, bag: Bag, *, is_whole: bool) -> Layout:
        kept = self._layouts.get(bag.id)
        if is_whole and kept is not None and kept.n == bag.n:
            return kept
        layout = Layout.of(bag.xy, bag.slides).to(self.device)
        if is_whole and kept is None and bag.n <= self._room:
            self._layouts[bag.id] = layout
            self._room -= bag.n
        return layout
