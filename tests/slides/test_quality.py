"""Pictures to look at, and rows with warnings."""

import numpy as np
import pytest
from PIL import Image

from psamil.slides.quality import BLUR_COLOUR, PEN_COLOUR, TISSUE_COLOUR, qc_picture, quality_row, warnings_of
from psamil.slides.slide import open_slide
from psamil.slides.tiling import TileGrid, lay_tiles
from psamil.slides.tissue import Tissue, tissue_of
from tests.slides.drawn import blurred, glass, stained, write_offset_slide, write_slide


def picture_of(slide, path, tissue=None):
    tissue = tissue_of(slide) if tissue is None else tissue
    tiles = lay_tiles(slide, tissue, TileGrid(size_px=112))
    qc_picture(slide, tissue, tiles, path)
    with Image.open(path) as picture:
        return tissue, tiles, np.asarray(picture.convert("RGB")).astype(int)


def count(picture, colour, tolerance=40):
    return int((np.abs(picture - colour).max(2) < tolerance).sum())


@pytest.fixture(scope="module")
def drawn():
    """At 1 um per pixel."""
    image = glass(800, 1200)
    image[100:700, 150:1050] = stained(600, 900, grain_px=10)
    return image


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_picture_shows_slide_tissue_and_tiles(tmp_path, drawn, suffix):
    with open_slide(write_slide(tmp_path / "a.tif", drawn, mpp=1.0)) as slide:
        _, tiles, picture = picture_of(slide, tmp_path / "qc" / f"a.{suffix}")
    assert len(tiles) > 100
    width = picture.shape[1]
    assert 1400 < width < 1600
    left, right = picture[100:-80, : width // 2], picture[100:-80, width // 2 :]
    assert count(right, TISSUE_COLOUR) > 300
    assert count(left, TISSUE_COLOUR) == 0
    assert np.abs(left[len(left) // 2, 300:400].mean(0) - drawn[400, 450:600].mean(0)).max() < 20
    assert (tmp_path / "qc" / f"a.{suffix}").stat().st_size < 1_000_000
    assert [file.name for file in (tmp_path / "qc").iterdir()] == [f"a.{suffix}"]  # no temporary file


def test_what_was_taken_away_has_colours(tmp_path, drawn):
    image = drawn.copy()
    image[:, 650:] = blurred(image, 20)[:, 650:]
    image[350:430, 50:600] = (40, 60, 160)
    with open_slide(write_slide(tmp_path / "a.tif", image, mpp=1.0)) as slide:
        tissue, tiles, picture = picture_of(slide, tmp_path / "a.png")
        row = quality_row(slide, tissue, tiles)
    panel = picture[80:-60, picture.shape[1] // 2 :]
    tinted = 105 / 255 * np.array([40, 60, 160]) + 150 / 255 * np.array(PEN_COLOUR)
    assert count(panel, tinted) > 5000
    assert (np.abs(panel[..., 0] - BLUR_COLOUR[0]) < 40).sum() > 10_000
    assert row["pen_share"] > 0.05
    assert row["blur_share"] > 0.2
    assert "out of focus" in row["warning"]


def test_wide_slides_are_stacked(tmp_path):
    image = glass(400, 2400)
    image[100:300, 300:2100] = stained(200, 1800)
    with open_slide(write_slide(tmp_path / "a.tif", image)) as slide:
        picture = picture_of(slide, tmp_path / "a.png")[2]
    assert picture.shape[1] < 800
    half = picture.shape[0] // 2
    assert count(picture[half:-60], TISSUE_COLOUR) > 500
    assert count(picture[60:half], TISSUE_COLOUR) == 0


@pytest.mark.parametrize("size", [(40, 40), (30, 500), (500, 30)], ids=str)
def test_tiny_slides(tmp_path, size):
    with open_slide(write_slide(tmp_path / "a.tif", stained(*size), levels=1)) as slide:
        picture = picture_of(slide, tmp_path / "a.jpg")[2]
    assert min(picture.shape[:2]) > 50


def test_only_the_scanned_area_is_shown(tmp_path):
    image = glass(1024, 1024)
    image[200:800, 200:800] = stained(600, 600)
    path = write_offset_slide(tmp_path / "a.scn", image, (3000, 2000), (8192, 4096))
    with open_slide(path) as slide:
        _, tiles, picture = picture_of(slide, tmp_path / "a.png")
    assert ((tiles.coords_px0 - (3000, 2000)) % 112 == 0).all()
    assert 25 <= len(tiles) <= 36
    panel = picture[64:-50, 14 : 14 + 720]
    tissue = (panel.max(2) - panel.min(2) > 40).mean()
    assert tissue == pytest.approx((600 / 1024) ** 2, rel=0.1)


def test_row(tmp_path, drawn):
    with open_slide(write_slide(tmp_path / "a.tif", drawn, mpp=1.0)) as slide:
        tissue = tissue_of(slide)
        tiles = lay_tiles(slide, tissue, TileGrid(mpp=1.0, size_px=112))
        row = quality_row(slide, tissue, tiles)
    assert list(row) == [
        *("slide", "mpp", "width_px0", "height_px0", "tissue_mm2", "tissue_share", "tiles", "pen_share", "blur_share"),
        "warning",
    ]
    assert (row["slide"], row["mpp"], row["width_px0"], row["height_px0"]) == ("a", 1.0, 1200, 800)
    assert row["tissue_mm2"] == pytest.approx(0.6 * 0.9, rel=0.05)
    assert row["tiles"] == len(tiles) > 20
    assert row["warning"] == ""


class Sheet:
    """A slide of 20 x 10 mm."""

    name, mpp_px0, size_px0, bounds_px0 = "a", 0.5, (40_000, 20_000), (0, 0, 40_000, 20_000)


def warnings_for(mask, pen=None, blurred=None):
    nothing = np.zeros_like(mask)
    tissue = Tissue(mask, 8.0, nothing if pen is None else pen, nothing if blurred is None else blurred)
    return warnings_of(Sheet(), tissue, lay_tiles(Sheet(), tissue, TileGrid()))


def area(mm2):
    mask = np.zeros((1250, 2500), bool)
    mask[: round(mm2 / 0.000064 / 1000), :1000] = True
    return mask


def test_warnings():
    assert warnings_for(area(20)) == []
    assert warnings_for(area(0)) == ["no tissue found"]
    (little,) = warnings_for(area(0.4))
    assert little.startswith("suspiciously little tissue: 0.38 mm²")
    (much,) = warnings_for(np.ones((1250, 2500), bool))
    assert much.startswith("100% of the scanned area counts as tissue")
    scattered = np.zeros((1250, 2500), bool)
    scattered[::10, ::10] = True
    assert warnings_for(scattered) == ["no tile has enough tissue"]
    half = np.roll(area(10), 400, axis=0)
    (pen,) = warnings_for(area(20), pen=half)
    assert pen.startswith("33% of what is not glass looks like pen")
    (blur,) = warnings_for(area(20), blurred=half)
    assert blur.startswith("33% of what is not glass is out of focus")


@pytest.mark.parametrize(("mpp", "is_told"), [(0.5, False), (0.52, False), (1.0, True)])
def test_tiles_beyond_the_resolution_of_the_scan_are_told(tmp_path, mpp, is_told):
    with open_slide(write_slide(tmp_path / "a.tif", stained(600, 700), mpp=mpp)) as slide:
        tissue = tissue_of(slide)
        warnings = "; ".join(warnings_of(slide, tissue, lay_tiles(slide, tissue, TileGrid(mpp=0.5))))
    assert ("tiles of 0.5 µm per pixel are enlarged: it was scanned at 1 µm" in warnings) == is_told
