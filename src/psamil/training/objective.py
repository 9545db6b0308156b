r"""What training makes small: the loss of a pass through the model.

    loss = task(logits, targets) + auxiliary losses of the model + w N

    N = mean_b mean_k absent_bk mean_{i in b} softplus(e_ik)

with e_ik the evidence of tile i for output k and w the setting ``negative_tiles``. N says what a label means where it
says that something is not there, such as a metastasis: then it is in no tile. A model that only has to tell slides
apart may as well do so by what the slides with a lesion have less of, and its evidence then points away from it.
"""

from __future__ import annotations

from torch import Tensor, nn

from psamil.bag import PackedBags
from psamil.errors import OptionError
from psamil.models.segments import segment_mean
from psamil.training.tasks import Task

NO_NEGATIVES = "negative_tiles (of the recipe 'detection') is for two classes, or for labels; set it to 0"
NO_EVIDENCE = "negative_tiles is for models that give evidence of tiles, which this one does not; set it to 0"


class Pass:
    """What goes through the objective at once. Not a dataclass: fabric would try to take it apart."""

    def __init__(self, batch: PackedBags, targets: Tensor) -> None:
        self.batch, self.targets = batch, targets


class Objective(nn.Module):
    """Loss of the task, auxiliary losses, and that of tiles of negative samples with the weight ``negative_tiles``."""

    def __init__(self, model: nn.Module, task: Task, negative_tiles: float = 0.0) -> None:
        super().__init__()
        self.model, self.task, self.negative_tiles = model, task, negative_tiles

    def forward(self, part: Pass) -> Tensor:
        if getattr(self.model, "wants_classes", False):
            output = self.model(part.batch, self.task.class_indices(part.targets))
        else:
            output = self.model(part.batch)
        loss: Tensor = self.task.loss(output.logits, part.targets)
        for extra in output.extra_predictions.values():
            loss = loss + extra.weight * self.task.loss(extra.logits, part.targets[extra.bag])
        for auxiliary in output.auxiliary_losses.values():
            loss = loss + auxiliary
        if self.negative_tiles:
            negative = negative_tile_loss(output.tile_evidence, self.task.absent(part.targets), part.batch)
            loss = loss + self.negative_tiles * negative
        return loss


def negative_tile_loss(evidence: Tensor | None, absent: Tensor | None, batch: PackedBags) -> Tensor:
    """N of the module, from (n, n_out) evidence of tiles and (b, n_out) what the bags of the batch lack."""
    if absent is None:
        raise OptionError(NO_NEGATIVES)
    if evidence is None:
        raise OptionError(NO_EVIDENCE)
    of_bags = segment_mean(nn.functional.softplus(evidence), batch.bag_of_tile, len(batch))
    return (of_bags * absent).mean()
