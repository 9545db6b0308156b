"""Classes of relative positions: the four of SETMIL's constants."""

import math

import torch

from psamil.models.relative_position import BUCKETS, bucket


def test_four_classes_of_distance() -> None:
    r = torch.arange(40.0)
    expected = [0, 1, 2, 2] + [3] * 36
    assert bucket(r, torch.zeros(40)).tolist() == expected
    assert bucket(torch.zeros(40), -r).tolist() == expected
    assert BUCKETS == 4


def test_distances_are_euclidean_and_rounded() -> None:
    cells = torch.arange(-6, 7)
    dx, dy = torch.meshgrid(cells, cells, indexing="xy")
    classes = bucket(dx, dy)
    for y in range(13):
        for x in range(13):
            r = round(math.hypot(x - 6, y - 6))
            far = min(3.8, round(1.9 + math.log(max(r, 1) / 1.9) / math.log(15.2 / 1.9) * 1.9))
            assert classes[y, x] == (r if r <= 1.9 else int(far)), (x - 6, y - 6)
    assert bucket(torch.tensor(1.0), torch.tensor(1.0)) == 1  # sqrt 2
    assert bucket(torch.tensor(3.0), torch.tensor(2.0)) == 3  # 3.6
