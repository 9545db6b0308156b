"""What keeps a model from learning its training slides by heart, whatever the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from psamil.bag import PackedBags

RUNNING_STATISTICS = ("running_mean", "running_var")
POWER_ITERATIONS = 15  # as many as torch makes for new weights


def drop_features(batch: PackedBags, share: float) -> PackedBags:
    """The batch with this share of all numbers set to 0 and the others divided by 1 - share, which keeps the mean."""
    if share == 0:
        return batch
    return replace(batch, features=torch.nn.functional.dropout(batch.features, share))


class WeightAverage:
    """A mean of the weights over the last steps, which is tested and kept instead of the weights themselves.

    With w_t the weights after step t, the mean is m_t = m_{t-1} + (w_t - m_{t-1}) / min(t, window): that of all steps
    until there are ``window`` of them, and then one whose weights fall off exponentially over about as many. Running
    statistics of batch normalisation are averaged with them. Other tensors of a model (counts, dictionaries, vectors
    that follow the weights) are no weights, and are taken as they are.
    """

    def __init__(self, window: int) -> None:
        self.window, self.steps = window, 0
        self.mean: dict[str, Tensor] = {}

    def begin_anew(self) -> None:
        self.steps, self.mean = 0, {}

    @torch.no_grad()
    def add(self, model: nn.Module) -> None:
        """The weights after one more step."""
        self.steps += 1
        averaged = {name for name, _ in model.named_parameters()}
        for name, tensor in model.state_dict().items():
            if name not in averaged and not name.endswith(RUNNING_STATISTICS):
                continue
            if self.steps == 1:
                self.mean[name] = tensor.detach().clone()
            else:
                self.mean[name].lerp_(tensor, 1 / min(self.steps, self.window))

    @contextmanager
    def taken_by(self, model: nn.Module) -> Iterator[None]:
        """The model has the mean as its weights, and its own ones again afterwards."""
        own = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(own | self.mean)
        _follow_weights(model)
        try:
            yield
        finally:
            model.load_state_dict(own)


@torch.no_grad()
def _follow_weights(model: nn.Module) -> None:
    """Singular vectors of layers with spectral normalisation, by power iteration, for weights that are new to them."""
    for module in model.modules():
        if parametrize.is_parametrized(module):
            training = module.training
            module.train()  # each look at a weight is one iteration then
            for name in module.parametrizations:  # type: ignore[union-attr]
                for _ in range(POWER_ITERATIONS):
                    getattr(module, str(name))
            module.train(training)
