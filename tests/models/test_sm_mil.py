"""Sm-MIL: the operator against closed forms and torchmil, the models against dense loops over bags."""

import math

import pytest
import torch
from torch import Tensor

from psamil import Bag, PackedBags, create_model
from psamil.errors import OptionError
from psamil.models import check_model
from psamil.models.adjacency import Adjacency
from psamil.models.smoothing import Smooth
from tests.models.outside import XY, by_torchmil, fill, wave


def adjacency_of(xy: Tensor) -> Adjacency:
    return Adjacency.of(PackedBags.of(Bag(torch.zeros(len(xy), 1), xy)))


def dense_a_hat(bag: Bag) -> Tensor:
    """A_hat, whose rows of tiles without neighbours are those of I."""
    slide = torch.repeat_interleave(bag.slides.diff())
    near = (torch.cdist(bag.xy.double(), bag.xy.double()) <= 1.5) & (slide[:, None] == slide)
    a = (near & ~torch.eye(bag.n, dtype=torch.bool)).double()
    degree = a.sum(1)
    return a / (degree.clamp(min=1)[:, None] * degree.clamp(min=1)).sqrt() + torch.diag((degree == 0).double())


def dense_smooth(smooth: Smooth, u: Tensor, a_hat: Tensor) -> Tensor:
    alpha = smooth.alpha
    if smooth.mode == "exact":
        gamma = alpha / (1 - alpha)
        eye = torch.eye(len(u), dtype=u.dtype)
        return torch.linalg.solve(eye + gamma * (eye - a_hat), u)
    g = u
    for _ in range(smooth.steps):
        g = alpha * (a_hat @ g) + (1 - alpha) * u
    return g


def bags(in_dim: int = 6) -> list[Bag]:
    generator = torch.Generator().manual_seed(1)

    def features(n: int) -> Tensor:
        return torch.randn(n, in_dim, generator=generator, dtype=torch.float64)

    lattice = torch.cartesian_prod(torch.arange(5), torch.arange(4)).float()[torch.arange(20) % 3 > 0]
    two = torch.cat((XY, XY + 0.25))
    alone = torch.tensor([[0.0, 0], [9, 9], [1, 0]])
    scattered = 4 * torch.rand(15, 2, generator=generator)
    return [
        Bag(features(13), lattice, "lattice"),
        Bag(features(14), two, "two slides", torch.tensor([0, 7, 14])),
        Bag(features(0), torch.zeros(0, 2), "empty"),
        Bag(features(3), alone, "one tile alone"),
        Bag(features(1), alone[:1], "one tile"),
        Bag(features(15), scattered, "scattered"),
    ]


@pytest.mark.parametrize(("mode", "alpha"), [("approximate", 0.5), ("exact", 0.9)])
def test_operator_against_torchmil(mode: str, alpha: float) -> None:
    g = Smooth(mode=mode, alpha=alpha).double()(wave(7, 2), adjacency_of(XY))
    torch.testing.assert_close(g, by_torchmil(f"sm {mode} {alpha}")["g"], rtol=0, atol=1e-8)


def test_two_tiles_by_hand() -> None:
    u, adjacency = torch.tensor([[1.0], [0.0]]), adjacency_of(XY[:2])
    g = Smooth(mode="exact")(u, adjacency)  # 0.5 (1, 0.5) / (1 - 0.5^2)
    torch.testing.assert_close(g, torch.tensor([[2 / 3], [1 / 3]]))
    g = Smooth(alpha=0.2, steps=2)(u, adjacency)  # G_1 = (0.8, 0.2), G_2 = 0.2 (0.2, 0.8) + 0.8 (1, 0)
    torch.testing.assert_close(g, torch.tensor([[0.84], [0.16]]))


@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.99])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_exact_mode_is_exact(alpha: float, dtype: torch.dtype) -> None:
    bag = bags()[1]
    smooth = Smooth(mode="exact", alpha=alpha).double()
    expected = dense_smooth(smooth, bag.features, dense_a_hat(bag))
    g = smooth.to(dtype)(bag.features.to(dtype), Adjacency.of(PackedBags.of(bag)))
    tolerance = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(g.double(), expected, rtol=0, atol=tolerance / (1 - alpha))


