"""Models of multiple instance learning, by name."""

from psamil.models import (  # noqa: F401 (each registers its models)
    bayes_mil,
    camil,
    clam,
    das_mil,
    dtfd,
    evidence,
    gtp,
    h2_mil,
    ibmil,
    longmil,
    pooling,
    psa,
    setmil,
    size,
    sm_mil,
    transmil,
    variants,
)
from psamil.models.check import check_model
from psamil.models.output import ExtraPrediction, ModelOutput
from psamil.models.registry import create_model, list_models, register_model

__all__ = ["ExtraPrediction", "ModelOutput", "check_model", "create_model", "list_models", "register_model"]
