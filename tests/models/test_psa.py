import math

import pytest
import torch

from psamil import Bag, PackedBags, check_model, create_model
from psamil.errors import OptionError, ShapeError
from psamil.spatial import DECAYS, Layout, parameter_groups, posterior_attention
from tests.spatial.cases import positions


def small(**options):
    torch.manual_seed(0)
    return create_model("psa", 6, 2, **{"heads": 2, "head_dim": 4, **options})


def bags(*sizes: int, dtype: torch.dtype = torch.float32) -> list[Bag]:
    generator = torch.Generator().manual_seed(0)
    kinds = ("lattice", "continuous", "two phases")
    return [
        Bag(torch.randn(n, 6, generator=generator).to(dtype), positions(kinds[i % 3], n, seed=i), f"bag {i}")
        for i, n in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("preset", "parameters"), [("paper-crc", 1_276_709), ("paper-camelyon16", 4_875_845), ("paper-demo", 167_525)]
)
def test_parameter_counts_of_the_authors(preset, parameters):
    model = create_model("psa", 384, 1, preset=preset)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("pooling", ["linear", "gated", "evidence", "opposed"])
@pytest.mark.parametrize("depth", [1, 2])
def test_output_and_gradients(decay, pooling, depth):
    model = small(decay=decay, pooling=pooling, depth=depth)
    batch = PackedBags.of(bags(50, 1, 30))
    out = model(batch)
    assert out.logits.shape == (3, 2)
    assert out.tile_scores.shape == (81,)
    assert out.radii_steps.shape == (depth, 2)
    assert not out.radii_steps.requires_grad
    (out.logits.square().sum() + sum(out.auxiliary_losses.values())).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert all(prior.free.grad.abs().min() > 0 for prior in model.priors)


