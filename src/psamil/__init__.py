"""psamil: slide-level learning from whole-slide images with spatial context."""

from psamil.bag import Bag, PackedBags
from psamil.models import ModelOutput, create_model, list_models, register_model

__all__ = ["Bag", "ModelOutput", "PackedBags", "create_model", "list_models", "register_model"]
__version__ = "0.1.0"
