"""Every registered model keeps what models promise, and every check finds the model that breaks just that promise."""

import re
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from psamil import ModelOutput, PackedBags, check_model, create_model, list_models
from psamil.errors import OptionError
from psamil.models.behaviours import CHECKS, check_permutation, example_bags
from psamil.models.check import ModelCheckError
from psamil.models.output import ExtraPrediction
from psamil.models.segments import segment_softmax, segment_sum
from psamil.spatial import neighbour_pairs

DOCUMENTED = Path(__file__).parents[2] / "docs" / "models.md"

# Of models that take seconds in their full size
SMALL = {
    "bayes_mil": {"hidden": 32},
    "camil": {"hidden": 32, "heads": 2, "landmarks": 32},
    "gtp": {"width": 16, "nodes": 20},
    "longmil": {"width": 96},
    "setmil": {"depth": 1, "token_width": 32, "branch_width": 32},
    "sm_transformer": {"hidden": 32},
    "transmil": {"width": 64},
    **{name: {"head_dim": 8} for name in ("local", "msa", "ppeg", "psa", "rope", "rpe")},
}


@pytest.mark.parametrize("name", list_models())
def test_registered_models(name: str) -> None:
    result = check_model(name, **SMALL.get(name, {}))
    assert result.name == name
    assert {*result.passed, *result.exceptions} == {"shapes", *CHECKS}


def test_every_model_and_check_has_its_row_in_the_documentation() -> None:
    page = DOCUMENTED.read_text()
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")
    ]
    exceptions = {row[0]: set(re.findall(r"[a-z][a-z ]+", row[-1])) for row in rows if len(row) == 6}
    assert sorted(exceptions) == list_models()
    for name, documented in exceptions.items():
        assert documented == set(getattr(create_model(name, 32, 1), "exceptions", {})), name
    assert [row[0] for row in rows if len(row) == 2] == ["shapes", *CHECKS]


def test_exceptions_of_the_documentation_with_their_reasons() -> None:
    rows = re.findall(
        r"^\| `(\w+)`(?: with `((?:grid|pooling): \w+)`)? \| ([a-z ]+) \| (.+) \|$", DOCUMENTED.read_text(), re.M
    )
    documented = {(name, option, check): reason for name, option, check, reason in rows if check in CHECKS}
    models = {(name, ""): create_model(name, 32, 1) for name in list_models()}
    for name, option, _ in documented:
        if option:
            key, value = option.split(": ")
            models[name, option] = create_model(name, 32, 1, **{key: value})
    declared = {
        (*key, check): reason
        for key, model in models.items()
        for check, reason in getattr(model, "exceptions", {}).items()
    }
    assert documented == declared


class Sound(nn.Module):
    """Attention pooling with the mean of neighbours: keeps every promise. Subclasses break one each."""

    def __init__(self, in_dim: int, n_out: int) -> None:
        super().__init__()
        self.embed = nn.Linear(in_dim, 8)
        self.score = nn.Linear(8, 1)
        self.head = nn.Linear(8, n_out)

    def features(self, batch: PackedBags) -> torch.Tensor:
        return batch.features.to(self.head.weight.dtype)

    def pairs(self, batch: PackedBags) -> torch.Tensor:
        return neighbour_pairs(batch.xy, batch.slides)

    def forward(self, batch: PackedBags) -> ModelOutput:
        h = self.embed(self.features(batch)).tanh()
        i, j = self.pairs(batch)
        h = (h + segment_sum(h[j], i, batch.n)).to(h.dtype)
        scores = self.score(h)[:, 0]
        bag = batch.bag_of_tile
        pooled = segment_sum(segment_softmax(scores, bag, len(batch))[:, None] * h, bag, len(batch))
        return ModelOutput(self.head(pooled.to(h.dtype)), scores)


class SeesOrder(Sound):
    def features(self, batch):
        x = super().features(batch)
        place = torch.arange(len(x)) - batch.offsets[batch.bag_of_tile]
        return x + 0.01 * place[:, None].to(x.dtype)


class SeesPlace(Sound):
    def features(self, batch):
        return super().features(batch) + 1e-3 * batch.xy.to(self.head.weight.dtype).mean(1, keepdim=True)


class CrossesSlides(Sound):
    def pairs(self, batch):
        return neighbour_pairs(batch.xy, batch.offsets)


class MixesBags(Sound):
    def features(self, batch):
        x = super().features(batch)
        return x - 1e-3 * x.sum(0)


class NeedsNeighbours(Sound):
    def features(self, batch):
        x = super().features(batch)
        return x / (1 if batch.n != 1 else 0 * x)


class DividesByDistance(Sound):
    """All tiles of a bag in one place: 0 / 0 for a bag of several tiles."""

    def features(self, batch):
        x = super().features(batch)
        spread = torch.stack(
            [xy.var(0, correction=0).sum() if len(xy) > 1 else xy.new_ones(()) for xy in batch.split(batch.xy)]
        )
        return x * (spread / spread).to(x.dtype)[batch.bag_of_tile, None]


