"""Overlays: every tile has its colour exactly where it is, at every level."""

import numpy as np
import pytest
import tifffile
from matplotlib import colormaps

from psamil.errors import OptionError
from psamil.readers import TilePlaces
from psamil.report import overlays
from psamil.slides.slide import open_slide
from tests.slides.made_slides import draw


def painted(slide, places, percentiles, path):
    overlays.write_overlay(path, slide, places, percentiles)
    with tifffile.TiffFile(path) as file:
        return [page.asarray() for page in file.pages]


@pytest.fixture
def slide(tmp_path):
    draw(tmp_path / "s.tif", side_px=1024, seed=1)
    with open_slide(tmp_path / "s.tif") as slide:
        yield slide


@pytest.mark.parametrize("longest_px", [8192, 512])
def test_tiles_have_their_colours_and_nothing_else_has(slide, tmp_path, monkeypatch, longest_px):
    monkeypatch.setattr(overlays, "LONGEST_PX", longest_px)
    monkeypatch.setattr(overlays, "SMALLEST_LEVEL_PX", 256)
    step = 64
    places = TilePlaces(np.array([[128.0, 64.0], [192.0, 64.0], [512.0, 640.0]]), step, "px0", slide.mpp_px0)
    percentiles = np.array([0.0, 50.0, 100.0])
    levels = painted(slide, places, percentiles, tmp_path / "o.tiff")
    downsample = 1024 // levels[0].shape[0]
    assert downsample == (1 if longest_px == 8192 else 2)
    assert levels[-1].shape[0] == 256
    for level in levels:
        d = 1024 // level.shape[0]
        before = slide.overview(slide.mpp_px0 * d)
        covered = np.zeros(level.shape[:2], dtype=bool)
        for (x, y), percentile in zip(places.corners.astype(int), percentiles, strict=True):
            there = np.s_[y // d : (y + step) // d, x // d : (x + step) // d]
            covered[there] = True
            colour = 255 * np.array(colormaps["viridis"](percentile / 100)[:3])
            grey = before[there] @ np.array([0.299, 0.587, 0.114])
            expected = 0.5 * grey[..., None] + 0.5 * colour
            assert np.abs(level[there] - expected).mean() < 4
            if level is levels[0]:
                assert np.abs(level[there] - expected).max() <= 1.5
        if level is levels[0]:
            assert (level[~covered] == before[~covered]).all()
        else:  # smaller levels are means of larger ones
            finer = levels[[other is level for other in levels].index(True) - 1]
            mean = finer.reshape(len(level), 2, len(level), 2, 3).mean((1, 3))
            assert np.abs(level - mean).max() <= 1


def test_other_readers_open_it(slide, tmp_path):
    overlays.write_overlay(
        tmp_path / "o.tiff", slide, TilePlaces(np.zeros((1, 2)), 64, "px0", slide.mpp_px0), np.zeros(1)
    )
    with open_slide(tmp_path / "o.tiff") as written:
        assert written.size_px0 == slide.size_px0
        assert written.mpp_px0 == pytest.approx(slide.mpp_px0)
        assert written.level_count == 2


def test_tiles_that_overlap_are_painted_once(slide, tmp_path):
    corners = np.array([[x, 64.0] for x in (0, 32, 64, 96)])
    (level, *_) = painted(slide, TilePlaces(corners, 64, "px0"), np.full(4, 100.0), tmp_path / "o.tiff")
    before = slide.overview(slide.mpp_px0)
    changed = (level != before).any((0, 2))
    assert changed[16:144].all()
    assert not changed[160:].any()


def test_tiles_without_a_place(slide, tmp_path):
    with pytest.raises(OptionError, match="are in steps"):
        overlays.write_overlay(tmp_path / "o.tiff", slide, TilePlaces(np.zeros((1, 2)), 1, "steps"), np.zeros(1))
