"""The lattice: sides, steps, places, and the share of tissue."""

import numpy as np
import openslide
import pytest

from psamil.errors import OptionError
from psamil.slides.slide import open_slide
from psamil.slides.tiling import TileGrid, lay_tiles
from psamil.slides.tissue import Tissue, tissue_of
from tests.real_data import DATA
from tests.slides.drawn import glass, stained, write_offset_slide, write_slide

SLIDES = DATA / "wsi"


class Blank:
    """As much of a slide as a lattice needs."""

    def __init__(self, size_px0, mpp_px0=0.5, bounds_px0=None):
        self.size_px0, self.mpp_px0, self.bounds_px0 = size_px0, mpp_px0, bounds_px0 or (0, 0, *size_px0)


def marked(mask, mpp=8.0):
    nothing = np.zeros_like(mask)
    return Tissue(mask, mpp, nothing, nothing)


EVERYWHERE = marked(np.ones((10, 10), bool))


@pytest.mark.parametrize(
    ("grid", "mpp_px0", "size", "step"),
    [
        (TileGrid(), 0.5, 224, 224),
        (TileGrid(), 0.25, 448, 448),
        (TileGrid(overlap_px=56), 0.25, 448, 336),
        (TileGrid(), 0.2527, 443, 443),
        (TileGrid(mpp=1.0, size_px=256), 0.499, 513, 513),
        (TileGrid(size_um=256), 0.5, 512, 512),
        (TileGrid(size_um=112, overlap_px=112), 0.25, 448, 224),
    ],
    ids=["same", "twice", "overlap", "fraction", "coarse", "um", "um overlap"],
)
def test_sides_and_steps(grid, mpp_px0, size, step):
    slide = Blank((5000, 4000), mpp_px0)
    assert (grid.size_px0(slide), grid.step_px0(slide)) == (size, step)
    tiles = lay_tiles(slide, EVERYWHERE, grid)
    assert (tiles.size_px0, tiles.step_px0) == (size, step)
    assert tiles.mpp * tiles.size_px == pytest.approx(size * mpp_px0)  # a tile is read as it was laid
    assert tiles.mpp == pytest.approx(grid.mpp, rel=0.5 / size)


def test_micrometres_make_pixels():
    assert TileGrid(size_um=256, mpp=0.5).size_px == 512
    assert TileGrid(size_um=256, mpp=8 / 7).size_px == 224


@pytest.mark.parametrize(
    "options",
    [
        dict(mpp=0),
        dict(mpp=float("nan")),
        dict(size_px=0),
        dict(size_um=-1.0),
        dict(size_um=0.1),
        dict(overlap_px=224),
        dict(overlap_px=-1),
        dict(least_tissue=1.1),
        dict(least_tissue=-0.1),
    ],
    ids=str,
)
def test_impossible_grids(options):
    with pytest.raises(OptionError):
        TileGrid(**options)


def test_one_lattice_row_by_row():
    tiles = lay_tiles(Blank((1000, 700)), EVERYWHERE, TileGrid())
    expected = [(x, y) for y in (0, 224, 448) for x in (0, 224, 448, 672)]
    np.testing.assert_array_equal(tiles.coords_px0, expected)
    assert tiles.coords_px0.dtype == np.int64
    assert tiles.tissue_share == pytest.approx(np.ones(12))
    assert len(tiles) == 12


def test_lattice_begins_at_the_scanned_area():
    slide = Blank((4000, 3000), bounds_px0=(1003, 601, 700, 500))
    tiles = lay_tiles(slide, EVERYWHERE, TileGrid())
    expected = [(x, y) for y in (601, 825) for x in (1003, 1227, 1451)]
    np.testing.assert_array_equal(tiles.coords_px0, expected)


@pytest.mark.parametrize("shape", [(10, 10), (13, 7), (100, 91), (600, 800)], ids=str)
def test_share_of_tissue_is_exact(shape):
    """Against the sum over level-0 pixels, each of which is a part of one pixel of the mask or of several."""
    rng = np.random.default_rng(1)
    mask = rng.random(shape) < 0.5
    slide = Blank((800, 600))
    tiles = lay_tiles(slide, marked(mask), TileGrid(size_px=97, overlap_px=10, least_tissue=0))
    fine = 8
    rows = np.minimum(((np.arange(600 * fine) + 0.5) / fine * shape[0] / 600).astype(int), shape[0] - 1)
    columns = np.minimum(((np.arange(800 * fine) + 0.5) / fine * shape[1] / 800).astype(int), shape[1] - 1)
    for (x, y), share in zip(tiles.coords_px0[::7], tiles.tissue_share[::7], strict=True):
        part = mask[np.ix_(rows[y * fine : (y + 97) * fine], columns[x * fine : (x + 97) * fine])]
        assert share == pytest.approx(part.mean(), abs=2e-3)


