"""IBMIL: its dictionary, the deconfounded model against a loop over bags, and its stages."""

import itertools
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans

from psamil import Bag, PackedBags, create_model
from psamil.errors import OptionError
from psamil.models import check_model
from psamil.models.ibmil import IBMIL, confounder_dictionary
from psamil.models.k_means import k_means

SIZES = (5, 0, 1, 7)


def model_of(n_out: int = 1, **options) -> IBMIL:
    torch.manual_seed(0)
    return create_model("ibmil", 6, n_out, **{"confounders": 3, **options})


def bags(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> list[Bag]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Bag(torch.randn(n, 6, generator=generator, dtype=torch.float64).to(dtype), torch.zeros(n, 2)) for n in sizes
    ]


def batches_of(parts: list[Bag]):
    return lambda: iter([PackedBags.of(parts[:2]), PackedBags.of(parts[2:])])


@pytest.mark.parametrize(
    ("in_dim", "of_base", "of_deconfounded"), [(384, 148_610, 247_554), (1024, 1_051_650, 1_315_074)]
)
def test_sizes(in_dim: int, of_base: int, of_deconfounded: int) -> None:
    model = create_model("ibmil", in_dim, 1)
    assert sum(p.numel() for p in model.base.parameters()) == of_base
    assert sum(p.numel() for p in model.deconfounded.parameters()) == of_deconfounded
    assert model.dictionary.shape == (8, in_dim)


def blobs(n: int, k: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    centres = 10 * torch.randn(k, 4, generator=generator, dtype=torch.float64)
    of = torch.arange(n) % k
    return centres[of] + spread * torch.randn(n, 4, generator=generator, dtype=torch.float64), of


def test_k_means_finds_clusters() -> None:
    points, of = blobs(60, 5, spread=0.1)
    cluster, distances = k_means(points, 5)
    pairs = set(zip(cluster.tolist(), of.tolist(), strict=True))
    assert len(pairs) == 5  # one to one
    centres = torch.stack([points[cluster == j].mean(0) for j in range(5)])
    torch.testing.assert_close(distances, (points[:, None] - centres).square().sum(2).sqrt())
    assert torch.equal(k_means(points, 5)[0], cluster)


def test_k_means_against_scikit_learn() -> None:
    points, _ = blobs(200, 6, spread=4.0)
    cluster, distances = k_means(points, 6, iterations=100)
    assert torch.equal(cluster, distances.argmin(1))
    centres = torch.stack([points[cluster == j].mean(0) for j in range(6)])
    outside = KMeans(6, init=centres.numpy(), n_init=1, max_iter=1).fit(points.numpy())
    assert torch.equal(torch.as_tensor(outside.labels_).long(), cluster)  # a fixed point of theirs as well
    best = KMeans(6, n_init=20, random_state=0).fit(points.numpy()).inertia_
    assert float(distances.amin(1).square().sum()) <= 1.2 * best


def test_k_means_of_few_points() -> None:
    points = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 1.0]])
    cluster, distances = k_means(points, 4)
    assert distances.shape == (3, 4)
    assert cluster[0] == cluster[2] != cluster[1]
    assert distances.amin(1).tolist() == [0, 0, 0]
    assert distances.amin(0).tolist() == [0, 0, 0, 0]  # centres without points stay where they were drawn


def test_dictionary_holds_means_of_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    axes = torch.eye(3, 6)
    lengths = torch.tensor([0.1] * 6 + [10.0] * 6)[:, None]  # as they are, the short ones would be one cluster
    vectors = lengths * (axes[torch.arange(12) % 3] + 0.01 * torch.randn(12, 6, generator=generator))
    found = confounder_dictionary(vectors, 3)
    expected = torch.stack([vectors[j::3].mean(0) for j in range(3)])  # of the unscaled vectors
    assert any(torch.allclose(found[list(order)], expected) for order in itertools.permutations(range(3)))
    few = confounder_dictionary(vectors[:2], 4)  # rows repeat, and none is 0
    assert {tuple(row.tolist()) for row in few} == {tuple(row.tolist()) for row in vectors[:2]}


