"""psamil: slide-level learning from whole-slide images with spatial context."""

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