@pytest.mark.parametrize("mode", ["approximate", "exact"])
def test_gradients_of_the_operator(mode: str) -> None:
    bag, smooth = bags()[3], Smooth(mode=mode, alpha=0.7, steps=4).double()
    adjacency = Adjacency.of(PackedBags.of(bag))

    def smoothed(u: Tensor, alpha_logit: Tensor) -> Tensor:
        return torch.func.functional_call(smooth, {"alpha_logit": alpha_logit}, (u, adjacency))

    inputs = bag.features.clone().requires_grad_(), smooth.alpha_logit.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(smoothed, inputs)


@pytest.mark.parametrize("mode", ["approximate", "exact"])
def test_what_smoothing_does(mode: str) -> None:
    bag = bags()[3]
    adjacency, a_hat = Adjacency.of(PackedBags.of(bag)), dense_a_hat(bag)
    g = Smooth(mode=mode).double()(bag.features, adjacency).detach()
    torch.testing.assert_close(g[1], bag.features[1])  # no neighbours

    def energy(x: Tensor) -> float:
        return float((x * (x - a_hat @ x)).sum())

    assert energy(g) < 0.5 * energy(bag.features)


@pytest.mark.parametrize("where", ["early", "mid", "late"])
def test_pooling_against_torchmil(where: str) -> None:
    model = create_model("sm_abmil", 8, 8, hidden=0, attention_dim=3, where=where, spectral_norm=False).double()
    fill([None, model.score.project.weight, model.score.project.bias, model.score.score.weight])
    model.head.weight.data, model.head.bias.data = torch.eye(8).double(), torch.zeros(8).double()
    out = model(PackedBags.of(Bag(wave(7, 8, k=0.37), XY)))
    expected = by_torchmil(f"sm pool {where}")
    torch.testing.assert_close(out.logits[0], expected["z"])
    torch.testing.assert_close(out.tile_scores, expected["f"])


def test_transformer_against_torchmil() -> None:
    model = create_model("sm_transformer", 8, 8, hidden=0, attention_dim=3, depth=2, spectral_norm=False).double()
    fill([None, model.score.project.weight, model.score.project.bias, model.score.score.weight])
    filled: list[Tensor | None] = []
    for block in model.blocks:
        filled += [block.attention.attention.qkv.weight, None]
        filled += [*block.mlp.parameters(), *block.norm1.parameters(), *block.norm2.parameters()]
    fill(filled + list(model.norm.parameters()))
    model.head.weight.data, model.head.bias.data = torch.eye(8).double(), torch.zeros(8).double()
    out = model(PackedBags.of(Bag(wave(7, 8, k=0.37), XY)))
    expected = by_torchmil("sm transformer")
    torch.testing.assert_close(out.logits[0], expected["z"])
    torch.testing.assert_close(out.tile_scores, expected["f"])


def dense_model(model: torch.nn.Module, bag: Bag) -> tuple[Tensor, Tensor]:
    """Logits and scores of one bag, by matrices."""
    a_hat, pool = dense_a_hat(bag), model.score
    h = (bag.features @ model.embed.project[0].weight.T + model.embed.project[0].bias).relu()
    if hasattr(model, "blocks"):
        x = h
        for block in model.blocks:
            attention = block.attention.attention
            q, k, v = (block.norm1(x) @ attention.qkv.weight.T).chunk(3, 1)
            heads = [
                (q_h @ k_h.T / math.sqrt(q_h.shape[1])).softmax(1) @ v_h
                for q_h, k_h, v_h in zip(*(t.chunk(attention.heads, 1) for t in (q, k, v)), strict=True)
            ]
            y = x + dense_smooth(block.attention.smooth, torch.cat(heads, 1), a_hat)
            x = y + block.mlp(block.norm2(y)) + h
        h = model.norm(x)
    if pool.where == "early":
        h = dense_smooth(pool.smooth, h, a_hat)
    hidden = h @ pool.project.weight.T + pool.project.bias
    if pool.where == "mid":
        hidden = dense_smooth(pool.smooth, hidden, a_hat)
    scores = hidden.tanh() @ pool.score.weight[0]
    if pool.where == "late":
        scores = dense_smooth(pool.smooth, scores[:, None], a_hat)[:, 0]
    return model.head(scores.softmax(0) @ h if bag.n else torch.zeros_like(model.head.weight[0])), scores


