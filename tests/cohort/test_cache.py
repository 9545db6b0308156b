import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
import torch

from psamil.bag import Bag
from psamil.cohort import cache as cache_module
from psamil.cohort.cache import BagCache, companions, default_folder, sample_tiles
from psamil.cohort.simulation import write_trident_bag
from psamil.errors import DataError, OptionError
from psamil.files import unwritable
from psamil.readers import find_bags, open_bag

N, DIM = 300, 16


def features(seed: int = 0, n: int = N, dtype: type = np.float16):
    return np.random.default_rng(seed).standard_normal((n, DIM)).astype(dtype)


def lattice(n: int = N):
    return np.stack(np.divmod(np.arange(n), 20)[::-1], 1) * 512


@pytest.fixture
def slide(tmp_path):
    return write_trident_bag(tmp_path / "job", "test", "slide_1", features(), lattice())


@pytest.fixture
def cache(tmp_path):
    return BagCache(tmp_path / "cache")


def entries(cache):
    return sorted((cache.folder / "entries").rglob("*.bag"))


def assert_same(ours: Bag, theirs: Bag) -> None:
    assert ours.features.dtype == theirs.features.dtype
    assert torch.equal(ours.features, theirs.features)
    assert torch.equal(ours.xy, theirs.xy)
    assert torch.equal(ours.slides, theirs.slides)
    assert (ours.id, ours.step, ours.step_um, ours.slide_ids) == (
        theirs.id,
        theirs.step,
        theirs.step_um,
        theirs.slide_ids,
    )


def never(*args, **options):
    raise AssertionError("the source was read again")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_bag_comes_back_as_it_is(tmp_path, cache, dtype, monkeypatch):
    path = write_trident_bag(tmp_path / "job", "test", "slide_1", features(dtype=dtype), lattice())
    direct = open_bag(path)
    assert direct.step.mpp == 0.25
    assert_same(cache.load(path), direct)
    monkeypatch.setattr(cache_module, "open_bag", never)
    monkeypatch.setattr(cache_module, "content_hash", never)
    assert_same(cache.load(str(path)), direct)
    again = BagCache(cache.folder, verify=True).load(path)  # another process, say
    assert_same(again, direct)
    assert again.features.is_contiguous()
    again.features.zero_()  # stays with the one who wrote
    assert_same(cache.load(path), direct)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_small_bags(tmp_path, cache, n):
    path = write_trident_bag(tmp_path / "job", "test", "slide_1", features(n=n), lattice(n))
    for _ in range(2):
        assert_same(cache.load(path), open_bag(path))


def test_references_and_options(tmp_path, slide, cache):
    (ref,) = find_bags(tmp_path / "job").bags
    assert_same(cache.load(ref), open_bag(ref))
    physical = BagCache(cache.folder, um_per_step=64.0)
    assert_same(physical.load(ref), open_bag(ref, um_per_step=64.0))
    assert len(entries(cache)) == 2


def test_errors_of_readers_come_through_and_nothing_is_kept(tmp_path, cache):
    bad = features()
    bad[3, 2] = np.nan
    path = write_trident_bag(tmp_path / "job", "test", "slide_1", bad, lattice())
    with pytest.raises(DataError, match="1 of 300 tiles have NaN"):
        cache.load(path)
    assert not entries(cache)
    assert BagCache(cache.folder, non_finite="drop").load(path).n == N - 1
    with pytest.raises(DataError, match="cannot be read: No such file"):
        cache.load(tmp_path / "none.h5")


def test_changes_are_noticed(slide, cache):
    first = cache.load(slide)
    write_trident_bag(slide.parents[2], "test", "slide_1", features(1), lattice())
    assert not torch.equal(cache.load(slide).features, first.features)
    assert_same(cache.load(slide), open_bag(slide))
    (state,) = slide.parents[2].joinpath("wsi_states").iterdir()
    state.write_text(state.read_text().replace("0.25", "0.5"))
    assert cache.load(slide).step.mpp == 0.5
    tiling = slide.parents[1] / "patches" / "slide_1_patches.h5"
    tiling.parent.mkdir()
    with h5py.File(tiling, "w") as file:
        file["coords"] = lattice(N + 1)
    with pytest.raises(DataError, match="incomplete"):
        cache.load(slide)


def test_a_file_that_changes_while_it_is_read_is_refused(slide, cache, monkeypatch):
    def slow(path, **options):
        bag = open_bag(path, **options)
        os.utime(slide, ns=(1, 1))
        return bag

    monkeypatch.setattr(cache_module, "open_bag", slow)
    with pytest.raises(DataError, match=r"slide_1\.h5: changed while it was read"):
        cache.load(slide)
    assert not entries(cache)


