r"""Losses on raw logits, one value per sample.

Every function takes the logits (n, n_out) of n samples and returns (n,) in float32 at least; the mean over a batch is
taken by the caller. Weights are those of the whole training part and are not normalised again inside a batch: a batch
without positives must not count its negatives for more. Everything is computed from log sigmoid and log softmax, so
that values and gradients are exact and finite for logits of any size without a clamp.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor, class_weights: Tensor) -> Tensor:
    r"""Weighted cross-entropy of one class per sample.

    With C columns of logits z (softmax), and with one column for two classes (y = 1 is the second class):

        l = -w_y log softmax(z)_y                l = -w_y [y log sigmoid(z) + (1 - y) log(1 - sigmoid(z))]

    Args:
        logits: (n, C), or (n, 1) for two classes.
        labels: (n,) index of the class.
        class_weights: (C,) w; ones for the plain cross-entropy.
    """
    logits = _wide(logits)
    if logits.shape[1] == 1:
        losses = F.binary_cross_entropy_with_logits(logits[:, 0], labels.to(logits.dtype), reduction="none")
    else:
        losses = F.cross_entropy(logits, labels, reduction="none")
    return class_weights.to(logits)[labels] * losses


def multilabel_cross_entropy(logits: Tensor, labels: Tensor, class_weights: Tensor) -> Tensor:
    r"""Mean over L labels of the weighted binary cross-entropy of each.

        l = 1/L sum_k -w_{k, y_k} [y_k log sigmoid(z_k) + (1 - y_k) log(1 - sigmoid(z_k))]

    Args:
        logits: (n, L).
        labels: (n, L) 0 or 1.
        class_weights: (L, 2) weights of no and yes for each label.
    """
    logits = _wide(logits)
    labels = labels.to(logits)
    no, yes = class_weights.to(logits).unbind(1)
    losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return (torch.lerp(no, yes, labels) * losses).mean(1)


def huber(logits: Tensor, targets: Tensor) -> Tensor:
    r"""Huber loss of standardised numbers: quadratic within one standard deviation, linear beyond.

        l = r^2 / 2 where |r| <= 1, |r| - 1/2 elsewhere, with r = z - y

    Args:
        logits: (n, 1).
        targets: (n,) with mean 0 and standard deviation 1 in the training part.
    """
    logits = _wide(logits)
    return F.huber_loss(logits[:, 0], targets.to(logits), reduction="none")


def survival_log_probabilities(logits: Tensor) -> tuple[Tensor, Tensor]:
    r"""Logarithms of the probability of the event in each of B time bins, and of surviving each of them, (n, B) both.

    Logit h_b is that of the hazard, the probability of the event in bin b given survival up to it:

        lambda_b = sigmoid(h_b),    S_b = prod_{u <= b} (1 - lambda_u),  S_{-1} = 1,    p_b = lambda_b S_{b-1}
    """
    logits = _wide(logits)
    log_stay = F.logsigmoid(-logits)  # log(1 - lambda)
    log_survival = log_stay.cumsum(1)
    before = F.pad(log_survival[:, :-1], (1, 0))  # log S_{b-1}
    return F.logsigmoid(logits) + before, log_survival


def survival_nll(logits: Tensor, bins: Tensor, events: Tensor, event_weight: float = 0.0) -> Tensor:
    r"""Negative log-likelihood of discrete survival times (Zadeh & Schmid, IEEE TPAMI 2020).

    With y the bin of the observed time and c = 1 where it is censored:

        l = -(1 - c) log p_y - c log S_y,        L = (1 - a) l - a (1 - c) log p_y

    so that events count 1 and censored times 1 - a. a = 0 is the maximum-likelihood estimate.

    Args:
        logits: (n, B) of the hazards.
        bins: (n,) y.
        events: (n,) 1 where the event was seen, 0 where censored.
        event_weight: a, from 0 to 1.
    """
    log_event, log_survival = survival_log_probabilities(logits)
    return _mix(_pick(log_event, bins), _pick(log_event, bins), _pick(log_survival, bins), events, event_weight)


def survival_cross_entropy(logits: Tensor, bins: Tensor, events: Tensor, event_weight: float = 0.0) -> Tensor:
    r"""Cross-entropy of "the event has happened by the end of bin y".

        l = -(1 - c) log(1 - S_y) - c log S_y,    L = (1 - a) l - a (1 - c) log p_y

    log(1 - S_y) is taken as the log-sum-exp of log p_b over b <= y. An event counts as seen anywhere up to its bin, so
    that for a = 0 predicted times come out too early; :func:`survival_nll` has no such bias. Arguments as there.
    """
    log_event, log_survival = survival_log_probabilities(logits)
    after = torch.arange(logits.shape[1], device=logits.device) > bins[:, None]
    log_by_now = log_event.masked_fill(after, -torch.inf).logsumexp(1)
    return _mix(log_by_now, _pick(log_event, bins), _pick(log_survival, bins), events, event_weight)


def _mix(log_seen: Tensor, log_event: Tensor, log_survival: Tensor, events: Tensor, event_weight: float) -> Tensor:
    of_event = (1 - event_weight) * log_seen + event_weight * log_event
    return -torch.where(events.bool(), of_event, (1 - event_weight) * log_survival)


def _pick(values: Tensor, column: Tensor) -> Tensor:
    return values.gather(1, column[:, None])[:, 0]


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
