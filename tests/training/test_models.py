"""What the trainer promises to models (:mod:`psamil.models.output`), and that every registered model can be trained."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from psamil.bag import PackedBags
from psamil.cohort import BagCache, Cohort, Split, simulate
from psamil.models import ExtraPrediction, ModelOutput, list_models, register_model, registry
from psamil.models.segments import segment_sum
from psamil.training.fold import HISTORY_FILE, MODEL_FILE, train_fold
from psamil.training.objective import Objective, Pass
from psamil.training.settings import TrainingSettings
from psamil.training.tasks import Task
from tests.models.test_check import SMALL

OUTCOMES = {"classes": {"target": "label"}, "survival": {"time": "survival_months", "censorship": "censorship"}}


class Asking(nn.Module):
    """A model that asks for everything that can be asked for, and writes down what it got."""

    wants_classes = True

    def __init__(self, in_dim, n_out):
        super().__init__()
        self.head = nn.Linear(in_dim, n_out)
        self.register_buffer("epochs_seen", torch.zeros(1))
        self.classes, self.looks = [], []

    @property
    def preliminary(self):
        return bool(self.epochs_seen < 2)

    def start_epoch(self, epoch, epochs, batches):
        assert not self.training
        assert not torch.is_grad_enabled()
        self.looks.append((epoch, epochs, [name for batch in batches() for name in batch.ids]))
        self.epochs_seen += 1

    def forward(self, batch, classes=None):
        self.classes.append(classes)
        tiles = self.head(batch.features.float())
        logits = segment_sum(tiles, batch.bag_of_tile, len(batch)) / batch.offsets.diff()[:, None]
        part = ExtraPrediction(tiles[:3] * 0, torch.zeros(3, dtype=torch.long), weight=0.5)
        return ModelOutput(logits, tiles[:, 0], {"constant": torch.tensor(10.0)}, {"part": part})


@pytest.fixture
def asking(monkeypatch):
    """Registered for the length of a test; the list gets every model that is made."""
    made = []

    def asking(in_dim, n_out):
        made.append(Asking(in_dim, n_out))
        return made[-1]

    monkeypatch.setattr(registry, "_BUILDERS", dict(registry._BUILDERS))
    register_model(asking)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "cohort"
    simulate(folder, slides=10, tiles=50, dim=8, range_steps=2, censored_share=0.1)
    return folder


@pytest.fixture(scope="module", params=list(OUTCOMES))
def cohort(request, folder):
    cache = BagCache(folder.parent / "cache")
    return Cohort.open(folder, folder / "labels.csv", **OUTCOMES[request.param], cache=cache)


@pytest.fixture(scope="module")
def split(folder):
    cohort = Cohort.open(folder, folder / "labels.csv", target="label")
    ids = [cohort.ids[i] for i in np.argsort(cohort.outcome.labels, kind="stable")]
    return Split(train=tuple(ids[1:-1]), val=(ids[0], ids[-1]), test=())


def test_a_model_gets_what_it_asks_for(asking, cohort, split, tmp_path):
    settings = TrainingSettings(model="asking", epochs=4, batch_samples=4, patience=1, lr=1e-6)
    saved = train_fold(cohort, split, settings, tmp_path)
    model = asking[0]
    train = cohort.select(split.train)
    targets = Task.fit(train.outcome).targets(train.outcome)
    classes = targets if targets.ndim == 1 else targets[:, 0]
    given = [got for got in model.classes if got is not None]
    assert sum(map(len, given)) == 8 * len(model.looks)
    assert sorted(torch.cat(given[:2]).tolist()) == sorted(classes.tolist())
    assert any(got is None for got in model.classes)  # in validation
    assert all(look == (epoch, 4, list(train.ids)) for epoch, look in enumerate(model.looks))
    assert saved.about["best_epoch"] >= 1  # the first epoch is preliminary
    history = [json.loads(line) for line in (tmp_path / HISTORY_FILE).read_text().splitlines()]
    assert len(history) >= 3  # patience does not count it either
    assert saved.model.epochs_seen == saved.about["best_epoch"] + 1


def test_losses_of_extra_predictions_and_of_the_model_are_added(asking, cohort, split):
    train = cohort.select(split.train)
    task = Task.fit(train.outcome)
    targets = task.targets(train.outcome)[:4]
    batch = PackedBags.of([cohort.load(sample) for sample in train.samples[:4]])
    torch.manual_seed(0)
    model = registry.create_model("asking", 8, task.n_out)
    extra = task.loss(torch.zeros(3, task.n_out), targets[[0, 0, 0]])
    expected = task.loss(model(batch).logits, targets) + 0.5 * extra + 10
    torch.testing.assert_close(Objective(model, task)(Pass(batch, targets)), expected)


@pytest.mark.parametrize("name", list_models())
def test_every_model_trains_and_goes_on_after_a_stop(name, cohort, split, tmp_path):
    settings = TrainingSettings(model=name, model_options=SMALL.get(name, {}), epochs=3, batch_samples=4, patience=None)
    straight = train_fold(cohort, split, settings, tmp_path / "straight")

    def stop(record):
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            train_fold(cohort, split, settings, tmp_path / "stopped", stop)
    train_fold(cohort, split, settings, tmp_path / "stopped")
    files = [(tmp_path / run / MODEL_FILE).read_bytes() for run in ("straight", "stopped")]
    assert files[0] == files[1]
    moved = replace(settings, seed=1)
    other = train_fold(cohort, split, moved, tmp_path / "other")
    learned = [sum(float(p.detach().double().abs().sum()) for p in m.model.parameters()) for m in (straight, other)]
    assert all(map(np.isfinite, learned))
    assert learned[0] != learned[1]
