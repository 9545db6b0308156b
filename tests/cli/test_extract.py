import csv
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from psamil.cli import main
from psamil.errors import DataError
from psamil.files import Lock, read_json
from psamil.slides.mpp_table import read_mpp_table, unmatched
from tests.real_data import DATA
from tests.slides.made_slides import draw

OPTIONS = ["--tile-px", "224", "--batch", "4", "--workers", "1", "--device", "cpu"]


def run(capsys, *args):
    with pytest.raises(SystemExit) as ended:
        main(["extract", *map(str, args)])
    told = capsys.readouterr()
    return ended.value.code, told.out, told.err


def test_from_slides_to_features(tmp_path, capsys):
    """With the embedded encoder; one slide has no resolution, which is given afterwards."""
    slides, out = tmp_path / "slides", tmp_path / "features"
    draw(slides / "a.tif")
    from PIL import Image

    Image.open(draw(tmp_path / "b.tif", seed=1)).convert("RGB").save(slides / "b.tif", compression="raw")
    code, told, progress = run(capsys, slides, "--out", out, *OPTIONS)
    assert code == 1
    assert (
        "2 slides, efficientnet-lite0 (1280 features; licence: Apache-2.0) on cpu, tiles of 224 px at 0.5 um"
        in progress
    )
    assert "1/2 a: 4 tiles" in progress
    assert "2/2 b: failed: does not say how large its pixels are" in progress
    assert "done: 1 slides, 4 tiles" in told
    assert f"failed: 1 (b); see {out / 'failures.csv'}" in told
    assert read_json(out / "extraction.json")["encoder"] == "efficientnet-lite0"

    table = tmp_path / "mpp.csv"
    table.write_text("slide,mpp\nb.tif,0.25\nslide-B,0.25\n")
    code, told, progress = run(capsys, slides, "--out", out, "--mpp-table", table, *OPTIONS)
    assert code == 0
    assert "done: 1 slides, 1 tiles" in told
    assert "finished before: 1" in told
    assert f"Warning: {table} names no slide of {slides}: slide-B." in progress
    assert f"Next: psamil inspect {out}" in told
    with open(out / "quality.csv", newline="") as file:
        assert [(row["slide"], row["mpp"]) for row in csv.DictReader(file)] == [("a", "0.5"), ("b", "0.25")]

    code, _, error = run(capsys, slides, "--out", out, "--tile-um", "64", *OPTIONS)
    assert code == 2
    assert error.splitlines()[-1].startswith(f"psamil: {out}: has features made with tile_px 224, not 128")

    lock = out / "20x_224px_0px_overlap" / "features_efficientnet-lite0" / "c.h5.lock"
    draw(slides / "c.tif")
    with Lock(lock):
        code, told, _ = run(capsys, slides, "--out", out, *OPTIONS)
    assert code == 3
    assert "other processes work on 1: c" in told


def test_masks(tmp_path, capsys):
    slides, masks = tmp_path / "slides", tmp_path / "masks"
    for name in ("a", "b"):
        draw(slides / f"{name}.tif")
    masks.mkdir()
    ring = [[0, 0], [224, 0], [224, 224], [0, 224], [0, 0]]
    (masks / "a.geojson").write_text(f'{{"type": "Polygon", "coordinates": [{ring}]}}')
    code, told, progress = run(capsys, slides, "--out", tmp_path / "out", "--masks", masks, *OPTIONS)
    assert code == 1
    assert "done: 1 slides, 1 tiles" in told
    assert f"b: failed: {masks}: has no mask of it" in progress
    code, _, error = run(capsys, slides, "--masks", tmp_path / "none", *OPTIONS)
    assert code == 2
    assert "none: is no folder" in error


def test_ends_like_ctrl_c_when_a_cluster_asks(tmp_path):
    """So that no locks are left, which other computers could not tell from those of living processes."""
    for i in range(9):
        draw(tmp_path / "slides" / f"{i}.tif", side_px=1024, seed=i)
    out = tmp_path / "out"
    encoder = ["--encoder", "python:tests.cli.small_encoder:small_encoder", "--tile-px", "16", "--batch", "1"]
    command = [sys.executable, "-m", "psamil", "extract", str(tmp_path / "slides"), "--out", str(out), *encoder]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE) as process:
        while process.poll() is None and not list(out.glob("*/*/*.h5.lock")):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate()
    assert process.returncode == 130, told
    assert told.endswith(b"psamil: stopped\n")
    assert not [lock for lock in out.rglob("*.lock") if lock.read_text()]  # an empty one is nobody's


def test_help_and_mistakes(tmp_path, capsys):
    code, told, _ = run(capsys, "--help")
    assert code == 0
    assert "Example: psamil extract slides --out features" in " ".join(told.split())
    code, _, error = run(capsys, tmp_path / "none")
    assert code == 2
    assert "none: does not exist" in error
    draw(tmp_path / "a.tif")
    assert run(capsys, tmp_path, "--encoder", "nonsense")[0] == 2
    code, _, error = run(capsys, tmp_path, "--workers", "0")
    assert code == 2
    assert "workers must be at least 1" in error
    code, _, error = run(capsys, tmp_path, "--mpp", "40", "--out", tmp_path / "out")
    assert code == 2
    assert "mpp is in micrometres per pixel, between 0.02 and 20, got 40; a magnification is not" in error


def test_tables_of_resolutions(tmp_path):
    table = tmp_path / "mpp.csv"
    table.write_text("Slide_ID,mpp\n007.svs,0.25\nb,\nc,0.5\nc,0.5\n")
    assert read_mpp_table(table) == {"007": 0.25, "c": 0.5}
    for text, message in (
        ("name,mpp\na,1\n", "has no column 'slide'"),
        ("slide,um\na,1\n", "has no column 'mpp'"),
        ("slide,mpp\na,-1\n", "-1 micrometres per pixel"),
        ("slide,mpp\na,40\n", "40 micrometres per pixel; write a number from 0.02 to 20, .* not the magnification"),
        ("slide,mpp\na,x\n", "not a number"),
        ("slide,mpp\na,1\na.svs,2\n", "has both 1 and 2 um"),
    ):
        table.write_text(text)
        with pytest.raises(DataError, match=message):
            read_mpp_table(table)


def test_names_of_a_table_that_are_no_slide():
    slides = ["TCGA-01", "TCGA-02", "x"]
    assert unmatched(["TCGA-01", "x"], slides) == []
    assert unmatched(["tcga-02", "TCGA_01", "other"], slides) == [
        "TCGA_01 (like TCGA-01)",
        "other",
        "tcga-02 (like TCGA-02)",
    ]


@pytest.mark.skipif(not (DATA / "wsi").is_dir(), reason="no data folder; PSAMIL_DATA names it")
def test_a_real_slide(tmp_path, capsys):
    slide = DATA / "wsi" / "CMU-1-Small-Region.svs"
    code, told, _ = run(capsys, slide, "--out", tmp_path, "--tile-um", "256", *OPTIONS[2:])
    assert code == 0
    assert "done: 1 slides" in told
    assert (tmp_path / "20x_512px_0px_overlap" / "features_efficientnet-lite0" / "CMU-1-Small-Region.h5").exists()
