"""A model beside a slide, ready for steps of training: ours, and those of torchmil that are measured beside ours.

torchmil is used as its documentation has it: a sparse adjacency from its own functions and a mask, in a batch from its
``collate_fn``. Once its models are made *like* ours, with the same embedding in front, widths, heads and depth as far
as they have options for these, and once *as it is*, with its defaults and no embedding.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from contenders import Slide
from torch import nn

from psamil import Bag, PackedBags
from psamil.cohort.outcomes import Classification
from psamil.spatial import Layout
from psamil.training.fold import new_model
from psamil.training.objective import Objective, Pass
from psamil.training.settings import TrainingSettings
from psamil.training.tasks import Task

DIM = 1024  # features of a tile
LIKE_OURS, AS_IT_IS = "torchmil ", "torchmil as it is, "  # before the name of ours, in the name of a contender


@dataclass(frozen=True)
class Theirs:
    kind: str
    embedding: int  # numbers per tile after it
    like_ours: dict[str, Any]
    needed: dict[str, Any]  # as it is, it fails without


TORCHMIL = {
    "camil": Theirs("CAMIL", 512, {"n_heads": 8, "gated_pool": True}, {"n_landmarks": 256}),
    "gtp": Theirs("GTP", 64, {"att_dim": 64, "n_layers": 3}, {}),
    "sm_abmil": Theirs("SmABMIL", 512, {"spectral_norm": True}, {}),
    "sm_transformer": Theirs("SmTransformerABMIL", 512, {"pool_spectral_norm": True}, {}),
}


class Trainee(Protocol):
    model: nn.Module

    def prepare(self) -> None:
        """What is done once per slide."""

    def step(self) -> None:
        """One step of training."""


class Ours:
    def __init__(self, name: str, bag: Bag) -> None:
        outcome = Classification("label", ("no", "yes"), np.array([0, 1]))
        task = Task.fit(outcome)
        self.bag, self.model = bag, new_model(TrainingSettings(model=name), DIM, task.n_out)
        self.objective, self.target = Objective(self.model, task), task.targets(outcome)[1:]
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def prepare(self) -> None:
        needs_layout = getattr(self.model, "needs_layout", False)
        self.batch = PackedBags.of(self.bag, Layout.of(self.bag.xy) if needs_layout else None)
        start_epoch = getattr(self.model, "start_epoch", None)
        if start_epoch is not None:  # the last epoch of two, in which everything is trained that predicts
            self.model.eval()
            with torch.no_grad():
                start_epoch(1, 2, lambda: [self.batch])
        self.model.train()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.objective(Pass(self.batch, self.target)).backward()
        self.optimizer.step()


class Torchmil:
    def __init__(self, name: str, bag: Bag, like_ours: bool) -> None:
        import torchmil.models

        theirs = TORCHMIL[name]
        options = dict(theirs.needed)
        if like_ours:
            options |= theirs.like_ours
            options["feat_ext"] = nn.Sequential(nn.Linear(DIM, theirs.embedding), nn.ReLU())
        self.bag, self.model = bag, getattr(torchmil.models, theirs.kind)((DIM,), **options)
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def prepare(self) -> None:
        """As its data sets do, but that weights are float32 like the features, without which its products fail."""
        from torchmil.data import collate_fn
        from torchmil.utils import build_adj, normalize_adj

        pairs, weights = build_adj(self.bag.xy.numpy(), dist_thr=1.5)
        weights = torch.from_numpy(normalize_adj(pairs, weights, n_nodes=self.bag.n)).float()
        shape = (self.bag.n, self.bag.n)
        adjacency = torch.sparse_coo_tensor(torch.from_numpy(pairs), weights, shape, check_invariants=True).coalesce()
        self.batch = collate_fn([{"X": self.bag.features, "Y": torch.tensor(1.0), "adj": adjacency}])

    def step(self) -> None:
        from torchmil.models import MILModelWrapper

        self.optimizer.zero_grad()
        _, losses = MILModelWrapper(self.model).compute_loss(self.batch)
        sum(losses.values(), torch.zeros(())).backward()
        self.optimizer.step()


def trainee(contender: str, bag: Bag) -> Trainee:
    for before, like_ours in ((AS_IT_IS, False), (LIKE_OURS, True)):
        if contender.startswith(before):
            return Torchmil(contender.removeprefix(before), bag, like_ours)
    return Ours(contender, bag)


def random_bag(n: int) -> Bag:
    features = torch.randn(n, DIM, generator=torch.Generator().manual_seed(1))
    return Bag(features, Slide.random(n).xy.float())


def once(made: Trainee) -> None:
    made.prepare()
    made.step()
