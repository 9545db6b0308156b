"""Models that pool tiles one by one: against loops over bags, and what every model promises."""

import pytest
import torch

from psamil import Bag, PackedBags, create_model, list_models
from psamil.errors import OptionError, ShapeError
from psamil.models import check_model
from tests.models.outside import XY, by_torchmil, fill, wave

MODELS = ["mean", "max", "abmil", "abmil plain"]
SIZES = (5, 0, 1, 7)


def model_of(name: str, **options):
    torch.manual_seed(0)
    name, *plain = name.split()
    gated = {"gated": False} if plain else {}
    sizes = {"attention_dim": 3} if name == "abmil" else {}
    return create_model(name, 6, 2, **{"hidden": 8, **sizes, **gated, **options})


def bags(*sizes: int, dtype: torch.dtype = torch.float64) -> list[Bag]:
    generator = torch.Generator().manual_seed(1)
    return [
        Bag(torch.randn(n, 6, generator=generator, dtype=torch.float64).to(dtype), torch.zeros(n, 2), f"bag {i}")
        for i, n in enumerate(sizes)
    ]


def test_names_and_sizes() -> None:
    assert {"mean", "max", "abmil"} <= set(list_models())
    abmil = create_model("abmil", 384, 1)
    assert sum(p.numel() for p in abmil.parameters()) == 329_090
    plain = create_model("abmil", 384, 1, gated=False)
    assert sum(p.numel() for p in plain.parameters()) == 329_090 - 128 * 513  # without U
    mean = create_model("mean", 384, 1)
    assert sum(p.numel() for p in mean.parameters()) == 384 * 512 + 512 + 513


@pytest.mark.parametrize("hidden", [0, 8])
@pytest.mark.parametrize("name", MODELS)
def test_against_a_loop_over_bags(name: str, hidden: int) -> None:
    model = model_of(name, hidden=hidden).double()
    parts = bags(*SIZES)
    out = model(PackedBags.of(parts))
    weight, bias = model.head.weight, model.head.bias
    for part, logits, scores in zip(parts, out.logits, out.tile_scores.split(SIZES), strict=True):
        h = (part.features @ model.embed.project[0].weight.T + model.embed.project[0].bias).relu() if hidden else None
        h = part.features if h is None else h
        tile_logits = h @ weight.T + bias
        if part.n == 0:
            expected = bias
        elif name == "mean":
            expected = tile_logits.mean(0)
        elif name == "max":
            expected = tile_logits.max(0).values
        else:
            expected = weight @ (model.score(h)[:, 0].softmax(0) @ h) + bias
        torch.testing.assert_close(logits, expected)
        own = tile_logits.amax(1) - tile_logits.mean(1)
        torch.testing.assert_close(scores, model.score(h)[:, 0] if "abmil" in name else own)


@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_abmil_against_torchmil(kind: str) -> None:
    model = create_model("abmil", 8, 1, hidden=0, attention_dim=3, gated=kind == "gated").double()
    of_score, of_head = list(model.score.parameters()), list(model.head.parameters())
    last, bias = of_score[-2:]  # torchmil has no such bias: it changes the scores, and not the attention
    bias.data.zero_()
    fill([*of_score[:2], last, *of_score[2:-2], *of_head])
    out, expected = model(PackedBags.of(Bag(wave(7, 8, k=0.37), XY))), by_torchmil(f"abmil {kind}")
    torch.testing.assert_close(out.logits[:, 0], expected["logits"])
    torch.testing.assert_close(out.tile_scores, expected["f"])


def test_attention_scores() -> None:
    x = torch.randn(4, 8, dtype=torch.float64)
    score = model_of("abmil plain").double().score
    expected = (x @ score[0].weight.T + score[0].bias).tanh() @ score[2].weight.T + score[2].bias
    torch.testing.assert_close(score(x), expected)
    score = model_of("abmil").double().score
    hidden = (x @ score.tanh.weight.T + score.tanh.bias).tanh() / (
        1 + (-x @ score.gate.weight.T - score.gate.bias).exp()
    )
    torch.testing.assert_close(score(x), hidden @ score.score.weight.T + score.score.bias)


