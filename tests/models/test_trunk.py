"""Spatial parts in one trunk: each against its formula in n x n arrays, slide by slide."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from psamil import Bag, PackedBags, check_model, create_model
from psamil.errors import OptionError
from psamil.models.relative_position import bucket
from psamil.models.trunk import Trunk
from psamil.models.variants import BUCKETS
from psamil.spatial import Layout
from tests.models.cases import assert_trains_in_bfloat16
from tests.spatial.cases import positions

OPTIONS = {
    "msa": {},
    "local": {"radius_steps": 3.0},
    "ppeg": {},
    "ppeg file": {"grid": "file"},
    "rpe": {},
    "rpe table20": {"buckets": "table20"},
    "rope": {},
}


def small(variant: str, **options) -> Trunk:
    torch.manual_seed(0)
    model = create_model(
        variant.split()[0], 6, 2, **{"heads": 2, "head_dim": 8, **OPTIONS.get(variant, {}), **options}
    ).double()
    for block in model.blocks:
        if hasattr(block.attention, "table"):
            torch.nn.init.normal_(block.attention.table)  # it begins at 0
    return model


def bags() -> list[Bag]:
    generator = torch.Generator().manual_seed(0)

    def features(n: int) -> Tensor:
        return torch.randn(n, 6, generator=generator, dtype=torch.float64)

    two = torch.cat((positions("lattice", 30), positions("lattice", 11, seed=1)))
    return [
        Bag(features(41), two, "two slides", slides=torch.tensor([0, 30, 41])),
        Bag(features(0), torch.zeros(0, 2), "none"),
        Bag(features(25), positions("continuous", 25), "anywhere"),
        Bag(features(1), torch.zeros(1, 2), "one"),
    ]


def by_definition(model: Trunk, variant: str, bag: Bag) -> tuple[Tensor, Tensor]:
    """Logits and scores of one bag, in arrays of all pairs of a slide."""
    x = model.adapter(bag.features)
    slides = [(x[a:b], bag.xy[a:b].double()) for a, b in pairwise(bag.slides.tolist())]
    (block,) = model.blocks
    tokens = torch.cat([attended(model, variant, block, *slide) for slide in slides])
    tokens = model.norm(tokens + block.mlp(block.norm2(tokens)))
    scores = model.score(tokens)[:, 0]
    return model.head(scores.softmax(0) @ tokens), scores


def attended(model: Trunk, variant: str, block, x: Tensor, xy: Tensor) -> Tensor:
    if variant == "ppeg":
        cells = (xy - xy.amin(0)).round().long()
        width, height = (cells.amax(0) + 1).tolist()
        x = x + on_canvas(model, x, cells, width, height)
    elif variant == "ppeg file":
        side = math.ceil(math.sqrt(len(x)))
        filled = torch.cat((x, x[: side**2 - len(x)]))
        cells = torch.stack((torch.arange(side**2) % side, torch.arange(side**2) // side), 1)
        x = x + on_canvas(model, filled, cells, side, side)[: len(x)]
    attention = block.attention
    q, k, v = (t.view(len(x), 2, 8) for t in attention.qkv(block.norm1(x)).chunk(3, 1))
    d = (xy[:, None] - xy).square().sum(-1).sqrt()
    outputs = []
    for head in range(2):
        score = q[:, head] @ k[:, head].T / math.sqrt(8)
        if variant == "local":
            score = score.masked_fill(d > 3.0 + 1e-9, -math.inf)
        elif variant == "rpe":
            score = score + attention.table[head][bucket(xy[:, None, 0] - xy[:, 0], xy[:, None, 1] - xy[:, 1])]
        elif variant == "rpe table20":
            score = score + attention.table[head][d.clamp(max=20).floor().long()]
        elif variant == "rope":
            score = rotary_scores(q[:, head], k[:, head], xy) / math.sqrt(8)
        outputs.append(score.softmax(1) @ v[:, head])
    return x + attention.proj(torch.cat(outputs, 1))


def on_canvas(model: Trunk, x: Tensor, cells: Tensor, width: int, height: int) -> Tensor:
    """The three convolutions of PPEG on a full canvas; tiles in one cell as their mean."""
    total, count = torch.zeros(height, width, x.shape[1]).double(), torch.zeros(height, width, 1).double()
    for tile, (column, row) in zip(x, cells.tolist(), strict=True):
        at = torch.zeros(height, width, 1).double()
        at[row, column] = 1
        total, count = total + at * tile, count + at
    canvas = (total / count.clamp(min=1)).permute(2, 0, 1)[None]
    out = sum(
        torch.nn.functional.conv2d(canvas, c.weight, c.bias, padding=c.kernel_size[0] // 2, groups=x.shape[1])
        for c in model.position.ppeg.convolutions
    )
    return out[0, :, cells[:, 1], cells[:, 0]].T


def rotary_scores(q: Tensor, k: Tensor, xy: Tensor) -> Tensor:
    """sum over pairs of numbers of  Re(q conj(k) exp(i theta (position of q - position of k)))."""
    q, k = (torch.view_as_complex(t.reshape(len(t), 4, 2).contiguous()) for t in (q, k))
    theta = torch.tensor([1.0, 10000 ** (-2 / 4)], dtype=torch.float64)
    score = torch.zeros(len(q), len(q), dtype=torch.float64)
    for axis in range(2):
        difference = xy[:, None, axis] - xy[:, axis]
        for i in range(2):
            turn = torch.polar(torch.ones_like(difference), difference * theta[i])
            score = score + (q[:, None, 2 * axis + i] * k[:, 2 * axis + i].conj() * turn).real
    return score


@pytest.mark.parametrize("variant", OPTIONS)
def test_against_the_definition(variant: str) -> None:
    model = small(variant)
    parts = bags()
    out = model(PackedBags.of(parts))
    expected = [by_definition(model, variant, part) for part in parts if part.n]
    logits = torch.stack([logits for logits, _ in expected])
    torch.testing.assert_close(out.logits[[0, 2, 3]], logits)
    torch.testing.assert_close(out.logits[1], model.head.bias)
    torch.testing.assert_close(out.tile_scores, torch.cat([scores for _, scores in expected]))
    upstream = torch.randn_like(logits)
    parameters = dict(model.named_parameters())
    gradients = [
        torch.autograd.grad(z, list(parameters.values()), upstream, allow_unused=True)
        for z in (out.logits[[0, 2, 3]], logits)
    ]
    for name, actual, wanted in zip(parameters, *gradients, strict=True):
        torch.testing.assert_close(actual, wanted, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("variant", ["ppeg file", "rpe table20"])
def test_options_keep_what_models_promise(variant: str) -> None:
    check_model(variant.split()[0], 6, 1, heads=2, head_dim=4, **OPTIONS[variant])


def test_sizes_differ_only_in_the_spatial_part() -> None:
    psa = 1_276_709 - 3  # without its radii
    convolutions = 288 * (49 + 25 + 9 + 3)
    extra = {"msa": 0, "local": 0, "ppeg": convolutions, "rpe": 3 * 4, "rpe table20": 3 * 21, "rope": 0}
    for variant, more in extra.items():
        model = create_model(variant.split()[0], 384, 1, preset="paper-crc", **OPTIONS[variant])
        assert sum(p.numel() for p in model.parameters()) == psa + more, variant


@pytest.mark.parametrize(("radius", "tiles"), [(7.0, 149), (15.0, 709)])
def test_a_disc_on_a_full_lattice(radius: float, tiles: int) -> None:
    attention = create_model("local", 6, 1, heads=1, head_dim=4, radius_steps=radius).blocks[0].attention
    xy = torch.cartesian_prod(torch.arange(33), torch.arange(33)).float()
    x = torch.randn(len(xy), 4, requires_grad=True)
    attention(x, xy, Layout.of(xy))[16 * 33 + 16].sum().backward()
    assert int((x.grad != 0).any(1).sum()) == tiles


def test_classes_of_distances() -> None:
    dx, dy = torch.cartesian_prod(torch.arange(25.0), torch.arange(25.0)).T
    d = torch.hypot(dx, dy)
    irpe, table = (torch.bucketize(d, torch.tensor(BUCKETS[name]), right=True) for name in ("irpe-euc", "table20"))
    assert torch.equal(irpe, bucket(dx, dy))
    assert [int(irpe[i]) for i in (0, 1, 2, 3, 4, 24)] == [0, 1, 2, 2, 3, 3]
    assert torch.equal(table, d.double().clamp(max=20).floor().long())


BEGINNINGS = {
    **OPTIONS,
    "psa": {"decay": "exponential", "k_init": [3.3, 6.7]},
    "psa nearest": {"neighbours": "nearest"},
}


@pytest.mark.parametrize("variant", BEGINNINGS)
def test_attention_that_begins_as_the_mean(variant: str) -> None:
    """With queries and keys of 0 twice the mean of what is looked at; theirs begin at a tenth of random ones."""
    model, random = (
        small(variant, **BEGINNINGS[variant], depth=2, first_attention=first) for first in ("mean", "random")
    )
    xy = positions("lattice", 30).double()
    d = (xy[:, None] - xy).square().sum(-1).sqrt()
    x = torch.randn(30, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for block, other in zip(model.blocks, random.blocks, strict=True):
        attention = block.attention
        content = attention.qkv.weight[:32]
        torch.testing.assert_close(content, other.attention.qkv.weight[:32] / 10)
        with torch.no_grad():
            content.zero_()
        found = attention(x, xy, Layout.of(xy))
        if variant == "psa nearest":  # whose neighbours are those of other tests: each half of x by its own head
            one = attention(torch.ones_like(x), xy, Layout.of(xy))
            torch.testing.assert_close(one, torch.full_like(x, 2.0))
            assert bool((found.abs() <= 2 * x.abs().amax(0)).all())
            continue
        weights = torch.ones_like(d)[None].repeat(2, 1, 1)
        if variant == "local":
            weights = (d <= 3.0 + 1e-9).double()[None]
        elif variant == "psa":
            prior = torch.exp(-d * attention.prior.theta.detach()[:, None, None])
            weights = prior * (prior >= attention.prior.tau)
        elif "rpe" in variant:  # distances are random in these tests
            torch.nn.init.zeros_(attention.table)
            found = attention(x, xy, Layout.of(xy))
        means = (weights / weights.sum(2, keepdim=True)) @ x
        torch.testing.assert_close(found, 2 * torch.cat((means[0, :, :8], means[-1, :, 8:]), 1))
    assert torch.equal(model.head.weight, random.head.weight)  # whatever else is random is so as before
    with pytest.raises(OptionError, match="unknown first_attention 'zero'"):
        small(variant, first_attention="zero")


def test_depth() -> None:
    model = small("rope", depth=2)
    out = model(PackedBags.of(bags()))
    assert len(model.blocks) == 2
    assert out.logits.shape == (4, 2)
    assert out.radii_steps is None


@pytest.mark.parametrize("variant", OPTIONS)
def test_bfloat16(variant: str) -> None:
    assert_trains_in_bfloat16(small(variant), bags())


def test_errors() -> None:
    with pytest.raises(OptionError, match="radius_steps must be positive"):
        small("local", radius_steps=0.0)
    with pytest.raises(OptionError, match="unknown grid 'true'"):
        small("ppeg", grid="true")
    with pytest.raises(OptionError, match="unknown buckets 'four'"):
        small("rpe", buckets="four")
    with pytest.raises(OptionError, match="multiple of 4"):
        small("rope", head_dim=6)
    with pytest.raises(OptionError, match="unknown preset 'paper'"):
        small("msa", preset="paper")
