"""Tissue on drawn overviews at 8 um per pixel: what is found, and what is taken away."""

import tracemalloc

import numpy as np
import pytest
from PIL import Image, ImageDraw

from psamil.slides.slide import open_slide
from psamil.slides.tissue import LARGEST_OVERVIEW_PX, _white, find_tissue, otsu_threshold, overview_mpp, tissue_of
from tests.slides.drawn import blurred, glass, stained, write_slide

MPP = 8.0
PIECE = np.s_[60:180, 80:240]  # of tissue: 0.96 x 1.28 mm


def overview(**options):
    image = glass(300, 400)
    image[PIECE] = stained(120, 160, grain_px=2, **options)
    return image


def inner(mask, margin_px=4):
    """The piece without its border."""
    return mask[60 + margin_px : 180 - margin_px, 80 + margin_px : 240 - margin_px]


def test_piece_of_tissue():
    tissue = find_tissue(overview(), MPP)
    assert inner(tissue.mask).all()
    assert tissue.mask.sum() == pytest.approx(120 * 160, rel=0.05)
    assert tissue.area_mm2 == pytest.approx(0.96 * 1.28, rel=0.05)
    assert tissue.share == tissue.mask.mean()
    assert not tissue.pen.any()
    assert not tissue.blurred.any()
    assert (tissue.pen_share, tissue.blur_share) == (0, 0)


@pytest.mark.parametrize(
    "colour",
    [(255, 255, 255), (243, 241, 243), (236, 232, 218), (225, 228, 235), (128, 128, 128), (10, 10, 10)],
    ids=["white", "glass", "yellowish", "bluish", "grey", "black"],
)
@pytest.mark.parametrize("noise", [0, 2])
def test_nothing_on_an_empty_slide(colour, noise):
    image = np.random.default_rng(0).normal(colour, noise, (200, 300, 3))
    assert not find_tissue(np.clip(image, 0, 255).astype(np.uint8), MPP).mask.any()


def test_everything_is_tissue():
    tissue = find_tissue(stained(200, 300, grain_px=2), MPP)
    assert tissue.mask.all()


def test_pale_tissue_beside_dark_tissue():
    image = overview()
    image[200:260, 80:240] = 255 - (255 - stained(60, 160, grain_px=2).astype(int)) // 3
    tissue = find_tissue(image, MPP)
    assert inner(tissue.mask).all()
    assert tissue.mask[204:256, 84:236].mean() > 0.98


def test_cast_of_the_glass():
    image = overview().astype(float) * np.array([236, 232, 214]) / np.array([243, 241, 243])
    tissue = find_tissue(image.astype(np.uint8), MPP)
    assert tissue.mask.sum() == pytest.approx(120 * 160, rel=0.05)


def test_holes_are_filled_up_to_a_size():
    image = overview()
    image[80:95, 100:115] = glass(15, 15)  # 0.014 mm²
    image[100:160, 150:210] = glass(60, 60)  # 0.23 mm²
    tissue = find_tissue(image, MPP)
    assert tissue.mask[78:97, 98:117].all()
    assert not tissue.mask[106:154, 156:204].any()


def test_small_pieces_are_left_out_of_a_slide_but_not_of_a_crop():
    image = overview()
    image[250:262, 300:312] = stained(12, 12, grain_px=2)  # 0.009 mm²
    assert not find_tissue(image, MPP).mask[245:270, 295:320].any()
    crop = find_tissue(image[246:266, 296:316], MPP)
    assert crop.mask[5:15, 5:15].all()


INKS = {
    "blue": (40, 60, 160),
    "deep blue": (30, 30, 150),
    "light blue": (120, 150, 220),
    "green": (30, 120, 60),
    "red": (215, 40, 55),
    "black": (25, 25, 28),
}


@pytest.mark.parametrize("ink", INKS)
def test_pen_marks(ink):
    picture = Image.fromarray(overview())
    draw = ImageDraw.Draw(picture)
    draw.line([(20, 40), (150, 150), (390, 280)], fill=INKS[ink], width=9)
    image = blurred(np.asarray(picture), 0.6)
    line = np.asarray(picture) == INKS[ink]
    tissue = find_tissue(image, MPP)
    assert not (tissue.mask & line.all(2)).any()
    assert tissue.pen[line.all(2)].all()
    assert 0.05 < tissue.pen_share < 0.5
    assert not tissue.mask[250:, 300:].any()  # on the glass
    beside = inner(tissue.mask | tissue.pen, 6)
    assert beside.all()  # nothing else is lost


def test_stains_with_colours_of_pens_can_be_kept():
    image = overview()
    image[60:180, 80:160] = 0.15 * image[60:180, 80:160] + 0.85 * np.array([60, 100, 170])  # like trichrome
    assert find_tissue(image, MPP).pen[70:170, 90:150].all()
    kept = find_tissue(image, MPP, reject_pens=False)
    assert inner(kept.mask).all()
    assert not kept.pen.any()


