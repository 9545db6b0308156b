"""Drawn slides: only the arrangement of nests tells the classes apart, and the files are what other tools expect."""

import json
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from scipy.ndimage import label

from psamil.cohort.simulation import write_trident_bag
from psamil.errors import DataError, OptionError
from psamil.readers import TilePlaces
from psamil.slides.lesions import lesions_of, read_outlines
from psamil.slides.procedural import APART_STEPS, MPP, NESTS, draw_cells, draw_slides
from psamil.slides.procedural_sprites import CELL_PX
from psamil.slides.procedural_tissue import FIELD_PER_CELL, GLANDS, STROMA, TUMOUR, Palette, Stain, paint
from psamil.slides.slide import open_slide
from psamil.slides.tile_labels import label_slide, label_tiles


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("drawn") / "cohort"
    assert draw_slides(out, slides=2, tiles=90, sites=1) == out / "labels.csv"
    return out


@pytest.mark.parametrize("seed", range(5))
def test_classes_differ_in_where_nests_lie_alone(seed):
    """From the same random numbers, slides of both classes have as many cells of every kind."""
    (together, outline, lesion), (apart, same_outline, nothing) = (
        draw_cells(90, positive, np.random.default_rng(seed)) for positive in (True, False)
    )
    assert np.array_equal(outline, same_outline)
    assert Counter(together.ravel().tolist()) == Counter(apart.ravel().tolist())
    assert len(nothing) == 0
    assert NESTS[0] <= len(lesion) <= NESTS[1]
    assert label(together == TUMOUR)[1] == 1
    assert {tuple(cell) for cell in lesion} == {tuple(cell) for cell in np.argwhere(together == TUMOUR)}
    single = np.argwhere(apart == TUMOUR)
    distances = np.hypot(*(single[:, None] - single[None]).transpose(2, 0, 1))
    assert distances[~np.eye(len(single), dtype=bool)].min() > APART_STEPS


def test_a_piece_stays_in_its_cell():
    """Otherwise tiles beside a lesion would look different from others."""
    cells = np.full((3, 3), STROMA)
    outline = np.ones((3 * FIELD_PER_CELL, 3 * FIELD_PER_CELL), dtype=np.float32)
    palette, stain = Palette.draw(0), Stain.draw(np.random.default_rng(0), 0.0)
    pictures = []
    for kind in (STROMA, TUMOUR, GLANDS):
        cells[1, 1] = kind
        pictures.append(paint(cells, outline, palette, stain, np.random.default_rng(1)).astype(int))
    middle = (slice(CELL_PX, 2 * CELL_PX),) * 2
    for picture in pictures[1:]:
        changed = (picture != pictures[0]).any(2)
        assert changed[middle].mean() > 0.1
        changed[middle] = False
        assert not changed.any()


def test_colours_are_those_of_haematoxylin_and_eosin():
    palette, stain = Palette.draw(0), Stain.draw(np.random.default_rng(0), 0.0)
    outline = np.ones((FIELD_PER_CELL, FIELD_PER_CELL), dtype=np.float32)
    stroma, tumour, glass = (
        paint(np.array([[kind]]), inside * outline, palette, stain, np.random.default_rng(0)).reshape(-1, 3).mean(0)
        for kind, inside in ((STROMA, 1), (TUMOUR, 1), (STROMA, -1))
    )
    red, green, blue = stroma
    assert red > blue > green  # pink
    assert tumour.mean() < stroma.mean() - 10
    assert tumour[0] - tumour[2] < red - blue - 3  # bluer
    assert glass.min() == glass.max() > 230


def test_files_are_those_of_a_scanner_and_of_qupath(folder):
    table = pd.read_csv(folder / "labels.csv")
    assert sorted(table["label"]) == ["negative", "positive"]
    for slide, class_name in zip(table["slide_id"], table["label"], strict=True):
        with open_slide(folder / "slides" / f"{slide}.tiff") as opened:
            assert opened.mpp_px0 == pytest.approx(MPP)
            assert all(side % CELL_PX == 0 for side in opened.size_px0)
        assert (folder / "lesions" / f"{slide}.geojson").exists() == (class_name == "positive")
    (outline,) = (folder / "lesions").iterdir()
    (feature,) = json.loads(outline.read_text())["features"]
    assert feature["properties"]["objectType"] == "annotation"
    assert feature["properties"]["classification"]["name"] == "Tumor"


def test_tiles_of_the_lesion_are_labelled(folder, tmp_path):
    """All cells of both slides: those of the lesion are covered wholly, the others not at all."""
    (outline,) = (folder / "lesions").iterdir()
    y, x = (side.ravel() * CELL_PX for side in np.mgrid[0:16, 0:16])
    corners = np.stack([x, y], 1)
    lesions = lesions_of(read_outlines(outline), mpp=None)
    cells = TilePlaces(corners.astype(float), CELL_PX, "px0")
    covered = [label_slide(cells, lesions, share).positive for share in (0.001, 0.999)]
    assert np.array_equal(*covered)
    assert NESTS[0] <= covered[0].sum() <= NESTS[1]
    step_px0 = 512  # of these files
    for slide in ("slide_000", "slide_001"):
        write_trident_bag(tmp_path / "features", "drawn", slide, np.zeros((256, 4), np.float32), corners)
    label_tiles(tmp_path / "features", folder / "lesions", tmp_path / "labels", unannotated="normal")
    positive = outline.stem
    negative = ({"slide_000", "slide_001"} - {positive}).pop()
    assert not np.load(tmp_path / "labels" / f"{negative}.npz")["positive"].any()
    expected = label_slide(TilePlaces(corners.astype(float), step_px0, "px0"), lesions, 0.5).positive
    assert expected.any()
    assert np.array_equal(np.load(tmp_path / "labels" / f"{positive}.npz")["positive"], expected)


def test_the_same_seed_gives_the_same_slides(folder, tmp_path):
    draw_slides(tmp_path / "again", slides=2, tiles=90, sites=1)
    draw_slides(tmp_path / "other", slides=2, tiles=90, sites=1, seed=1)
    for file in ("slides/slide_000.tiff", "labels.csv"):
        assert (folder / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    assert (folder / "slides/slide_000.tiff").read_bytes() != (
        tmp_path / "other" / "slides/slide_000.tiff"
    ).read_bytes()


@pytest.mark.parametrize(
    ("options", "named"), [({"tiles": 20}, "tiles"), ({"slides": 1}, "slides"), ({"tile_spread": 2.0}, "tile_spread")]
)
def test_options_out_of_bounds_are_named(options, named, tmp_path):
    with pytest.raises(OptionError, match=named):
        draw_slides(tmp_path / "new", **options)


def test_nothing_is_overwritten(folder):
    with pytest.raises(DataError, match="not empty"):
        draw_slides(folder)
