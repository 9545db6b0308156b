"""DTFD-MIL: against loops over pseudo-bags, who trains what, and how tiles are split."""

import pytest
import torch
from torch import Tensor

from psamil import Bag, PackedBags, create_model
from psamil.errors import OptionError
from psamil.models import check_model
from psamil.models.dtfd import DISTILLATIONS, DTFD, feature_hash, ranks_in_segments

SIZES = (11, 0, 1, 3, 8)


def model_of(n_out: int = 1, **options) -> DTFD:
    torch.manual_seed(0)
    return create_model("dtfd", 6, n_out, **{"hidden": 8, "attention_dim": 3, "pseudo_bags": 4, **options})


def bags(*sizes: int, dtype: torch.dtype = torch.float64) -> list[Bag]:
    generator = torch.Generator().manual_seed(1)
    return [
        Bag(torch.randn(n, 6, generator=generator, dtype=torch.float64).to(dtype), torch.zeros(n, 2)) for n in sizes
    ]


def test_size() -> None:
    # embedding, then twice: V and U, w, two classes
    expected = 384 * 512 + 2 * (2 * 513 * 128 + 129 + 2 * 513)
    assert sum(p.numel() for p in create_model("dtfd", 384, 1).parameters()) == expected
    blocks = create_model("dtfd", 384, 1, residual_blocks=2)
    assert sum(p.numel() for p in blocks.parameters()) == expected + 4 * 512**2


def attention(tier, h: Tensor) -> Tensor:
    tanh = (h @ tier.score.tanh.weight.T + tier.score.tanh.bias).tanh()
    gate = (h @ tier.score.gate.weight.T + tier.score.gate.bias).sigmoid()
    return (tanh * gate) @ tier.score.score.weight[0] + tier.score.score.bias


def as_outputs(class_logits: Tensor, n_out: int) -> Tensor:
    return class_logits[1:] - class_logits[:1] if n_out == 1 else class_logits


def by_loops(model: DTFD, parts: list[Bag], pseudo_bag: list[Tensor], n_out: int) -> tuple[Tensor, list[Tensor], list]:
    """Logits of the bags, logits of the pseudo-bags of each, scores of the tiles of each, as the definition says it."""
    logits, of_pseudo_bags, scores = [], [], []
    C, c = model.tier1.head.weight, model.tier1.head.bias
    for part, groups in zip(parts, pseudo_bag, strict=True):
        h = (part.features @ model.embed.project.weight.T).relu()
        distilled, rows = [], []
        for m in sorted(set(groups.tolist())):
            members = h[groups == m]
            a = attention(model.tier1, members).softmax(0)
            z = a @ members
            rows.append(as_outputs(C @ z + c, n_out))
            if model.distillation == "AFS":
                distilled.append(z.detach())
                continue
            probability = torch.stack(
                [(C @ (weight * tile)).softmax(0)[-1] for weight, tile in zip(a, members, strict=True)]
            )
            best_first = probability.argsort(descending=True)
            distilled += members[best_first[: model.instances]].detach().unbind()
            if model.distillation == "MaxMinS":
                distilled += members[best_first[-model.instances :]].detach().unbind()
        of_pseudo_bags.append(rows)
        slide = torch.zeros(8, dtype=torch.float64)
        if distilled:
            vectors = torch.stack(distilled)
            slide = attention(model.tier2, vectors).softmax(0) @ vectors
        logits.append(as_outputs(model.tier2.head.weight @ slide + model.tier2.head.bias, n_out))
        a = attention(model.tier1, h).softmax(0)
        activations = [as_outputs(C @ (part.n * weight * tile), n_out) for weight, tile in zip(a, h, strict=True)]
        cam = [of.max() - (of.mean() if n_out > 1 else 0) for of in activations]
        scores += cam
    return torch.stack(logits), of_pseudo_bags, scores


CASES = [("AFS", 1, 1), ("AFS", 3, 1), ("MaxS", 1, 1), ("MaxS", 1, 2), ("MaxMinS", 1, 1), ("MaxMinS", 1, 2)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("distillation", "n_out", "instances"), CASES)
def test_against_loops(distillation: str, n_out: int, instances: int, training: bool) -> None:
    model = model_of(n_out, distillation=distillation, instances=instances).double().train(training)
    parts = bags(*SIZES)
    batch = PackedBags.of(parts)
    torch.manual_seed(5)
    part, _ = model.split(batch)
    logits, of_pseudo_bags, scores = by_loops(model, parts, batch.split(part), n_out)
    torch.manual_seed(5)
    out = model(batch)
    torch.testing.assert_close(out.logits, logits)
    torch.testing.assert_close(out.tile_scores, torch.stack(scores))
    extra = out.extra_predictions["pseudo-bags"]
    assert extra.bag.tolist() == [0] * 4 + [2] + [3] * 3 + [4] * 4
    torch.testing.assert_close(extra.logits, torch.stack([row for rows in of_pseudo_bags for row in rows]))
    assert extra.weight == 1

    weights = torch.randn(len(extra.logits), n_out, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ours = (extra.logits * weights).sum() + out.logits.square().sum()
    theirs = (torch.stack([row for rows in of_pseudo_bags for row in rows]) * weights).sum() + logits.square().sum()
    parameters = dict(model.named_parameters())
    for name, a, b in zip(
        parameters,
        torch.autograd.grad(ours, parameters.values()),
        torch.autograd.grad(theirs, parameters.values()),
        strict=True,
    ):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"gradient of {name}: {text}")


