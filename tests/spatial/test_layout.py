import pickle

import pytest
import torch

from psamil.errors import OptionError, ShapeError
from psamil.spatial import Layout, posterior_attention
from tests.spatial.cases import inputs, positions, thetas


@pytest.mark.parametrize("kind", ["lattice", "continuous", "duplicates"])
def test_count_pairs(kind):
    xy = positions(kind, 300)
    d2 = (xy[:, None] - xy).square().sum(-1)
    for keep in (0.25, 1.0, 40.0, 1e9, float("inf")):
        assert Layout.of(xy).bags[0].count_pairs(keep) == int((d2 <= keep).sum())


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
    with pytest.raises(ShapeError, match="bags must be offsets that rise from 0 to 3"):
        Layout.of(torch.zeros(3, 2), torch.tensor([0, 2]))
