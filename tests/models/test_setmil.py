"""SETMIL: against whole maps with masks, and what happens to maps."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from psamil import Bag, PackedBags, create_model
from psamil.errors import OptionError
from psamil.models.relative_position import bucket
from psamil.models.setmil import EMPTY, SETMIL, DistanceBlock, WindowTokens, changed_at_random, sinusoids, windows
from tests.models.cases import lattice_bag

SMALL = {"map_side": 12, "token_width": 6, "branch_width": 4, "depth": 2, "heads": 3, "mlp_ratio": 2}


def model_of(n_out: int = 2, **options) -> SETMIL:
    torch.manual_seed(0)
    model = create_model("setmil", 5, n_out, **{**SMALL, **options}).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)  # so that every part matters
    return model.eval()


def bags() -> list[Bag]:
    generator = torch.Generator().manual_seed(1)
    # the whole map, nothing, one tile, two slides of which one is pooled by 2 and one is small
    places = [(20, 12, ()), (0, 1, ()), (1, 1, ()), (40, 20, (0, 35, 40))]
    return [lattice_bag(n, side, 5, generator, slides) for n, side, slides in places]


def whole_map(x: Tensor, xy: Tensor, side: int) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """(1, d, side, side) map with zeros, where it has tiles, and row and column of each tile."""
    extent = int((xy.amax(0) - xy.amin(0)).max()) + 1
    step = math.ceil(extent / side)
    cells = ((xy - xy.amin(0)) // step).int()
    first = [(side - 1 - int(last)) // 2 for last in cells.amax(0)]
    at = [(int(row) + first[1], int(column) + first[0]) for column, row in cells]
    canvas, count = torch.zeros(1, x.shape[1], side, side, dtype=x.dtype), torch.zeros(side, side)
    for value, (row, column) in zip(x, at, strict=True):
        canvas[0, :, row, column] += value
        count[row, column] += 1
    return canvas / count.clamp(min=1), count > 0, at


def window_tokens(layer: WindowTokens, canvas: Tensor, present: Tensor, side: int, stride: int) -> Tensor:
    """(1, width, h, w) with zeros where no token is; every place is computed, absent ones are masked."""
    d, size = canvas.shape[1], len(present)
    patches = F.unfold(canvas, side, padding=side // 2, stride=stride)[0].T  # (t, d side^2), channels first
    patches = patches.view(-1, d, side**2).transpose(1, 2).flatten(1)
    q, k, v = F.linear(layer.norm1(patches), layer.qkv.weight).chunk(3, 1)
    scores = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(~present.flatten(), -torch.inf)
    y = v + layer.proj(scores.softmax(1) @ v)
    y = y + layer.mlp(layer.norm2(y))
    return (y * present.flatten()[:, None]).T.view(1, -1, size, size)


def transformer(model: SETMIL, tokens: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """All places of the map as tokens, absent ones masked. Class token, and (h, w) what it gives."""
    size = len(present)
    x = torch.cat((model.class_token, tokens[0].flatten(1).T))
    p, width = torch.arange(size**2 + 1, dtype=torch.float64), x.shape[1]
    for k in range(width):
        angle = p / 10000 ** ((k - k % 2) / width)
        x = x + torch.eye(width, dtype=x.dtype)[k] * (angle.cos() if k % 2 else angle.sin())[:, None]
    hidden = torch.cat((torch.tensor([False]), ~present.flatten()))
    row, column = torch.arange(size**2) // size, torch.arange(size**2) % size
    classes = torch.full((size**2 + 1, size**2 + 1), 4)
    classes[1:, 1:] = bucket((column[:, None] - column).double(), (row[:, None] - row).double())
    for block in model.blocks:
        assert isinstance(block, DistanceBlock)
        q, k, v = F.linear(block.norm1(x), block.qkv.weight, block.qkv.bias).chunk(3, 1)
        heads, given = [], []
        for h, (qh, kh, vh) in enumerate(zip(*(part.chunk(block.heads, 1) for part in (q, k, v)), strict=True)):
            scores = qh @ kh.T / math.sqrt(qh.shape[1]) + block.bias[h][classes]
            given.append(scores[0, 1:])
            heads.append(scores.masked_fill(hidden, -torch.inf).softmax(1) @ vh)
        x = x + block.proj(torch.cat(heads, 1))
        x = x + block.mlp(block.norm2(x))
    return model.norm(x[0]), torch.stack(given).mean(0).view(size, size)


def reference(model: SETMIL, bag: Bag) -> tuple[Tensor, Tensor]:
    """Logits and tile scores of one bag."""
    class_tokens, scores = [], []
    for a, b in zip(bag.slides[:-1].tolist(), bag.slides[1:].tolist(), strict=True):
        if a == b:
            continue
        canvas, filled, at = whole_map(bag.features[a:b], bag.xy[a:b], model.map_side)
        present = F.max_pool2d(filled[None].float(), 5, stride=2, padding=2)[0] > 0
        tokens = window_tokens(model.reduce, canvas, present, 5, 2)
        branches = [
            window_tokens(branch, tokens, present, side, 1)
            for branch, side in zip(model.pyramid, (3, 5, 7), strict=True)
        ]
        class_token, given = transformer(model, torch.cat(branches, 1), present)
        class_tokens.append(class_token)
        scores += [given[row // 2, column // 2] for row, column in at]
    if not class_tokens:
        nothing = torch.zeros(6, 6, dtype=torch.bool)
        class_tokens.append(transformer(model, torch.zeros(1, 12, 6, 6, dtype=torch.float64), nothing)[0])
    return model.head(torch.stack(class_tokens).mean(0)), torch.stack(scores) if scores else torch.zeros(0)


@pytest.mark.parametrize("n_out", [1, 3])
def test_against_whole_maps_with_gradients(n_out: int) -> None:
    model, parts = model_of(n_out), bags()
    out = model(PackedBags.of(parts))
    expected = [reference(model, bag) for bag in parts]
    torch.testing.assert_close(out.logits, torch.stack([logits for logits, _ in expected]))
    torch.testing.assert_close(out.tile_scores, torch.cat([scores for _, scores in expected]).double())
    parameters = list(model.parameters())
    actual = torch.autograd.grad(out.logits.sin().sum() + out.tile_scores.sin().sum(), parameters)
    loss = sum(logits.sin().sum() + scores.sin().sum() for logits, scores in expected)
    for (name, _), a, b in zip(model.named_parameters(), actual, torch.autograd.grad(loss, parameters), strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


def test_size() -> None:
    def t2t(inputs: int, width: int) -> int:
        return 2 * inputs + inputs * 3 * width + (width**2 + width) + 2 * width + 2 * (width**2 + width)

    block = 4 * 192 + (192 * 576 + 576) + (192**2 + 192) + 16 * 5 + 2 * 4 * 192**2 + 5 * 192
    pyramid = sum(t2t(side**2 * 128, 64) for side in (3, 5, 7))
    total = t2t(25 * 1280, 128) + pyramid + 192 + 6 * block + 2 * 192 + 193
    assert sum(p.numel() for p in create_model("setmil", 1280, 1).parameters()) == total


def test_distances_begin_without_effect() -> None:
    model = create_model("setmil", 5, 1, **SMALL)
    assert all((block.bias == 0).all() for block in model.blocks)
    weights = create_model("setmil", 64, 1).reduce.qkv.weight
    assert weights.std().item() == pytest.approx(0.02, rel=0.05)


def test_windows() -> None:
    rows = torch.arange(16).view(4, 4)
    found = windows(rows, 3)
    assert found[0, 0].tolist() == [EMPTY, EMPTY, EMPTY, EMPTY, 0, 1, EMPTY, 4, 5]
    assert found[2, 1].tolist() == [4, 5, 6, 8, 9, 10, 12, 13, 14]
    assert torch.equal(windows(rows, 3, stride=2), found[::2, ::2])


def test_sinusoids() -> None:
    found = sinusoids(torch.tensor([0, 3]), 5, torch.float32)
    assert found[0].tolist() == [0, 1, 0, 1, 0]
    angles = [3 / 10000 ** (2 * k / 5) for k in range(3)]
    expected = [math.sin(angles[0]), math.cos(angles[0]), math.sin(angles[1]), math.cos(angles[1]), math.sin(angles[2])]
    torch.testing.assert_close(found[1], torch.tensor(expected))


def test_large_slides_make_no_more_tokens() -> None:
    side = 150
    cells = torch.cartesian_prod(torch.arange(side), torch.arange(side)).float()
    model, seen = create_model("setmil", 3, 1, depth=1), []
    model.blocks[0].register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    model.eval()(PackedBags.of(Bag(torch.randn(side**2, 3), cells)))
    # squares of 4 x 4 tiles: 38 x 38 cells from 5 to 42; windows around 2 i reach them for i from 2 to 22
    assert seen == [1 + 21**2]


def test_training_changes_maps_and_evaluation_does_not() -> None:
    model, batch = model_of(dropout=0.0), PackedBags.of(bags())
    before = model(batch).logits
    model.train()
    torch.manual_seed(0)
    assert not torch.allclose(model(batch).logits[0], before[0])
    plain = model_of(dropout=0.0, augment=False).train()
    torch.testing.assert_close(plain(batch).logits, before)
    dropped = model_of(dropout=0.5, augment=False).train()
    assert not torch.allclose(dropped(batch).logits, before)


def test_changed_maps() -> None:
    side = 16
    rows = torch.arange(side**2).view(side, side)
    torch.manual_seed(0)
    corners, shares, holes = set(), [], []
    for _ in range(200):
        changed = changed_at_random(rows)
        assert changed.shape == rows.shape
        down = changed[side // 2, side // 2] - changed[side // 2 - 2, side // 2]
        corners.add((int(down.sign()), int(down.abs() >= side)))  # along rows or columns, forwards or backwards
        shares.append(len(changed.unique()) / side**2)
        holes.append(int((changed == EMPTY).sum()))
    assert {(1, 1), (-1, 1), (1, 0), (-1, 0)} <= corners
    assert min(holes) == (side // 8) ** 2  # enlarged: nothing but the hole is empty
    assert max(holes) > side**2 * 0.2  # made smaller: a margin is empty
    assert min(shares) < 0.8
    lonely = torch.full((16, 16), EMPTY)
    lonely[5, 5] = 0
    assert all((changed_at_random(lonely) != EMPTY).any() for _ in range(100))


@pytest.mark.parametrize("wrong", [{"map_side": 0}, {"dropout": 1.0}, {"heads": 5}], ids=lambda o: next(iter(o)))
def test_wrong_options(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        model_of(**wrong)