class HasAnIdleLayer(Sound):
    def __init__(self, in_dim, n_out):
        super().__init__(in_dim, n_out)
        self.idle = nn.Linear(8, 8)


class HasInfiniteGradient(Sound):
    def features(self, batch):
        x = super().features(batch)
        return x + (0 * self.embed.weight.sum()).abs().sqrt() if self.training and len(batch) > 3 else x


class IgnoresALayer(HasAnIdleLayer):
    def features(self, batch):
        return super().features(batch) + 0 * (self.idle.weight.sum() + self.idle.bias.sum())


class DropsInEvaluation(Sound):
    def features(self, batch):
        return nn.functional.dropout(super().features(batch), 0.1)


class KeepsStateOutside(Sound):
    def __init__(self, in_dim, n_out):
        super().__init__(in_dim, n_out)
        self.shift = torch.randn(in_dim)

    def features(self, batch):
        x = super().features(batch)
        return x + self.shift.to(x.dtype)


class ChangesItsInput(Sound):
    def features(self, batch):
        x = super().features(batch)
        return x.relu_() if len(batch) > 1 and x.dtype == torch.float32 and self.training else x.relu()


class NeedsMoreThanHalf(Sound):
    def features(self, batch):
        x = super().features(batch)
        return x.float() if x.dtype == torch.bfloat16 else x


class TakesOnePrecision(Sound):
    def features(self, batch):
        return batch.features


class AveragesNothing(Sound):
    def forward(self, batch):
        out = super().forward(batch)
        size = batch.offsets.diff()[:, None]
        return ModelOutput(out.logits * (size / size), out.tile_scores)


class GivesProbabilities(Sound):
    def forward(self, batch):
        out = super().forward(batch)
        return ModelOutput(torch.stack((-out.logits, out.logits), -1).flatten(1), out.tile_scores)


class GivesATuple(Sound):
    def forward(self, batch):
        out = super().forward(batch)
        return out.logits, out.tile_scores


class PoolsScores(Sound):
    def forward(self, batch):
        out = super().forward(batch)
        return ModelOutput(out.logits, out.tile_scores[:-1])


class EvidenceDoesNotAddUp(Sound):
    def forward(self, batch):
        out = super().forward(batch)
        return ModelOutput(out.logits, out.tile_scores, tile_evidence=out.logits[batch.bag_of_tile] + 1)


BROKEN = [
    (EvidenceDoesNotAddUp, {"evidence"}, "logits of bag 'lattice' lie outside the evidence of its tiles"),
    (SeesOrder, {"permutation"}, "logits of permuted tiles differ by up to"),
    (SeesPlace, {"translation"}, "logits of moved slides differ by up to"),
    (CrossesSlides, {"translation"}, "values differ"),
    (MixesBags, {"batch", "single tile", "empty bag"}, "logits of packed bags differ by up to"),
    (NeedsNeighbours, {"single tile"}, "with one tile: 1 of 1 logits are not finite"),
    (DividesByDistance, {"duplicates"}, "with all tiles in one place: 1 of 1 logits are not finite"),
    (HasAnIdleLayer, {"gradients"}, "2 parameters get no gradient: idle.weight, idle.bias"),
    (IgnoresALayer, {"gradients"}, "2 parameters have a gradient of 0 for every bag: idle.weight, idle.bias"),
    (
        HasInfiniteGradient,
        {"gradients", "half weights"},
        "256 of 256 numbers of the gradient of embed.weight are not finite",
    ),
    (
        DropsInEvaluation,
        {"permutation", "translation", "batch", "single tile", "empty bag", "deterministic", "state", "half features"},
        "of a second pass in evaluation mode differ",
    ),
    (KeepsStateOutside, {"state"}, "of a new model with the same state differ"),
    (ChangesItsInput, {"inputs"}, "features of the batch after a pass differ"),
    (NeedsMoreThanHalf, {"half weights"}, "RuntimeError: "),
    (TakesOnePrecision, {"half features"}, "RuntimeError: "),
    (AveragesNothing, {"empty bag"}, "with no tiles: 1 of 1 logits are not finite"),
    (GivesProbabilities, {"shapes"}, r"logits must be \(4, 1\), got \(4, 2\)"),
    (GivesATuple, {"shapes"}, "must return a ModelOutput, got tuple"),
    (PoolsScores, {"shapes"}, r"tile_scores of 371 tiles must be \(371,\), got \(370,\)"),
]


def test_a_sound_model_passes() -> None:
    state = torch.get_rng_state()
    result = check_model(Sound)
    assert torch.equal(torch.get_rng_state(), state)
    assert result.passed == ("shapes", *CHECKS)
    assert str(result).startswith("Sound: 14 checks passed (shapes, evidence")


