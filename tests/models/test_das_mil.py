"""DAS-MIL: against dense graphs bag by bag, its losses, and what training leaves out."""

import math

import pytest
import torch
from torch import Tensor

from psamil import Bag, PackedBags, create_model
from psamil.errors import OptionError
from psamil.models.das_mil import DASMIL, DualStreamHead, bernoulli_divergence
from tests.models.cases import lattice_bag


def model_of(n_out: int = 2, **options) -> DASMIL:
    torch.manual_seed(0)
    model = create_model("das_mil", 6, n_out, **{"hidden": 8, "heads": 2, "query_dim": 5, **options}).double()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model.eval()


def bags() -> list[Bag]:
    generator = torch.Generator().manual_seed(1)
    places = [(30, 9, ()), (0, 1, ()), (1, 1, ()), (24, 7, (0, 10, 24))]
    return [lattice_bag(n, side, 6, generator, slides) for n, side, slides in places]


def dense_gat(layer: torch.nn.Module, x: Tensor, adjacent: Tensor) -> Tensor:
    allowed = adjacent | torch.eye(len(x), dtype=torch.bool)
    values = (x @ layer.project.weight.T).view(len(x), layer.heads, -1)
    scores = (values * layer.sender).sum(-1)[None] + (values * layer.receiver).sum(-1)[:, None]  # (i, j, heads)
    scores = torch.nn.functional.leaky_relu(scores, 0.2).masked_fill(~allowed[..., None], -torch.inf)
    return torch.einsum("ijh,jhd->ihd", scores.softmax(1), values).mean(1) + layer.bias


def dense_head(head: DualStreamHead, h: Tensor) -> tuple[Tensor, Tensor]:
    nodes = head.node(h)
    u = head.hidden[0](h).relu()
    q, v = head.query[0](u).tanh(), head.value(u)
    pooled = []
    for c in range(nodes.shape[1]):
        weights = (q @ q[nodes[:, c].argmax()] / math.sqrt(q.shape[1])).softmax(0)
        pooled.append(weights @ v)
    return nodes, head.bag(torch.cat(pooled))