def test_a_moved_cohort_finds_its_entries_and_names_are_kept_apart(tmp_path, slide, cache, monkeypatch):
    cache.load(slide)
    moved = shutil.copytree(tmp_path / "job", tmp_path / "elsewhere") / slide.relative_to(tmp_path / "job")
    other = write_trident_bag(tmp_path / "job", "test", "slide_2", features(), lattice())
    assert cache.load(other).id == "slide_2"  # though it has the same tiles
    monkeypatch.setattr(cache_module, "open_bag", never)
    assert cache.load(moved).id == "slide_1"


def test_companions(tmp_path):
    for name in (
        *("job/x/features_a/s.1.h5", "job/x/features_a/s.1.index.npz", "job/x/features_a/s.10.h5"),
        *(
            "job/x/features_a/s.1.svs",
            "job/x/features_a/s.1.h5.lock",
            "job/x/patches/s.1_patches.h5",
            "job/x/patches/s.10_patches.h5",
        ),
        *("job/wsi_states/s.1__0a.json", "clam/f/pt_files/s.1.pt", "clam/f/h5_files/s.1.h5", "clam/t/patches/s.1.h5"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def found(name):
        return {path.relative_to(tmp_path).as_posix() for path in companions(tmp_path / name)}

    assert found("job/x/features_a/s.1.h5") == {
        *("job/x/features_a/s.1.index.npz", "job/x/patches/s.1_patches.h5", "job/wsi_states/s.1__0a.json")
    }
    assert found("clam/f/h5_files/s.1.h5") == {"clam/t/patches/s.1.h5"}
    assert found("clam/f/pt_files/s.1.pt") == {"clam/f/h5_files/s.1.h5", "clam/t/patches/s.1.h5"}


@pytest.mark.parametrize("damage", ["truncated", "empty", "header", "longer"])
def test_a_damaged_entry_is_built_again(slide, cache, damage):
    cache.load(slide)
    (entry,) = entries(cache)
    content = bytearray(entry.read_bytes())
    if damage == "header":
        content[content.index(b'"length": 5') + 10] ^= 1
    entry.write_bytes({"truncated": content[:-64], "empty": b"", "longer": content + b"x"}.get(damage, content))
    assert_same(cache.load(slide), open_bag(slide))
    assert_same(BagCache(cache.folder, verify=True).load(slide), open_bag(slide))


def test_damage_inside_the_arrays_is_found_on_request(slide, cache):
    cache.load(slide)
    (entry,) = entries(cache)
    content = bytearray(entry.read_bytes())
    content[3000] ^= 1
    entry.write_bytes(content)
    assert_same(BagCache(cache.folder, verify=True).load(slide), open_bag(slide))


def test_a_forgotten_source_is_hashed_again(slide, cache):
    cache.load(slide)
    for memory in (cache.folder / "sources").iterdir():
        memory.write_text("{")
    assert_same(BagCache(cache.folder).load(slide), open_bag(slide))
    assert len(entries(cache)) == 1


def test_a_read_only_cache_that_is_complete_can_be_used(slide, cache, monkeypatch):
    cache.load(slide)
    monkeypatch.setattr(cache_module, "atomic_write", never)
    monkeypatch.setattr(cache_module, "write_json", never)
    assert_same(BagCache(cache.folder).load(slide), open_bag(slide))


@pytest.mark.parametrize("place", ["", "entries", "sources"])
def test_a_file_where_a_folder_of_the_cache_should_be(tmp_path, place):
    (tmp_path / "cache" / place).parent.mkdir(exist_ok=True)
    (tmp_path / "cache" / place).touch()
    with pytest.raises(DataError, match=r"is a file where the cache .* needs a folder; move it elsewhere"):
        BagCache(tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, cache):
    job = tmp_path / "job"
    slides = [write_trident_bag(job, "test", f"slide_{i}", features(i), lattice()) for i in range(3)]
    cache.load(slides[0])
    (there,) = entries(cache)
    for name in (f"{i:02x}" for i in range(256)):
        if name != there.parent.name:
            (cache.folder / "entries" / name).touch()
    with pytest.warns(UserWarning, match=r"cannot be written.*; until then, bags are read from their files") as told:
        loaded = [cache.load(slide) for slide in (*slides, *slides)]
    assert len(told) == 1
    for bag, slide in zip(loaded, (*slides, *slides), strict=True):
        assert_same(bag, open_bag(slide))
    assert len(entries(cache)) == 1


def test_a_full_disk(slide, cache, monkeypatch):
    def full(path):
        raise unwritable(path, OSError(errno.ENOSPC, "No space left on device"))

    monkeypatch.setattr(cache_module, "write_json", lambda path, value: full(path))
    monkeypatch.setattr(cache_module, "atomic_write", full)
    with pytest.warns(UserWarning, match="the disk is full") as told:
        bags = [cache.load(slide), cache.load(slide)]
    assert len(told) == 1
    for bag in bags:
        assert_same(bag, open_bag(slide))


def test_a_source_that_cannot_be_read_is_named(slide, cache, monkeypatch):
    def forbidden(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(cache_module, "content_hash", forbidden)
    with pytest.raises(DataError, match=r"slide_1\.h5: cannot be read: Permission denied"):
        cache.load(slide)


def test_size_and_clear(tmp_path, slide, cache):
    assert cache.size_bytes() == 0
    cache.load(slide)
    assert cache.size_bytes() > N * DIM * 2
    (cache.folder / "mine.txt").touch()
    cache.clear()
    assert os.listdir(cache.folder) == ["mine.txt"]
    assert_same(cache.load(slide), open_bag(slide))


def test_the_default_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert BagCache().folder == tmp_path / "psamil" / "bags"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_folder() == tmp_path / "home" / ".cache" / "psamil" / "bags"


def load_all(folder, paths, barrier):
    barrier.wait()
    cache = BagCache(folder)
    sums = [float(cache.load(path).features.double().sum()) for path in paths]
    os._exit(0 if np.allclose(sums, [features(i).astype(float).sum() for i in range(len(paths))]) else 1)


def test_processes_that_fill_the_same_cache(tmp_path, cache):
    job = tmp_path / "job"
    paths = [write_trident_bag(job, "test", f"slide_{i}", features(i), lattice()) for i in range(6)]
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    workers = [context.Process(target=load_all, args=(cache.folder, paths, barrier)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(entries(cache)) == 6
    assert not list(cache.folder.rglob("*.tmp"))
    verified = BagCache(cache.folder, verify=True)
    for path in paths:
        assert_same(verified.load(path), open_bag(path))


@pytest.mark.parametrize("moment", ["os.fsync", "os.replace"])
def test_kill_in_the_middle_of_a_build(slide, cache, moment):
    code = f"""
import os, signal
from psamil.cohort import cache
write = cache.write_entry
def killed(*args):
    {moment} = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    write(*args)
cache.write_entry = killed
cache.BagCache({str(cache.folder)!r}).load({str(slide)!r})
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert not entries(cache)
    (left,) = cache.folder.rglob("*.tmp")
    assert_same(cache.load(slide), open_bag(slide))
    (entry,) = entries(cache)
    entry.unlink()
    hours_ago = time.time() - 2 * cache_module.ABANDONED_S
    os.utime(left, (hours_ago, hours_ago))
    cache.load(slide)
    assert not left.exists()


def test_sampling(slide, cache):
    whole = cache.load(slide)
    sample = cache.load(slide, max_tiles=100, seed=1, epoch=2)
    assert sample.n == 100
    assert sample.features.dtype == torch.float16
    rows = (sample.xy[:, None] == whole.xy).all(2).nonzero()[:, 1]
    assert len(rows) == 100
    assert (rows.diff() > 0).all()
    assert torch.equal(sample.features, whole.features[rows])
    assert_same(BagCache(cache.folder).load(slide, max_tiles=100, seed=1, epoch=2), sample)
    for other in ({"seed": 2, "epoch": 2}, {"seed": 1, "epoch": 3}):
        assert not torch.equal(cache.load(slide, max_tiles=100, **other).xy, sample.xy)
    assert_same(cache.load(slide, max_tiles=N), whole)
    with pytest.raises(OptionError, match="max_tiles must be at least 1, got 0"):
        cache.load(slide, max_tiles=0)


def test_samples_depend_on_the_name_and_reach_every_tile():
    bag = Bag(torch.zeros(50, 1), torch.arange(100.0).view(50, 2), "a")
    other = Bag(bag.features, bag.xy, "b")
    assert not torch.equal(sample_tiles(bag, 20).xy, sample_tiles(other, 20).xy)
    counts = torch.zeros(50)
    for epoch in range(500):
        counts[(sample_tiles(bag, 20, epoch=epoch).xy[:, 0] / 2).long()] += 1
    assert counts.min() > 150  # of 200 expected
    assert counts.max() < 250


def test_samples_keep_the_slides_of_a_patient():
    bag = Bag(torch.zeros(50, 1), torch.zeros(50, 2), "p", torch.tensor([0, 10, 10, 50]), slide_ids=("a", "b", "c"))
    bag.xy[10:, 0] = 1
    sample = sample_tiles(bag, 20, seed=3)
    assert sample.slides[1] == sample.slides[2] == (sample.xy[:, 0] == 0).sum()
    assert sample.slides[-1] == 20
    assert sample.slide_ids == bag.slide_ids
