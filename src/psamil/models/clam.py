r"""CLAM: attention pooling whose embedding is also trained to tell tiles of high from tiles of low attention.

With h_i = ReLU(W x_i + b) the embedding of tile i and one branch for all classes (``clam_sb``) or one per class
(``clam_mb``):

    a_ik = w_k . (tanh(V h_i) * sigmoid(U h_i)),    z_k = sum_i softmax_i(a_ik) h_i,    s_c = C_c . z_k + c_c

with s_c the logit of class c, and z_k the only branch or the branch k = c. One output, n_out = 1, means two classes and
is s_1 - s_0, whose logistic loss is the cross-entropy of (s_0, s_1). The score of a tile is a_i, in ``clam_mb`` that of
the branch of the largest class logit. Its evidence is its own s = C h_i + c (for s_1 - s_0, in ``clam_sb`` alone).

**Instance loss**, in training. Let y be the class of a bag. The k = 8 tiles of highest a_y (target 1) and the k of
lowest (target 0), all where there are fewer, are classified by the instance classifier of class y, two scores per tile.
With ``subtyping``, where a tile of one class cannot be one of another, the k highest tiles of every other class are
given to the classifier of that class with target 0, and the loss is the mean over the C classifiers. The choice of
tiles has no gradient, their embeddings have. The loss of one tile is the smooth top-1 SVM (:func:`smooth_top1_svm`),
averaged over the tiles of a classifier and over bags. The published sum is 0.7 bag + 0.3 instance. Here the loss of the
task counts 1 and the instance loss 0.3 / 0.7: the same minimum, and the same steps of Adam but for weight decay.

For survival, y is the time bin of the patient, seen or censored, and C the number of bins. Outcomes without classes
(numbers, several labels) have no instance loss.

Positions are not used. A bag without tiles has z = 0. Time O(n in_dim hidden), memory O(n hidden).
Where this differs from the authors' code: bags of fewer than 8 tiles are allowed, and several bags go at once. The loss
is the smooth one everywhere; implementations that take the hard SVM where one score exceeds the other by log 1000
differ from it by less than 0.003 there.

Lu, Williamson, Chen, Chen, Barbieri, Mahmood: Data-efficient and weakly supervised computational pathology on
whole-slide images. Nature Biomedical Engineering 2021. Loss: Berrada, Zisserman, Kumar: Smooth Loss Functions for Deep
Top-k Classification. ICLR 2018.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psamil.bag import PackedBags
from psamil.errors import OptionError
from psamil.models.output import ModelOutput
from psamil.models.pooling import PoolingModel
from psamil.models.registry import register_model
from psamil.models.tiles import GatedScore, attention_pooling
from psamil.models.two_classes import class_count, outputs_of_classes

ATTENTION_DROPOUT = 0.25
"""Of both factors of the gated attention, wherever there is any dropout."""


def smooth_top1_svm(scores: Tensor, targets: Tensor) -> Tensor:
    """l = log sum_j exp(s_j + [j != t] - s_t), the soft maximum of violations of a margin of 1; (m,).

    Args:
        scores: (m, C) s.
        targets: (m,) class t of each row.
    """
    margins = 1 - F.one_hot(targets, scores.shape[1])  # 0 at the target: the loss is the cross-entropy of s + margins
    return F.cross_entropy(scores + margins, targets, reduction="none")


class GatedBranches(GatedScore):
    """a_ik = w_k . (tanh(V x_i) * sigmoid(U x_i)) for several branches k, with dropout of both factors."""

    def __init__(self, width: int, hidden: int, branches: int, dropout: float) -> None:
        super().__init__(width, hidden)
        self.score = nn.Linear(hidden, branches)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.dropout(self.tanh(x).tanh()) * self.dropout(self.gate(x).sigmoid()))


class CLAM(PoolingModel):
    """Attention pooling with an instance loss.

    Args:
        in_dim: width of the tile features.
        n_out: number of raw outputs.
        multi_branch: whether each class has an attention of its own.
        hidden: width of the embedding; 0 takes the features as they are.
        dropout: share of the embedding that is dropped in training; above 0, attention has a dropout of 0.25.
        attention_dim: rows of V and U; the authors' "big" model has 384.
        instances: k, tiles at either end of the attention that are classified.
        instance_weight: share of the instance loss in the sum of both losses.
        subtyping: whether classes exclude one another in a tile.
    """

    wants_classes = True

    def __init__(
        self,
        in_dim: int,
        n_out: int,
        *,
        multi_branch: bool,
        hidden: int = 512,
        dropout: float = 0.25,
        attention_dim: int = 256,
        instances: int = 8,
        instance_weight: float = 0.3,
        subtyping: bool = False,
    ) -> None:
        classes = class_count(n_out)
        super().__init__(in_dim, classes, hidden=hidden, dropout=dropout)  # row c of the head belongs to class c
        if min(attention_dim, instances) < 1:
            raise OptionError(f"attention_dim and instances must be at least 1, got {attention_dim} and {instances}")
        if not 0 <= instance_weight < 1:
            raise OptionError(f"instance_weight is a share of the loss, from 0 to below 1, got {instance_weight}")
        self.n_out, self.instances, self.instance_weight, self.subtyping = n_out, instances, instance_weight, subtyping
        branches = classes if multi_branch else 1
        width = self.embed.width
        self.score = GatedBranches(width, attention_dim, branches, ATTENTION_DROPOUT if dropout else 0.0)
        self.classify_instances = nn.Linear(width, 2 * classes)

    def forward(self, batch: PackedBags, classes: Tensor | None = None) -> ModelOutput:
        h = self.tiles(batch)
        scores = self.score(h)  # (n, branches)
        bag = batch.bag_of_tile
        pooled = torch.stack([attention_pooling(a, h, bag, len(batch)) for a in scores.unbind(1)], 1)
        class_logits = (pooled * self.head.weight).sum(2) + self.head.bias  # (b, classes)
        branch = class_logits.argmax(1) if scores.shape[1] > 1 else bag.new_zeros(len(batch))
        differs = scores.shape[1] > 1 and self.n_out == 1  # s_1 - s_0 of tiles that the branches weigh differently
        losses = {}
        if classes is not None and self.instance_weight:
            weight = self.instance_weight / (1 - self.instance_weight)
            losses["instances"] = weight * self.instance_loss(h, scores, batch, classes)
        return ModelOutput(
            logits=outputs_of_classes(class_logits.to(self.head.weight.dtype), self.n_out),
            tile_scores=scores.gather(1, branch[bag, None])[:, 0],
            auxiliary_losses=losses,
            tile_evidence=None if differs else outputs_of_classes(self.head(h), self.n_out),
        )

    def instance_loss(self, h: Tensor, scores: Tensor, batch: PackedBags, classes: Tensor) -> Tensor:
        """Mean over the bags, those without tiles counting 0; arguments as in :meth:`forward`."""
        total = self.head.bias.new_zeros(())
        for tiles, of_branches, own in zip(batch.split(h), batch.split(scores), classes.tolist(), strict=True):
            asked = range(self.head.out_features) if self.subtyping else [own]
            for c in asked if len(tiles) else []:
                total = total + self._loss_of_class(tiles, of_branches, c, own=c == own) / len(asked)
        return total / len(batch)

    def _loss_of_class(self, h: Tensor, scores: Tensor, c: int, *, own: bool) -> Tensor:
        """Of one bag, by the instance classifier of class c."""
        a = scores[:, c if scores.shape[1] > 1 else 0]
        k = min(self.instances, len(a))
        chosen = a.topk(k).indices
        targets = torch.full_like(chosen, int(own))
        if own:
            chosen = torch.cat((chosen, a.topk(k, largest=False).indices))
            targets = torch.cat((targets, torch.zeros_like(targets)))
        scores_of_chosen = self.classify_instances(h[chosen])[:, 2 * c : 2 * c + 2]
        return smooth_top1_svm(scores_of_chosen.to(self.head.weight.dtype), targets).mean()


@register_model
def clam_sb(in_dim: int, n_out: int, **options: Any) -> CLAM:
    """One attention for all classes; options of :class:`CLAM`."""
    return CLAM(in_dim, n_out, multi_branch=False, **options)


@register_model
def clam_mb(in_dim: int, n_out: int, **options: Any) -> CLAM:
    """One attention per class; options of :class:`CLAM`."""
    return CLAM(in_dim, n_out, multi_branch=True, **options)
