"""The picture of a slide lies exactly where its places say, at every zoom."""

import io
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tifffile
from PIL import Image

from psamil.errors import DataError
from psamil.serve import pictures
from psamil.serve.pictures import OVERLAP_PX, TILE_PX, Pictures, Pyramid
from tests.slides.drawn import stained, wave_values, waves, write_offset_slide, write_slide

OFFSET, WHOLE = (211, 97), (1400, 1300)


def write_uneven_slide(path, image):
    """Its second level is 2.37 times as coarse as the first, by nearest centres of smooth waves."""
    height, width = image.shape[0], image.shape[1]
    small = round(width / 2.37), round(height / 2.37)
    places = [(np.arange(side) + 0.5) * full / side for side, full in zip(small, (width, height), strict=True)]
    options = dict(tile=(128, 128), photometric="rgb", metadata=None)
    options |= dict(resolution=(20000, 20000), resolutionunit="CENTIMETER")
    with tifffile.TiffWriter(path) as file:
        file.write(image, **options)
        file.write(wave_values(*places), subfiletype=1, **options)
    return path


@pytest.fixture(scope="module", params=["halves", "uneven", "offset"])
def wavy(request, tmp_path_factory):
    """A slide, and the place of its pixel (0, 0)."""
    folder, image = tmp_path_factory.mktemp("pictures"), waves(1103, 1201)
    if request.param == "halves":
        return write_slide(folder / "slide.tif", image, levels=3), (0, 0)
    if request.param == "uneven":
        return write_uneven_slide(folder / "slide.tif", image), (0, 0)
    return write_offset_slide(folder / "slide.scn", image[:1001, :1101], OFFSET, WHOLE), OFFSET


def decoded(jpeg):
    return np.asarray(Image.open(io.BytesIO(jpeg))).astype(int)


@pytest.fixture
def opened():
    made = Pictures()
    yield made
    made.close()


@pytest.fixture
def lossless(monkeypatch):
    """So that what is measured is geometry."""

    def png(pixels):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG", compress_level=1)
        return file.getvalue()

    monkeypatch.setattr(pictures, "_jpeg", png)


