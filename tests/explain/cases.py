"""Models and bags, and the posterior as a dense array, written to be read."""

import math

import torch

from psamil import Bag, create_model
from psamil.spatial import get_decay
from psamil.spatial.reference import squared_radius
from psamil.training.class_tasks import ClassificationTask, MultiLabelTask
from psamil.training.saved_model import SavedModel
from tests.spatial.cases import positions

IN_DIM = 6
TWO_CLASSES = ClassificationTask(("negative", "positive"), (1.0, 1.0), "none")
THREE_CLASSES = ClassificationTask(("a", "b", "c"), (1.0, 1.0, 1.0), "none")
LABELS = MultiLabelTask(("x", "y"), ((1.0, 1.0), (1.0, 1.0)), "none")
MODELS = {
    "psa": {"heads": 3, "head_dim": 4, "k_init": 3.0},
    "psa, two layers": {"heads": 2, "head_dim": 4, "depth": 2, "k_init": 2.0, "decay": "cauchy", "tau": 0.05},
    "psa_evidence": {"heads": 2, "head_dim": 4, "components": 4, "k_init": 2.5, "decay": "exponential"},
}


def saved_model(name, task=TWO_CLASSES, seed=0, **options) -> SavedModel:
    """Not trained, in float64; queries and keys are larger than at the start, so that the likelihood counts."""
    torch.manual_seed(seed)
    model = create_model(name, IN_DIM, task.n_out, **options).double().eval()
    for module in model.modules():
        if hasattr(module, "qkv"):
            module.qkv.weight.data *= 6
    return SavedModel(model, task, {"settings": {"model": name}, "in_dim": IN_DIM})


def explained_model(kind) -> SavedModel:
    return saved_model(kind.split(",")[0], **MODELS[kind])


def bag_of(*kinds, n=40, seed=0) -> Bag:
    """A slide for each kind of positions, in float64."""
    generator = torch.Generator().manual_seed(seed)
    xy = torch.cat([positions(kind, n, seed + i) for i, kind in enumerate(kinds)])
    features = torch.randn(len(xy), IN_DIM, generator=generator, dtype=torch.float64)
    return Bag(features, xy, "a bag", torch.arange(len(kinds) + 1) * n, step_um=112.0)


def dense_posterior(q, k, xy, slides, theta, decay, tau):
    """(n, n) p_ij of one head: q, k are (n, d), theta a number."""
    decay = get_decay(decay)
    slide = torch.repeat_interleave(slides.diff())
    d2 = (xy[:, None] - xy[None]).square().sum(-1)
    kept = (slide[:, None] == slide[None]) & (d2 <= squared_radius(decay, theta, tau))
    log_likelihood = -(q[:, None] - k[None]).square().sum(-1) / (2 * math.sqrt(q.shape[1]))
    joint = torch.where(kept, (log_likelihood + decay.log_prior(d2, theta)).exp(), 0.0)
    return joint / joint.sum(1, keepdim=True)


def tokens_of(model, batch):
    """What each attention of a model is given and makes of it, caught on the way."""
    caught = []
    attentions = [module for module in model.modules() if hasattr(module, "prior") and hasattr(module, "qkv")]
    hooks = [a.register_forward_hook(lambda a, args, out: caught.append((a, args[0], out))) for a in attentions]
    model(batch)
    for hook in hooks:
        hook.remove()
    return caught
