"""Lesions and detections on tiles: connected components, their sizes, and non-maximum suppression."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial import KDTree

from psamil.errors import OptionError
from psamil.training.metrics import Integers

TOUCHING_STEPS = 1.02  # the larger of |dx| and |dy|: the eight neighbours, also where pieces of tissue differ in phase


def label_lesions(xy: ArrayLike, positive: ArrayLike) -> Integers:
    """Numbers lesions, the groups of positive tiles that touch by side or corner: 1, 2, ...; 0 for other tiles.

    Args:
        xy: (n, 2) positions in tile steps.
        positive: (n,).
    """
    tiles = np.flatnonzero(np.asarray(positive))
    lesions = np.zeros(len(np.asarray(positive)), dtype=np.int64)
    if len(tiles):
        pairs = KDTree(np.asarray(xy, dtype=np.float64)[tiles]).query_pairs(
            TOUCHING_STEPS, p=np.inf, output_type="ndarray"
        )
        touching = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(len(tiles), len(tiles)))
        lesions[tiles] = 1 + connected_components(touching, directed=False)[1]
    return lesions


def lesion_lengths_um(xy: ArrayLike, lesions: ArrayLike, step_um: float) -> dict[int, float]:
    r"""Length of each lesion's major axis, measured on its tiles.

    That of the ellipse with the same second moments, :math:`4 \sqrt{\lambda_{max}}`, where to the covariance of the
    tiles' centres 1/12 is added for the extent of a tile. It is coarse where a lesion is no larger than a tile.

    Args:
        xy: (n, 2) positions in tile steps.
        lesions: (n,) number of the lesion of each tile, 0 for none.
        step_um: length of a tile step in micrometres.
    """
    positions, number = np.asarray(xy, dtype=np.float64), np.asarray(lesions)
    lengths = {}
    for lesion in np.unique(number[number > 0]).tolist():
        covariance = np.cov(positions[number == lesion].T, bias=True) + np.eye(2) / 12
        lengths[lesion] = float(4 * np.sqrt(np.linalg.eigvalsh(covariance)[-1]) * step_um)
    return lengths


def local_maxima(xy: ArrayLike, scores: ArrayLike, radius_steps: float) -> Integers:
    """Indices of detections, the highest score first: non-maximum suppression.

    The tile with the highest score is a detection and silences all tiles within the radius; so on with those that are
    left. Among equal scores the smallest y, then the smallest x, comes first.

    Args:
        xy: (n, 2) positions in tile steps.
        scores: (n,).
        radius_steps: Euclidean; 0 makes a detection of every tile.
    """
    positions, values = np.asarray(xy, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    if not radius_steps >= 0 or np.isnan(values).any():
        raise OptionError(f"non-maximum suppression needs a radius of 0 or more, not {radius_steps}, and no NaN scores")
    order = np.lexsort((positions[:, 0], positions[:, 1], -values))
    if radius_steps == 0 or len(order) == 0:
        return order
    tree, alive, kept = KDTree(positions), np.ones(len(order), dtype=bool), []
    for tile in order.tolist():
        if alive[tile]:
            kept.append(tile)
            alive[tree.query_ball_point(positions[tile], radius_steps)] = False
    return np.array(kept, dtype=np.int64)
