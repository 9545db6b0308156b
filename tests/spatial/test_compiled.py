"""The compiled path against the reference, and what happens where it cannot be had."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from psamil.errors import OptionError
from psamil.spatial import DECAYS, Layout, compiled, get_decay, posterior_attention
from psamil.spatial.compiled import QUERIES, SortedTiles
from tests.spatial.cases import KINDS, compare, gradients, inputs, positions, thetas

RADII = ([0.5, 1.0, 1.5], [2.0, 7.0, 4.3], [15.0, 25.0, 9.9])
SINGLE = {"dtype": torch.float32, "tolerance": 2e-5, "paths": ["compiled"]}

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="needs a C compiler"
)


@needs_compiler
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("radii", RADII, ids=str)
def test_it_equals_the_reference(decay, kind, radii):
    compare(positions(kind, 400), decay, radii, d=16, **SINGLE)


@needs_compiler
@pytest.mark.parametrize("d", [1, 7, 17, 32, 48, 100])
def test_any_width_of_a_head(d):
    compare(positions("two phases", 150), "gaussian", [3.0, 6.0], d=d, **SINGLE)


@needs_compiler
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 1000, 3000])
@pytest.mark.parametrize("kind", ["lattice", "continuous"])
def test_sizes(n, kind):
    compare(positions(kind, n), "cauchy", [1.0, 6.0], d=4, **SINGLE)


@needs_compiler
def test_any_radius_on_a_lattice():
    xy = positions("lattice", 150)
    for radius in [*torch.linspace(0.5, 12, 47).tolist(), 4.98, 4.999, 5.0, 5.001]:
        compare(xy, "exponential", [radius], d=2, **SINGLE)


@needs_compiler
@pytest.mark.parametrize("decay", DECAYS)
def test_packed_bags_and_no_pruning(decay):
    parts = [positions(kind, size) for kind, size in zip(KINDS, (400, 1, 90, 230, 65, 16), strict=True)]
    bags = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    compare(torch.cat(parts), decay, [2.0, 7.0, 20.0], bags=bags, **SINGLE)
    compare(torch.cat(parts), decay, [2.0, 7.0, 20.0], bags=bags, tau=0.0, **SINGLE)


@needs_compiler
@pytest.mark.parametrize("gap", [1e2, 1e4, 1e6])
def test_pieces_far_apart(gap):
    xy = torch.cat((positions("continuous", 150), positions("continuous", 170, seed=1) + gap))
    compare(xy, "gaussian", [5.0, 2.0], **SINGLE)


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(
    st.builds(positions, st.sampled_from(KINDS), st.integers(1, 150), st.integers(0, 2**16)),
    st.sampled_from(sorted(DECAYS)),
    st.lists(st.floats(0.5, 25), min_size=1, max_size=3),
)
def test_any_bag_equals_the_reference(xy, decay, radii):
    compare(xy, decay, radii, d=4, **SINGLE)


def attend(q, k, v, xy, grad, path="compiled"):
    theta = thetas("gaussian", [3.0, 6.0]).float()
    return gradients(posterior_attention, [q, k, v], theta, xy, grad, decay="gaussian", layout=Layout.of(xy, path=path))


@needs_compiler
def test_threads_do_not_change_a_bit():
    xy = positions("lattice", 500)
    case = inputs(500, 2, 8, torch.float32)
    one = attend(*case[:3], xy, case[3])
    torch.set_num_threads(2)
    try:
        two = attend(*case[:3], xy, case[3])
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@needs_compiler
def test_strided_inputs_are_read_as_they_are():
    xy = positions("lattice", 200)
    qkv = torch.randn(200, 3, 2, 8)
    q, k, v = qkv.unbind(1)
    assert not q.is_contiguous()
    grad = torch.randn(2, 200, 8).transpose(0, 1)
    expected = attend(q.contiguous(), k.contiguous(), v.contiguous(), xy, grad.contiguous())
    for actual, wanted in zip(attend(q, k, v, xy, grad), expected, strict=True):
        assert torch.equal(actual, wanted)
    columns = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]  # features far apart
    for actual, wanted in zip(attend(*columns, xy, grad), expected, strict=True):
        assert torch.equal(actual, wanted)


@needs_compiler
def test_nan_is_seen_by_those_who_look_at_it():
    xy = torch.stack((torch.arange(60.0), torch.zeros(60)), 1)
    q, k, v, _ = inputs(60, 1, 8, torch.float32)
    v[30] = torch.nan
    theta = thetas("gaussian", [4.0]).float()
    out = posterior_attention(q, k, v, xy, theta, decay="gaussian", layout=Layout.of(xy, path="compiled"))
    seen = out.isnan().any(-1)[:, 0]
    assert seen[26:35].all()
    assert not seen[:10].any()  # a block may share a NaN, but no more


@needs_compiler
def test_it_is_taken_wherever_it_can_be(monkeypatch):
    layout = Layout.of(positions("lattice", 300))
    assert layout.choose([5.0], compiled=True) == ("compiled",)
    assert layout.choose([5.0]) != ("compiled",)
    assert Layout.of(layout.bags[0].xy, path="scattered").choose([5.0], compiled=True) == ("scattered",)
    calls = []
    monkeypatch.setattr(compiled, "forward", lambda q, *_: calls.append(q.dtype) or (q, q[..., 0]))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        q, k, v, _ = inputs(300, 1, 8, dtype)
        theta = thetas("cauchy", [4.0]).float()
        posterior_attention(q, k, v, layout.bags[0].xy, theta, decay="cauchy", layout=layout)
    assert calls == [torch.float32, torch.float32]


@pytest.mark.parametrize("kind", KINDS)
def test_sorted_tiles_hold_every_tile_once(kind):
    xy = positions(kind, 333)
    xy = xy - xy.amin(0)
    tiles = SortedTiles.build(xy)
    assert tiles.order.sort().values.tolist() == tiles.packed.sort().values.tolist() == list(range(333))
    torch.testing.assert_close(torch.stack((tiles.x, tiles.y), 1), xy[tiles.order])
    for a, b, low, high in zip(tiles.row_start, tiles.row_start[1:], tiles.row_low, tiles.row_high, strict=False):
        assert (tiles.x[a:b].diff() >= 0).all()
        assert tiles.y[a:b].min() == low
        assert tiles.y[a:b].max() == high
    assert (tiles.row_low[1:] >= tiles.row_high[:-1]).all()


def test_blocks_are_compact():
    xy = torch.cartesian_prod(torch.arange(64.0), torch.arange(64.0)).double()
    tiles = SortedTiles.build(xy)
    x, y = (t[tiles.packed].view(-1, QUERIES) for t in (tiles.x, tiles.y))
    assert ((x.amax(1) - x.amin(1) + 1) * (y.amax(1) - y.amin(1) + 1)).mean() < 24


@needs_compiler
def test_flops_are_those_of_the_kept_pairs_also_when_it_is_first_built(monkeypatch):
    monkeypatch.setattr(compiled, "_LOADED", {})
    xy = positions("lattice", 400)
    q, k, v, grad = inputs(400, 2, 8, torch.float32)
    d2 = torch.cdist(xy, xy).square().round()
    pairs = sum(int((d2 <= radius**2).sum()) for radius in (3, 6))
    q.requires_grad_()
    layout = Layout.of(xy, path="compiled")
    with FlopCounterMode(display=False) as counter:
        theta = thetas("gaussian", [3.0, 6.0]).float()
        posterior_attention(q, k, v, xy, theta, decay="gaussian", layout=layout).backward(grad)
    assert counter.get_total_flops() == (4 + 10) * 8 * pairs


def taken(monkeypatch, tmp_path, decay="gaussian", **environment):
    """Whether the compiled path can be taken in a new environment; the attention must be right in any."""
    monkeypatch.setattr(compiled, "_LOADED", {})
    monkeypatch.setenv("PSAMIL_CACHE", str(tmp_path))
    compiled._cache_folder.cache_clear()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    try:
        compare(positions("lattice", 60), decay, [3.0], dtype=torch.float32, tolerance=2e-5)
        return compiled.kernel_for(torch.zeros(1, 1, 8), get_decay(decay)) is not None
    finally:
        compiled._cache_folder.cache_clear()


@needs_compiler
def test_it_is_kept_for_the_next_process(monkeypatch, tmp_path):
    assert taken(monkeypatch, tmp_path)
    (library,) = (tmp_path / "compiled").glob("*.so")
    before = library.stat()
    assert taken(monkeypatch, tmp_path)
    assert library.stat().st_mtime_ns == before.st_mtime_ns


def test_without_a_compiler_pytorch_does_it(monkeypatch, tmp_path):
    assert not taken(monkeypatch, tmp_path, CC="no-such-compiler")
    assert not taken(monkeypatch, tmp_path, CC="false")


def test_it_can_be_switched_off(monkeypatch, tmp_path):
    assert not taken(monkeypatch, tmp_path, PSAMIL_COMPILED="0")


@needs_compiler
def test_a_cache_that_cannot_be_written_is_no_obstacle(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    assert taken(monkeypatch, tmp_path / "file")


@needs_compiler
def test_a_folder_that_others_can_write_is_not_trusted(monkeypatch, tmp_path):
    folder = tmp_path / "compiled"
    folder.mkdir()
    folder.chmod(0o777)
    assert taken(monkeypatch, tmp_path)
    assert not list(folder.iterdir())


@needs_compiler
def test_c_that_is_not_the_decay_is_found_out(monkeypatch, tmp_path, caplog):
    class Wrong(type(get_decay("gaussian"))):
        c_log_prior = "d2 * (-0.4f / (theta * theta))"

    monkeypatch.setitem(DECAYS, "wrong", Wrong())
    assert not taken(monkeypatch, tmp_path, decay="wrong")
    assert "wrong on this computer" in caplog.text


def test_a_forced_path_that_cannot_be_taken_is_an_error():
    xy = positions("lattice", 30)
    q, k, v, _ = inputs(30, 1, 4, torch.float64)
    with pytest.raises(OptionError, match="needs a C compiler, float32"):
        posterior_attention(
            q, k, v, xy, thetas("gaussian", [3.0]), decay="gaussian", layout=Layout.of(xy, path="compiled")
        )


@needs_compiler
def test_two_processes_build_at_the_same_time(tmp_path):
    code = (
        "import torch; from psamil.spatial import compiled, get_decay;"
        "assert compiled.kernel_for(torch.zeros(1, 1, 8), get_decay('cauchy')) is not None"
    )
    environment = os.environ | {"PSAMIL_CACHE": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    running = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    assert len(list((tmp_path / "compiled").iterdir())) == 1
