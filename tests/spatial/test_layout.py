import pickle

import pytest
import torch

from psamil.errors import OptionError, ShapeError
from psamil.spatial import Layout, posterior_attention
from psamil.spatial.layout import SLOTS, Plan
from tests.spatial.cases import KINDS, inputs, positions, thetas


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


@pytest.mark.parametrize("kind", ["lattice", "continuous", "duplicates"])
def test_count_pairs(kind):
    xy = positions(kind, 300)
    d2 = (xy[:, None] - xy).square().sum(-1)
    for keep in (0.25, 1.0, 40.0, 1e9):
        assert Layout.of(xy).bags[0].count_pairs(keep) == int((d2 <= keep).sum())


def test_plan_covers_all_blocks_in_bounded_chunks():
    blocks = Layout.of(positions("continuous", 2000)).bags[0].scattered
    plan = Plan(blocks, 4.0, window=0)
    chunks = list(plan.chunks(10_000))
    assert [chunk.first for chunk in chunks[1:]] == [chunk.last for chunk in chunks[:-1]]
    assert (chunks[0].first, chunks[-1].last) == (0, len(blocks.bag))
    for chunk in chunks:
        assert len(chunk.keys) == (chunk.last - chunk.first) * chunk.length
        assert chunk.length * (chunk.last - chunk.first) * SLOTS <= 10_000 or chunk.last - chunk.first == 1


def test_the_path_is_chosen_by_counted_work():
    large, small = Layout.of(positions("lattice", 4000)), Layout.of(positions("lattice", 40))
    assert large.choose([3.0]) == ("lattice",)
    assert small.choose([20.0]) == ("dense",)
    assert Layout.of(positions("continuous", 4000)).choose([3.0]) == ("scattered",)
    assert large.choose([float("inf")]) == ("dense",)
    work = large.work([3.0])[0]
    assert min(work, key=work.__getitem__) == "lattice"
    assert work["lattice"] < 0.1 * work["dense"]
    sparse = Layout.of(positions("lattice", 1000) * 2)  # a lattice of which few cells are tiles
    assert sparse.choose([10.0]) == ("scattered",)


def test_a_path_can_be_forced():
    xy = positions("lattice", 40)
    for path in ("lattice", "scattered", "dense"):
        assert Layout.of(xy, path=path).choose([3.0]) == (path,)
    with pytest.raises(OptionError, match="do not lie on a lattice"):
        Layout.of(positions("continuous", 40), path="lattice")
    with pytest.raises(OptionError, match="unknown path 'fast'"):
        Layout.of(xy, path="fast")
    with pytest.raises(OptionError, match="radii up to 64"):
        Layout.of(xy, path="lattice").choose([100.0])


def test_pack_pickle_and_move_change_nothing():
    parts = [positions("lattice", 300), positions("continuous", 200), positions("lattice", 1)]
    xy, bags = torch.cat(parts), torch.tensor([0, 300, 500, 501])
    q, k, v, _ = inputs(501, 2, 4)
    theta = thetas("gaussian", [3.0, 8.0])
    direct = posterior_attention(q, k, v, xy, theta, decay="gaussian", bags=bags)
    packed = Layout.pack([Layout.of(part) for part in parts])
    for layout in (packed, pickle.loads(pickle.dumps(packed)), packed.to("cpu")):
        again = posterior_attention(q, k, v, xy, theta, decay="gaussian", layout=layout)
        torch.testing.assert_close(again, direct, rtol=0, atol=0)
    assert repr(packed) == "Layout(3 bags, 2 on a lattice, 501 tiles, path=auto)"


def test_errors():
    with pytest.raises(ShapeError, match="2 tiles with NaN or infinite"):
        Layout.of(torch.tensor([[0.0, float("nan")], [float("inf"), 0.0], [1.0, 1.0]]))
    with pytest.raises(ShapeError, match=r"xy must be \(n, 2\)"):
        Layout.of(torch.zeros(3))
    with pytest.raises(ShapeError, match="rise from 0 to n = 3"):
        Layout.of(torch.zeros(3, 2), torch.tensor([0, 2]))