@pytest.mark.parametrize("distillation", DISTILLATIONS)
def test_tiers_are_trained_apart(distillation: str) -> None:
    model = model_of(distillation=distillation)
    out = model(PackedBags.of(bags(*SIZES, dtype=torch.float32)))
    first = [*model.embed.parameters(), *model.tier1.parameters()]
    out.logits.square().sum().backward()
    assert all(p.grad is None for p in first)
    assert all(p.grad.isfinite().all() for p in model.tier2.parameters())
    assert model.tier2.head.weight.grad.abs().sum() > 0
    model.zero_grad()
    out.extra_predictions["pseudo-bags"].logits.square().sum().backward()
    assert all(p.grad is None for p in model.tier2.parameters())
    assert all(p.grad.abs().sum() > 0 for p in first)


def test_split_in_training_is_random_and_even() -> None:
    model, batch = model_of(), PackedBags.of(bags(*SIZES))
    torch.manual_seed(3)
    first, bag_of_part = model.split(batch)
    torch.manual_seed(3)
    assert torch.equal(model.split(batch)[0], first)
    assert not torch.equal(model.split(batch)[0], first)
    assert torch.equal(bag_of_part[first], batch.bag_of_tile)
    assert torch.bincount(first).tolist() == [3, 3, 3, 2, 1, 1, 1, 1, 2, 2, 2, 2]
    together = sum(bool(part[0] == part[1]) for part in (model.split(batch)[0] for _ in range(2000))) / 2000
    assert together == pytest.approx(10 / 55, abs=0.04)  # 3 * 3 + 1 of 55 pairs of 11 tiles


def test_split_in_evaluation_belongs_to_the_tiles() -> None:
    model, parts = model_of().eval(), bags(300, 40)
    model.pseudo_bags = 5
    batch = PackedBags.of(parts)
    part, _ = model.split(batch)
    assert torch.bincount(part).tolist() == [60] * 5 + [8] * 5
    torch.manual_seed(1)
    assert torch.equal(model.split(batch)[0], part)
    order = torch.randperm(300)
    permuted = Bag(parts[0].features[order], parts[0].xy)
    assert torch.equal(model.split(PackedBags.of(permuted))[0], part[:300][order])
    assert torch.equal(model.split(PackedBags.of(parts[1]))[0], part[300:] - 5)
    of_first_half = torch.bincount(part[:150], minlength=5)[:5]
    assert (of_first_half - 30).abs().max() < 15  # 30 on average


def test_hash() -> None:
    x = torch.randn(5000, 3).half()
    hashed = feature_hash(x)
    assert len(set(hashed.tolist())) == len({tuple(row) for row in x.tolist()})
    assert torch.equal(feature_hash(x.float()), hashed)
    assert torch.equal(feature_hash(x[4990:]), hashed[4990:])
    assert feature_hash(x[:0]).shape == (0,)


def test_ranks() -> None:
    generator = torch.Generator().manual_seed(0)
    segment = torch.randint(5, (60,), generator=generator)
    segment[segment == 3] = 4  # no row has segment 3
    keys = torch.randint(20, (60,), generator=generator)
    expected = torch.empty(60, dtype=torch.long)
    for s in range(5):
        rows = [i for i in range(60) if segment[i] == s]
        for rank, row in enumerate(sorted(rows, key=lambda i: int(keys[i]))):
            expected[row] = rank
    assert torch.equal(ranks_in_segments(keys, segment, 5), expected)


def test_scores_do_not_shrink_with_the_bag() -> None:
    model, (part,) = model_of().double().eval(), bags(7)
    alone = model(PackedBags.of(part)).tile_scores
    twice = model(PackedBags.of(Bag(torch.cat((part.features, part.features)), torch.zeros(14, 2)))).tile_scores
    torch.testing.assert_close(twice, torch.cat((alone, alone)))


def test_bags_without_tiles() -> None:
    model = model_of(3)
    out = model(PackedBags.of(bags(0, 0, dtype=torch.float32)))
    assert out.extra_predictions == {}
    torch.testing.assert_close(out.logits, model.tier2.head.bias.expand(2, 3))


@pytest.mark.parametrize("distillation", DISTILLATIONS)
def test_bfloat16_autocast(distillation: str) -> None:
    model = model_of(distillation=distillation).eval()
    batch = PackedBags.of(bags(*SIZES, dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch)
    torch.testing.assert_close(out.logits.float(), model(batch).logits, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("distillation", "n_out"), [("AFS", (1, 4)), ("MaxS", 1), ("MaxMinS", 1)])
def test_promises_of_every_model(distillation: str, n_out: int | tuple[int, int]) -> None:
    check_model("dtfd", n_out=n_out, distillation=distillation, instances=2)


def test_errors() -> None:
    with pytest.raises(OptionError, match="unknown distillation 'MAS'; known: 'AFS', 'MaxMinS', 'MaxS'"):
        model_of(distillation="MAS")
    with pytest.raises(OptionError, match="which 3 outputs do not have; use 'AFS'"):
        model_of(3, distillation="MaxS")
    for wrong in ({"pseudo_bags": 0}, {"residual_blocks": -1}, {"instances": 0}):
        with pytest.raises(OptionError, match="must be at least 1"):
            model_of(**wrong)