def test_a_batch_equals_its_bags_and_tile_order_does_not_matter():
    model, parts = small().double(), bags(70, 1, 2, 40, dtype=torch.float64)
    together = model(PackedBags.of(parts))
    scores = together.tile_scores.split([70, 1, 2, 40])
    for i, part in enumerate(parts):
        order = torch.randperm(part.n, generator=torch.Generator().manual_seed(i))
        alone = model(PackedBags.of(Bag(part.features[order], part.xy[order] + 17, part.id)))
        torch.testing.assert_close(alone.logits[0], together.logits[i], rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(alone.tile_scores, scores[i][order], rtol=1e-9, atol=1e-10)


def test_slides_of_a_patient_are_pooled_but_are_no_neighbours():
    model = small().double()
    one, two = bags(40, 30, dtype=torch.float64)
    patient = Bag(
        torch.cat((one.features, two.features)),
        torch.cat((one.xy, two.xy)),
        "patient",
        slides=torch.tensor([0, 40, 70]),
    )
    together, apart = model(PackedBags.of(patient)), model(PackedBags.of([one, two]))
    torch.testing.assert_close(together.tile_scores, apart.tile_scores)
    assert together.logits.shape == (1, 2)


def test_positions_matter():
    model = small()
    (part,) = bags(60)
    moved = Bag(part.features, part.xy[torch.randperm(60)], part.id)
    assert not torch.allclose(model(PackedBags.of(part)).logits, model(PackedBags.of(moved)).logits)


def test_an_empty_bag_has_a_prediction():
    for sizes in ((5, 0), (0, 0)):
        for pooling in ("linear", "evidence", "opposed"):
            model = small(pooling=pooling)
            out = model(PackedBags.of(bags(*sizes)))
            assert out.logits.shape == (2, 2)
            assert out.tile_scores.shape == (sum(sizes),)
            torch.testing.assert_close(out.logits[1], model.head.bias)


def test_a_prepared_layout_gives_the_same_result():
    model, parts = small(), bags(30, 40)
    batch = PackedBags.of(parts)
    prepared = PackedBags.of(parts, layout=Layout.pack([Layout.of(part.xy) for part in parts])).to("cpu")
    torch.testing.assert_close(model(prepared).logits, model(batch).logits, rtol=0, atol=0)


def test_precisions():
    model, parts = small(), bags(64, 20)
    full = model(PackedBags.of(parts)).logits
    half = [Bag(part.features.half(), part.xy, part.id) for part in parts]
    torch.testing.assert_close(model(PackedBags.of(half)).logits, full, rtol=1e-2, atol=1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(PackedBags.of(parts))
    torch.testing.assert_close(out.logits.float(), full, rtol=0.1, atol=0.05)
    (out.logits.float().sum() + sum(out.auxiliary_losses.values())).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_bfloat16_pools_large_bags_right():
    model = small()
    batch = PackedBags.of(bags(8000))
    full = model(batch).logits
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(batch).logits.float(), full, rtol=0.02, atol=0.02)


def test_a_layout_of_other_slides_is_refused():
    model, (one, two) = small(), bags(30, 40)
    swapped = Layout.pack([Layout.of(two.xy), Layout.of(one.xy)])
    with pytest.raises(ShapeError, match=r"begin at \[0, 30, 70\]; its bags begin at \[0, 40, 70\]"):
        model(PackedBags.of([one, two], layout=swapped))
    joined = Layout.of(torch.cat((one.xy, two.xy)))
    with pytest.raises(ShapeError, match=r"must be a .* of its slides"):
        model(PackedBags.of([one, two], layout=joined))
    empty_between = [one, *bags(0), two]
    model(PackedBags.of(empty_between, layout=Layout.pack([Layout.of(part.xy) for part in empty_between])))


@pytest.mark.parametrize("layer", [0, 1])
def test_posterior_rows_of_a_model(layer):
    model = small(depth=2).double()
    batch = PackedBags.of(bags(30, 20, dtype=torch.float64))
    seen = {}
    attention = model.blocks[layer].attention
    attention.register_forward_hook(lambda _, args, out: seen.update(x=args[0], out=out))
    model(batch)
    rows = model.posterior_rows(batch, [3, 41], layer=layer)
    _, _, v = attention.project(seen["x"])
    for tile, heads in zip((3, 41), rows, strict=True):
        mixed = torch.stack([row.posterior @ v[row.neighbours, row.head] for row in heads])
        torch.testing.assert_close(attention.proj(mixed.flatten()), seen["out"][tile])


def test_the_attention_of_the_model_is_the_operator():
    model = small()
    (part,) = bags(30)
    attention = model.blocks[0].attention
    x = torch.randn(30, 8)
    q, k, v = attention.qkv(x).chunk(3, dim=1)
    heads = [t.reshape(30, 2, 4) for t in (q, k, v)]
    expected = attention.proj(
        posterior_attention(*heads, part.xy, attention.prior.theta, decay="gaussian").reshape(30, 8)
    )
    torch.testing.assert_close(attention(x, part.xy, Layout.of(part.xy)), expected)


def test_state_round_trip_and_optimiser_groups():
    model, other = small(), small(k_init=12.0)
    other.load_state_dict(model.state_dict(), strict=True)
    batch = PackedBags.of(bags(20))
    torch.testing.assert_close(other(batch).logits, model(batch).logits, rtol=0, atol=0)
    weights, priors = parameter_groups(model, lr=1e-4)
    assert len(priors["params"]) == 1
    assert len(weights["params"]) == len(list(model.parameters())) - 1


def test_errors():
    with pytest.raises(ShapeError, match="takes features of width 6, got 5"):
        small()(PackedBags.of(Bag(torch.zeros(3, 5), torch.zeros(3, 2))))
    with pytest.raises(ShapeError, match="takes PackedBags, got Bag"):
        small()(bags(3)[0])
    with pytest.raises(OptionError, match="unknown preset 'paper'"):
        small(preset="paper")
    with pytest.raises(OptionError, match="unknown pooling 'max'"):
        small(pooling="max")
    with pytest.raises(OptionError, match="unknown form of diversity 'kde'"):
        small(diversity="kde")
    with pytest.raises(OptionError, match="must be at least 1"):
        small(depth=0)


@pytest.mark.parametrize("n_out", [1, 3])
def test_pooling_by_evidence(n_out):
    """The mean of the evidence for sharpness 0, its maximum for a high one."""
    model = create_model("psa", 6, n_out, heads=2, head_dim=4, pooling="evidence").double()
    parts = bags(50, 1, 30, dtype=torch.float64)
    for sharpness, pooled in ((1e-9, torch.mean), (1e4, torch.amax), (0.7, None)):
        with torch.no_grad():
            model.log_sharpness.fill_(sharpness).log_()
        out = model(PackedBags.of(parts))
        for logits, evidence in zip(out.logits, out.tile_evidence.split([50, 1, 30]), strict=True):
            weights = (sharpness * evidence).softmax(0)
            expected = (weights * evidence).sum(0) if pooled is None else pooled(evidence, 0)
            torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_evidence_is_signed_and_its_score_is_that_of_the_class_it_speaks_for():
    model = create_model("psa", 6, 1, heads=2, head_dim=4, pooling="evidence")
    out = model(PackedBags.of(bags(40)))
    torch.testing.assert_close(out.tile_scores + model.head.bias, out.tile_evidence[:, 0])
    check_model("psa", heads=2, head_dim=4, pooling="evidence")


@pytest.mark.parametrize("n_out", [1, 3])
def test_opposed_evidence_is_pooled_twice_and_added(n_out):
    """Against the definition in loops, with weights that training has moved apart."""
    model = create_model("psa", 6, n_out, heads=2, head_dim=4, pooling="opposed").double()
    parts = bags(50, 1, 30, dtype=torch.float64)
    batch = PackedBags.of(parts)
    tokens = []
    model.norm.register_forward_hook(lambda module, args, out: tokens.append(out))
    with torch.no_grad():
        model.opposed.weight.normal_(generator=torch.Generator().manual_seed(0))
        model.log_sharpness.fill_(0.7).log_()
    out = model(batch)
    for b, (first, end) in enumerate([(0, 50), (50, 51), (51, 81)]):
        logits, evidence, x = out.logits[b], out.tile_evidence[first:end], tokens[0][first:end]
        for k in range(n_out):
            e, o = x @ model.head.weight[k], x @ model.opposed.weight[k]
            pooled = [sum(w * v for w, v in zip((0.7 * of).softmax(0), of, strict=True)) for of in (e, o)]
            torch.testing.assert_close(logits[k], sum(pooled) + model.head.bias[k])
            torch.testing.assert_close(evidence[:, k], e + o + model.head.bias[k])
    sums = tokens[0] @ (model.head.weight + model.opposed.weight).T
    expected = sums[:, 0] if n_out == 1 else sums.amax(1) - sums.mean(1)
    torch.testing.assert_close(out.tile_scores, expected)


@pytest.mark.parametrize("pooling", ["evidence", "opposed"])
@pytest.mark.parametrize("n_out", [1, 3])
def test_scores_of_tiles_know_as_much_of_the_slide_as_they_are_told(pooling, n_out):
    torch.manual_seed(0)
    plain, knowing = (
        create_model("psa", 6, n_out, heads=2, head_dim=4, pooling=pooling, slide_share=share).double()
        for share in (0.0, 0.25)
    )
    if plain.opposed is not None:
        with torch.no_grad():
            plain.opposed.weight.mul_(0.5)
    knowing.load_state_dict(plain.state_dict())
    batch = PackedBags.of(bags(50, 1, 30, dtype=torch.float64))
    alone, told = plain(batch), knowing(batch)
    torch.testing.assert_close(told.logits, alone.logits)
    torch.testing.assert_close(told.tile_evidence, alone.tile_evidence)
    bias = plain.head.bias
    of_slide = (alone.logits - bias)[torch.repeat_interleave(torch.arange(3), torch.tensor([50, 1, 30]))]
    expected = alone.tile_evidence - bias + 0.25 * of_slide
    expected = expected[:, 0] if n_out == 1 else expected.amax(1) - expected.mean(1)
    torch.testing.assert_close(told.tile_scores, expected)
    assert not torch.allclose(told.tile_scores, alone.tile_scores)
    with pytest.raises(OptionError, match="slide_share must be a number from 0 on"):
        create_model("psa", 6, 1, slide_share=-1.0)


def test_opposed_evidence_begins_without_a_side():
    """The evidence of all tiles is the bias, and logits are 2 gamma var(e) + bias to first order in gamma."""
    model = create_model("psa", 6, 1, heads=2, head_dim=4, pooling="opposed").double()
    with torch.no_grad():
        model.log_sharpness.fill_(1e-3).log_()
    tokens = []
    model.norm.register_forward_hook(lambda module, args, out: tokens.append(out))
    out = model(PackedBags.of(bags(60, dtype=torch.float64)))
    assert bool((out.tile_scores == 0).all())
    torch.testing.assert_close(out.tile_evidence, model.head.bias.expand(60, 1))
    variance = (tokens[0] @ model.head.weight[0]).var(correction=0)
    torch.testing.assert_close(out.logits[0, 0] - model.head.bias[0], 2e-3 * variance, rtol=1e-4, atol=0)


def test_opposed_evidence_keeps_all_other_promises():
    def begun(in_dim, n_out):  # before the first step all scores are 0
        options = {"pooling": "opposed", "slide_share": 0.5, "first_attention": "mean"}
        model = create_model("psa", in_dim, n_out, heads=2, head_dim=4, **options)
        with torch.no_grad():
            model.opposed.weight.mul_(0.9)
        return model

    assert set(check_model(begun).exceptions) == {"evidence"}


def test_radii_shall_be_small_in_the_second_half_of_training():
    model = small(radius_weight=0.5, alpha=0.0, k_init=[5.0, 10.0], depth=2)
    batch = PackedBags.of(bags(30))
    for epoch, is_late in enumerate([False, False, False, True, True]):  # from epoch 2.5 of 5 on
        model.start_epoch(epoch, 5, lambda: [])
        losses = model(batch).auxiliary_losses
        assert ("radius" in losses) == is_late
    assert float(losses["radius"].detach()) == pytest.approx(0.5 * 2 * math.log(5 * 10) / 2, rel=1e-5)
    losses["radius"].backward()
    assert all((prior.free.grad > 0).all() for prior in model.priors)  # downhill is towards smaller radii


def test_radii_are_free_by_default():
    model = small()
    model.start_epoch(1, 2, lambda: [])
    assert model(PackedBags.of(bags(30))).auxiliary_losses.keys() == {"diversity"}
    assert model.cost == 0
