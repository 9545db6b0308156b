"""K-means of a few thousand vectors: always the same clusters for the same vectors."""

import torch
from torch import Tensor

from psamil.models.segments import segment_sum


def k_means(points: Tensor, k: int, *, iterations: int = 20) -> tuple[Tensor, Tensor]:
    """Cluster of each point, (n,), and distances of the points to the k centres, (n, k).

    Lloyd's algorithm from centres that are drawn far apart, each with a probability proportional to the squared
    distance to those before (Arthur & Vassilvitskii, SODA 2007), with a fixed seed. A cluster may be left without
    points, as it must be where there are fewer than k different ones; its centre then stays where it was.

    Args:
        points: (n, dim), n >= 1; on the CPU, where the draws are made.
        k: number of clusters.
        iterations: of the algorithm.
    """
    draw = torch.Generator().manual_seed(0)
    centres = points[torch.randint(len(points), (1,), generator=draw)]
    while len(centres) < k:
        squared = _distances(points, centres).amin(1).square()
        chances = squared if squared.sum() > 0 else torch.ones_like(squared)
        centres = torch.cat((centres, points[torch.multinomial(chances, 1, generator=draw)]))
    for _ in range(iterations):
        cluster = _distances(points, centres).argmin(1)
        sizes = torch.bincount(cluster, minlength=k)[:, None]
        centres = torch.where(sizes > 0, segment_sum(points, cluster, k) / sizes.clamp(min=1), centres)
    distances = _distances(points, centres)
    return distances.argmin(1), distances


def _distances(points: Tensor, centres: Tensor) -> Tensor:
    """(n, k), exactly 0 between equal vectors."""
    return torch.cdist(points, centres, compute_mode="donot_use_mm_for_euclid_dist")