def test_black_and_grey_borders_are_no_tissue():
    image = overview()
    image[:, :20] = 4
    image[-30:] = (120, 121, 120)
    for reject_pens in (True, False):
        tissue = find_tissue(image, MPP, reject_pens=reject_pens)
        assert tissue.pen[:270, :20].all()
        assert not tissue.mask[:, :30].any()
        assert not tissue.mask[-30:].any()
        assert inner(tissue.mask).all()


@pytest.mark.parametrize("sigma_px", [2.0, 3.0, 4.0])
def test_blur(sigma_px):
    image = overview()
    image[:, 160:] = blurred(image, sigma_px)[:, 160:]
    tissue = find_tissue(image, MPP)
    assert tissue.blurred[80:160, 180:220].mean() > 0.95
    assert tissue.mask[70:170, 90:140].all()
    assert tissue.blur_share == pytest.approx(0.5, abs=0.12)
    assert find_tissue(image, MPP, reject_blur=False).mask[70:170, 90:230].all()


def test_weak_contrast_is_not_blur():
    image = overview()
    mean = image[PIECE].mean((0, 1))
    image[PIECE] = mean + 0.15 * (image[PIECE] - mean)
    tissue = find_tissue(image, MPP)
    assert not tissue.blurred.any()
    assert inner(tissue.mask).all()


def test_jpeg_is_not_blur(tmp_path):
    Image.fromarray(overview()).save(tmp_path / "a.jpg", quality=50)
    tissue = find_tissue(np.asarray(Image.open(tmp_path / "a.jpg")), MPP)
    assert not tissue.blurred.any()
    assert inner(tissue.mask).all()


def test_threshold_after_otsu():
    counts = np.zeros(256, np.int64)
    counts[[25, 179]] = 900, 100  # values of 0.1 and 0.7
    assert 0.1 < otsu_threshold(counts) < 0.7
    assert 0 <= otsu_threshold(np.zeros(256, np.int64)) <= 1


def with_everything():
    """Pieces, a hole, pens, blur and a border, on glass with a cast."""
    image = overview()
    image[200:280, 80:330] = blurred(stained(80, 250, grain_px=2), 3)
    image[100:160, 150:210] = glass(60, 60)
    picture = Image.fromarray(image)
    ImageDraw.Draw(picture).line([(20, 40), (150, 150), (390, 280)], fill=INKS["green"], width=9)
    image = (np.asarray(picture) * np.array([0.97, 0.96, 0.9])).astype(np.uint8)
    image[:, :20] = 4
    return image


@pytest.mark.parametrize("block_px", [64, 100, 293])
def test_tissue_does_not_depend_on_the_blocks(monkeypatch, block_px):
    image = with_everything()
    whole = find_tissue(image, MPP)
    assert whole.pen.any()
    assert whole.blurred.any()
    monkeypatch.setattr("psamil.slides.tissue.BLOCK_PX", block_px)
    found = find_tissue(image, MPP)
    for name in ("mask", "pen", "blurred"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name), err_msg=name)


def test_white_is_the_median_of_bright_glass():
    image = with_everything()
    low, high = image.min(2), image.max(2)
    clear = (low >= 190) & (low < 254) & (high - low < 0.08 * high)
    expected = np.median(image[clear & (low >= np.percentile(low[clear], 75))], axis=0)
    np.testing.assert_array_equal(_white(image), expected)
    assert expected.max() < 245
    np.testing.assert_array_equal(_white(stained(50, 50)), [255] * 3)


def test_memory_of_a_large_overview_is_small():
    """What is held besides the picture: numbers for blocks, and few bytes per pixel."""
    image = np.tile(with_everything(), (4, 4, 1))
    tracemalloc.start()
    find_tissue(image, MPP)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * image.shape[0] * image.shape[1]


def test_tissue_of_a_slide(tmp_path):
    image = glass(800, 1000)
    image[200:600, 250:750] = stained(400, 500, grain_px=10)
    with open_slide(write_slide(tmp_path / "a.tif", image, mpp=1.0)) as slide:
        assert overview_mpp(slide) == MPP
        tissue = tissue_of(slide)
    assert tissue.mask.shape == (100, 125)
    assert tissue.area_mm2 == pytest.approx(0.4 * 0.5, rel=0.1)


def test_overview_of_a_huge_slide_is_bounded():
    class Huge:
        size_px0, mpp_px0 = (200_000, 100_000), 0.25

    mpp = overview_mpp(Huge())
    assert 200_000 * 100_000 * (0.25 / mpp) ** 2 == pytest.approx(LARGEST_OVERVIEW_PX)
