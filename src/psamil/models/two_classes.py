"""One output for two classes, out of models that are defined with one logit per class.

With class logits s_0 and s_1 the output is s_1 - s_0: its logistic loss is the cross-entropy of (s_0, s_1).
"""

from torch import Tensor


def class_count(n_out: int) -> int:
    """Number of classes that n_out outputs stand for."""
    return 2 if n_out == 1 else n_out


def outputs_of_classes(class_logits: Tensor, n_out: int) -> Tensor:
    """(b, n_out) outputs of class logits (b, class_count(n_out))."""
    return class_logits[:, 1:] - class_logits[:, :1] if n_out == 1 else class_logits
