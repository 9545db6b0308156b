"""Models of multiple instance learning, by name."""

from psamil.models import pooling as _pooling  # registers its models
from psamil.models import psa as _psa  # registers itself
from psamil.models import size as _size  # registers itself
from psamil.models.output import ExtraPrediction, ModelOutput
from psamil.models.registry import create_model, list_models, register_model

__all__ = ["ExtraPrediction", "ModelOutput", "create_model", "list_models", "register_model"]
del _pooling, _psa, _size