@pytest.mark.parametrize("name", MODELS)
def test_tile_order_positions_and_packing_do_not_matter(name: str) -> None:
    model, parts = model_of(name).double(), bags(*SIZES)
    together = model(PackedBags.of(parts))
    for i, part in enumerate(parts):
        order = torch.randperm(part.n, generator=torch.Generator().manual_seed(i))
        alone = model(PackedBags.of(Bag(part.features[order], part.xy + torch.arange(part.n)[:, None])))
        torch.testing.assert_close(alone.logits[0], together.logits[i])
        torch.testing.assert_close(alone.tile_scores, together.tile_scores.split(SIZES)[i][order])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [SIZES, (1,), (0, 0)])
def test_gradients_are_finite(name: str, sizes: tuple[int, ...]) -> None:
    model = model_of(name)
    out = model(PackedBags.of(bags(*sizes, dtype=torch.float32)))
    assert out.logits.isfinite().all()
    out.logits.square().sum().backward()
    assert model.head.bias.grad.abs().min() > 0
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    if sum(sizes) > 1:
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.head.parameters())
        assert model.embed.project[0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", MODELS)
def test_gradient_is_that_of_the_formula(name: str) -> None:
    model, parts = model_of(name).double(), bags(*SIZES)
    features = torch.cat([part.features for part in parts]).requires_grad_()
    batch = PackedBags.of(parts)

    def logits(x):
        return model(PackedBags(x, batch.xy, batch.offsets, batch.slides, batch.ids)).logits

    assert torch.autograd.gradcheck(logits, features)


@pytest.mark.parametrize("name", MODELS)
def test_precisions(name: str) -> None:
    model, parts = model_of(name), bags(300, 20, dtype=torch.float32)
    full = model(PackedBags.of(parts)).logits
    half = [Bag(part.features.half(), part.xy, part.id) for part in parts]
    torch.testing.assert_close(model(PackedBags.of(half)).logits, full, rtol=1e-2, atol=1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(PackedBags.of([*parts, *bags(0, dtype=torch.float32)]))
    torch.testing.assert_close(out.logits[:2].float(), full, rtol=0.05, atol=0.05)
    out.logits.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_dropout_is_for_training_only(name: str) -> None:
    model, batch = model_of(name, dropout=0.5), PackedBags.of(bags(30, dtype=torch.float32))
    assert not torch.equal(model(batch).logits, model(batch).logits)
    model.eval()
    torch.testing.assert_close(model(batch).logits, model_of(name)(batch).logits, rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_promises_of_every_model(name: str) -> None:
    name, *plain = name.split()
    check_model(name, **({"gated": False} if plain else {}))


def test_errors() -> None:
    with pytest.raises(ShapeError, match="takes features of width 6, got 5"):
        model_of("mean")(PackedBags.of(Bag(torch.zeros(3, 5), torch.zeros(3, 2))))
    with pytest.raises(ShapeError, match="takes PackedBags, got Bag"):
        model_of("max")(bags(3)[0])
    for wrong in ({"hidden": -1}, {"dropout": 1.0}):
        with pytest.raises(OptionError, match="dropout in"):
            model_of("abmil", **wrong)
    with pytest.raises(OptionError, match="attention_dim must be at least 1, got 0"):
        model_of("abmil", attention_dim=0)


@pytest.mark.parametrize("name", ["mean", "abmil", "clam_sb", "psa", "local", "msa", "psa_evidence"])
def test_logits_are_a_mean_of_the_evidence_of_tiles(name: str) -> None:
    """With one tile it is the logits; a tile that speaks louder moves the logits its way."""
    torch.manual_seed(0)
    model = create_model(name, 8, 2).double().eval()
    one = Bag(torch.randn(1, 8).double(), torch.zeros(1, 2))
    output = model(PackedBags.of(one))
    torch.testing.assert_close(output.tile_evidence, output.logits)
    many = model(PackedBags.of(Bag(torch.randn(30, 8).double(), torch.arange(60).reshape(30, 2) % 7)))
    assert many.tile_evidence.shape == (30, 2)
    if name in ("abmil", "clam_sb", "psa", "local", "msa"):
        shares = many.tile_scores.softmax(0)
        torch.testing.assert_close((shares[:, None] * many.tile_evidence).sum(0, keepdim=True), many.logits)
