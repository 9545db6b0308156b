"""CLAM: its instance loss on worked values, the model against loops over bags, classes and tiles."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from psamil import Bag, PackedBags, create_model
from psamil.errors import OptionError
from psamil.models import check_model
from psamil.models.clam import CLAM, smooth_top1_svm

NAMES = ["clam_sb", "clam_mb"]
SIZES = (9, 0, 1, 3)
CLASSES = torch.tensor([1, 0, 0, 1])


def model_of(name: str, n_out: int = 1, **options) -> CLAM:
    torch.manual_seed(0)
    return create_model(name, 6, n_out, **{"hidden": 8, "attention_dim": 3, "dropout": 0.0, "instances": 2, **options})


def bags(*sizes: int, dtype: torch.dtype = torch.float64) -> list[Bag]:
    generator = torch.Generator().manual_seed(1)
    return [
        Bag(torch.randn(n, 6, generator=generator, dtype=torch.float64).to(dtype), torch.zeros(n, 2)) for n in sizes
    ]


@pytest.mark.parametrize(
    ("name", "n_out", "in_dim", "parameters"),
    [
        ("clam_sb", 1, 384, 463_111),
        ("clam_sb", 1, 1024, 790_791),
        ("clam_sb", 4, 384, 463_111 + 2 * 3 * 513),
        ("clam_mb", 1, 384, 463_111 + 257),  # a second branch of the attention
    ],
)
def test_sizes(name: str, n_out: int, in_dim: int, parameters: int) -> None:
    assert sum(p.numel() for p in create_model(name, in_dim, n_out).parameters()) == parameters


def test_smooth_svm_on_worked_values() -> None:
    scores = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([1, 1, 1, 0, 0, 0])
    losses = smooth_top1_svm(scores, targets)
    torch.testing.assert_close(losses.mean(), torch.tensor(1.62347), rtol=0, atol=1e-5)
    expected = [
        torch.stack([s + (j != t) - row[t] for j, s in enumerate(row)]).exp().sum().log()
        for row, t in zip(scores, targets, strict=True)
    ]
    torch.testing.assert_close(losses, torch.stack(expected))
    sure = smooth_top1_svm(torch.tensor([[0.0, 0.0], [0.0, 500.0], [500.0, 0.0]]), torch.tensor([1, 1, 1]))
    torch.testing.assert_close(sure, torch.tensor([1.3132617, 0.0, 501.0]))  # log(1 + e), kept, missed by 500 + 1


def by_loops(model: CLAM, parts: list[Bag], classes: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    """Class logits, scores of the branches and instance loss, as the definition says it."""
    logits, scores, instance_loss = [], [], torch.zeros((), dtype=torch.float64)
    n_classes = model.head.out_features
    many = model.score.score.out_features > 1
    for part, y in zip(parts, classes.tolist(), strict=True):
        h = (part.features @ model.embed.project[0].weight.T + model.embed.project[0].bias).relu()
        tanh = (h @ model.score.tanh.weight.T + model.score.tanh.bias).tanh()
        gate = (h @ model.score.gate.weight.T + model.score.gate.bias).sigmoid()
        a = (tanh * gate) @ model.score.score.weight.T + model.score.score.bias
        row = []
        for c in range(n_classes):
            z = a[:, c if many else 0].softmax(0) @ h
            row.append(model.head.weight[c] @ z + model.head.bias[c])
        logits.append(torch.stack(row))
        scores.append(a)
        order = a.detach().argsort(0, descending=True)
        of_bag = []
        for c in range(n_classes):
            best_first = order[:, c if many else 0].tolist()
            high, low = best_first[: model.instances], best_first[-model.instances :]
            weight = model.classify_instances.weight[2 * c : 2 * c + 2]
            bias = model.classify_instances.bias[2 * c : 2 * c + 2]
            asked = [(i, 1) for i in high] + [(i, 0) for i in low] if c == y else [(i, 0) for i in high]
            if asked and (c == y or model.subtyping):
                s = [(weight @ h[i] + bias, t) for i, t in asked]
                of_bag.append(sum((1 + (v[1 - t] - v[t] + 1).exp()).log() for v, t in s) / len(asked))
        instance_loss = instance_loss + (sum(of_bag) / len(of_bag) if of_bag else 0)
    return torch.stack(logits), scores, instance_loss / len(parts)


@pytest.mark.parametrize("subtyping", [False, True])
@pytest.mark.parametrize("n_out", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_against_loops(name: str, n_out: int, subtyping: bool) -> None:
    model = model_of(name, n_out, subtyping=subtyping).double()
    parts = bags(*SIZES)
    class_logits, scores, instance_loss = by_loops(model, parts, CLASSES)
    out = model(PackedBags.of(parts), CLASSES)

    expected = class_logits[:, 1:] - class_logits[:, :1] if n_out == 1 else class_logits
    torch.testing.assert_close(out.logits, expected)
    torch.testing.assert_close(out.auxiliary_losses["instances"], 0.3 / 0.7 * instance_loss)
    shown = class_logits.argmax(1) if name == "clam_mb" else torch.zeros(4, dtype=torch.long)
    expected_scores = torch.cat([a[:, k] for a, k in zip(scores, shown, strict=True)])
    torch.testing.assert_close(out.tile_scores, expected_scores)

    reference = 0.7 * F.cross_entropy(class_logits, CLASSES) + 0.3 * instance_loss  # as published
    if n_out == 1:
        bag_loss = F.binary_cross_entropy_with_logits(out.logits[:, 0], CLASSES.double())
    else:
        bag_loss = F.cross_entropy(out.logits, CLASSES)
    loss = 0.7 * (bag_loss + out.auxiliary_losses["instances"])
    torch.testing.assert_close(loss, reference)
    parameters = dict(model.named_parameters())
    ours = torch.autograd.grad(loss, parameters.values())
    theirs = torch.autograd.grad(reference, parameters.values())
    for parameter, a, b in zip(parameters, ours, theirs, strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, parameter=parameter: f"gradient of {parameter}: {text}")


@pytest.mark.parametrize("name", NAMES)
def test_choosing_tiles_has_no_gradient(name: str) -> None:
    model = model_of(name)
    model(PackedBags.of(bags(*SIZES, dtype=torch.float32)), CLASSES).auxiliary_losses["instances"].backward()
    assert all(p.grad is None for p in [*model.score.parameters(), *model.head.parameters()])
    assert all(p.grad.abs().sum() > 0 for p in [*model.embed.parameters(), *model.classify_instances.parameters()])


def test_only_the_classifier_of_the_class_learns_without_subtyping() -> None:
    batch = PackedBags.of(bags(9, dtype=torch.float32))
    for subtyping in (False, True):
        model = model_of("clam_sb", 3, subtyping=subtyping)
        model(batch, torch.tensor([2])).auxiliary_losses["instances"].backward()
        learns = model.classify_instances.weight.grad.reshape(3, -1).abs().sum(1) > 0
        assert learns.tolist() == [subtyping, subtyping, True]


@pytest.mark.parametrize("name", NAMES)
def test_no_classes_no_instance_loss(name: str) -> None:
    batch = PackedBags.of(bags(*SIZES, dtype=torch.float32))
    assert model_of(name)(batch).auxiliary_losses == {}
    assert model_of(name, instance_weight=0.0)(batch, CLASSES).auxiliary_losses == {}
    empty = PackedBags.of(bags(0, 0, dtype=torch.float32))
    assert model_of(name)(empty, CLASSES[:2]).auxiliary_losses["instances"] == 0


@pytest.mark.parametrize(("dropout", "of_attention"), [(0.0, 0.0), (0.25, 0.25), (0.6, 0.25)])
def test_dropout(dropout: float, of_attention: float) -> None:
    model = model_of("clam_sb", dropout=dropout)
    assert (model.embed.dropout.p, model.score.dropout.p) == (dropout, of_attention)
    ones = torch.ones(40_000, 8)
    model.score.tanh.weight.data.zero_()
    model.score.tanh.bias.data.fill_(1.0)
    model.score.score.weight.data = torch.tensor([[1.0, 0.0, 0.0]])
    model.score.score.bias.data.zero_()
    assert float((model.score(ones) == 0).float().mean()) == pytest.approx(1 - (1 - of_attention) ** 2, abs=0.01)
    batch = PackedBags.of(bags(*SIZES, dtype=torch.float32))
    torch.testing.assert_close(
        model_of("clam_sb", dropout=dropout).eval()(batch).logits, model_of("clam_sb")(batch).logits
    )


def test_bfloat16_autocast() -> None:
    model = model_of("clam_mb", 3)
    batch = PackedBags.of(bags(*SIZES, dtype=torch.float32))
    full = model(batch, CLASSES)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch, CLASSES)
    torch.testing.assert_close(out.logits, full.logits, rtol=0.05, atol=0.05)
    torch.testing.assert_close(
        out.auxiliary_losses["instances"], full.auxiliary_losses["instances"], rtol=0.05, atol=0.05
    )


@pytest.mark.parametrize("name", NAMES)
def test_promises_of_every_model(name: str) -> None:
    check_model(name, subtyping=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"attention_dim": 0}, "attention_dim and instances must be at least 1, got 0 and 2"),
        ({"instances": 0}, "attention_dim and instances must be at least 1, got 3 and 0"),
        ({"instance_weight": 1.0}, "instance_weight is a share of the loss"),
        ({"dropout": 1.0}, "dropout in"),
    ],
    ids=["attention_dim", "instances", "instance_weight", "dropout"],
)
def test_errors(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        model_of("clam_sb", **wrong)
