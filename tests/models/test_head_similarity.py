"""How alike heads are: the definition, and the numbers that passes through a model leave."""

import math

import pytest
import torch

from psamil import Bag, PackedBags, create_model
from psamil.models.head_similarity import head_similarity, watched_heads
from tests.spatial.cases import positions


def bag(n: int, seed: int = 0) -> Bag:
    generator = torch.Generator().manual_seed(seed)
    return Bag(torch.randn(n, 6, generator=generator), positions("lattice", n, seed=seed))


def test_the_definition():
    """Head 2 is 5 away from head 1 in each tile; head 3 is 1 and 3 away from it, 2 on average."""
    outputs = torch.tensor([[[0.0, 0.0], [3.0, 4.0], [1.0, 0.0]], [[1.0, 1.0], [-2.0, -3.0], [1.0, 4.0]]])
    similarity = head_similarity(outputs)
    assert similarity[0, 1].item() == similarity[1, 0].item() == pytest.approx(1 / 5)
    assert similarity[0, 2].item() == pytest.approx(1 / 2)
    assert similarity.diagonal().isinf().all()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("psa", {"heads": 3, "head_dim": 4}),
        ("psa", {"heads": 2, "head_dim": 4, "depth": 2, "neighbours": "nearest"}),
        ("psa_evidence", {"heads": 2}),
        ("msa", {"heads": 2, "head_dim": 4}),
    ],
    ids=["three heads", "two layers", "evidence", "without a prior"],
)
def test_each_pass_gives_the_mean_over_layers_and_pairs(name, options):
    torch.manual_seed(0)
    model = create_model(name, 6, 1, **options).eval()
    batches = [PackedBags.of(bag(n, seed=n)) for n in (30, 12)]
    caught = []
    layers = [module for module in model.modules() if hasattr(module, "qkv")]
    hooks = [layer.proj.register_forward_pre_hook(lambda _, arguments: caught.append(arguments[0])) for layer in layers]
    expected, logits = [], []
    for batch in batches:
        caught.clear()
        logits.append(model(batch).logits)
        pairs = []
        for outputs in caught:
            parts = outputs.detach().double().chunk(layers[0].heads, dim=1)
            distances = [(a - b).norm(dim=1).mean() for i, a in enumerate(parts) for b in parts[:i]]
            pairs.append(sum(1 / distance for distance in distances) / len(distances))
        expected.append(float(sum(pairs) / len(pairs)))
    for hook in hooks:
        hook.remove()
    with watched_heads(model) as similarities:
        again = [model(batch).logits for batch in batches]
    assert similarities == pytest.approx(expected)
    for one, other in zip(logits, again, strict=True):
        assert torch.equal(one, other)
    model(batches[0])
    assert len(similarities) == 2  # nobody watches any more
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_passes_that_tell_nothing():
    model = create_model("psa", 6, 1, heads=2, head_dim=4)
    attention = model.blocks[0].attention
    with watched_heads(model) as similarities:
        model(PackedBags.of(bag(0)))
        with torch.no_grad():
            attention.qkv.weight.zero_()
            attention.qkv.bias.zero_()
        model(PackedBags.of(bag(9)))
    assert math.isnan(similarities[0])
    assert similarities[1] == math.inf


@pytest.mark.parametrize(("name", "options"), [("abmil", {}), ("psa", {"heads": 1}), ("transmil", {"width": 64})])
def test_models_without_heads_to_compare(name, options):
    model = create_model(name, 6, 1, **options).eval()
    with watched_heads(model) as similarities:
        model(PackedBags.of(bag(20)))
    assert similarities == []
