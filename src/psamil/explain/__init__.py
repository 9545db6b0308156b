"""Why a model says what it says about a slide: scores of tiles, heads with their radii, the posterior of a tile.

>>> (chosen, *_) = models_for("run", "slide_007")  # of the fold that had the slide in its test part
>>> explanation = explain_bag(SavedModel.load(chosen.path), bag)
>>> explanation.top_tiles(5), [head.radius_steps for head in explanation.heads]
>>> explanation.rows(tile=42)  # where this tile looks, by each head
>>> occlude(explanation.saved, bag, explanation.tile_scores).area  # positive: the scores are faithful
"""

from psamil.explain.explaining import explain_bag
from psamil.explain.explanation import Explanation, Head
from psamil.explain.models_of import ModelOf, models_for
from psamil.explain.occlusion import OcclusionCurve, occlude
from psamil.explain.posterior_sums import posterior_sums
from psamil.models.head_similarity import head_similarity

__all__ = [
    "Explanation",
    "Head",
    "ModelOf",
    "OcclusionCurve",
    "explain_bag",
    "head_similarity",
    "models_for",
    "occlude",
    "posterior_sums",
]
