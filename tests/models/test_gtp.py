"""GTP: its losses against torch-geometric and by hand, the model against a dense loop over bags."""

import math

import pytest
import torch
from torch import Tensor

from psamil import Bag, PackedBags, create_model
from psamil.errors import OptionError, ShapeError
from psamil.models import check_model
from psamil.models.adjacency import Adjacency
from psamil.models.gtp import min_cut_losses
from tests.models.cases import bags_at
from tests.models.outside import XY, wave


def model_of(in_dim: int = 6, n_out: int = 3, **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return create_model("gtp", in_dim, n_out, **{"width": 8, "nodes": 5, "depth": 2, "heads": 2, **options})


def bags(dtype: torch.dtype = torch.float64) -> list[Bag]:
    generator = torch.Generator().manual_seed(1)
    places = {
        "lattice": torch.cartesian_prod(torch.arange(5), torch.arange(4)).float()[torch.arange(20) % 3 > 0],
        "two slides": torch.cat((XY, XY + 0.25)),
        "empty": torch.zeros(0, 2),
        "far apart": torch.tensor([[0.0, 0], [9, 9], [5, 0]]),
        "one tile": torch.zeros(1, 2),
    }
    return bags_at(places, dtype, generator)


def dense_adjacency(bag: Bag) -> Tensor:
    slide = torch.repeat_interleave(bag.slides.diff())
    near = (torch.cdist(bag.xy.double(), bag.xy.double()) <= 1.5) & (slide[:, None] == slide)
    return (near & ~torch.eye(bag.n, dtype=torch.bool)).double()


def dense_losses(s: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    if len(s) == 0:
        return torch.zeros(()).double(), torch.zeros(()).double()
    total = torch.trace(s.T @ torch.diag(a.sum(1)) @ s)
    cut = -torch.trace(s.T @ a @ s) / total if a.any() else torch.zeros(()).double()
    overlap, eye = s.T @ s, torch.eye(s.shape[1], dtype=s.dtype)
    return cut, torch.linalg.matrix_norm(overlap / torch.linalg.matrix_norm(overlap) - eye / math.sqrt(s.shape[1]))


def dense_logits(model: torch.nn.Module, nodes: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
    """Logits, and the attention weights of each head of each block."""
    transformer, weights = model.transformer, []
    x = torch.cat((transformer.token[None], nodes))
    for block in transformer.blocks:
        attention, heads, of_block = block.attention, [], []
        q, k, v = (block.norm1(x) @ attention.qkv.weight.T).chunk(3, 1)
        for q_h, k_h, v_h in zip(*(t.chunk(attention.heads, 1) for t in (q, k, v)), strict=True):
            of_block.append((q_h @ k_h.T / math.sqrt(q_h.shape[1])).softmax(1))
            heads.append(of_block[-1] @ v_h)
        weights.append(of_block)
        x = x + torch.cat(heads, 1) @ attention.mix.weight.T + attention.mix.bias
        x = x + block.mlp(block.norm2(x))
    return transformer.head(transformer.norm(x[0])), weights


def dense_scores(model: torch.nn.Module, s: Tensor, nodes: Tensor) -> Tensor:
    logits, weights = dense_logits(model, nodes.requires_grad_())
    relevance = torch.eye(1 + len(nodes), dtype=nodes.dtype)
    for of_block in weights:
        gradients = torch.autograd.grad(logits.max() - logits.mean(), of_block, retain_graph=True)
        heads = [(p * g).clamp(min=0) for p, g in zip(of_block, gradients, strict=True)]
        relevance = relevance + sum(heads) / len(heads) @ relevance
    c = (s @ relevance[0, 1:]).detach()
    probability = logits.detach().softmax(0).max()
    if len(c) < 2:
        return probability.expand(len(c))
    return probability * (c - c.min()) / (c.max() - c.min())


def dense_model(model: torch.nn.Module, parts: list[Bag], training: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits, scores and the two losses, by matrices."""
    convolution, norm = model.convolution.linear, model.convolution.norm
    rows = []
    for bag in parts:
        u = (dense_adjacency(bag) @ bag.features + bag.features) @ convolution.weight.T + convolution.bias
        rows.append(u / u.norm(dim=1, keepdim=True))
    every = torch.cat(rows)
    mean = every.mean(0) if training else norm.running_mean
    variance = every.var(0, correction=0) if training else norm.running_var
    logits, scores, cuts, balances = [], [], [], []
    for bag, u in zip(parts, rows, strict=True):
        y = (u - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias
        s = (y @ model.assign.weight.T + model.assign.bias).softmax(1)
        nodes = s.T @ y
        logits.append(dense_logits(model, nodes)[0])
        scores.append(dense_scores(model, s.detach(), nodes.detach()))
        cut, balance = dense_losses(s, dense_adjacency(bag))
        cuts.append(cut)
        balances.append(balance)
    return torch.stack(logits), torch.cat(scores), torch.stack(cuts).mean(), torch.stack(balances).mean()


def test_sizes() -> None:
    for in_dim, expected in ((512, 139_622), (384, 131_430)):
        assert sum(p.numel() for p in create_model("gtp", in_dim, 2).parameters()) == expected
    model = create_model("gtp", 512, 2)
    assert not model.transformer.token.any()
    assert not model.convolution.linear.bias.any()


@pytest.mark.parametrize("seed", range(5))
def test_losses_against_torch_geometric(seed: int) -> None:
    nn = pytest.importorskip("torch_geometric.nn")
    generator = torch.Generator().manual_seed(seed)
    tiles = torch.randperm(100, generator=generator)[: 20 + 5 * seed]
    bag = Bag(torch.zeros(len(tiles), 1), torch.stack((tiles // 10, tiles % 10), 1).double())
    logits = torch.randn(bag.n, 4, generator=generator, dtype=torch.float64)
    batch = PackedBags.of(bag)
    cut, balance = min_cut_losses(logits.softmax(1), Adjacency.of(batch), batch)
    _, _, *expected = nn.dense_mincut_pool(
        bag.features[None].double(), dense_adjacency(bag)[None].double(), logits[None]
    )
    torch.testing.assert_close(torch.stack((cut[0], balance[0])), torch.stack(expected))


def test_losses_by_hand() -> None:
    pairs = Bag(torch.zeros(4, 1), torch.tensor([[0.0, 0], [1, 0], [7, 0], [8, 0]]))
    batch = PackedBags.of([pairs, pairs, pairs])
    whole, mixed = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1]]), torch.tensor([[1.0, 0], [0, 1], [1, 0], [0, 1]])
    one = torch.tensor([[1.0, 0]]).expand(4, 2)
    cut, balance = min_cut_losses(torch.cat((whole, mixed, one)), Adjacency.of(batch), batch)
    torch.testing.assert_close(cut, torch.tensor([-1.0, 0, -1]))  # neighbours together, never, together
    torch.testing.assert_close(balance, torch.tensor([0, 0, math.sqrt(2 - math.sqrt(2))]))  # equal halves; all in one


@pytest.mark.parametrize("training", [False, True])
def test_against_a_dense_loop_over_bags(training: bool) -> None:
    model = model_of().double().train(training)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        model.convolution.norm.running_mean += 0.3
        model.convolution.norm.running_var *= 1.7
    expected = dense_model(model, bags(), training)
    out = model(PackedBags.of(bags()))
    losses = out.auxiliary_losses
    found = out.logits, out.tile_scores, losses["cut"], losses["balance"]
    for what, a, b in zip(("logits", "scores", "cut", "balance"), found, expected, strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, what=what: f"{what}: {text}")
    parameters, weight = dict(model.named_parameters()), wave(5, 3)
    gradients = [
        torch.autograd.grad((logits * weight).sum() + 2 * cut + 3 * balance, list(parameters.values()))
        for logits, _, cut, balance in (found, expected)
    ]
    for name, a, b in zip(parameters, *gradients, strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


def test_scores_where_gradients_are_off() -> None:
    model, batch = model_of().eval(), PackedBags.of(bags(torch.float32))
    expected = model(batch).tile_scores
    with torch.no_grad():
        assert torch.equal(model(batch).tile_scores, expected)
    with torch.inference_mode():
        torch.testing.assert_close(model(batch).tile_scores, expected)
    assert all(p.grad is None for p in model.parameters())


def test_scores_can_be_compared_across_bags() -> None:
    """The first tile of a bag has the probability of the bag, whatever the number of tiles."""
    model, bag = model_of(n_out=1).double().eval(), bags()[0]
    many = Bag(bag.features.repeat(50, 1), bag.xy.repeat(50, 1), "50 slides", bag.n * torch.arange(51))
    out = model(PackedBags.of([bag, many]))
    for logit, scores in zip(out.logits[:, 0], out.tile_scores.split((bag.n, many.n)), strict=True):
        torch.testing.assert_close(scores.max(), logit.sigmoid())
        assert scores.min() == 0
    equal = Bag(bag.features[:1].float().expand(bag.n, -1), bag.xy)  # the same up to rounding
    out = model.float()(PackedBags.of(equal))
    torch.testing.assert_close(out.tile_scores, out.logits[0].sigmoid().expand(bag.n))


def test_scores_find_the_node_that_decides() -> None:
    """The class token looks at nodes with a large first number, whose second number is the logit."""
    model = model_of(n_out=1, depth=1, heads=1).double().eval()
    transformer, attention = model.transformer, model.transformer.blocks[0].attention
    with torch.no_grad():
        for parameter in transformer.blocks.parameters():
            parameter.zero_()
        transformer.blocks[0].norm1.weight.fill_(1)
        transformer.blocks[0].norm1.bias[2] = 1  # what the class token, all zeros, asks with
        attention.qkv.weight[0, 2] = attention.qkv.weight[8, 0] = attention.qkv.weight[17, 1] = 3
        attention.mix.weight[1, 1] = 1
        transformer.norm.weight.fill_(1)
        transformer.norm.bias.zero_()
        transformer.head.weight.copy_(torch.eye(8)[1:2])
    nodes = torch.zeros(1, 5, 8).double()
    nodes[0, :, 3] = 0.1
    nodes[0, 2, :2] = nodes[0, 4, 0] = 1  # both are looked at, one of them speaks for the class
    relevance = model._relevance(nodes)[0]
    for factor in (1e3, 1e6):  # sums over more tiles
        torch.testing.assert_close(model._relevance(factor * nodes)[0, 2], relevance[2], rtol=0.01, atol=0)
    assert relevance[2] > 10 * relevance[[0, 1, 3, 4]].max()


def test_batch_norm_of_one_tile() -> None:
    model = model_of().train()
    tile = bags(torch.float32)[4]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    out = model(PackedBags.of(tile))
    torch.testing.assert_close(out.logits, model.eval()(PackedBags.of(tile)).logits)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    model.train()(PackedBags.of([tile, tile, bags(torch.float32)[0]]))
    assert not torch.equal(model.convolution.norm.running_mean, before["convolution.norm.running_mean"])


def test_promises_with_other_options() -> None:
    check_model("gtp", n_out=2, width=8, nodes=3, depth=1, heads=1, mlp_ratio=1, radius_steps=2.0)


def test_mixed_precision() -> None:
    model, batch = model_of(nodes=20, width=16), PackedBags.of(bags(torch.float32))
    full = model(batch)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch)
    torch.testing.assert_close(out.logits.float(), full.logits, rtol=0.05, atol=0.05)
    torch.testing.assert_close(out.auxiliary_losses["cut"], full.auxiliary_losses["cut"], rtol=0.02, atol=0.02)
    (out.logits.float().sum() + sum(out.auxiliary_losses.values())).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_in_half_precision(dtype: torch.dtype) -> None:
    model, batch = model_of().eval(), PackedBags.of(bags(torch.float32))
    full = model(batch).logits
    out = model.to(dtype)(batch)
    torch.testing.assert_close(out.logits.float(), full, rtol=0.05, atol=0.05)
    (out.logits.float().sum() + sum(out.auxiliary_losses.values())).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_sums_over_large_bags_fit_into_half_precision() -> None:
    model, n = model_of(nodes=4, depth=1, heads=1).eval(), 70_000
    with torch.no_grad():
        model.assign.bias[0] = 30  # all tiles go to one node: S^T S holds n, float16 ends at 65,504
    batch = PackedBags.of(Bag(torch.ones(n, 6), 3 * torch.arange(n)[:, None].expand(-1, 2).float()))
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        out = model(batch)
    torch.testing.assert_close(out.auxiliary_losses["balance"], torch.tensor(1.0))  # || e_1 e_1^T - I / 2 ||
    assert out.logits.isfinite().all()


def test_errors() -> None:
    with pytest.raises(OptionError, match="must be at least 1"):
        model_of(nodes=0)
    with pytest.raises(OptionError, match="multiple of the number of heads, got 8 and 3"):
        model_of(heads=3)
    with pytest.raises(ShapeError, match="takes features of width 6, got 5"):
        model_of()(PackedBags.of(Bag(torch.zeros(3, 5), torch.zeros(3, 2))))
