"""From slides to feature files: layout, resume, damage, killed processes, several at once."""

import csv
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from psamil import find_bags, open_bag
from psamil.errors import DataError, OptionError
from psamil.files import Lock, read_json, write_json
from psamil.slides import reading_pool
from psamil.slides.extraction_record import Extraction, read_extraction
from psamil.slides.slide import open_slide
from psamil.slides.tiling import TileGrid
from tests.real_data import DATA
from tests.slides import crashing
from tests.slides.made_slides import MPP, TILE_PX, draw, extract_all, tiny_encoder, tiny_grid

ROOT = Path(__file__).parents[2]
TILING = "20x_64px_0px_overlap"
FEATURES = f"{TILING}/features_tiny"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three slides and their features, read by two processes in small chunks."""
    folder = tmp_path_factory.mktemp("made")
    for i, name in enumerate("abc"):
        draw(folder / "slides" / f"{name}.tif", seed=i)
    outcome = extract_all(folder / "slides", folder / "out", workers=2, batch=3)
    assert outcome.done == ["a", "b", "c"]
    assert not outcome.failed
    return folder


@pytest.fixture
def slides(made, tmp_path):
    """A copy of the slides."""
    return shutil.copytree(made / "slides", tmp_path / "slides")


@pytest.fixture
def out(made, tmp_path):
    """A copy of slides that are finished."""
    return shutil.copytree(made / "out", tmp_path / "out")


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def files_of(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def identities(folder):
    """What changes when a file is written again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.h5")}


def test_layout_of_trident(made):
    out = made / "out"
    states = {path.name for path in (out / "wsi_states").iterdir()}
    assert files_of(out) == {
        *(f"{FEATURES}/{name}.h5" for name in "abc"),
        *(f"{TILING}/patches/{name}_patches.h5" for name in "abc"),
        *(f"{TILING}/visualization/{name}.jpg" for name in "abc"),
        *(f"slide_records/{name}.json" for name in "abc"),
        *(f"wsi_states/{name}" for name in states),
        *("extraction.json", "quality.csv"),
    }
    assert sorted(name.partition("__")[0] for name in states) == ["a", "b", "c"]
    about = {
        "name": str,
        "savetodir": str,
        "patch_size": np.int64,
        "patch_size_level0": np.int64,
        "level0_magnification": np.int64,
        "target_magnification": np.int64,
        "overlap": np.int64,
        "level0_width": np.int64,
        "level0_height": np.int64,
    }
    with h5py.File(out / FEATURES / "a.h5") as file, h5py.File(out / TILING / "patches" / "a_patches.h5") as patches:
        assert set(file) == {"features", "coords"}
        assert set(patches) == {"coords"}
        assert not file.attrs
        assert file["features"].dtype == np.float32
        assert file["features"].shape == (len(file["coords"]), 12)
        assert file["features"].maxshape == (None, 12)
        assert {name: type(value) for name, value in file["features"].attrs.items()} == {
            "name": str,
            "savetodir": str,
            "encoder": str,
        }
        assert file["features"].attrs["encoder"] == "tiny"
        for coords in (file["coords"], patches["coords"]):
            assert coords.dtype == np.int64
            assert {name: type(value) for name, value in coords.attrs.items()} == about
            assert coords.attrs["patch_size_level0"] == TILE_PX
            assert (coords.attrs["level0_magnification"], coords.attrs["target_magnification"]) == (20, 20)
        assert (file["coords"][:] == patches["coords"][:]).all()


def test_features_are_those_of_the_tiles(made):
    """In order, whatever came first from the reading processes."""
    assert_features_are_of_tiles(made / "slides", made / "out", least_tiles=30)


