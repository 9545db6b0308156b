"""LongMIL against its formula in n x n arrays, slide by slide."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from psamil import Bag, PackedBags, create_model
from psamil.errors import OptionError
from psamil.models.longmil import LongMIL
from tests.models.cases import assert_as_one_by_one, assert_trains_in_bfloat16
from tests.spatial.cases import positions


def small(**options) -> LongMIL:
    torch.manual_seed(0)
    return create_model("longmil", 6, 2, **{"width": 16, "radius_steps": 3.0, **options}).double().eval()


def bags() -> list[Bag]:
    generator = torch.Generator().manual_seed(0)

    def features(n: int) -> Tensor:
        return torch.randn(n, 6, generator=generator, dtype=torch.float64)

    two = torch.cat((positions("lattice", 40), positions("duplicates", 21, seed=1)))
    return [
        Bag(features(61), two, "two slides", slides=torch.tensor([0, 40, 61])),
        Bag(features(30), positions("continuous", 30), "anywhere"),
        Bag(features(1), torch.zeros(1, 2), "one"),
    ]


def by_definition(model: LongMIL, bag: Bag) -> tuple[Tensor, Tensor]:
    h = (bag.features @ model.embed.project[0].weight.T + model.embed.project[0].bias).relu()
    slopes = [1 / 4, 1 / 16, 1 / 64, 1 / 256]
    for number, block in enumerate(model.blocks):
        x = block.norm1(h)
        slides = []
        for a, b in pairwise(bag.slides.tolist()):
            d = (bag.xy[a:b, None] - bag.xy[a:b]).double().square().sum(-1).sqrt()
            q, k, v = (t.view(b - a, 4, 4) for t in (x[a:b] @ block.attention.qkv.weight.T).chunk(3, 1))
            heads = []
            for head, slope in enumerate(slopes):
                beyond = -math.inf if number < 2 else -100 * slope
                bias = torch.where(d <= 3 + 1e-9, -slope * d, beyond)
                heads.append((q[:, head] @ k[:, head].T / 2 + bias).softmax(1) @ v[:, head])
            slides.append(torch.cat(heads, 1))
        h = h + block.attention.proj(torch.cat(slides))
        h = h + block.mlp(block.norm2(h))
    of_tiles = model.head(model.norm(h))
    return model.head(model.norm(h.mean(0))), of_tiles.amax(1) - of_tiles.mean(1)


def test_against_the_definition() -> None:
    model, parts = small(), bags()
    assert_as_one_by_one(model, parts, [by_definition(model, part) for part in parts])


def test_sizes() -> None:
    model = create_model("longmil", 1024, 2)
    block = 2 * 768 + 3 * 384**2 + 384**2 + 384 + 8 * 384**2 + 5 * 384
    assert sum(p.numel() for p in model.parameters()) == 1024 * 384 + 384 + 3 * block + 768 + 384 * 2 + 2
    assert model.blocks[0].attention.slopes.tolist() == [0.25, 0.0625, 0.015625, 0.00390625]
    assert [block.attention.prior.name for block in model.blocks] == ["local alibi", "local alibi", "global alibi"]


def test_an_empty_bag_and_dropout() -> None:
    model = small(dropout=0.5)
    batch = PackedBags.of([*bags(), Bag(torch.zeros(0, 6).double(), torch.zeros(0, 2))])
    empty = model(batch).logits[-1]
    torch.testing.assert_close(empty, model.head(model.norm.bias))
    first, second = (model.train()(batch).logits for _ in range(2))
    assert not torch.allclose(first[:3], second[:3])
    torch.testing.assert_close(model.eval()(batch).logits, small()(batch).logits)


def test_bfloat16() -> None:
    assert_trains_in_bfloat16(small(), bags())


def test_errors() -> None:
    with pytest.raises(OptionError, match="width a multiple of heads"):
        small(width=15)
    with pytest.raises(OptionError, match="radius_steps must be positive and at most 100, got 101"):
        small(radius_steps=101)
