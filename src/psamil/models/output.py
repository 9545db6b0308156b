"""What every model returns."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class ModelOutput:
    """Raw results of a model on a batch of b bags with n tiles altogether.

    Nothing is squashed: losses take logits. A tile's score says how much the prediction rests on it, not for which
    class; being no share of the bag, it can be compared across slides.
    """

    logits: Tensor  # (b, n_out)
    tile_scores: Tensor  # (n,) before any softmax over the bag
    auxiliary_losses: dict[str, Tensor] = field(default_factory=dict)  # weighted: add them to the loss of the task
    radii_steps: Tensor | None = None  # (layers, heads) learned radii in tile steps, without gradient