def assert_features_are_of_tiles(slides, out, least_tiles):
    """Each tile is read again, at the place that the file says."""
    encoder = tiny_encoder()
    for path in (out / FEATURES).glob("*.h5"):
        with open_slide(slides / f"{path.stem}.tif") as slide, h5py.File(path) as file:
            tiles = np.stack([slide.read(x, y, TILE_PX, MPP) for x, y in file["coords"][:].tolist()])
            assert len(tiles) >= least_tiles
            np.testing.assert_allclose(file["features"][:], encoder.encode(tiles).numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mpp", [0.265, 0.301])
def test_readers_know_the_step(tmp_path, caplog, mpp):
    """Also where nominal magnifications give another size: 64 px of 0.5 um are 121 px of 0.265 um, not 128."""
    draw(tmp_path / "slides" / "a.tif", side_px=1024, mpp=mpp)
    extract_all(tmp_path / "slides", tmp_path / "out", grid=tiny_grid(overlap_px=16))
    (ref,) = find_bags(tmp_path / "out").bags
    bag = open_bag(ref)
    size = round(TILE_PX * 0.5 / mpp)
    assert bag.step.length == size - round(size / 4)
    assert bag.step.source == "metadata"
    assert bag.step.mpp == pytest.approx(mpp, rel=1e-3)
    assert (bag.xy == bag.xy.round()).all()
    assert not caplog.messages


def test_what_is_finished_is_not_done_again(slides, out):
    before = identities(out / FEATURES)
    draw(slides / "d.tif")
    outcome = extract_all(slides, out)
    assert (outcome.finished_before, outcome.done) == (["a", "b", "c"], ["d"])
    after = identities(out / FEATURES)
    assert {name: after[name] for name in before} == before


def test_damaged_results_are_made_anew(slides, out):
    truncated, missing, short = (out / FEATURES / f"{name}.h5" for name in "abc")
    truncated.write_bytes(truncated.read_bytes()[:-500])
    missing.unlink()
    with h5py.File(short, "r+") as file:
        for name in ("features", "coords"):
            file[name].resize(5, axis=0)
    assert extract_all(slides, out).done == ["a", "b", "c"]
    assert_features_are_of_tiles(slides, out, least_tiles=30)


def test_damaged_slides_are_named_and_set_aside(slides, out, tmp_path):
    whole = draw(tmp_path / "whole.tif").read_bytes()
    (slides / "truncated.tif").write_bytes(whole[: len(whole) // 2])
    (slides / "text.svs").write_text("no slide")
    (slides / "nothing.mrxs").touch()
    (slides / "series").mkdir()
    (slides / "series" / "1.dcm").write_bytes(b"DICM" * 100)
    draw(slides / "white.tif", margin_px=256)
    draw(slides / "one_tile.tif", side_px=TILE_PX, margin_px=2)
    outcome = extract_all(slides, out)
    assert outcome.finished_before == ["a", "b", "c"]
    assert outcome.done == ["one_tile"]
    assert outcome.empty == ["white"]
    assert sorted(outcome.failed) == ["nothing", "series", "text", "truncated"]
    table = {row["slide"]: row for row in rows_of(out / "failures.csv")}
    assert {name: row["reason"] for name, row in table.items()} == outcome.failed
    assert table["text"]["path"].endswith("text.svs")
    bags = {ref.id: open_bag(ref) for ref in find_bags(out).bags}
    assert sorted(bags) == ["a", "b", "c", "one_tile", "white"]
    assert len(bags["one_tile"]) == 1
    assert tuple(bags["white"].features.shape) == (0, 12)
    assert {row["slide"]: row["status"] for row in rows_of(out / "quality.csv")}["white"] == "empty"

    (slides / "truncated.tif").write_bytes(whole)  # mended
    for name in ("text.svs", "nothing.mrxs"):
        (slides / name).unlink()
    (slides / "series" / "1.dcm").unlink()
    again = extract_all(slides, out)
    assert again.done == ["truncated"]
    assert not again.failed
    assert [row["slide"] for row in rows_of(out / "failures.csv")] == ["series"]  # the others are gone


def test_another_slide_of_the_same_name(slides, out):
    """Is not taken for the one that is finished; a slide that moved is."""
    before = identities(out / FEATURES)
    draw(slides / "b.tif", seed=77)
    outcome = extract_all(slides, out)
    assert outcome.finished_before == ["a", "c"]
    assert "b.h5 has the features of another slide of this name" in outcome.failed["b"]
    assert identities(out / FEATURES) == before
    assert [row["slide"] for row in rows_of(out / "failures.csv")] == ["b"]
    assert read_json(out / "slide_records" / "b.json")["status"] == "done"


def test_links_keep_their_names(tmp_path):
    """Stores of data link to files whose names are hashes."""
    stored = draw(tmp_path / "stored.tif").rename(tmp_path / "5f3a")
    (tmp_path / "slides").mkdir()
    (tmp_path / "slides" / "a.tif").symlink_to(stored)
    assert extract_all(tmp_path / "slides", tmp_path / "out").done == ["a"]
    assert [row["slide"] for row in rows_of(tmp_path / "out" / "quality.csv")] == ["a"]


def test_a_damaged_mask_is_named(tmp_path):
    draw(tmp_path / "slides" / "a.tif")
    (tmp_path / "a.npy").write_bytes(b"no array")
    outcome = extract_all(tmp_path / "slides", tmp_path / "out", masks=tmp_path)
    assert outcome.failed["a"].startswith(f"{tmp_path / 'a.npy'}: is no NumPy array")


def test_failures_csv_goes_with_the_last_failure(slides, out):
    (slides / "d.tif").write_text("no slide")
    assert list(extract_all(slides, out).failed) == ["d"]
    assert (out / "failures.csv").exists()
    draw(slides / "d.tif")
    assert extract_all(slides, out).done == ["d"]
    assert not (out / "failures.csv").exists()


def test_failures_that_are_gone_are_not_listed(slides, out):
    (slides / "d.tif").write_text("no slide")
    (slides / "e.tif").symlink_to(slides / "nowhere.tif")
    assert sorted(extract_all(slides, out).failed) == ["d", "e"]
    assert [row["slide"] for row in rows_of(out / "failures.csv")] == ["d", "e"]
    (slides / "d.tif").unlink()
    extract_all(slides, out)
    assert [row["slide"] for row in rows_of(out / "failures.csv")] == ["e"]
    (slides / "e.tif").unlink()
    extract_all(slides, out)
    assert not (out / "failures.csv").exists()


def test_enlarged_tiles_are_told(tmp_path):
    draw(tmp_path / "slides" / "a.tif", mpp=0.5)
    draw(tmp_path / "slides" / "b.tif", mpp=1.0)
    outcome = extract_all(tmp_path / "slides", tmp_path / "out")
    assert outcome.enlarged == {"b": pytest.approx(1.0)}
    assert ["enlarged" in row["warning"] for row in rows_of(tmp_path / "out" / "quality.csv")] == [False, True]


@pytest.mark.parametrize("given", [{"mpp": 40}, {"mpp_of": {"a": 0.0}}], ids=["all", "one"])
def test_resolutions_of_no_scan_are_refused(slides, tmp_path, given):
    with pytest.raises(OptionError, match="micrometres per pixel"):
        extract_all(slides, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_other_settings_are_refused(slides, out):
    before = identities(out / FEATURES)
    with pytest.raises(DataError, match=r"made with tile_px 64, not 32, tile_um 32.0, not 16.0; choose another folder"):
        extract_all(slides, out, grid=tiny_grid(size_px=32))
    with pytest.raises(DataError, match=r"made with fingerprint '\w+', not '\w+'; choose"):
        extract_all(slides, out, encoder=tiny_encoder(input_px=4))
    assert identities(out / FEATURES) == before


@pytest.mark.parametrize("option", ["workers", "batch"])
def test_bad_options(slides, tmp_path, option):
    with pytest.raises(OptionError, match=f"{option} must be at least 1"):
        extract_all(slides, tmp_path / "out", **{option: 0})


def test_features_that_are_not_finite_cost_their_slide_alone(tmp_path):
    slides, out = tmp_path / "slides", tmp_path / "out"
    draw(slides / "a.tif", seed=1)
    draw(slides / "b.tif", seed=2)
    encoder = tiny_encoder()
    encode, seen = encoder._forward, []

    def odd(tiles):
        seen.append(tiles)
        return encode(tiles) * (float("nan") if len(seen) == 1 else 1.0)

    encoder._forward = odd
    found = extract_all(slides, out, encoder=encoder)
    assert list(found.failed) == ["a"]
    assert "not finite" in found.failed["a"]
    assert found.done == ["b"]
    assert not list((out / FEATURES).glob("a.h5*"))
    assert extract_all(slides, out).done == ["a"]


def test_another_resolution_is_another_slide(tmp_path):
    slides, out = tmp_path / "slides", tmp_path / "out"
    draw(slides / "a.tif")
    assert extract_all(slides, out).done == ["a"]
    assert extract_all(slides, out, mpp=0.5).finished_before == ["a"]
    assert extract_all(slides, out, mpp=0.25).done == ["a"]
    assert extract_all(slides, out, mpp=0.25).finished_before == ["a"]
    (out / "slide_records" / "a.json").write_text("damaged")
    assert extract_all(slides, out, mpp=0.5).finished_before == ["a"]  # nothing is known any more


def test_settings_can_be_read_back(tmp_path):
    out, grid = tmp_path / "out", tiny_grid(size_um=40.3, overlap_px=3, least_tissue=0.1)
    extract_all(draw(tmp_path / "a.tif"), out, grid=grid)
    settings = read_extraction(out)
    assert settings == Extraction.of(tiny_encoder(), grid)
    assert settings.fingerprint == tiny_encoder().fingerprint
    assert settings.grid == grid
    (folder,) = out.glob("*/features_tiny")
    assert read_extraction(folder) == settings
    assert read_extraction(tmp_path) is None
    write_json(out / "extraction.json", {"encoder": "x"})
    with pytest.raises(DataError, match=r"is not of this version of psamil"):
        read_extraction(out)
    record = read_json(out / "slide_records" / "a.json")
    assert record["tile_px0"] == round(40.3 / 0.5)
    assert record["tile_mpp"] == pytest.approx(0.5)


@pytest.mark.parametrize("size", [{}, {"size_um": 128.0}, {"size_um": 40.3}, {"mpp": 0.3, "size_px": 100}], ids=str)
def test_settings_give_their_grid(size):
    settings = Extraction.of(tiny_encoder(), TileGrid(**size))
    assert Extraction.of(tiny_encoder(), settings.grid) == settings


def test_a_crash_costs_its_slide_alone(slides, out, monkeypatch):
    """Killed for want of memory, a fault in a decoder after some tiles, an exception that nobody foresaw."""
    for name in ("crashes", "kills", "raises"):
        draw(slides / f"{name}.tif")
    monkeypatch.setattr(reading_pool, "plan_slide", crashing.plan_slide)
    monkeypatch.setattr(reading_pool, "read_tiles", crashing.read_tiles)
    (out / FEATURES / "b.h5").unlink()
    (out / FEATURES / "c.h5").unlink()
    outcome = extract_all(slides, out)
    assert outcome.done == ["b", "c"]
    assert outcome.failed["kills"].startswith("the process that read it ended (Killed)")
    assert "take fewer workers" in outcome.failed["kills"]
    assert outcome.failed["crashes"].startswith("the process that read it ended (Segmentation fault")
    assert outcome.failed["raises"] == "cannot be read (RuntimeError: codec)"
    assert {path.name for path in (out / FEATURES).iterdir()} == {"a.h5", "b.h5", "c.h5"}
    monkeypatch.undo()
    assert extract_all(slides, out).done == ["crashes", "kills", "raises"]


def test_interruption_leaves_nothing_behind(slides, tmp_path):
    out = tmp_path / "out"

    def stop(step):
        if step.slide == "b" and step.tiles_done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract_all(slides, out, report=stop)
    assert [path.name for path in (out / FEATURES).iterdir()] == ["a.h5"]  # no lock, nothing half-written
    assert extract_all(slides, out).done == ["b", "c"]


def test_slides_of_others_are_left_to_them(slides, out):
    (out / FEATURES / "b.h5").unlink()
    with Lock(out / FEATURES / "b.h5.lock"):
        outcome = extract_all(slides, out)
    assert (outcome.finished_before, outcome.done, outcome.elsewhere) == (["a", "c"], [], ["b"])
    assert extract_all(slides, out).done == ["b"]


def test_two_processes_share_the_slides(tmp_path):
    slides, out = tmp_path / "slides", tmp_path / "out"
    for i in range(8):
        draw(slides / f"{i}.tif", seed=i)
    told = []
    command = [sys.executable, "-m", "tests.slides.made_slides", str(slides), str(out)]
    with subprocess.Popen(command, cwd=ROOT) as other:
        while other.poll() is None and not (out / "extraction.json").exists():
            time.sleep(0.02)
        extract_all(slides, out, report=told.append)
    assert other.returncode == 0
    assert len(find_bags(out).bags) == 8
    assert not [path for path in out.rglob("*.lock") if path.is_file()]
    mine = [step.slide for step in told if step.status == "done"]
    assert len(set(mine)) == len(mine) < 8  # the other process had begun before
    before = identities(out / FEATURES)
    assert extract_all(slides, out).done == []
    assert identities(out / FEATURES) == before


def test_killed_at_any_moment(tmp_path):
    """Nothing is lost, nothing done twice, nothing half-done has a final name, and readers end with their parent."""
    slides, out = tmp_path / "slides", tmp_path / "out"
    for i in range(20):
        draw(slides / f"{i:02d}.tif", side_px=384, seed=i)
    command = [sys.executable, "-m", "tests.slides.made_slides", str(slides), str(out)]
    finished: dict[str, tuple[int, int]] = {}
    chance = random.Random(0)
    for wanted in (1, 6, 13):
        with subprocess.Popen(command, cwd=ROOT) as process:
            while len(identities(out / FEATURES)) < wanted and process.poll() is None:
                time.sleep(0.005)
            time.sleep(chance.uniform(0, 0.2))
            assert process.poll() is None, "it should be killed at work"
            readers = children_of(process.pid)
            process.send_signal(signal.SIGKILL)
        now = identities(out / FEATURES)
        assert {name: now[name] for name in finished} == finished
        finished = now
        for path in (out / FEATURES).glob("*.h5"):
            with h5py.File(path) as file:
                assert len(file["features"]) == len(file["coords"]) > 0
        wait_until_gone(readers)
    assert 13 <= len(finished) < 20
    outcome = extract_all(slides, out)
    assert sorted(outcome.finished_before) == sorted(name.removesuffix(".h5") for name in finished)
    assert len(outcome.done) == 20 - len(finished)
    now = identities(out / FEATURES)
    assert {name: now[name] for name in finished} == finished
    assert not [name for name in files_of(out) if name.endswith((".tmp", ".lock"))]
    assert len(find_bags(out).bags) == 20
    assert_features_are_of_tiles(slides, out, least_tiles=4)


def test_the_lock_of_a_process_killed_after_its_last_write_is_removed(tmp_path):
    slides, out = tmp_path / "slides", tmp_path / "out"
    draw(slides / "00.tif", side_px=384, seed=0)
    extract_all(slides, out)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        ended.wait()
    lock = out / FEATURES / "00.h5.lock"
    with Lock(lock):
        holder = read_json(lock)
    write_json(lock, {**holder, "pid": ended.pid})
    assert extract_all(slides, out).finished_before == ["00"]
    assert not lock.exists()


def children_of(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in children.read_text().split()] if children.exists() else []


def wait_until_gone(pids, seconds=10):
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"readers {pids} live on"
        time.sleep(0.02)


def test_readers_need_no_torch():
    code = "import sys, psamil.slides.reading; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.skipif(not (DATA / "wsi").is_dir(), reason="no data folder; PSAMIL_DATA names it")
def test_real_slides(tmp_path):
    """One tells its resolution, the other does not: it is refused, and done once the resolution is given."""
    out, grid = tmp_path / "out", TileGrid(mpp=0.5, size_px=224)
    without = extract_all(DATA / "wsi", out, grid=grid)
    assert without.done == ["CMU-1-Small-Region"]
    (reason,) = without.failed.values()
    assert "does not say how large its pixels are" in reason
    assert "--mpp" in reason
    outcome = extract_all(DATA / "wsi", out, grid=grid, mpp_of={"TCGA-CR-7395-01A-01-TS1": 0.25})
    assert outcome.done == ["TCGA-CR-7395-01A-01-TS1"]
    bags = {ref.id: open_bag(ref) for ref in find_bags(out).bags}
    assert [bag.step.length for bag in bags.values()] == [224, 448]
    assert all(len(bag) > 20 for bag in bags.values())
