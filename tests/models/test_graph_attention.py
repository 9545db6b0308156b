"""Graph attention along edges: against dense attention with a mask, and torch-geometric."""

import pytest
import torch

from psamil.models.graph_attention import GraphAttention, with_loops


def graph(n: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    adjacent = torch.rand(n, n, generator=generator) < 0.3  # edges in one direction only are allowed
    return x, adjacent.fill_diagonal_(False).nonzero().T


def attention(**options) -> GraphAttention:
    torch.manual_seed(1)
    layer = GraphAttention(5, 4, heads=3, **options).double()
    torch.nn.init.normal_(layer.bias)
    return layer


def dense(layer: GraphAttention, x: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    n = len(x)
    allowed = torch.eye(n, dtype=torch.bool)
    allowed[pairs[0], pairs[1]] = True
    heads = []
    for h in range(layer.heads):
        value = x @ layer.project.weight[4 * h : 4 * h + 4].T
        scores = (value @ layer.receiver[h])[:, None] + (value @ layer.sender[h])[None, :]
        scores = torch.where(scores > 0, scores, 0.2 * scores).masked_fill(~allowed, -torch.inf)
        heads.append(scores.softmax(1) @ value)
    return sum(heads) / layer.heads + layer.bias


def test_against_dense_attention_with_gradients() -> None:
    layer, (x, pairs) = attention(), graph()
    x.requires_grad_()
    actual, expected = layer(x, pairs), dense(layer, x, pairs)
    torch.testing.assert_close(actual, expected)
    weight = torch.randn(actual.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    inputs = [x, *layer.parameters()]
    gradients = torch.autograd.grad((actual * weight).sum(), inputs)
    for a, b in zip(gradients, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_against_torch_geometric_with_gradients() -> None:
    nn = pytest.importorskip("torch_geometric.nn")
    layer, (x, pairs) = attention(), graph()
    theirs = nn.GATConv(5, 4, heads=3, concat=False).double()
    theirs.load_state_dict(
        {
            "lin.weight": layer.project.weight,
            "att_src": layer.sender[None],
            "att_dst": layer.receiver[None],
            "bias": layer.bias,
        }
    )
    x.requires_grad_()
    actual, expected = layer(x, pairs), theirs(x, pairs.flip(0))  # it has the sender above
    torch.testing.assert_close(actual, expected)
    weight = torch.randn(actual.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ours = x, layer.project.weight, layer.sender, layer.receiver, layer.bias
    same = x, theirs.lin.weight, theirs.att_src, theirs.att_dst, theirs.bias
    gradients = torch.autograd.grad((actual * weight).sum(), ours)
    for a, b in zip(gradients, torch.autograd.grad((expected * weight).sum(), same), strict=True):
        torch.testing.assert_close(a, b.reshape(a.shape))


def test_order_of_edges_does_not_matter() -> None:
    layer, (x, pairs) = attention(), graph()
    order = torch.randperm(pairs.shape[1], generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(layer(x, pairs[:, order]), layer(x, pairs))


@pytest.mark.parametrize("n", [0, 1])
def test_without_edges_a_node_sees_itself(n: int) -> None:
    layer, x = attention(), graph()[0][:n]
    expected = (x @ layer.project.weight.T).view(n, 3, 4).mean(1) + layer.bias
    torch.testing.assert_close(layer(x, torch.zeros(2, 0, dtype=torch.long)), expected)


def test_dropout_is_of_weights_and_for_training_only() -> None:
    layer, (x, pairs) = attention(dropout=0.5), graph()
    torch.manual_seed(0)
    mean = torch.stack([layer(x, pairs) for _ in range(600)]).mean(0)
    layer.eval()
    assert torch.equal(layer(x, pairs), layer(x, pairs))
    torch.testing.assert_close(mean, layer(x, pairs), rtol=0, atol=0.3)


def test_loops_are_added_in_order() -> None:
    assert with_loops(torch.tensor([[2, 0], [0, 1]]), 3).tolist() == [[0, 0, 1, 2, 2], [1, 0, 1, 0, 2]]
