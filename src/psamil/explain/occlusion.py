r"""Whether a map of tile scores is faithful: tiles are taken away, and the prediction is watched.

Let y(s) be what is watched once a share s of the tiles is gone, and y(0) its value on the whole bag:

- classes: the log-odds of the predicted class, log p / (1 - p); with two classes its logit. Labels: the logit of one;
- numbers and survival, which have no class: -|value - value on the whole bag|.

Tiles go in three orders: those of the highest score first, those of the lowest first, and at random in several draws.
If the prediction rests on the tiles that the map points at, y falls sooner by the first order than by chance:

    area = 1 / s_max  integral from 0 to s_max of  mean_r y_random,r(s) - y_top(s)  ds      (trapezoids)

is positive then, in the unit of y. Near 0, the map tells no more than chance which tiles the prediction rests on. It
says nothing about whether the prediction is right. Scores are not computed again while tiles go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from psamil.bag import Bag, PackedBags
from psamil.errors import DataError, OptionError, ShapeError, one_of
from psamil.spatial import Layout
from psamil.training.class_tasks import ClassificationTask, MultiLabelTask
from psamil.training.saved_model import SavedModel
from psamil.training.tasks import Task

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
DRAWS = 5

Watch = Callable[[Tensor], float]  # from the logits of one bag, (n_out,)


@dataclass(frozen=True, eq=False)
class OcclusionCurve:
    """y after each share of the tiles is gone, by the order in which they went."""

    watched: str  # what y is
    whole: float  # y(0)
    shares: NDArray[np.float64]  # (s,) of the tiles that are gone, ascending: whole tiles, so near those asked for
    top: NDArray[np.float64]  # (s,) highest scores first
    lowest: NDArray[np.float64]  # (s,) lowest scores first
    random: NDArray[np.float64]  # (draws, s)

    @property
    def area(self) -> float:
        """How much lower y is without the top tiles than without random ones; positive for a faithful map."""
        return float(self._areas.mean())

    @property
    def area_spread(self) -> float:
        """Standard deviation of the area over the random draws."""
        return float(self._areas.std(ddof=1)) if len(self.random) > 1 else float("nan")

    @property
    def _areas(self) -> NDArray[np.float64]:
        """(draws,)"""
        gap = np.pad(self.random - self.top, ((0, 0), (1, 0)))  # all curves begin at y(0)
        widths = np.diff(self.shares, prepend=0.0)
        areas: NDArray[np.float64] = (widths * (gap[:, 1:] + gap[:, :-1]) / 2).sum(1) / self.shares[-1]
        return areas


def occlude(
    saved: SavedModel,
    bag: Bag,
    scores: Tensor,
    shares: Sequence[float] = SHARES,
    *,
    watch: str | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> OcclusionCurve:
    """The test of the module, which runs the model len(shares) * (2 + draws) + 1 times.

    Args:
        saved: the model, which has to give the scores no more.
        bag: with at least two tiles.
        scores: (n,) of its tiles: those of the model, or any other map.
        shares: of the tiles that are taken away, between 0 and 1; at least one tile goes, and one stays.
        watch: the class or label whose logit is watched; by default the most probable one.
        draws: random orders.
        seed: of these.
    """
    if bag.n < 2:
        raise DataError(f"bag {bag.id!r}", f"has {bag.n} tiles; to take some away there must be two")
    if scores.shape != (bag.n,):
        raise ShapeError(f"{bag.n} tiles need scores of shape ({bag.n},), got {tuple(scores.shape)}")
    if not shares or not all(0 < share < 1 for share in shares) or draws < 1:
        raise OptionError(f"shares must lie between 0 and 1 and draws be at least 1, got {list(shares)} and {draws}")
    counts = sorted({min(max(1, round(share * bag.n)), bag.n - 1) for share in shares})
    whole = _logits(saved, bag)
    name, y = _watched(saved.task, whole, watch)

    def curve(order: Tensor) -> list[float]:
        return [y(_logits(saved, without_tiles(bag, order[:count]))) for count in counts]

    falling = scores.argsort(descending=True, stable=True)
    generator = torch.Generator().manual_seed(seed)
    return OcclusionCurve(
        watched=name,
        whole=y(whole),
        shares=np.array(counts) / bag.n,
        top=np.array(curve(falling)),
        lowest=np.array(curve(falling.flip(0))),
        random=np.array([curve(torch.randperm(bag.n, generator=generator)) for _ in range(draws)]),
    )


def without_tiles(bag: Bag, gone: Tensor) -> Bag:
    """The bag without some tiles; slides stay apart."""
    stays = torch.ones(bag.n, dtype=torch.bool)
    stays[gone] = False
    before = torch.cat((torch.zeros(1, dtype=torch.long), stays.cumsum(0)))
    return replace(bag, features=bag.features[stays], xy=bag.xy[stays], slides=before[bag.slides])


@torch.no_grad()
def _logits(saved: SavedModel, bag: Bag) -> Tensor:
    """(n_out,) float64"""
    model = saved.model.eval()
    layout = Layout.of(bag.xy, bag.slides) if getattr(model, "needs_layout", False) else None
    logits: Tensor = model(PackedBags.of(bag, layout).to(next(model.parameters()).device)).logits
    return logits[0].cpu().double()


def _watched(task: Task, whole: Tensor, watch: str | None) -> tuple[str, Watch]:
    """What y is, and how it is computed."""
    if not isinstance(task, ClassificationTask | MultiLabelTask):
        column = next(iter(task.predictions(whole[None])))
        at_first = float(task.predictions(whole[None])[column][0])
        return (
            f"-|change of {column}|",
            lambda logits: -abs(float(task.predictions(logits[None])[column][0]) - at_first),
        )
    names = task.labels if isinstance(task, MultiLabelTask) else task.classes
    two_classes = isinstance(task, ClassificationTask) and task.n_out == 1
    each = torch.stack((-whole[0], whole[0])) if two_classes else whole
    if watch is not None and watch not in names:
        raise one_of("class or label to watch", watch, names)
    index = int(each.argmax()) if watch is None else names.index(watch)
    name = f"log-odds of {names[index]}"
    if two_classes:
        return name, lambda logits: float(logits[0] if index else -logits[0])
    if isinstance(task, MultiLabelTask):
        return name, lambda logits: float(logits[index])
    others = torch.arange(len(names)) != index
    return name, lambda logits: float(logits[index] - logits[others].logsumexp(0))
