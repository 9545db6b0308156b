"""Models of multiple instance learning, by name."""

from psamil.models import bayes_mil as _bayes_mil  # registers itself
from psamil.models import camil as _camil  # registers itself
from psamil.models import clam as _clam  # registers its models
from psamil.models import das_mil as _das_mil  # registers itself
from psamil.models import dtfd as _dtfd  # registers itself
from psamil.models import gtp as _gtp  # registers itself
from psamil.models import h2_mil as _h2_mil  # registers itself
from psamil.models import ibmil as _ibmil  # registers itself
from psamil.models import longmil as _longmil  # registers itself
from psamil.models import pooling as _pooling  # registers its models
from psamil.models import psa as _psa  # registers itself
from psamil.models import setmil as _setmil  # registers itself
from psamil.models import size as _size  # registers itself
from psamil.models import sm_mil as _sm_mil  # registers its models
from psamil.models import transmil as _transmil  # registers itself
from psamil.models import variants as _variants  # registers its models
from psamil.models.check import check_model
from psamil.models.output import ExtraPrediction, ModelOutput
from psamil.models.registry import create_model, list_models, register_model

__all__ = ["ExtraPrediction", "ModelOutput", "check_model", "create_model", "list_models", "register_model"]
del (
    _bayes_mil,
    _camil,
    _clam,
    _das_mil,
    _dtfd,
    _gtp,
    _h2_mil,
    _ibmil,
    _pooling,
    _psa,
    _setmil,
    _size,
    _sm_mil,
    _longmil,
    _transmil,
    _variants,
)
