"""Training of one fold: the schedule, batches in parts, early stopping, and going on after anything that can happen."""

import json
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch

from psamil.bag import PackedBags
from psamil.cohort import BagCache, Cohort, Split, simulate
from psamil.errors import DataError, OptionError
from psamil.models import ibmil
from psamil.models.ibmil import confounder_dictionary
from psamil.models.pooling import MeanPooling
from psamil.training import fold
from psamil.training.class_tasks import ClassificationTask
from psamil.training.fold import HISTORY_FILE, MODEL_FILE, STATE_FILE, train_fold
from psamil.training.optimisation import lr_factor
from psamil.training.prediction import loader_for, predict_logits
from psamil.training.saved_model import SavedModel
from psamil.training.settings import TrainingSettings
from psamil.training.state import read_tensors, without_prefix
from psamil.training.tasks import TaskOptions
from tests.training.test_batches import Changed, without_tiles
from tests.training.test_state import files_limited_to

PSA = TrainingSettings(epochs=3, batch_samples=4, model_options={"heads": 2, "head_dim": 4})
MEAN = TrainingSettings(model="mean", epochs=3, batch_samples=4, model_options={"hidden": 4})
DROPPED = replace(MEAN, optimizer="radam", lr=0.05, plateau_epochs=1, drop_epochs=[1], drop_factor=0.5, fall="cosine")
DROPOUT = replace(MEAN, model_options={"hidden": 16, "dropout": 0.5}, samples_per_pass=1, max_tiles=30)
THINNED = replace(PSA, model_options={**PSA.model_options, "radius_weight": 1.0}, drop_features=0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fold") / "cohort"
    simulate(folder, slides=14, tiles=60, dim=8)
    return folder


@pytest.fixture(scope="module")
def cohort(folder):
    return Cohort.open(folder, folder / "labels.csv", target="label", cache=BagCache(folder.parent / "cache"))


@pytest.fixture(scope="module")
def split(cohort):
    by_class = np.argsort(cohort.outcome.labels, kind="stable")
    ids = [cohort.ids[i] for i in by_class]
    return Split(train=tuple(ids[2:-2]), val=(ids[0], ids[-1]), test=(ids[1], ids[-2]))


@pytest.fixture
def steps(monkeypatch):
    """Learning rates, weight decays and gradients before each step of the optimiser."""
    seen = []

    def update(self, epoch):
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        groups = {group["name"]: (group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups}
        seen.append((groups, gradients))
        original(self, epoch)

    original = fold._Training._update
    monkeypatch.setattr(fold._Training, "_update", update)
    return seen


def weights(model: SavedModel):
    return model.model.state_dict()


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_every_group_follows_the_schedule_from_its_own_learning_rate(cohort, split, steps, tmp_path):
    train_fold(cohort, split, replace(PSA, lr=1e-3, weight_decay=0.01, epochs=4), tmp_path)
    assert len(steps) == 4 * 3  # ten samples are three batches
    for step, (groups, _) in enumerate(steps):
        factor = lr_factor(step, 12, replace(PSA, lr=1e-3))
        assert groups["weights"] == (pytest.approx(1e-3 * factor), 0.01)
        assert groups["prior"] == (pytest.approx(1e-1 * factor), 0.0)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
@pytest.mark.parametrize("samples_per_pass", [1, 3])
def test_a_batch_in_parts_has_the_gradient_of_the_whole(cohort, split, steps, tmp_path, samples_per_pass, optimizer):
    settings = replace(PSA, epochs=1, optimizer=optimizer)
    whole = train_fold(cohort, split, settings, tmp_path / "whole")
    parts = train_fold(cohort, split, replace(settings, samples_per_pass=samples_per_pass), tmp_path / "parts")
    first, first_in_parts = steps[0][1], steps[3][1]
    assert first.keys() == first_in_parts.keys()
    for name in first:
        torch.testing.assert_close(first[name], first_in_parts[name], rtol=1e-4, atol=1e-6)
    losses = [json.loads((tmp_path / name / HISTORY_FILE).read_text())["loss"] for name in ("whole", "parts")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(tensor, weights(parts)[name], rtol=1e-3, atol=1e-4)


def test_the_order_of_tiles_does_not_matter(cohort, split, tmp_path):
    def reversed_tiles(bag):
        return replace(bag, features=bag.features.flip(0), xy=bag.xy.flip(0))

    settings = replace(PSA, optimizer="adamw")
    other = replace(cohort, loader=Changed(cohort.loader, reversed_tiles))
    logits = []
    for name, of in (("a", cohort), ("b", other)):
        model = train_fold(of, split, settings, tmp_path / name).model
        logits.append(predict_logits(model, loader_for(model, of, 8), of.samples))
    np.testing.assert_allclose(*logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("settings", [PSA, DROPOUT, THINNED, DROPPED], ids=["psa", "drawn", "thinned", "dropped"])
@pytest.mark.parametrize("epochs_before", [1, 2, 3])
def test_going_on_ends_with_the_same_bits(cohort, split, tmp_path, settings, epochs_before):
    whole = train_fold(cohort, split, settings, tmp_path / "whole")

    def stop(record):
        if record["epoch"] + 1 == epochs_before:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_fold(cohort, split, settings, tmp_path / "broken", stop)
    torch.manual_seed(99)
    seen = []
    resumed = train_fold(cohort, split, settings, tmp_path / "broken", seen.append)
    assert [record["epoch"] for record in seen] == list(range(epochs_before, 3))
    assert_same_bits(weights(whole), weights(resumed))
    for file in (HISTORY_FILE, MODEL_FILE):
        assert (tmp_path / "broken" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert not (tmp_path / "broken" / STATE_FILE).exists()


def test_dropout_and_drawn_tiles_differ_between_epochs(cohort, split, steps, tmp_path):
    train_fold(cohort, split, replace(DROPOUT, lr=1e-6, batch_samples=99), tmp_path)
    first, second, _ = (gradients["head.weight"] for _, gradients in steps)
    assert not torch.allclose(first, second, rtol=1e-3)


def scripted(monkeypatch, scores, losses=(1.0,) * 9):
    """Validation scores and losses that come from lists."""
    remaining, of_loss = iter(scores), iter(losses)
    monkeypatch.setattr(ClassificationTask, "validation_score", lambda self, outcome, logits: ("auc", next(remaining)))
    monkeypatch.setattr(ClassificationTask, "validation_loss", lambda self, outcome, logits: next(of_loss))


def test_validation_stops_and_the_best_epoch_is_kept(cohort, split, monkeypatch, tmp_path):
    scripted(monkeypatch, [0.5, 0.7, 0.6, 0.7, 0.9])
    of_epoch = {}

    def remember(record):
        of_epoch[record["epoch"]] = without_prefix("model", read_tensors(tmp_path / STATE_FILE, "")[0])

    model = train_fold(cohort, split, replace(MEAN, epochs=9, patience=2), tmp_path, remember)
    assert model.about["epochs"] == 4
    assert model.about["best_epoch"] == 1  # the first of equals, whose losses are equal as well
    assert_same_bits(weights(model), of_epoch[1])


def test_of_equal_scores_narrow_radii_are_kept_if_radii_cost_something(cohort, split, monkeypatch, tmp_path):
    losses = [0.1, 0.1, 0.101, 0.102]
    for weight, kept in ((0.0, 0), (1.0, 3)):
        scripted(monkeypatch, [0.5] * len(losses), losses)
        options = {**PSA.model_options, "radius_weight": weight}
        settings = replace(PSA, epochs=len(losses), model_options=options, prior_lr_scale=100.0, patience=None)
        model = train_fold(cohort, split, settings, tmp_path / f"{weight:g}")
        assert model.about["best_epoch"] == kept


def test_of_equal_scores_the_lower_loss_is_kept_and_patience_counts_from_the_first(
    cohort, split, monkeypatch, tmp_path
):
    script = [0.5, 0.9, 0.9, 0.8, 0.9, 0.9], [0.1, 0.7, 0.5, 0.1, 0.6, 0.3]
    settings = replace(MEAN, epochs=9, patience=3)
    scripted(monkeypatch, *script)
    model = train_fold(cohort, split, settings, tmp_path / "whole")
    assert model.about["epochs"] == 5  # 3 after epoch 1, though epoch 2 is better by its loss
    assert model.about["best_epoch"] == 2

    def stop(record):
        if record["epoch"] == 2:
            raise KeyboardInterrupt

    scripted(monkeypatch, *script)
    with pytest.raises(KeyboardInterrupt):
        train_fold(cohort, split, settings, tmp_path / "broken", stop)
    resumed = train_fold(cohort, split, settings, tmp_path / "broken")  # which knows the loss of epoch 2
    assert resumed.about == model.about
    assert_same_bits(weights(resumed), weights(model))


def test_validation_loss_is_that_of_the_kept_model(cohort, split, tmp_path):
    model = train_fold(cohort, split, MEAN, tmp_path)
    val = cohort.select(split.val)
    logits = predict_logits(model.model, loader_for(model.model, cohort, 8), val.samples)
    kept = json.loads((tmp_path / HISTORY_FILE).read_text().splitlines()[model.about["best_epoch"]])
    assert kept["validation loss"] == pytest.approx(model.task.validation_loss(val.outcome, logits), rel=1e-6)


def test_steps_are_told(cohort, split, tmp_path):
    steps, records = [], []
    train_fold(cohort, split, replace(MEAN, epochs=2), tmp_path, records.append, steps.append)
    assert [(step["epoch"], step["step"], step["steps"]) for step in steps] == [
        (e, k, 3) for e in (0, 1) for k in range(3)
    ]
    mean = sum(step["loss"] * n for step, n in zip(steps[:3], (4, 4, 2), strict=True)) / 10
    assert records[0]["loss"] == pytest.approx(mean)


def test_stopping_survives_a_stop(cohort, split, monkeypatch, tmp_path):
    def stop(record):
        if record["epoch"] == 2:
            raise KeyboardInterrupt

    scripted(monkeypatch, [0.5, 0.7, 0.6, 0.65, 0.9])
    settings = replace(MEAN, epochs=9, patience=2)
    with pytest.raises(KeyboardInterrupt):
        train_fold(cohort, split, settings, tmp_path, stop)
    assert train_fold(cohort, split, settings, tmp_path).about["epochs"] == 4


def test_least_epochs_are_trained_in_any_case(cohort, split, monkeypatch, tmp_path):
    scripted(monkeypatch, [0.9, 0.1, 0.1, 0.1, 0.1, 0.1])
    model = train_fold(cohort, split, replace(MEAN, epochs=6, patience=1, least_epochs=4), tmp_path)
    assert (model.about["epochs"], model.about["best_epoch"]) == (4, 0)


def test_the_learning_rate_drops_where_the_validation_loss_does_not(cohort, split, monkeypatch, tmp_path):
    scripted(monkeypatch, [0.5] * 5, [0.9, 0.8, 0.8, 0.7, 0.7])
    settings = replace(MEAN, epochs=5, patience=None, warm_up=0.0, constant=1.0, plateau_epochs=1, drop_factor=0.5)
    records = []
    train_fold(cohort, split, settings, tmp_path, records.append)
    assert [record["lr"] / settings.lr for record in records] == pytest.approx([1, 1, 1, 0.5, 0.5])


def test_without_patience_all_epochs_are_trained(cohort, split, monkeypatch, tmp_path):
    scripted(monkeypatch, [0.9, 0.1, 0.1, 0.1])
    model = train_fold(cohort, split, replace(MEAN, epochs=4, patience=None), tmp_path)
    assert (model.about["epochs"], model.about["best_epoch"]) == (4, 0)


def test_without_validation_the_last_weights_are_kept(cohort, split, tmp_path):
    last = {}

    def remember(record):
        last.update(without_prefix("model", read_tensors(tmp_path / STATE_FILE, "")[0]))

    model = train_fold(cohort, Split(split.train, (), split.test), replace(MEAN, patience=1), tmp_path, remember)
    assert (model.about["epochs"], model.about["best_epoch"]) == (3, 2)
    assert_same_bits(weights(model), last)
    assert "validation" not in (tmp_path / HISTORY_FILE).read_text()


@pytest.mark.parametrize("validated", [True, False])
def test_the_dictionary_of_the_first_stage_is_kept(cohort, split, monkeypatch, tmp_path, validated):
    made = []

    def recorded(*args):
        made.append(confounder_dictionary(*args))
        return made[-1]

    monkeypatch.setattr(ibmil, "confounder_dictionary", recorded)
    settings = TrainingSettings(model="ibmil", model_options={"confounders": 2}, epochs=4, patience=None, lr=0.01)
    parts = split if validated else Split(split.train, (), split.test)
    model = train_fold(cohort, parts, settings, tmp_path / "run").model
    torch.testing.assert_close(model.dictionary, made[0], rtol=0, atol=0)


def test_dropped_features_are_drawn_anew_in_each_step_and_not_in_validation(cohort, split, monkeypatch, tmp_path):
    shares = []

    def seen(self, batch):
        shares.append((self.training, float((batch.features == 0).float().mean())))
        return original(self, batch)

    original = MeanPooling.forward
    monkeypatch.setattr(MeanPooling, "forward", seen)
    train_fold(cohort, split, replace(MEAN, drop_features=0.4, epochs=2), tmp_path)
    training = [share for is_training, share in shares if is_training]
    assert all(0.3 < share < 0.5 for share in training)
    assert len(set(training)) == len(training)
    assert all(share == 0 for is_training, share in shares if not is_training)


@pytest.mark.parametrize("score", [float("nan"), float("-inf")])
def test_a_validation_score_that_is_no_number_is_an_error(cohort, split, monkeypatch, tmp_path, score):
    scripted(monkeypatch, [0.5, score])
    with pytest.raises(OptionError, match=r"the validation score became .* in epoch 2; try a lower lr"):
        train_fold(cohort, split, MEAN, tmp_path)
    assert not (tmp_path / MODEL_FILE).exists()


def with_value(value):
    return lambda bag: replace(bag, features=torch.full(bag.features.shape, value))


@pytest.mark.parametrize(("value", "what"), [(float("nan"), "loss"), (3e38, "loss"), (1e30, "norm of the gradient")])
def test_divergence_is_an_error(cohort, split, tmp_path, value, what):
    odd = replace(cohort, loader=Changed(cohort.loader, with_value(value)))
    with pytest.raises(OptionError, match=f"the {what} became (nan|inf) in epoch 1"):
        train_fold(odd, split, replace(MEAN, gradient_clip=None), tmp_path)
    assert not (tmp_path / MODEL_FILE).exists()


def test_weights_that_burst_in_the_last_step_are_an_error(cohort, split, monkeypatch, tmp_path):
    def burst(self, epoch):
        self.model.head.bias.data.fill_(torch.inf)

    monkeypatch.setattr(fold._Training, "_update", burst)
    with pytest.raises(OptionError, match="sum of all weights became inf in epoch 1"):
        train_fold(cohort, Split(split.train), replace(MEAN, epochs=1, batch_samples=99), tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x80\x04pickle", bytes(range(256)) * 9])
def test_a_damaged_state_is_named_with_a_remedy(cohort, split, tmp_path, content):
    (tmp_path / STATE_FILE).write_bytes(content)
    with pytest.raises(DataError, match=r"state\.safetensors: is damaged.*delete it; training then begins anew"):
        train_fold(cohort, split, MEAN, tmp_path)
    (tmp_path / STATE_FILE).unlink()
    assert train_fold(cohort, split, MEAN, tmp_path).about["epochs"] == 3


def test_what_belongs_to_other_settings_is_refused(cohort, split, tmp_path):
    def stop(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_fold(cohort, split, MEAN, tmp_path, stop)
    other = replace(MEAN, lr=1e-3)
    with pytest.raises(DataError, match="no state of a training with these settings"):
        train_fold(cohort, split, other, tmp_path)
    train_fold(cohort, split, MEAN, tmp_path)
    with pytest.raises(DataError, match="was trained with other settings"):
        train_fold(cohort, split, other, tmp_path)
    (tmp_path / MODEL_FILE).rename(tmp_path / STATE_FILE)
    with pytest.raises(DataError, match="no state of a training"):
        train_fold(cohort, split, MEAN, tmp_path)


def test_when_the_disk_is_full_the_last_state_is_good(cohort, split, tmp_path):
    settings = replace(MEAN, model_options={"hidden": 4000})  # a state of 0.8 MB
    whole = train_fold(cohort, split, settings, tmp_path / "whole")
    sizes = []

    def fill_disk(record):
        sizes.append((tmp_path / "full" / STATE_FILE).stat().st_size)
        limit.enter_context(files_limited_to(sizes[0] // 2))

    with ExitStack() as limit, pytest.raises(DataError, match=r"state\.safetensors: cannot be written") as error:
        train_fold(cohort, split, settings, tmp_path / "full", fill_disk)
    assert "\n" not in str(error.value)
    assert len(sizes) == 1
    assert_same_bits(weights(whole), weights(train_fold(cohort, split, settings, tmp_path / "full")))


def test_a_slide_that_is_damaged_meanwhile_is_named(tmp_path, split):
    simulate(tmp_path / "cohort", slides=14, tiles=60, dim=8)
    cohort = Cohort.open(tmp_path / "cohort", tmp_path / "cohort" / "labels.csv", target="label").checked()
    damaged = cohort.select(split.train).samples[3].bags[0].path

    def damage(record):
        damaged.write_bytes(damaged.read_bytes()[:3000])

    with pytest.raises(DataError, match=damaged.name):
        train_fold(cohort, split, MEAN, tmp_path / "fold", damage)
    assert (tmp_path / "fold" / STATE_FILE).exists()


@pytest.mark.parametrize("settings", [PSA, MEAN, replace(MEAN, model="max"), replace(MEAN, model="abmil")])
def test_slides_without_tiles_are_trained_on_and_predicted(cohort, split, tmp_path, settings):
    empty = {split.train[0], split.train[1], split.val[0]}
    some = replace(cohort, loader=Changed(cohort.loader, lambda bag: without_tiles(bag, bag.id in empty)))
    model = train_fold(some, split, replace(settings, samples_per_pass=1), tmp_path).model
    assert np.isfinite(predict_logits(model, loader_for(model, some, 8), some.samples)).all()
    none = replace(cohort, loader=Changed(cohort.loader, lambda bag: without_tiles(bag, True)))
    with pytest.raises(OptionError, match="no training sample has any tiles"):
        train_fold(none, split, settings, tmp_path / "none")


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("features", [torch.float16, torch.float32, torch.float64])
def test_precisions(cohort, split, tmp_path, precision, features):
    """Whatever the precision of training is, the model that is returned is the one in the file."""
    of = replace(cohort, loader=Changed(cohort.loader, lambda bag: replace(bag, features=bag.features.to(features))))
    settings = replace(PSA, epochs=2, precision=precision, accelerator="cpu")
    model = train_fold(of, split, settings, tmp_path)
    assert_same_bits(weights(model), weights(SavedModel.load(tmp_path / MODEL_FILE)))
    with torch.no_grad():
        assert model.model(PackedBags.of(of.load(of.samples[0]))).logits.isfinite().all()


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "bf16-true"])
def test_going_on_in_other_precisions(cohort, split, tmp_path, precision):
    def stop(record):
        raise KeyboardInterrupt

    settings = replace(PSA, epochs=2, precision=precision, accelerator="cpu")
    whole = train_fold(cohort, split, settings, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train_fold(cohort, split, settings, tmp_path / "broken", stop)
    assert_same_bits(weights(whole), weights(train_fold(cohort, split, settings, tmp_path / "broken")))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"model": "resnet"}, "unknown model 'resnet'"),
        ({"model_options": {"hidde": 3}}, "model 'mean' cannot be made with .*hidde"),
        ({"model_options": {"hidden": -3}}, "hidden at least 0"),
        ({"precision": "16-mixed", "accelerator": "cpu"}, "precision '16-mixed' cannot be used on a CPU; take 'bf16"),
        ({"accelerator": "abacus"}, "accelerator 'abacus' cannot be used here"),
        ({"accelerator": "tpu"}, "accelerator 'tpu' cannot be used here"),
    ],
)
def test_options_that_cannot_be_used(cohort, split, tmp_path, setting, message):
    with pytest.raises(OptionError, match=message):
        train_fold(cohort, split, replace(MEAN, **setting), tmp_path)
    assert not list(tmp_path.iterdir())


def test_sampling_instead_of_weights(cohort, split, monkeypatch, tmp_path):
    seen = []

    def order(n, *, seed, epoch, weights):
        seen.append(weights)
        return original(n, seed=seed, epoch=epoch, weights=weights)

    original = fold.epoch_order
    monkeypatch.setattr(fold, "epoch_order", order)
    train_fold(cohort, split, replace(MEAN, epochs=1, task=TaskOptions(balance="sampling")), tmp_path / "a")
    train_fold(cohort, split, replace(MEAN, epochs=1), tmp_path / "b")
    assert sum(seen[0]) == pytest.approx(1)
    assert seen[1] is None


def test_history_has_no_clock_and_knows_the_radii(cohort, split, tmp_path):
    train_fold(cohort, split, PSA, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / HISTORY_FILE).read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [0, 1, 2]
    validation = {"validation auc", "validation loss", "head_similarity"}
    assert lines[0].keys() == {"epoch", "loss", "lr", *validation, "radii_steps"}
    assert np.shape(lines[0]["radii_steps"]) == (1, 2)
