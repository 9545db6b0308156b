"""What every model returns, and what a model may ask of whoever feeds and trains it.

A model is a module whose ``forward(batch: PackedBags)`` gives a :class:`ModelOutput`. Beyond that,

- one that uses :mod:`psamil.spatial` says ``needs_layout = True``: batches then come with a prepared layout;
- one whose losses need the class of a bag says ``wants_classes = True`` and takes ``forward(batch, classes)``: (b,)
  class indices in training (time bins for survival), None for other outcomes and whenever it only predicts;
- one that must look at the training bags between epochs has ``start_epoch(epoch, epochs, batches)``, called in
  evaluation mode and without gradients before each epoch; ``batches()`` goes through the training bags. What it finds
  belongs into buffers, so that it is saved with the weights;
- ``exclusive`` is False on a model whose outputs are not the classes of which one holds (labels, hazards of time bins,
  a number), and otherwise taken to be True. Whoever trains it sets it; scores of tiles go by it;
- one that is trained in stages says ``preliminary`` = True during the first ones: none of their epochs is kept if a
  later one exists;
- one of which something is better small, whatever it predicts, has a number ``cost``: of epochs with equal validation
  scores, the one is kept whose validation loss and cost together are least.
"""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class ExtraPrediction:
    """Logits that have to answer for the target of a bag too, such as those of its parts."""

    logits: Tensor  # (m, n_out)
    bag: Tensor  # (m,) index of the bag whose target each row has
    weight: float = 1.0


@dataclass(frozen=True)
class ModelOutput:
    """Raw results of a model on a batch of b bags with n tiles altogether.

    Nothing is squashed: losses take logits. A tile's score says how much the prediction rests on it, not for which
    class, which its evidence says; being no shares of the bag, both can be compared across slides.
    """

    logits: Tensor  # (b, n_out)
    tile_scores: Tensor  # (n,) before any softmax over the bag
    auxiliary_losses: dict[str, Tensor] = field(default_factory=dict)  # weighted: add them to the loss of the task
    extra_predictions: dict[str, ExtraPrediction] = field(default_factory=dict)  # the task's loss is taken of each
    radii_steps: Tensor | None = None  # (layers, heads) learned radii in tile steps, without gradient
    tile_evidence: Tensor | None = None
    """(n, n_out) for and against each output, on the scale of the logits: those of a bag are a mean of its tiles'
    evidence with weights that the model chooses (or a sum of such means of its parts, where the model declares that as
    an exception). Of models whose pooling allows it."""
