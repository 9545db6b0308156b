"""psamil: slide-level learning from whole-slide images with spatial context."""

from typing import TYPE_CHECKING

from psamil.lazy import importing

if TYPE_CHECKING:
    from psamil.bag import Bag, PackedBags, TileStep
    from psamil.cohort import BagCache, Cohort
    from psamil.evaluation.predictor import load
    from psamil.evaluation.run import fit
    from psamil.models import ModelOutput, check_model, create_model, list_models, register_model
    from psamil.readers import find_bags, open_bag

__all__ = [
    "Bag",
    "BagCache",
    "Cohort",
    "ModelOutput",
    "PackedBags",
    "TileStep",
    "check_model",
    "create_model",
    "find_bags",
    "fit",
    "list_models",
    "load",
    "open_bag",
    "register_model",
]
__version__ = "0.1.0"

__getattr__ = importing(
    __name__,
    {
        "psamil.bag": ("Bag", "PackedBags", "TileStep"),
        "psamil.cohort": ("BagCache", "Cohort"),
        "psamil.evaluation.predictor": ("load",),
        "psamil.evaluation.run": ("fit",),
        "psamil.models": ("ModelOutput", "check_model", "create_model", "list_models", "register_model"),
        "psamil.readers": ("find_bags", "open_bag"),
    },
)