@pytest.mark.parametrize("mode", ["approximate", "exact"])
@pytest.mark.parametrize("where", ["early", "mid", "late"])
@pytest.mark.parametrize("name", ["sm_abmil", "sm_transformer"])
def test_against_a_dense_loop_over_bags(name: str, where: str, mode: str) -> None:
    torch.manual_seed(0)
    depth = {"depth": 2, "heads": 2} if name == "sm_transformer" else {}
    model = create_model(name, 6, 2, hidden=8, attention_dim=3, where=where, mode=mode, alpha=0.6, **depth)
    model.double().eval()
    out = model(PackedBags.of(bags()))
    logits, scores = zip(*(dense_model(model, bag) for bag in bags()), strict=True)
    torch.testing.assert_close(out.logits, torch.stack(logits))
    torch.testing.assert_close(out.tile_scores, torch.cat(scores))
    parameters = dict(model.named_parameters())
    weight = wave(6, 2)
    found = torch.autograd.grad((out.logits * weight).sum(), list(parameters.values()))
    expected = torch.autograd.grad((torch.stack(logits) * weight).sum(), list(parameters.values()))
    for parameter, a, b in zip(parameters, found, expected, strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, parameter=parameter: f"{parameter}: {text}")


@pytest.mark.parametrize("where", ["early", "mid", "late"])
def test_spectral_norm_of_the_layers_behind_the_operator(where: str) -> None:
    torch.manual_seed(0)
    model = create_model("sm_abmil", 6, 1, hidden=8, attention_dim=3, where=where)
    with torch.no_grad():
        for name, parameter in model.score.named_parameters():
            if "weight" in name:
                parameter.mul_(10)
    for _ in range(30):  # every pass in training refines the largest singular value
        model(PackedBags.of([Bag(bag.features.float(), bag.xy, bag.id, bag.slides) for bag in bags()]))
    layers = model.score.project, model.score.score
    norms = [float(torch.linalg.matrix_norm(layer.weight.detach(), 2)) for layer in layers]
    assert [abs(norm - 1) < 1e-3 for norm in norms] == [where == "early", where != "late"]


def test_alpha_is_learned_or_not() -> None:
    batch = PackedBags.of(bags())
    for learn in (True, False):
        model = create_model("sm_abmil", 6, 1, hidden=8, alpha=0.3, learn_alpha=learn).double()
        torch.testing.assert_close(model.score.smooth.alpha, torch.tensor(0.3).double())
        model(batch).logits.sum().backward()
        assert (model.score.smooth.alpha_logit.grad is not None) == learn


def test_sizes() -> None:
    def size(name: str, **options: object) -> int:
        return sum(p.numel() for p in create_model(name, 384, 1, **options).parameters())

    pool = 384 * 512 + 512 + 512 * 128 + 128 + 128 + 1 + 513
    assert size("sm_abmil") == pool
    assert size("sm_transformer") == pool + 3 * 512**2 + 1 + 2 * 4 * 512**2 + 5 * 512 + 3 * 2 * 512


@pytest.mark.parametrize(
    ("name", "options"),
    [("sm_abmil", {"where": "late", "mode": "exact"}), ("sm_transformer", {"hidden": 32, "depth": 2, "where": "mid"})],
)
def test_promises_with_other_options(name: str, options: dict[str, object]) -> None:
    check_model(name, n_out=2, **options)


@pytest.mark.parametrize("name", ["sm_abmil", "sm_transformer"])
def test_mixed_precision(name: str) -> None:
    torch.manual_seed(0)
    model = create_model(name, 6, 2, hidden=16).eval()
    batch = PackedBags.of([Bag(bag.features.float(), bag.xy, bag.id, bag.slides) for bag in bags()])
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch)
    torch.testing.assert_close(out.logits.float(), model(batch).logits, rtol=0.05, atol=0.05)
    out.logits.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_errors() -> None:
    for wrong, message in (
        ({"where": "erly"}, "place of Sm"),
        ({"mode": "fast"}, "mode"),
        ({"alpha": 1.0}, "alpha must lie between 0 and 1, got 1.0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"attention_dim": 0}, "attention_dim must be at least 1, got 0"),
    ):
        with pytest.raises(OptionError, match=message):
            create_model("sm_abmil", 6, 1, **wrong)
    with pytest.raises(OptionError, match="multiple of the number of heads, got 512 and 3"):
        create_model("sm_transformer", 6, 1, heads=3)
    with pytest.raises(OptionError, match="depth must be at least 1, got 0"):
        create_model("sm_transformer", 6, 1, depth=0)
