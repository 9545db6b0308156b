"""Nystrom attention against loops over heads, landmarks and rows."""

import pytest
import torch
from torch import Tensor

from psamil.errors import OptionError
from psamil.models.nystrom import BLOCK, NystromAttention, convolved, pseudo_inverse


def attention_of(landmarks: int = 4, **options) -> NystromAttention:
    torch.manual_seed(0)
    return NystromAttention(6, heads=2, head_dim=3, landmarks=landmarks, kernel=5, **options).double()


def by_hand(attention: NystromAttention, x: Tensor) -> Tensor:
    n, m = len(x), attention.landmarks
    zeros = (m - n % m) % m
    rows = torch.cat((torch.zeros(zeros, 6, dtype=x.dtype), x))
    segment = len(rows) // m
    matrices = []
    for head in range(2):
        q, k, v = (rows @ attention.qkv.weight[6 * part + 3 * head : 6 * part + 3 * head + 3].T for part in range(3))
        q = q / 3**0.5
        q_mean = torch.stack([q[segment * i : segment * (i + 1)].sum(0) / segment for i in range(m)])
        k_mean = torch.stack([k[segment * i : segment * (i + 1)].sum(0) / segment for i in range(m)])
        matrices.append([(a @ b.T).softmax(1) for a, b in ((q, k_mean), (q_mean, k_mean), (q_mean, k))] + [v])
    largest_row = max(a[i].sum() for _, a, _, _ in matrices for i in range(m))
    largest_column = max(a[:, i].sum() for _, a, _, _ in matrices for i in range(m))
    columns = []
    for head, (f, a, b, v) in enumerate(matrices):
        z = a.T / (largest_row * largest_column)
        for _ in range(attention.iterations):
            z = 0.25 * z @ (13 * torch.eye(m) - a @ z @ (15 * torch.eye(m) - a @ z @ (7 * torch.eye(m) - a @ z)))
        taps = attention.conv.weight[head, 0, :, 0]
        smooth = torch.zeros_like(v)
        for i in range(len(v)):
            for tap in range(5):
                if 0 <= i + tap - 2 < len(v):
                    smooth[i] += taps[tap] * v[i + tap - 2]
        columns.append(f @ z @ (b @ v) + smooth)
    return (torch.cat(columns, 1) @ attention.project.weight.T + attention.project.bias)[zeros:]


@pytest.mark.parametrize("n", [1, 16, 37])
def test_against_the_package(n: int) -> None:
    """nystrom-attention, which TransMIL is built on."""
    package = pytest.importorskip("nystrom_attention")
    torch.manual_seed(0)
    theirs = package.NystromAttention(dim=12, heads=2, dim_head=3, num_landmarks=8, residual_conv_kernel=5).double()
    ours = NystromAttention(12, heads=2, head_dim=3, landmarks=8, kernel=5).double()
    names = ("qkv.weight", "project.weight", "project.bias", "conv.weight")
    ours.load_state_dict(dict(zip(names, theirs.parameters(), strict=True)))
    x = 2 * torch.randn(n, 12, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(n, 12, dtype=torch.float64)
    output, (expected, weights) = ours(x), theirs(x[None], return_attn=True)
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(ours.attend(x, row=n - 1)[1], weights[0].mean(0)[-1, -n:].detach())
    gradients = (torch.autograd.grad(out, x, upstream)[0] for out in (output, expected[0]))
    torch.testing.assert_close(*gradients)


def test_bfloat16() -> None:
    attention, x = attention_of().float(), torch.randn(30, 6)
    full = attention(x)
    with torch.autocast("cpu", torch.bfloat16):
        output = attention(x)
    torch.testing.assert_close(output.float(), full, rtol=0.05, atol=0.05)
    output.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in attention.parameters())


@pytest.mark.parametrize("n", [1, 3, 4, 9, 16])
def test_against_loops(n: int) -> None:
    attention = attention_of()
    x = torch.randn(n, 6, dtype=torch.float64, requires_grad=True)
    actual, expected = attention(x), by_hand(attention, x)
    torch.testing.assert_close(actual, expected)
    weights = [x, *attention.parameters()]
    upstream = torch.randn_like(actual)
    for a, e in zip(
        torch.autograd.grad(actual, weights, upstream), torch.autograd.grad(expected, weights, upstream), strict=True
    ):
        torch.testing.assert_close(a, e)


def test_a_landmark_per_row_is_softmax_attention() -> None:
    """Without padding and with an exact inverse, F A^+ B is softmax(q k^T)."""
    attention = attention_of(landmarks=5, iterations=40)
    x = torch.randn(5, 6, dtype=torch.float64)
    q, k, _ = attention.qkv(x).view(5, 3, 2, 3).permute(1, 2, 0, 3)
    rows = torch.stack([attention.attend(x, row=i)[1] for i in range(5)])
    torch.testing.assert_close(rows, (q @ k.mT / 3**0.5).softmax(-1).mean(0))
    torch.testing.assert_close(attention.attend(x, row=0)[0], attention(x))


def test_the_inverse() -> None:
    a = torch.rand(3, 6, 6, dtype=torch.float64).softmax(-1) + torch.eye(6)
    torch.testing.assert_close(pseudo_inverse(a, 20), a.inverse())
    assert (pseudo_inverse(a, 1) - a.inverse()).abs().max() > 1e-3


def test_no_rows_sizes_and_errors() -> None:
    output, row = attention_of().attend(torch.zeros(0, 6, dtype=torch.float64), row=0)
    assert output.shape == (0, 6)
    assert row.shape == (0,)
    published = NystromAttention(512)
    assert sum(p.numel() for p in published.parameters()) == 512 * 1536 + 8 * 33 + 512 * 512 + 512
    for wrong in ({"landmarks": 0}, {"iterations": 0}, {"kernel": 4}):
        with pytest.raises(OptionError, match="kernel odd"):
            NystromAttention(6, **wrong)


@pytest.mark.parametrize("n", [1, 4, BLOCK, 2 * BLOCK + 3])
def test_convolution(n: int) -> None:
    values = torch.randn(2, n, 3, dtype=torch.float64)
    kernels = torch.randn(2, 7, dtype=torch.float64)
    expected = torch.nn.functional.conv2d(values[None], kernels[:, None, :, None], padding=(3, 0), groups=2)[0]
    torch.testing.assert_close(convolved(values, kernels), expected)
