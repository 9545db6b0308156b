"""Pyramids that we write, opened by other programs' readers."""

import numpy as np
import pytest

from psamil.slides.pyramid import SMALLEST_LEVEL_PX, write_pyramid
from psamil.slides.slide import open_slide


@pytest.fixture(scope="module")
def image():
    """Blocks of 64 px of one colour each, which JPEG keeps; sides that tiles do not divide."""
    random = np.random.default_rng(0)
    colours = random.integers(40, 220, (11, 20, 1)).repeat(3, 2)  # grey: chrominance is halved
    return colours.repeat(64, 0).repeat(64, 1).astype(np.uint8)[:-7, :-13]


def test_openslide_reads_size_resolution_and_pixels(image, tmp_path):
    openslide = pytest.importorskip("openslide")
    write_pyramid(tmp_path / "slide.tiff", image, 0.25)
    with openslide.OpenSlide(tmp_path / "slide.tiff") as slide:
        assert slide.properties["openslide.vendor"] == "generic-tiff"
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(0.25)
        height, width = image.shape[:2]
        assert slide.dimensions == (width, height)
        assert slide.level_dimensions[1:] == ((634, 349), (317, 175))
        assert max(slide.level_dimensions[-2]) > SMALLEST_LEVEL_PX
        read = np.asarray(slide.read_region((0, 0), 0, slide.dimensions))[..., :3].astype(int)
        assert np.abs(read - image).max() <= 6
        assert np.abs(read - image).mean() < 1
        half = np.asarray(slide.read_region((0, 0), 1, slide.level_dimensions[1]))[..., :3].astype(int)
        assert np.abs(half[8::32, 8::32] - image[16::64, 16::64]).max() <= 6


def test_tifffile_sees_tiles_and_levels(image, tmp_path):
    tifffile = pytest.importorskip("tifffile")
    write_pyramid(tmp_path / "slide.tiff", image, 0.5)
    with tifffile.TiffFile(tmp_path / "slide.tiff") as file:
        first, *others = file.pages
        assert first.is_tiled
        assert not first.is_reduced
        assert others
        assert all(page.is_reduced for page in others)
        assert all(page.is_tiled for page in others)


def test_our_reader_needs_no_option(image, tmp_path):
    write_pyramid(tmp_path / "slide.tiff", image, 0.5)
    with open_slide(tmp_path / "slide.tiff") as slide:
        assert slide.mpp_px0 == pytest.approx(0.5)
        assert abs(slide.read(64, 64, 32, 1.0).astype(int) - image[64, 64]).max() <= 6