def test_every_level_lies_where_level_0_does(wavy, opened, lossless):
    path, origin = wavy
    pyramid = opened.pyramid(path)
    for level in range(pyramid.levels - 4, pyramid.levels):  # coarser ones are coarser than the waves
        d = pyramid.downsample(level)
        width, height = pyramid.size(level)
        for column in range(-(-width // TILE_PX)):
            for row in range(-(-height // TILE_PX)):
                got = decoded(opened.pyramid_tile(path, level, column, row))
                left, top = (max(0, i * TILE_PX - OVERLAP_PX) for i in (column, row))
                x, y = (np.arange(side) + 0.5 for side in (got.shape[1], got.shape[0]))
                x, y = (x + left) * d - origin[0], (y + top) * d - origin[1]
                scanned = pyramid.bounds[2:]
                inside_x, inside_y = ((p > 4 * d) & (p < side - 4 * d) for p, side in zip((x, y), scanned, strict=True))
                if not (inside_x.any() and inside_y.any()):
                    continue
                error = np.abs(got[inside_y][:, inside_x] - wave_values(x[inside_x], y[inside_y]))
                # The waves change by 1.35 per pixel of level 0, so this is half a pixel of the level. Level 0 is exact;
                # OpenSlide puts the others of an offset slide at whole pixels of theirs.
                assert error.mean() < (0.5 if d == 1 else 0.5 + 0.7 * d), (level, column, row)


@pytest.mark.parametrize("d", [1, 2, 4, 8])
def test_a_shift_by_one_pixel_would_be_seen(d):
    x = (np.arange(800 // d) + 0.5) * d
    assert np.abs(wave_values(x + d, x + d).astype(int) - wave_values(x, x)).mean() > 0.5 + 0.7 * d


def test_tiles_of_a_level_make_up_its_size(wavy, opened):
    path, _ = wavy
    pyramid = opened.pyramid(path)
    assert pyramid.size(pyramid.levels - 1) == (pyramid.width, pyramid.height)
    assert pyramid.size(0) == (1, 1)
    for level in range(pyramid.levels):
        width, height = pyramid.size(level)
        columns, rows = -(-width // TILE_PX), -(-height // TILE_PX)
        widths = [decoded(opened.pyramid_tile(path, level, c, 0)).shape[1] for c in range(columns)]
        heights = [decoded(opened.pyramid_tile(path, level, 0, r)).shape[0] for r in range(rows)]
        assert sum(widths) == width + 2 * OVERLAP_PX * (columns - 1)
        assert sum(heights) == height + 2 * OVERLAP_PX * (rows - 1)
        assert opened.pyramid_tile(path, level, columns, 0) is None
        assert opened.pyramid_tile(path, level, 0, rows) is None
    assert opened.pyramid_tile(path, pyramid.levels, 0, 0) is None


def test_tile_with_its_margin(wavy, opened, lossless):
    path, origin = wavy
    x0, y0, size = origin[0] + 256, origin[1] + 320, 128
    got = decoded(opened.tile_view(path, x0, y0, size))
    places = (np.arange(len(got)) + 0.5) * size * 1.5 / len(got) - size / 4
    expected = wave_values(x0 - origin[0] + places, y0 - origin[1] + places)
    assert got.shape == expected.shape
    assert np.abs(got - expected).mean() < 1.0


def test_levels_of_small_and_odd_sizes():
    assert Pyramid(1, 1, (0, 0, 1, 1), None).levels == 1
    assert Pyramid(2, 1, (0, 0, 2, 1), None).levels == 2
    assert Pyramid(1024, 3, (0, 0, 1024, 3), None).levels == 11
    assert Pyramid(1025, 3, (0, 0, 1025, 3), None).levels == 12
    assert Pyramid(1025, 3, (0, 0, 1025, 3), None).size(9) == (257, 1)


@pytest.mark.parametrize(("side", "first"), [(1, 0), (510, 9), (511, 8), (1020, 9), (100_000, 9)])
def test_the_first_level_worth_asking_for_is_the_last_in_one_tile(side, first):
    assert Pyramid(side, 1, (0, 0, side, 1), None).to_json()["first_level"] == first


@pytest.mark.parametrize("place", [(-1, 0, 0), (0, -1, 0), (0, 0, -1), (99, 0, 0), (3, 10**8, 0), (3, 0, 10**8)])
def test_no_tile_outside(place):
    assert Pyramid(1025, 3000, (0, 0, 1025, 3000), None).box(*place) is None


def test_threads_share_slides(tmp_path, opened):
    image = stained(700, 1300)
    paths = [write_slide(tmp_path / f"{name}.ome.tif", image, levels=1) for name in "abcdefg"]
    alone = Pictures()
    expected = [alone.pyramid_tile(paths[0], 11, column, 1) for column in range(3)]
    alone.close()
    barrier = threading.Barrier(4)

    def read(worker):
        barrier.wait(10)
        return [opened.pyramid_tile(path, 11, column, 1) for path in paths for column in range(3)]

    with ThreadPoolExecutor(4) as pool:
        for tiles in pool.map(read, range(4)):
            assert tiles == expected * len(paths)
    assert len(opened._idle) <= pictures.IDLE_HANDLES


def test_encoded_tiles_are_kept(wavy, opened, monkeypatch):
    path, _ = wavy
    first = opened.pyramid_tile(path, 9, 0, 0)
    monkeypatch.setattr(opened, "_read_tile", lambda *args: pytest.fail("read again"))
    assert opened.pyramid_tile(path, 9, 0, 0) is first


def test_slide_without_resolution_can_be_shown(tmp_path, opened):
    path = write_slide(tmp_path / "slide.tif", stained(300, 400), mpp=None)
    assert opened.pyramid(path).mpp is None
    assert decoded(opened.pyramid_tile(path, 9, 0, 0)).shape == (300, 400, 3)


def test_damaged_slide(tmp_path, opened):
    path = tmp_path / "slide.tif"
    path.write_bytes(b"II*\0 but no more")
    with pytest.raises(DataError, match=r"slide\.tif"):
        opened.pyramid(path)
