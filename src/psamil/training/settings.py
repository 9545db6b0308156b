"""How a model is trained: every setting, its default and what it does."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from psamil.errors import OptionError, one_of
from psamil.training.tasks import TaskOptions

OPTIMIZERS = ("adam", "adamw", "radam")
FALLS = ("line", "cosine")
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed")


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of one training run. Defaults follow the paper where it trains well, and stop early on validation."""

    model: str = "psa"
    """Name of the model, one of ``psamil.list_models()``."""
    model_options: dict[str, Any] = field(default_factory=dict)
    """Options of the model, for instance ``{"decay": "cauchy", "heads": 4}``; plain values, to be saved with it."""
    task: TaskOptions = field(default_factory=TaskOptions)
    """How the outcome becomes a loss."""
    epochs: int = 15
    """Number of times that every training sample is seen, at most."""
    batch_samples: int = 8
    """Samples (slides or patients) per optimisation step."""
    samples_per_pass: int | None = None
    """Samples that are packed into one pass; a batch of more is accumulated. Default: the whole batch in one pass."""
    max_tiles: int | None = None
    """Tiles of a sample that are drawn anew in each epoch of training. Default: all. Predictions always use all."""
    drop_features: float = 0.0
    """Share of the numbers of all tiles that are set to 0 in training, drawn anew in each step."""
    negative_tiles: float = 0.0
    """Weight of a loss that lets no tile of a sample of the first class (or without a label) speak for the second (for
    that label); for two classes or labels, and models that give evidence of tiles."""
    optimizer: str = "adam"
    """"adam"; "adamw" or "radam", in which weight decay is apart from the gradient."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Of its running means of the gradient and of its square."""
    lr: float = 1e-4
    """Highest learning rate."""
    first_lr: float = 1e-6
    """Learning rate at which the rise begins and the fall ends."""
    warm_up: float = 0.1
    """Share of the steps in which the learning rate rises."""
    constant: float = 0.9
    """Share of the remaining steps in which it stays; it falls in the others."""
    fall: str = "line"
    """How it falls: along a "line" or a "cosine"."""
    drop_epochs: list[int] = field(default_factory=list)
    """Epochs, from 0, at which it drops to ``drop_factor`` of what it would be, once for each."""
    plateau_epochs: int | None = None
    """Epochs without a lower validation loss after which it drops as well; needs a validation part. Default: it does
    not."""
    drop_factor: float = 0.1
    """See ``drop_epochs`` and ``plateau_epochs``."""
    prior_lr_scale: float = 100.0
    """Learning rate of the radii over that of the weights."""
    weight_decay: float = 1e-5
    """Of the weights; radii have none."""
    gradient_clip: float | None = 5.0
    """Largest norm of a gradient; null for any."""
    patience: int | None = 5
    """Epochs without a higher validation score after which training ends; null trains all epochs."""
    least_epochs: int = 0
    """Epochs before which patience ends nothing."""
    seed: int = 0
    """Of initial weights, order of samples, drawn tiles and dropout."""
    accelerator: str = "auto"
    """Device as lightning-fabric names it: "auto", "cpu", "gpu", "mps"."""
    devices: int = 1
    """Devices that train one model together: GPUs, or processes on a CPU. Each takes a share of every batch."""
    precision: str = "32-true"
    """As lightning-fabric names it: "32-true", "64-true", "bf16-mixed", "bf16-true", or on a GPU "16-mixed"."""

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise one_of("optimizer", self.optimizer, OPTIMIZERS)
        if self.fall not in FALLS:
            raise one_of("fall", self.fall, FALLS)
        if self.precision not in PRECISIONS:
            raise one_of("precision", self.precision, PRECISIONS)
        for name in (
            "epochs",
            "batch_samples",
            "samples_per_pass",
            "max_tiles",
            "patience",
            "plateau_epochs",
            "devices",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} must be at least 1, got {value}")
        if self.devices > self.batch_samples:
            raise OptionError(f"batches of {self.batch_samples} samples cannot be shared by {self.devices} devices")
        for name in ("warm_up", "constant"):
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(f"{name} is a share of the steps, from 0 to 1, got {getattr(self, name)}")
        if not 0 < self.first_lr <= self.lr:
            raise OptionError(f"first_lr must lie between 0 and lr = {self.lr:g}, got {self.first_lr:g}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise OptionError(f"betas are two numbers, from 0 to below 1, got {self.betas}")
        if not 0 < self.drop_factor <= 1:
            raise OptionError(f"drop_factor must lie between 0 and 1, got {self.drop_factor}")
        if any(epoch < 0 for epoch in self.drop_epochs):
            raise OptionError(f"drop_epochs must not be negative, got {self.drop_epochs}")
        if not 0 <= self.drop_features < 1:
            raise OptionError(f"drop_features is a share, from 0 to below 1, got {self.drop_features}")
        for name in ("seed", "weight_decay", "prior_lr_scale", "negative_tiles", "least_epochs"):
            if not getattr(self, name) >= 0:
                raise OptionError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.gradient_clip is not None and not self.gradient_clip > 0:
            raise OptionError(f"gradient_clip must be positive, or null, got {self.gradient_clip}")
        for name, option in self.model_options.items():
            if not _is_plain(option):
                kind = type(option).__name__
                raise OptionError(f"option {name!r} of the model is a {kind}; only plain values can be saved with it")

    def to_json(self) -> dict[str, Any]:
        """All settings as plain values, as they read back from a file."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


def _is_plain(value: object) -> bool:
    """Whether it survives a JSON file; a tuple comes back as a list, which models take as well."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
