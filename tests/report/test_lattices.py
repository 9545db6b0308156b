"""Which slides are drawn."""

from pathlib import Path

import numpy as np

from psamil.bag import TileStep
from psamil.readers import BagRef, BagSummary
from psamil.report.lattices import MAX_SLIDES, choose_slides, draw_lattices


def summary(name, n, warnings=(), placed=True):
    xy = np.stack((np.arange(n), np.zeros(n)), 1).astype(float) if placed else None
    step = TileStep(512.0) if placed else None
    ref = BagRef(name, Path(f"{name}.h5"), "trident")
    return BagSummary(ref, n, 8, "float16", None, step, xy, 0, 1, warnings)


def test_sizes_are_spread_and_warnings_come_first():
    bags = [summary(f"s{n:03d}", n) for n in range(1, 101)]
    bags += [summary("warned", 50, ("odd",)), summary("nowhere", 70, placed=False), summary("empty", 0)]
    chosen = choose_slides(bags)
    assert len(chosen) == MAX_SLIDES
    names = [bag.ref.id for bag in chosen]
    assert "warned" in names
    assert "s001" in names
    assert not {"nowhere", "empty"} & set(names)
    assert choose_slides([summary("nowhere", 70, placed=False)]) == []


def test_any_number_of_slides_can_be_drawn(tmp_path):
    for count in (1, 4):
        draw_lattices([summary(f"a-long-name-of-a-slide-{n}", n) for n in range(1, count + 1)], tmp_path / "p.png")
    assert [file.name for file in tmp_path.iterdir()] == ["p.png"]
