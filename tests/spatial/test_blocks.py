import pytest
import torch

from psamil.spatial import Layout
from psamil.spatial.blocks import SLOTS
from tests.spatial.cases import KINDS, positions


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("radius", [0.5, 1.0, 3.3, 12.0])
def test_runs_hold_every_neighbour(kind, radius):
    """Each query finds each of its neighbours exactly once among the keys of its block."""
    xy = positions(kind, 333)
    bag = Layout.of(xy).bags[0]
    near = torch.cdist(xy, xy) <= radius
    for blocks in filter(None, (bag.lattice, bag.scattered)):
        runs = blocks.runs(radius)
        found = torch.zeros(len(blocks.bag), len(xy), dtype=torch.long)
        for block, start, size in zip(runs.block.tolist(), runs.start.tolist(), runs.size.tolist(), strict=True):
            found[block, blocks.order[start : start + size]] += 1
        assert found.max() == 1
        assert (found[blocks.place // SLOTS] >= near).all()


def test_every_tile_has_a_slot_of_its_own():
    for kind in KINDS:
        xy = positions(kind, 500)
        bag = Layout.of(xy).bags[0]
        for blocks in filter(None, (bag.lattice, bag.scattered)):
            assert len(blocks.place.unique()) == 500
            assert (blocks.queries.view(-1)[blocks.place] == torch.arange(500)).all()


def test_lattices_are_recognised():
    on_lattice = {kind: Layout.of(positions(kind, 50)).bags[0].lattice is not None for kind in KINDS}
    assert on_lattice == {
        "lattice": True,
        "two phases": False,
        "continuous": False,
        "duplicates": True,
        "collinear": True,
        "subsampled": True,
    }
    assert Layout.of(positions("lattice", 50) * 512 / 512.0 + 0.25).bags[0].lattice is not None  # any one phase


def test_pathological_shapes_stay_small():
    """The number of runs is bounded, however the tiles lie: on a line, in a heap, two pieces far apart."""
    n = 20_000
    line = torch.linspace(0, 100, n, dtype=torch.float64)
    zero = torch.zeros(n, dtype=torch.float64)
    heap = torch.rand(n, 2, dtype=torch.float64) * 1e-9
    apart = positions("continuous", n) + 1e6 * (torch.arange(n) % 2)[:, None]
    for xy in (torch.stack((zero, line), 1), torch.stack((line, zero), 1), heap, apart):
        blocks = Layout.of(xy).bags[0].scattered
        assert len(blocks.runs(25.0).block) < 100 * n
        assert len(blocks.bag) == -(-n // SLOTS)
