"""Spatial attention with learnable priors: the operator, its layouts, decays, learnable radii and diversity."""

from psamil.spatial.attention import posterior_attention, spatial_lag
from psamil.spatial.decays import DECAYS, Cauchy, Decay, Exponential, Gaussian, check_decay, get_decay
from psamil.spatial.diversity import diversity_entropy
from psamil.spatial.layout import Layout
from psamil.spatial.neighbours import neighbour_pairs
from psamil.spatial.prior import DistancePrior, parameter_groups
from psamil.spatial.reference import posterior_attention_reference, spatial_lag_reference
from psamil.spatial.rows import PosteriorRow, posterior_rows

__all__ = [
    "DECAYS",
    "Cauchy",
    "Decay",
    "DistancePrior",
    "Exponential",
    "Gaussian",
    "Layout",
    "PosteriorRow",
    "check_decay",
    "diversity_entropy",
    "get_decay",
    "neighbour_pairs",
    "parameter_groups",
    "posterior_attention",
    "posterior_attention_reference",
    "posterior_rows",
    "spatial_lag",
    "spatial_lag_reference",
]