@pytest.mark.parametrize(("model", "broken", "message"), BROKEN, ids=[model.__name__ for model, _, _ in BROKEN])
def test_a_broken_promise_is_found(model: type[Sound], broken: set[str], message: str) -> None:
    with pytest.raises(ModelCheckError, match=message) as caught:
        check_model(model, n_out=1)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"model {model.__name__!r} fails:"
    assert {line.strip().split(" (n_out=1): ")[0] for line in lines[1:]} == broken


def test_every_check_has_a_model_that_breaks_it() -> None:
    assert set().union(*(broken for _, broken, _ in BROKEN)) == {"shapes", *CHECKS}


def test_declared_exceptions() -> None:
    reason = "tiles are a sequence"
    declared = type("Declared", (SeesOrder,), {"exceptions": {"permutation": reason}})
    result = check_model(declared)
    assert result.exceptions == {"permutation": reason}
    assert "permutation" not in result.passed
    assert str(result).splitlines()[1] == "  not permutation: tiles are a sequence"
    also = type("Also", (SeesOrder, SeesPlace), {"exceptions": {"permutation": reason}})
    with pytest.raises(ModelCheckError, match="translation") as caught:
        check_model(also)
    assert "moved slides" in str(caught.value.__cause__)  # not what was declared
    stale = type("Stale", (Sound,), {"exceptions": {"permutation": reason}})
    with pytest.raises(ModelCheckError, match="permutation: declared as an exception, but it holds"):
        check_model(stale)
    unknown = type("Unknown", (Sound,), {"exceptions": {"order": reason}})
    with pytest.raises(
        OptionError, match="unknown check in the exceptions of model 'Unknown': 'order'; known: 'batch'"
    ):
        check_model(unknown)


def test_an_exception_may_hold_for_some_numbers_of_outputs() -> None:
    class HeadOfManyClasses(Sound):
        exceptions: ClassVar = {"gradients": "the extra layer serves several classes only"}

        def __init__(self, in_dim, n_out):
            super().__init__(in_dim, n_out)
            self.extra = nn.Parameter(torch.zeros(n_out))

        def forward(self, batch):
            out = super().forward(batch)
            return ModelOutput(out.logits + (self.extra if out.logits.shape[1] > 1 else 0), out.tile_scores)

    assert "gradients" in check_model(HeadOfManyClasses).exceptions
    assert "gradients" in check_model(HeadOfManyClasses, n_out=1).exceptions
    with pytest.raises(ModelCheckError, match="gradients: declared as an exception, but it holds"):
        check_model(HeadOfManyClasses, n_out=4)


class Demanding(Sound):
    """Uses all that a model may ask of its trainer; every part of it is a parameter of its own."""

    wants_classes = True

    def __init__(self, in_dim, n_out, parts=("classes", "first epoch", "last epoch", "extra")):
        super().__init__(in_dim, n_out)
        self.weights = nn.ParameterDict({name.replace(" ", "_"): torch.ones(()) for name in parts})
        self.register_buffer("epoch", torch.tensor(-1))
        self.register_buffer("middle", torch.zeros(in_dim))

    def start_epoch(self, epoch, epochs, batches):
        assert not self.training
        assert not torch.is_grad_enabled()
        self.epoch.fill_(0 if epoch == 0 else 1 if epoch == epochs - 1 else -1)
        self.middle.copy_(torch.cat([batch.features for batch in batches()]).mean(0))

    def features(self, batch):
        return super().features(batch) - self.middle

    def forward(self, batch, classes=None):
        out = super().forward(batch)
        if not self.training:
            return out
        losses = {}
        if classes is not None:
            assert classes.tolist() == [i % max(2, out.logits.shape[1]) for i in range(len(batch))]
            losses["classes"] = self.weights["classes"] * out.logits.sum()
        now = ("first_epoch", "last_epoch")[int(self.epoch)]
        losses["epoch"] = self.weights[now] * out.logits.sum()
        extra = ExtraPrediction(self.weights["extra"] * out.logits, torch.arange(len(batch)))
        return ModelOutput(out.logits, out.tile_scores, losses, {"extra": extra})


def test_everything_that_a_model_may_ask_for_is_given() -> None:
    check_model(Demanding)
    with pytest.raises(ModelCheckError, match=r"1 parameters get no gradient: weights\.other"):
        check_model(Demanding, n_out=1, parts=("classes", "first epoch", "last epoch", "extra", "other"))


def test_a_single_check_on_bags_of_ones_own() -> None:
    bags = example_bags(5)[:2]
    check_permutation(lambda: Sound(5, 2), bags)
    with pytest.raises(AssertionError, match="permuted tiles"):
        check_permutation(lambda: SeesOrder(5, 2), bags)


def test_names_builders_and_options() -> None:
    assert check_model("abmil", in_dim=7, n_out=2, gated=False, hidden=8).name == "abmil"
    with pytest.raises(OptionError, match="unknown model 'abml'"):
        check_model("abml")
    with pytest.raises(OptionError, match="got Sound; pass its class"):
        check_model(Sound(3, 1))
