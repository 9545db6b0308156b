"""CAMIL against its equations, tile by tile."""

import math

import pytest
import torch
from torch import Tensor

from psamil import Bag, PackedBags, create_model
from psamil.errors import OptionError, ShapeError
from psamil.models.adjacency import Adjacency
from psamil.models.camil import CAMIL, feature_similarity

SMALL = {"hidden": 8, "heads": 2, "head_dim": 3, "landmarks": 4, "neighbour_dim": 5, "attention_dim": 3}


def model_of(**options) -> CAMIL:
    torch.manual_seed(0)
    return create_model("camil", 6, 2, **{**SMALL, **options}).double()


def bag_of(n: int, side: int = 4, slides: list[int] | None = None) -> Bag:
    generator = torch.Generator().manual_seed(n)
    cells = torch.cartesian_prod(torch.arange(side), torch.arange(side)).float()
    xy = cells[torch.randperm(side**2, generator=generator)[:n]]
    features = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    return Bag(features, xy, f"{n} tiles", torch.tensor(slides or [0, n]))


def similarity(bag: Bag, slide: list[int], i: int) -> dict[int, float]:
    """s_ij of tile i and the tiles around it, itself included."""
    xy, f = bag.xy.tolist(), bag.features
    around = [j for j in range(bag.n) if j != i and slide[j] == slide[i] and math.dist(xy[i], xy[j]) <= 1.5]
    distance = {j: float((f[i] - f[j]).square().sum()) ** 0.5 for j in around}
    norm = sum(d * d for d in distance.values()) ** 0.5
    s = {j: math.exp(-d / norm) for j, d in distance.items()}
    s[i] = max(s.values(), default=1.0)
    return s


def by_hand(model: CAMIL, bag: Bag) -> tuple[Tensor, Tensor]:
    slide = torch.repeat_interleave(bag.slides.diff()).tolist()
    linear = model.embed.project[0]
    x = (bag.features @ linear.weight.T + linear.bias).relu()
    t = x + model.context(x)
    w = []
    for i in range(bag.n):
        s = similarity(bag, slide, i)
        terms = [s[j] * ((model.query.weight @ t[i]) @ (model.key.weight @ t[j])) for j in s]
        w.append(torch.stack(terms).sum() / 5**0.5)
    weights = torch.stack(w).exp() / torch.stack(w).exp().sum()
    a, pooled = [], []
    for i in range(bag.n):
        local = weights[i] * (model.value.weight @ t[i])
        gate = 1 / (1 + (-local).exp())
        pooled.append(gate * local + (1 - gate) * t[i])
        gated = (model.score.tanh(t[i])).tanh() * model.score.gate(t[i]).sigmoid()
        a.append(model.score.score(gated)[0])
    scores = torch.stack(a)
    return model.head.weight @ (scores.softmax(0) @ torch.stack(pooled)) + model.head.bias, scores


def test_against_its_equations() -> None:
    model = model_of()
    bags = [bag_of(9), bag_of(10, slides=[0, 4, 10]), bag_of(1), bag_of(14)]
    expected = [by_hand(model, bag) for bag in bags]
    output = model(PackedBags.of(bags))
    torch.testing.assert_close(output.logits, torch.stack([logits for logits, _ in expected]))
    torch.testing.assert_close(output.tile_scores, torch.cat([scores for _, scores in expected]))
    parameters = list(model.parameters())
    actual = torch.autograd.grad(output.logits.square().sum() + output.tile_scores.sum(), parameters)
    loss = sum(logits.square().sum() + scores.sum() for logits, scores in expected)
    for name, a, e in zip(dict(model.named_parameters()), actual, torch.autograd.grad(loss, parameters), strict=True):
        torch.testing.assert_close(a, e, msg=lambda text, name=name: f"gradient of {name}: {text}")


def test_similarity_of_three_tiles_in_a_row() -> None:
    features = torch.tensor([[0.0, 0.0], [3.0, 0.0], [3.0, 4.0], [9.0, 9.0]])
    xy = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [7.0, 0.0]])
    of_pair, of_itself = feature_similarity(features, Adjacency.of(PackedBags.of(Bag(features, xy))))
    # distances 3 and 4 of the middle tile have the norm 5; a single neighbour is always at 1; the last tile has none
    torch.testing.assert_close(of_pair, torch.tensor([-1.0, -0.6, -0.8, -1.0]).exp())
    torch.testing.assert_close(of_itself, torch.tensor([math.exp(-1), math.exp(-0.6), math.exp(-1), 1.0]))


def test_equal_tiles_are_fully_alike() -> None:
    bag = Bag(torch.ones(3, 2), torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]]))
    of_pair, of_itself = feature_similarity(bag.features, Adjacency.of(PackedBags.of(bag)))
    assert of_pair.tolist() == [1.0] * 4
    assert of_itself.tolist() == [1.0] * 3


def test_similarity_of_half_precision_features() -> None:
    """Tiles 500 apart: the square of that is beyond float16."""
    bag = bag_of(9)
    adjacency, features = Adjacency.of(PackedBags.of(bag)), 200 * bag.features
    expected = feature_similarity(features, adjacency)
    for found, exact in zip(feature_similarity(features.half(), adjacency), expected, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=1e-2)


def test_neighbours_matter() -> None:
    model, bag = model_of(), bag_of(9)
    apart = Bag(bag.features, bag.xy * 2, bag.id)
    with torch.no_grad():
        assert (model(PackedBags.of(bag)).logits - model(PackedBags.of(apart)).logits).abs().max() > 1e-4


def test_sizes() -> None:
    published = create_model("camil", 512, 1, hidden=0)
    nystrom = 512 * 1536 + 8 * 33 + 512 * 512 + 512
    assert sum(p.numel() for p in published.parameters()) == nystrom + 4 * 512 * 256 + 2 * (512 * 128 + 128) + 129 + 513
    embedded = create_model("camil", 384, 1)
    assert sum(p.numel() for p in embedded.parameters()) == 1_705_610 + 384 * 512 + 512


def test_features_as_they_are_and_no_tiles() -> None:
    model = model_of(hidden=0)
    empty = Bag(torch.zeros(0, 6), torch.zeros(0, 2))
    output = model(PackedBags.of([empty, bag_of(9)]))
    torch.testing.assert_close(output.logits[0], model.head.bias)
    torch.testing.assert_close(output.logits[1:], model(PackedBags.of(bag_of(9))).logits)


def test_dropout_is_for_training_only() -> None:
    model, batch = model_of(dropout=0.5), PackedBags.of(bag_of(9))
    assert not torch.equal(model(batch).logits, model(batch).logits)
    torch.testing.assert_close(model.eval()(batch).logits, model_of()(batch).logits, rtol=0, atol=0)


def test_errors() -> None:
    with pytest.raises(ShapeError, match="takes features of width 6, got 5"):
        model_of()(PackedBags.of(Bag(torch.zeros(3, 5), torch.zeros(3, 2))))
    for wrong in ({"neighbour_dim": 0}, {"hidden": -1}, {"dropout": 1.0}, {"attention_dim": 0}):
        with pytest.raises(OptionError, match="at least 1"):
            model_of(**wrong)