@pytest.mark.parametrize("n_out", [1, 3])
def test_deconfounded_model_against_a_loop(n_out: int) -> None:
    model, parts = model_of(n_out).double(), bags(*SIZES, dtype=torch.float64)
    model.start_epoch(1, 2, batches_of(parts))
    net, B = model.deconfounded, model.dictionary
    logits, scores, alphas = [], [], []
    for part in parts:
        x = part.features
        a = ((x @ net.score[0].weight.T + net.score[0].bias).tanh() @ net.score[2].weight.T + net.score[2].bias)[:, 0]
        m = a.softmax(0) @ x
        q = net.query.weight @ m + net.query.bias
        alpha = torch.stack([q @ (net.key.weight @ b + net.key.bias) / 128**0.5 for b in B]).softmax(0)
        u = sum(weight * b for weight, b in zip(alpha, B, strict=True))
        logits.append(net.head.weight @ torch.cat((m, u)) + net.head.bias)
        scores.append(a)
        alphas.append(alpha)
    out = model(PackedBags.of(parts))
    torch.testing.assert_close(out.logits, torch.stack(logits))
    torch.testing.assert_close(out.tile_scores, torch.cat(scores))
    torch.testing.assert_close(model.confounder_attention(PackedBags.of(parts)), torch.stack(alphas))
    parameters = dict(net.named_parameters())
    ours = torch.autograd.grad(out.logits.square().sum(), parameters.values())
    theirs = torch.autograd.grad(torch.stack(logits).square().sum(), parameters.values())
    for name, mine, expected in zip(parameters, ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, msg=lambda text, name=name: f"gradient of {name}: {text}")


def test_dictionary_comes_from_the_bag_vectors_of_the_base() -> None:
    model, parts = model_of().eval(), bags(*SIZES)
    model.start_epoch(0, 4, batches_of(parts))
    model.start_epoch(1, 4, batches_of(parts))
    assert model.preliminary
    assert model.dictionary.abs().sum() == 0
    model.start_epoch(2, 4, batches_of(parts))
    assert not model.preliminary
    vectors = [model.base.score(part.features)[:, 0].softmax(0) @ part.features for part in parts if part.n]
    expected = confounder_dictionary(torch.stack(vectors), 3)  # three bags that are not empty, three rows
    torch.testing.assert_close(model.dictionary, expected)
    model.start_epoch(3, 4, batches_of(bags(*SIZES, seed=2)))  # made once
    torch.testing.assert_close(model.dictionary, expected)


def train(model: IBMIL, optimizer: torch.optim.Optimizer, epochs: range, total: int, parts: list[Bag]) -> None:
    batch, y = PackedBags.of(parts), torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    for epoch in epochs:
        model.eval()
        model.start_epoch(epoch, total, batches_of(parts))
        model.train()
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(batch).logits, y).backward()
        optimizer.step()


def copy(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_each_stage_trains_its_own_weights() -> None:
    model, parts = model_of(), bags(*SIZES)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    base, deconfounded = copy(model.base), copy(model.deconfounded)
    train(model, optimizer, range(0, 2), 5, parts)
    assert not same(copy(model.base), base)
    assert same(copy(model.deconfounded), deconfounded)
    base = copy(model.base)
    train(model, optimizer, range(2, 5), 5, parts)
    assert same(copy(model.base), base)
    names = [name for name, p in model.deconfounded.named_parameters() if torch.equal(p, deconfounded[name])]
    assert names == []
    assert optimizer.state[model.deconfounded.head.weight]["step"] == 3  # Adam began afresh


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_training_goes_on_from_its_state(stop: int) -> None:
    parts = bags(*SIZES)
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, range(stop), 4, parts)
    later = create_model("ibmil", 6, 1, confounders=3)
    later.load_state_dict(copy(model))
    later_optimizer = torch.optim.Adam(later.parameters(), lr=0.01)
    later_optimizer.load_state_dict(deepcopy(optimizer.state_dict()))  # which would share its tensors
    train(model, optimizer, range(stop, 4), 4, parts)
    train(later, later_optimizer, range(stop, 4), 4, parts)
    assert same(copy(model), copy(later))
    assert not later.preliminary


def test_one_epoch_is_enough_for_a_dictionary() -> None:
    model = model_of()
    model.start_epoch(0, 1, batches_of(bags(*SIZES)))
    assert not model.preliminary
    assert model.dictionary.abs().sum(1).min() > 0


def test_without_a_dictionary_it_is_the_base() -> None:
    model, batch = model_of(2), PackedBags.of(bags(*SIZES))
    torch.testing.assert_close(model(batch).logits, model.base(batch).logits, rtol=0, atol=0)


def test_promises_of_every_model() -> None:
    check_model("ibmil")


def test_errors() -> None:
    with pytest.raises(OptionError, match="confounders must be at least 1, got 0"):
        model_of(confounders=0)