def reference(model: DASMIL, bag: Bag, side: int) -> dict[str, Tensor]:
    """One bag with dense matrices; parents are found tile by tile."""
    slide = torch.repeat_interleave(bag.slides.diff())
    corner = torch.stack([bag.xy[slide == s].amin(0) for s in slide])
    names = [(int(s), *map(int, cell)) for s, cell in zip(slide, (bag.xy - corner) // side, strict=True)]
    parents = sorted(set(names))
    member = torch.tensor([[name == parent for name in names] for parent in parents])  # (m, n)
    coarse = member.double() / member.sum(1, keepdim=True) @ bag.features
    at = torch.tensor(parents)
    near_tiles = ((torch.cdist(bag.xy, bag.xy) < 1.5) & (slide[:, None] == slide)).fill_diagonal_(False)
    steps = (at[:, None, 1:] - at[None, :, 1:]).abs().amax(2)
    near_parents = ((steps == 1) & (at[:, None, 0] == at[:, 0])).fill_diagonal_(False)
    joint = torch.cat((torch.cat((near_parents, member), 1), torch.cat((member.T, near_tiles), 1)))
    both = torch.cat(
        (dense_gat(model.parent_graph, coarse, near_parents), dense_gat(model.tile_graph, bag.features, near_tiles))
    )
    h = dense_gat(model.joint_graph, both, joint)
    parent_logits, low = dense_head(model.parent_head, h[: len(parents)])
    tile_logits, high = dense_head(model.tile_head, h[len(parents) :])
    teacher = torch.stack([tile_logits[m].amax(0) for m in member]).detach()
    p, q = (high.detach() / model.temperature).sigmoid(), (low / model.temperature).sigmoid()
    return {
        "logits": high,
        "scores": tile_logits.amax(1) - (tile_logits.mean(1) if tile_logits.shape[1] > 1 else 0),
        "highest tile": tile_logits.amax(0),
        "highest parent": parent_logits.amax(0),
        "parents": low,
        "distil tiles": (parent_logits - teacher).square().mean(),
        "distil bag": (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum(),
    }


@pytest.mark.parametrize("n_out", [1, 3])
@pytest.mark.parametrize("side", [2, 4])
def test_against_dense_graphs_with_gradients(n_out: int, side: int) -> None:
    model = model_of(n_out, parent_steps=side, distil_bag=0.7, distil_tiles=0.4)
    parts = bags()
    out = model(PackedBags.of(parts))
    expected = [reference(model, bag, side) if bag.n else None for bag in parts]
    full = [one for one in expected if one is not None]
    torch.testing.assert_close(out.logits[[0, 2, 3]], torch.stack([one["logits"] for one in full]))
    torch.testing.assert_close(out.tile_scores, torch.cat([one["scores"] for one in full]))
    empty_low = model.parent_head.bag.bias
    for name, weight in {"highest tile": 1.0, "highest parent": 1.0, "parents": 1 - 0.7}.items():
        extra = out.extra_predictions[name]
        assert extra.bag.tolist() == [0, 2, 3]
        assert extra.weight == pytest.approx(weight)
        torch.testing.assert_close(extra.logits, torch.stack([one[name] for one in full]))
    tiles = 0.4 * sum(one["distil tiles"] for one in full) / 4
    torch.testing.assert_close(out.auxiliary_losses["distil tiles"], tiles)
    of_empty = bernoulli_divergence(model.tile_head.bag.bias.detach() / 1.5, empty_low / 1.5).sum()
    bag = 0.7 * (sum(one["distil bag"] for one in full) + of_empty) / 4
    torch.testing.assert_close(out.auxiliary_losses["distil bag"], bag)

    actual_loss = sum(out.auxiliary_losses.values()) + out.logits[[0, 2, 3]].sin().sum()
    actual_loss = actual_loss + sum(extra.logits.sin().sum() for extra in out.extra_predictions.values())
    names = ("logits", "highest tile", "highest parent", "parents")
    expected_loss = tiles + bag + sum(one[name].sin().sum() for one in full for name in names)
    parameters = list(model.parameters())
    for (name, _), a, b in zip(
        model.named_parameters(),
        torch.autograd.grad(actual_loss, parameters),
        torch.autograd.grad(expected_loss, parameters),
        strict=True,
    ):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


def test_size() -> None:
    gat = 384 * 3 * 384 + 2 * 3 * 384 + 384
    joint = 384 * 3 * 256 + 2 * 3 * 256 + 256
    head = (256 + 1) + 2 * (256 * 256 + 256) + (256 * 128 + 128) + (256 + 1)
    assert sum(p.numel() for p in create_model("das_mil", 384, 1).parameters()) == 2 * gat + joint + 2 * head
    assert 2 * gat + joint + 2 * head == 1_516_804


def test_the_teacher_does_not_learn_from_its_pupil() -> None:
    model = model_of(1)
    out = model(PackedBags.of(bags()))
    sum(out.auxiliary_losses.values()).backward()
    assert all(p.grad is None for p in model.tile_head.parameters())
    assert model.parent_head.bag.weight.grad.abs().sum() > 0
    assert model.parent_head.node.weight.grad.abs().sum() > 0


def test_by_default_parents_learn_from_tiles_alone() -> None:
    out = create_model("das_mil", 6, 1)(PackedBags.of(Bag(torch.randn(5, 6), torch.rand(5, 2))))
    assert list(out.extra_predictions) == ["highest tile", "highest parent"]
    no_tiles = create_model("das_mil", 6, 1)(PackedBags.of(Bag(torch.zeros(0, 6), torch.zeros(0, 2))))
    assert not no_tiles.extra_predictions  # a mean over no rows would be NaN
    assert all(loss.isfinite() for loss in no_tiles.auxiliary_losses.values())


def test_divergence_of_known_numbers() -> None:
    teacher, student = torch.tensor([0.0, 0.0, 40.0]), torch.tensor([0.0, math.log(3.0), 0.0])
    expected = [0.0, 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25), math.log(2.0)]
    torch.testing.assert_close(bernoulli_divergence(teacher, student), torch.tensor(expected))
    assert bernoulli_divergence(torch.tensor(500.0), torch.tensor(-500.0)).isfinite()


def test_training_leaves_out_the_edges_of_half_the_nodes() -> None:
    model = model_of(1, node_dropout=0.5).train()
    n = 200
    pairs = torch.cartesian_prod(torch.arange(n), torch.arange(n)).T
    kept: list[Tensor] = []

    def record(x: Tensor, pairs: Tensor) -> Tensor:
        kept.append(pairs)
        return x

    torch.manual_seed(0)
    for _ in range(20):
        model._attend(record, torch.zeros(n, 1), pairs)
    nodes = [one.unique() for one in kept]
    assert all(one.shape[1] == len(left) ** 2 for one, left in zip(kept, nodes, strict=True))  # all or none of a node
    assert 90 < sum(map(len, nodes)) / 20 < 110
    assert not torch.equal(nodes[0], nodes[1])
    model.eval()
    model._attend(record, torch.zeros(n, 1), pairs)
    assert torch.equal(kept[-1], pairs)


@pytest.mark.parametrize(
    "wrong",
    [{"hidden": 0}, {"parent_steps": 0}, {"node_dropout": 1.0}, {"distil_bag": 1.5}, {"temperature": 0.0}],
    ids=lambda options: next(iter(options)),
)
def test_wrong_options(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        model_of(**wrong)