def test_least_tissue():
    mask = np.zeros((4, 4), bool)
    mask[0, 0] = True  # the first quarter of the first of four tiles
    slide = Blank((448, 448))
    assert len(lay_tiles(slide, marked(mask), TileGrid(least_tissue=0.25))) == 1
    assert len(lay_tiles(slide, marked(mask), TileGrid(least_tissue=0.26))) == 0
    assert len(lay_tiles(slide, marked(mask), TileGrid(least_tissue=0))) == 4


def test_slide_without_tissue():
    tiles = lay_tiles(Blank((448, 448)), marked(np.zeros((4, 4), bool)), TileGrid())
    assert tiles.coords_px0.shape == (0, 2)
    assert len(tiles) == 0


def test_slide_smaller_than_a_tile(tmp_path):
    image = stained(100, 150)
    with open_slide(write_slide(tmp_path / "a.tif", image, levels=1)) as slide:
        tiles = lay_tiles(slide, tissue_of(slide), TileGrid())
        np.testing.assert_array_equal(tiles.coords_px0, [(0, 0)])
        tile = slide.read(0, 0, tiles.size_px, tiles.mpp)
    np.testing.assert_array_equal(tile[:100, :150], image)
    assert (tile[100:] == 255).all()
    assert (tile[:, 150:] == 255).all()


def test_slide_of_one_tile_without_tissue(tmp_path):
    with open_slide(write_slide(tmp_path / "a.tif", glass(224, 224), levels=1)) as slide:
        assert len(lay_tiles(slide, tissue_of(slide), TileGrid())) == 0


def test_tiles_on_an_offset_scan(tmp_path):
    image = glass(1024, 1280)
    image[300:900, 400:1100] = stained(600, 700)
    path = write_offset_slide(tmp_path / "a.scn", image, (1000, 600), (4096, 2048))
    with open_slide(path) as slide:
        tiles = lay_tiles(slide, tissue_of(slide), TileGrid(size_px=128))
        assert ((tiles.coords_px0 - (1000, 600)) % 128 == 0).all()
        x, y = (tiles.coords_px0 - (1000, 600)).T
        assert (x.min(), y.min(), x.max(), y.max()) == (384, 256, 1024, 768)
        for (x0, y0), share in zip(tiles.coords_px0, tiles.tissue_share, strict=True):
            x, y = x0 - 1000, y0 - 600
            np.testing.assert_array_equal(slide.read(x0, y0, 128, tiles.mpp), image[y : y + 128, x : x + 128])
            inside = max(0, min(x + 128, 1100) - max(x, 400)) * max(0, min(y + 128, 900) - max(y, 300)) / 128**2
            assert share == pytest.approx(inside, abs=0.2)


@pytest.mark.skipif(not SLIDES.is_dir(), reason="no data folder; PSAMIL_DATA names it")
@pytest.mark.parametrize(
    ("name", "mpp", "least", "most"),
    [("CMU-1-Small-Region.svs", None, 50, 65), ("TCGA-CR-7395-01A-01-TS1.svs", 0.5, 190, 215)],
    ids=["cmu", "tcga"],
)
def test_every_tile_of_real_slides(name, mpp, least, most):
    """Read again with OpenSlide alone: the same pixels at the scan's resolution, nearly their mean at coarser ones."""
    with openslide.OpenSlide(SLIDES / name) as reference:
        whole = np.asarray(reference.read_region((0, 0), 0, reference.dimensions).convert("RGB"))
    with open_slide(SLIDES / name, mpp) as slide:
        tiles = lay_tiles(slide, tissue_of(slide), TileGrid(mpp=slide.mpp_px0))
        assert tiles.size_px0 == 224
        assert least <= len(tiles) <= most
        for i, (x, y) in enumerate(tiles.coords_px0.tolist()):
            region = whole[y : y + 224, x : x + 224]
            np.testing.assert_array_equal(slide.read(x, y, 224, tiles.mpp), region)
            for k in (2, 4) if i % 10 == 0 else ():
                tile = slide.read(x, y, 224 // k, k * tiles.mpp)
                averaged = region.reshape(224 // k, k, 224 // k, k, 3).mean((1, 3))
                assert np.corrcoef(tile.ravel(), averaged.ravel())[0, 1] > 0.97


@pytest.mark.parametrize("overlap_px", [0, 100])
def test_shares_do_not_depend_on_how_many_rows_are_summed_together(monkeypatch, overlap_px):
    mask = np.random.default_rng(0).random((61, 83)) < 0.5
    slide, grid = Blank((8300, 6100), bounds_px0=(130, 70, 8000, 5900)), TileGrid(least_tissue=0, overlap_px=overlap_px)
    found = []
    for rows in (1, 3, 1000):
        monkeypatch.setattr("psamil.slides.tiling.ROWS_TOGETHER", rows)
        found.append(lay_tiles(slide, marked(mask), grid).tissue_share)
    assert len(found[0]) > 500
    np.testing.assert_allclose(found[0], found[2], atol=1e-12)
    np.testing.assert_allclose(found[1], found[2], atol=1e-12)
