"""H2-MIL: against dense graphs and clusters found node by node."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from psamil import Bag, PackedBags, create_model
from psamil.errors import OptionError
from psamil.models import h2_mil
from psamil.models.h2_mil import H2MIL, ClusterPooling, GraphNorm, Tree, TypedAttention, clusters, nearest_centres


def model_of(n_out: int = 2, **options) -> H2MIL:
    torch.manual_seed(0)
    model = create_model("h2_mil", 6, n_out, **{"hidden": 8, "head_dim": 5, "keep_share": 0.25, **options}).double()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, mean=0.5)
    return model.eval()


def bags() -> list[Bag]:
    generator = torch.Generator().manual_seed(1)

    def bag(n: int, side: int, slides: tuple[int, ...] = ()) -> Bag:
        cells = torch.cartesian_prod(torch.arange(side), torch.arange(side + 3))
        xy = cells[torch.randperm(len(cells), generator=generator)[:n]].double() + 3
        x = torch.randn(n, 6, generator=generator, dtype=torch.float64)
        return Bag(x, xy, slides=torch.tensor(slides, dtype=torch.long))

    return [bag(70, 9), bag(0, 1), bag(1, 1), bag(40, 7, (0, 11, 40))]


def dense_attention(layer: TypedAttention, x: Tensor, level: list[int], adjacent: Tensor) -> Tensor:
    rows = []
    w, w_type = layer.project.weight, layer.project_type.weight
    for i in range(len(x)):
        near = [j for j in range(len(x)) if adjacent[i, j] or j == i]
        types = sorted({level[j] for j in near})
        type_scores, messages = [], []
        for t in types:
            of_type = x[[j for j in near if level[j] == t]]
            token = of_type.mean(0)
            type_scores.append(layer.of_types[0] @ (w_type @ token) + layer.of_types[1] @ (w_type @ x[i]))
            scores = of_type @ w.T @ layer.of_nodes[0] + layer.of_nodes[1] @ (w @ x[i])
            messages.append(torch.nn.functional.leaky_relu(scores, 0.2).softmax(0) @ (of_type @ w.T))
        weights = torch.nn.functional.leaky_relu(torch.stack(type_scores), 0.2).softmax(0)
        rows.append(weights @ torch.stack(messages) + layer.bias)
    return torch.stack(rows)


def dense_norm(layer: GraphNorm, x: Tensor) -> Tensor:
    return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() * layer.weight + layer.bias


def chosen(nodes: list[int], fitness: Tensor, place: Tensor, keep: float) -> list[list[int]]:
    """Clusters of nodes, each joined to the nearest of the centres."""
    ranked = sorted(nodes, key=lambda i: -float(fitness[i]))
    stride = round(1 / keep) if keep < 1 else -(-len(nodes) // int(keep))
    centres = ranked[::stride]
    found: dict[int, list[int]] = {c: [] for c in centres}
    for i in nodes:
        costs = {c: float((place[i] - place[c]).norm() + (fitness[i] - fitness[c]).abs()) for c in centres}
        found[min(costs, key=lambda c: costs[c])].append(i)
    return [members for members in found.values() if members]


class DenseSlide:
    """Nodes of one slide: the slide, its squares, its tiles; ``adjacent`` is dense."""

    def __init__(self, bag_x: Tensor, xy: Tensor) -> None:
        cells = [tuple(cell) for cell in ((xy - xy.amin(0)) // 2).int().tolist()]
        squares = sorted(set(cells))
        m, n = len(squares), len(xy)
        member = torch.tensor([[cell == square for cell in cells] for square in squares]).double()
        mean = member / member.sum(1, keepdim=True)
        middle, half = (xy.amin(0) + xy.amax(0)) / 2, (xy.amax(0) - xy.amin(0)).max().clamp(min=1) / 2
        place = (xy - middle) / half
        self.x = torch.cat((bag_x.mean(0, keepdim=True), mean @ bag_x, bag_x))
        self.place = torch.cat((place.mean(0, keepdim=True), mean @ place, place))
        self.level = [0] + [1] * m + [2] * n
        self.parent = [0] + [0] * m + [1 + squares.index(cell) for cell in cells]
        self.adjacent = torch.zeros(1 + m + n, 1 + m + n, dtype=torch.bool)
        at = torch.tensor(squares)
        self.adjacent[1 : 1 + m, 1 : 1 + m] = (at[:, None] - at).abs().amax(2) == 1
        self.adjacent[1 + m :, 1 + m :] = torch.cdist(xy, xy) < 1.5
        for node, parent in enumerate(self.parent):
            self.adjacent[node, parent] = self.adjacent[parent, node] = True
        self.adjacent.fill_diagonal_(False)

    def pool(self, layer: ClusterPooling) -> list[list[int]]:
        """Replaces the nodes by clusters, whose members are returned."""
        fitness = (self.x.detach() @ layer.direction).tanh()
        found, level, parent = [[0]], [0], [0]
        of_level = [[0]]
        for t in (1, 2):
            new: list[list[int]] = []
            for p in of_level[t - 1]:
                children = [i for i in range(len(self.x)) if self.level[i] == t and self.parent[i] in found[p]]
                for cluster in chosen(children, fitness, self.place, layer.keep[t - 1]):
                    new.append(cluster)
                    level.append(t)
                    parent.append(p)
            of_level.append(list(range(len(found), len(found) + len(new))))
            found += new
        s = torch.zeros(len(found), len(self.x), dtype=torch.float64)
        for cluster, members in enumerate(found):
            s[cluster, members] = 1
        self.adjacent = ((s @ self.adjacent.double() @ s.T) > 0).fill_diagonal_(False)
        s = s / s.sum(1, keepdim=True)
        self.x, self.place, self.level, self.parent = s @ self.x, s @ self.place, level, parent
        return found


def reference(model: H2MIL, bag: Bag) -> tuple[Tensor, Tensor]:
    """Logits and tile scores of one bag."""
    r1, r2, tiles = [], [], []
    for a, b in zip(bag.slides[:-1].tolist(), bag.slides[1:].tolist(), strict=True):
        slide = DenseSlide(bag.features[a:b], bag.xy[a:b])
        slide.x = dense_norm(model.norm, slide.x)
        slide.x = dense_norm(
            model.norm1, dense_attention(model.attention1, slide.x, slide.level, slide.adjacent).relu()
        )
        fine = slide.x[-(b - a) :]
        n_before = len(slide.x)
        found = slide.pool(model.pool1)
        r1.append(slide.x)
        slide.x = dense_norm(
            model.norm2, dense_attention(model.attention2, slide.x, slide.level, slide.adjacent).relu()
        )
        of_node = {node: cluster for cluster, members in enumerate(found) for node in members}
        tiles.append(fine + slide.x[[of_node[node] for node in range(n_before - (b - a), n_before)]])
        slide.pool(model.pool2)
        r2.append(slide.x)
    logits = model.head(torch.cat(r1).mean(0) + torch.cat(r2).mean(0))
    of_tiles = model.head(torch.cat(tiles))
    return logits, of_tiles.amax(1) - (of_tiles.mean(1) if of_tiles.shape[1] > 1 else 0)


@pytest.mark.parametrize("n_out", [1, 3])
def test_against_dense_graphs_with_gradients(n_out: int) -> None:
    model, parts = model_of(n_out), bags()
    out = model(PackedBags.of(parts))
    expected = [reference(model, bag) for bag in parts if bag.n]
    torch.testing.assert_close(out.logits[[0, 2, 3]], torch.stack([logits for logits, _ in expected]))
    torch.testing.assert_close(out.tile_scores, torch.cat([scores for _, scores in expected]))
    torch.testing.assert_close(out.logits[1], model.head(torch.zeros(8, dtype=torch.float64)))
    parameters = list(model.parameters())
    actual = torch.autograd.grad(out.logits[[0, 2, 3]].sin().sum() + out.tile_scores.sin().sum(), parameters)
    loss = sum(logits.sin().sum() + scores.sin().sum() for logits, scores in expected)
    for (name, _), a, b in zip(model.named_parameters(), actual, torch.autograd.grad(loss, parameters), strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


def test_size() -> None:
    def attention(width: int) -> int:
        return 2 * width * 256 + 4 * 256 + 256

    head = 256 * 128 + 128 + 2 * 128 + 128 + 1
    model = create_model("h2_mil", 1024, 1)
    assert sum(p.numel() for p in model.parameters()) == attention(1024) + attention(256) + 3 * 2 + head


@pytest.mark.parametrize("keep", [0.1, 0.34, 4, 2])
def test_clusters_in_one_chunk_and_in_many(keep: float, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    group = torch.randint(0, 4, (90,), generator=generator) * 3
    fitness, place = torch.rand(90, generator=generator), torch.rand(90, 2, generator=generator)
    own, group_of_cluster = clusters(group, fitness, place, keep)
    for chunk in (1, 17):
        monkeypatch.setattr(h2_mil, "PAIRS_AT_ONCE", chunk)
        again, _ = clusters(group, fitness, place, keep)
        assert torch.equal(own, again)
    found = {frozenset((own == c).nonzero().flatten().tolist()) for c in range(len(group_of_cluster))}
    expected = set()
    for g in group.unique():
        members = (group == g).nonzero().flatten().tolist()
        inside = chosen(members, fitness, place, keep)
        expected |= set(map(frozenset, inside))
        assert (group_of_cluster == g).sum() == len(inside)
        assert keep < 1 or len(inside) <= keep
    assert found == expected
    assert torch.equal(group_of_cluster[own], group)


@given(st.integers(0, 10**6), st.integers(1, 400), st.integers(1, 5), st.sampled_from([0.0, 1e-3, 1.0]), st.booleans())
def test_nearest_centres_are_those_among_all(seed: int, n: int, groups: int, spread: float, on_lattice: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    point = torch.rand(n, 3, generator=generator) * torch.tensor([1, 1, spread])
    if on_lattice:  # many equal distances
        point = (point * 6).round() / 6
    group = torch.randint(0, groups, (n,), generator=generator).unique(return_inverse=True)[1]
    centre = torch.cat([(group == g).nonzero()[0] for g in range(int(group.amax()) + 1)])
    centre = torch.cat((centre, torch.randperm(n, generator=generator)[: n // 5]))
    away = point[:, None] - point[centre]
    cost = torch.linalg.vector_norm(away[..., :2], dim=2) + away[..., 2].abs()
    cost[group[:, None] != group[centre]] = torch.inf
    lowest = cost.amin(1, keepdim=True)
    expected = torch.where(cost == lowest, torch.arange(len(centre)), len(centre)).amin(1)
    assert torch.equal(nearest_centres(point, group, centre), expected)


def test_nodes_of_equal_fitness_are_clustered_whatever_their_order() -> None:
    place = torch.cartesian_prod(torch.arange(5.0), torch.arange(5.0)) / 4
    own, _ = clusters(torch.zeros(25, dtype=torch.long), torch.zeros(25), place, 0.2)
    order = torch.randperm(25, generator=torch.Generator().manual_seed(0))
    again, _ = clusters(torch.zeros(25, dtype=torch.long), torch.zeros(25), place[order], 0.2)
    assert torch.equal(again, own[order])
    assert len(own.unique()) == 5


def test_twins_share_a_cluster() -> None:
    own, group = clusters(torch.zeros(6, dtype=torch.long), torch.zeros(6), torch.zeros(6, 2), 0.5)
    assert own.tolist() == [0] * 6
    assert group.tolist() == [0]


def test_pooled_tree_is_a_tree() -> None:
    batch = PackedBags.of(bags())
    tree = Tree.of(batch.features, batch, 2)
    pooled, cluster = ClusterPooling(6, (0.25, 0.25)).double()(tree)
    for one in (tree, pooled):
        assert (one.level[one.parent] == (one.level - 1).clamp(min=0)).all()
        assert torch.equal(one.slide[one.parent], one.slide)
        assert torch.equal(one.slide[one.pairs[0]], one.slide[one.pairs[1]])
        edges = {(int(i), int(j)) for i, j in one.pairs.T}
        assert len(edges) == one.pairs.shape[1]
        assert all((j, i) in edges and i != j for i, j in edges)
        tied = {(node, int(one.parent[node])) for node in range(len(one.x)) if one.level[node]}
        assert tied <= edges
    assert torch.equal(pooled.parent[cluster], cluster[tree.parent])
    assert pooled.x.shape[0] < tree.x.shape[0] / 2


def test_second_pooling_leaves_thirteen_nodes_at_most() -> None:
    batch = PackedBags.of(bags()[0])
    tree = Tree.of(batch.features, batch, 2)
    pooled, _ = ClusterPooling(6, h2_mil.LAST_CLUSTERS).double()(replace(tree, x=tree.x))
    assert torch.bincount(pooled.level).tolist()[:2] == [1, 4]
    assert len(pooled.x) <= 13


def test_dropout_is_for_training_only() -> None:
    model, batch = model_of(dropout=0.5), PackedBags.of(bags())
    assert torch.equal(model(batch).logits, model(batch).logits)
    model.train()
    assert not torch.equal(model(batch).logits, model(batch).logits)


@pytest.mark.parametrize("wrong", [{"hidden": 0}, {"dropout": 1.0}, {"keep_share": 1.0}], ids=lambda o: next(iter(o)))
def test_wrong_options(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        model_of(**wrong)
