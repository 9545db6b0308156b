import torch

from psamil.models.segments import segment_mean, segment_softmax, segment_sum


def test_softmax_and_sum_inside_segments():
    segment = torch.tensor([0, 0, 0, 2, 2])
    logits = torch.tensor([1.0, 2.0, 3.0, 1000.0, -1000.0], requires_grad=True)
    weights = segment_softmax(logits, segment, 3)
    torch.testing.assert_close(weights[:3], logits[:3].softmax(0))
    torch.testing.assert_close(weights[3:], torch.tensor([1.0, 0.0]))
    sums = segment_sum(weights[:, None] * torch.ones(5, 2), segment, 3)
    torch.testing.assert_close(sums, torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]))
    assert torch.autograd.gradcheck(
        lambda x: segment_softmax(x, segment, 3), torch.randn(5, dtype=torch.float64, requires_grad=True)
    )


def test_means_of_segments() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [7.0, 8.0]])
    means = segment_mean(values, torch.tensor([2, 2, 0]), 3)
    assert means.tolist() == [[7.0, 8.0], [0.0, 0.0], [2.0, 3.0]]
    assert segment_mean(values[:, 0], torch.tensor([0, 0, 1]), 2).tolist() == [2.0, 7.0]
