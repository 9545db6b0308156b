"""TransMIL and its position encoding against the steps of the paper, bag by bag on full canvases."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d

from psamil import Bag, PackedBags, check_model, create_model
from psamil.errors import OptionError
from psamil.models.ppeg import PPEG, file_cells, lattice_cells
from psamil.models.transmil import TransMIL
from psamil.spatial import Layout
from tests.models.cases import assert_as_one_by_one
from tests.spatial.cases import positions


def small(grid: str = "file", **options) -> TransMIL:
    torch.manual_seed(0)
    options = {"width": 8, "heads": 2, "landmarks": 4, "grid": grid, **options}
    return create_model("transmil", 6, 2, **options).double().eval()


def bags() -> list[Bag]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"lattice": 23, "continuous": 9, "none": 0, "collinear": 1}
    return [
        Bag(torch.randn(n, 6, generator=generator, dtype=torch.float64), positions(kind, n, seed=i), kind)
        for i, (kind, n) in enumerate(sizes.items())
    ]


def convolved(ppeg: PPEG, canvas: Tensor) -> Tensor:
    """(height, width, channels): the identity and three convolutions."""
    image = canvas.permute(2, 0, 1)[None]
    parts = [
        conv2d(image, c.weight, c.bias, padding=c.kernel_size[0] // 2, groups=len(image[0])) for c in ppeg.convolutions
    ]
    return (image + sum(parts))[0].permute(1, 2, 0)


def class_attention(attention, x: Tensor) -> Tensor:
    """Row of the first token in F A^+ B, for all tokens at once."""
    zeros = -len(x) % attention.landmarks
    rows = torch.cat((torch.zeros(zeros, x.shape[1], dtype=x.dtype), x))
    d = attention.head_dim
    weights = []
    for head in range(attention.heads):
        q, k = (attention.qkv(rows).chunk(3, 1)[i][:, d * head : d * (head + 1)] for i in range(2))
        q = q / math.sqrt(d)
        q_mean, k_mean = (torch.stack([part.mean(0) for part in t.chunk(attention.landmarks)]) for t in (q, k))
        weights.append([(q @ k_mean.T).softmax(1), (q_mean @ k_mean.T).softmax(1), (q_mean @ k.T).softmax(1)])
    a = torch.stack([w[1] for w in weights])
    z = a.mT / (a.sum(1).max() * a.sum(2).max())
    for _ in range(6):
        z = (
            0.25
            * z
            @ (
                13 * torch.eye(len(a[0]))
                - a @ z @ (15 * torch.eye(len(a[0])) - a @ z @ (7 * torch.eye(len(a[0])) - a @ z))
            )
        )
    rows_of_heads = [(f @ inverse @ b)[zeros, zeros:] for (f, _, b), inverse in zip(weights, z, strict=True)]
    return torch.stack(rows_of_heads).mean(0)


def by_steps(model: TransMIL, bag: Bag) -> tuple[Tensor, Tensor]:
    """Logits and scores of a bag of one slide."""
    x, n = (bag.features @ model.embed.project[0].weight.T + model.embed.project[0].bias).relu(), bag.n
    if model.grid == "file":
        side = math.ceil(math.sqrt(n))
        order, sequence = torch.arange(n), torch.cat((x, x[: side**2 - n]))
    else:
        place = bag.xy - bag.xy.amin(0) if n else bag.xy
        cells = place.round().long()
        order = torch.tensor(sorted(range(n), key=lambda i: (cells[i, 1].item(), place[i, 0].item())), dtype=torch.long)
        sequence, cells = x[order], cells[order]
    h = torch.cat((model.class_token, sequence))
    h = h + model.attentions[0](model.norms[0](h))
    if n and model.grid == "file":
        tiles = convolved(model.ppeg, h[1:].view(side, side, -1)).flatten(0, 1)
        h = torch.cat((h[:1], tiles))
    elif n:
        width, height = (cells.amax(0) + 1).tolist()
        at = cells[:, 1] * width + cells[:, 0]
        canvas = torch.zeros(width * height, 8, dtype=h.dtype).index_add(0, at, h[1:])
        canvas = canvas / torch.bincount(at, minlength=width * height).clamp(min=1)[:, None]
        around = convolved(model.ppeg, canvas.view(height, width, 8)).flatten(0, 1) - canvas
        h = torch.cat((h[:1], h[1:] + around[at]))
    normed = model.norms[1](h)
    scores = torch.empty(n, dtype=h.dtype)
    length = math.ceil(len(h) / model.attentions[1].landmarks) * model.attentions[1].landmarks
    scores[order] = length * class_attention(model.attentions[1], normed)[1 : n + 1]
    return model.head(model.norm((h + model.attentions[1](normed))[0])), scores


@pytest.mark.parametrize("grid", ["file", "lattice"])
@pytest.mark.parametrize("n", [4, 60, 255, 300, 1000])
def test_an_equal_share_is_1_whatever_the_size(grid: str, n: int) -> None:
    torch.manual_seed(0)
    model = create_model("transmil", 6, 1, width=32, heads=2, grid=grid).eval()
    xy = torch.stack((torch.arange(n) % 16, torch.arange(n) // 16), 1).float()
    scores = model(PackedBags.of(Bag(torch.randn(n, 6), xy))).tile_scores
    assert float(scores.mean()) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("grid", ["file", "lattice"])
def test_against_the_steps(grid: str) -> None:
    model, parts = small(grid), bags()
    assert_as_one_by_one(model, parts, [by_steps(model, part) for part in parts])


@pytest.mark.parametrize(("in_dim", "parameters"), [(1024, 2_672_146), (384, 2_344_466)])
def test_parameter_counts(in_dim: int, parameters: int) -> None:
    model = create_model("transmil", in_dim, 2)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model.attentions[0].landmarks == 256


def test_the_lattice_does_not_depend_on_the_file() -> None:
    part = bags()[0]
    order = torch.randperm(part.n, generator=torch.Generator().manual_seed(0))
    shuffled = Bag(part.features[order], part.xy[order])
    for grid, same in (("lattice", True), ("file", False)):
        model = small(grid)
        out, other = (model(PackedBags.of(bag)) for bag in (part, shuffled))
        assert torch.allclose(out.logits, other.logits) == same
        assert torch.allclose(out.tile_scores[order], other.tile_scores) == same


@pytest.mark.parametrize("grid", ["file", "lattice"])
def test_positions_of_one_slide_do_not_reach_another(grid: str) -> None:
    """PPEG alone: the convolutions of one slide do not see the tiles of the next."""
    one, two = positions("lattice", 20), positions("lattice", 13, seed=1)
    torch.manual_seed(0)
    ppeg, x = PPEG(4).double(), torch.randn(33, 4, dtype=torch.float64)

    def encode(x: Tensor, *slides: Tensor) -> Tensor:
        if grid == "lattice":
            return ppeg(x, lattice_cells(Layout.of(torch.cat(slides), torch.tensor([0, *map(len, slides)]).cumsum(0))))
        tiles, cells, first = file_cells([len(slide) for slide in slides])
        return ppeg(x[tiles], cells)[first]

    apart = torch.cat((encode(x[:20], one), encode(x[20:], two)))
    torch.testing.assert_close(encode(x, one, two), apart)
    assert not torch.allclose(encode(x, torch.cat((one, two))), apart)


@pytest.mark.parametrize("far", [0, 3, 4, 1000, 10**8])
def test_sparse_convolution(far: int) -> None:
    """Tiles any distance apart, across the borders of the squares that are computed at once."""
    torch.manual_seed(0)
    ppeg = PPEG(3).double()
    cells = torch.cartesian_prod(torch.arange(14, 20), torch.arange(13, 19))[torch.randperm(36)[:25]]
    cells = torch.cat((cells, cells[:4] + torch.tensor([[far + 6, 1]])))
    x = torch.randn(len(cells), 3, dtype=torch.float64)
    seven, five, three = ppeg.convolutions
    expected = x + seven.bias + five.bias + three.bias
    for i, cell in enumerate(cells):
        for j, other in enumerate(cells):
            dx, dy = (other - cell).tolist()
            for kernel, reach in ((seven, 3), (five, 2), (three, 1)):
                if max(abs(dx), abs(dy)) <= reach:
                    expected[i] = expected[i] + kernel.weight[:, 0, dy + reach, dx + reach] * x[j]
    torch.testing.assert_close(ppeg(x, cells), expected)


def test_squares_of_the_file() -> None:
    tiles, cells, first = file_cells([5, 0, 1])
    assert tiles.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 5]
    assert cells[:4].tolist() == [[0, 0], [1, 0], [2, 0], [0, 1]]
    assert first.tolist() == [0, 1, 2, 3, 4, 9]


def test_it_keeps_what_models_promise_on_a_lattice() -> None:
    result = check_model("transmil", 6, 1, width=8, heads=2, landmarks=4, grid="lattice")
    assert set(result.exceptions) == {"permutation"}


def test_errors() -> None:
    with pytest.raises(OptionError, match="unknown grid 'square'"):
        small("square")
    with pytest.raises(OptionError, match="width a multiple of heads"):
        small(width=9)
