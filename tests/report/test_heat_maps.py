"""Heat maps: every tile one square of the colour of its score, in place."""

import base64
import io
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from scipy import ndimage

from psamil.errors import DataError, OptionError, ShapeError
from psamil.readers import TilePlaces
from psamil.report.heat_maps import (
    FILE_DPI,
    GAP_IN,
    PANEL_IN,
    ScoredPicture,
    colour_limits,
    heat_maps,
    save_heat_map,
)
from psamil.report.map_panels import cells_of, scale_bar_um
from psamil.report.overviews import Overview

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("matplotlib")
LOW, HIGH = (68, 1, 84), (253, 231, 37)  # ends of viridis
GREEN, RED, INK = (10, 200, 10), (228, 0, 43), (32, 36, 43)


def pixels_of(data) -> np.ndarray:
    return np.asarray(Image.open(data).convert("RGB")).astype(int)


def decoded(figure) -> list[np.ndarray]:
    found = re.findall(r'src="data:image/\w+;base64,([^"]+)"', figure.element)
    return [pixels_of(io.BytesIO(base64.b64decode(data))) for data in found]


def saved(picture, folder, **options) -> np.ndarray:
    save_heat_map(picture, folder / "map.png", **options)
    return pixels_of(folder / "map.png")


def is_colour(picture: np.ndarray, colour: tuple[int, int, int], within: int = 24) -> np.ndarray:
    return np.abs(picture - colour).max(2) < within


def share(picture: np.ndarray, colour: tuple[int, int, int]) -> float:
    return float(is_colour(picture, colour).mean())


def largest(mask: np.ndarray) -> tuple[slice, slice]:
    """Rows and columns of the largest connected area."""
    parts, _ = ndimage.label(mask)
    sizes = np.bincount(parts.ravel())[1:]
    return ndimage.find_objects(parts)[sizes.argmax()]


def ends(of: slice) -> np.ndarray:
    return np.array([of.start, of.stop], dtype=float)


def places(cells, size: float = 1000.0, step: float | None = None, **options) -> TilePlaces:
    corners = np.array(cells, dtype=float) * (step or size)
    return TilePlaces(corners, size, options.pop("unit", "um"), **options)


SQUARE = [(0, 0), (1, 0), (0, 1), (1, 1)]
BLOCK = [(x, y) for y in range(4) for x in range(6)]


def slide(scores, *, green=None, **options) -> ScoredPicture:
    pixels = np.full((40, 40, 3), GREEN if green is None else (255, 255, 255), np.uint8)
    overview = Overview(pixels, (0, 0, 4000, 4000), 0.5)
    arrays = {run: np.array(values, dtype=float) for run, values in scores.items()}
    return ScoredPicture("a slide", places(SQUARE), arrays, overview, **options)


def test_tiles_have_the_colours_of_their_scores():
    (picture,) = decoded(heat_maps([slide({"psa": [0, 0, 0, 1]})], "what it shows"))
    low, high = (share(picture, colour) for colour in (LOW, HIGH))
    assert low > 0.1
    assert 2.4 < low / high < 3.2  # three tiles and one, beside the colour bar
    assert share(picture, GREEN) > 0.2  # the slide itself
    middle = [np.argwhere(is_colour(picture, colour)).mean(0)[0] for colour in (LOW, HIGH)]
    assert middle[1] > middle[0]  # y points down


@pytest.mark.parametrize("shift", [0, 300], ids=["lattice", "free"])
def test_a_tile_is_one_square_in_its_place(shift, tmp_path):
    """Its edges are where its coordinates say, to a pixel, among all tiles."""
    scores = np.zeros(24)
    scores[BLOCK.index((4, 2))] = 1.0
    where = places(BLOCK, unit="steps", size=1.0)
    where.corners[0, 0] -= shift / 1000  # the first tile lies off the lattice, or not
    assert (cells_of(where) is None) == bool(shift)
    picture = saved(ScoredPicture("a", where, {"psa": scores}), tmp_path)
    rows, columns = largest(is_colour(picture, LOW, 3) | is_colour(picture, HIGH, 3))
    tile_rows, tile_columns = largest(is_colour(picture, HIGH, 3))
    width, height = np.ptp(ends(columns)), np.ptp(ends(rows))
    left = shift / 1000
    assert ends(tile_columns) - columns.start == pytest.approx(width * (np.array([4, 5]) + left) / (6 + left), abs=1.01)
    assert ends(tile_rows) - rows.start == pytest.approx(height * np.array([2, 3]) / 4, abs=1.01)
    assert is_colour(picture, HIGH, 3)[tile_rows, tile_columns].all()  # without blur


def test_tile_and_slide_coincide(tmp_path):
    """A mark on the slide and the tile at its place are as far apart as the panels."""
    pixels = np.full((200, 200, 3), 255, np.uint8)
    pixels[100:150, 50:100] = GREEN
    overview = Overview(pixels, (1000, 1000, 3000, 3000), 0.25)  # its scanned area begins at (1000, 1000)
    where = TilePlaces(np.array([[1500.0, 2000.0], [2000.0, 1000.0]]), 500.0, "px0")
    picture = saved(ScoredPicture("a", where, {"psa": np.array([1.0, 0.0])}, overview), tmp_path)
    mark, tile = largest(is_colour(picture, GREEN)), largest(is_colour(picture, HIGH, 3))
    assert ends(tile[0]) == pytest.approx(ends(mark[0]), abs=1.01)
    assert ends(tile[1]) - ends(mark[1]) == pytest.approx((PANEL_IN + GAP_IN) * FILE_DPI, abs=1.01)


def test_blended_tiles_let_the_slide_through(tmp_path):
    opaque, blended = (saved(slide({"psa": [0, 0, 0, 1]}), tmp_path, opacity=o) for o in (1.0, 0.5))
    assert share(opaque, HIGH) > 2 * share(blended, HIGH)
    grey = int((10 * 0.299 + 200 * 0.587 + 10 * 0.114) * 0.65 + 255 * 0.35)
    half = tuple((c + grey) // 2 for c in HIGH)
    assert share(blended, half) > 0.03
    with pytest.raises(OptionError, match="opacity"):
        saved(slide({"psa": [0, 0, 0, 1]}), tmp_path, opacity=2)


def test_scale_bar_has_its_length(tmp_path):
    picture = saved(ScoredPicture("a", places(BLOCK), {"psa": np.arange(24.0)}), tmp_path)  # 6 mm wide
    ink = is_colour(picture, INK, 4)
    runs = [np.diff(np.flatnonzero(np.diff(np.pad(row, 1).astype(int))))[::2].max(initial=0) for row in ink]
    assert max(runs) == pytest.approx(PANEL_IN * FILE_DPI / 6, abs=2)  # 1 mm
    assert scale_bar_um(6000) == 1000
    assert scale_bar_um(40_000) == 10_000
    assert scale_bar_um(300) == 50


def test_svg_keeps_text_and_one_pixel_per_tile(tmp_path):
    scores = {"a & <b>": np.arange(24.0)}
    save_heat_map(ScoredPicture("named", places(BLOCK, unit="px0", mpp=0.5), scores), tmp_path / "map.svg")
    root = ElementTree.parse(tmp_path / "map.svg").getroot()
    texts = ["".join(e.itertext()) for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"named", "a & <b>", "500 µm", "0", "11.5", "23"} <= set(texts)
    hrefs = [e.get("{http://www.w3.org/1999/xlink}href") for e in root.iter("{http://www.w3.org/2000/svg}image")]
    images = [pixels_of(io.BytesIO(base64.b64decode(href.split(",", 1)[1]))) for href in hrefs]
    (tiles,) = [image for image in images if image.shape[:2] == (4, 6)]
    rows = [tiles, tiles[::-1]]  # SVG may hold the image upside down
    assert any((np.abs(image[0, 0] - LOW).max() < 3 and np.abs(image[3, 5] - HIGH).max() < 3) for image in rows)
    with pytest.raises(OptionError, match=r"\.png or \.svg"):
        save_heat_map(slide({"psa": [0, 0, 0, 1]}), tmp_path / "map.bmp")


def test_colours_mean_the_same_in_all_slides_of_a_run():
    upper, lower = decoded(heat_maps([slide({"psa": [0, 0, 0, 0]}), slide({"psa": [9, 9, 9, 9]})], ""))
    assert share(upper, LOW) > 0.1
    assert share(lower, LOW) < 0.01
    assert share(lower, HIGH) > 0.1


def test_one_odd_tile_does_not_darken_a_map():
    scores = np.append(np.linspace(0, 1, 1000), 1e6)
    where = TilePlaces(np.stack([np.arange(1001.0), np.zeros(1001)], axis=1), 1.0, "steps")
    low, high = colour_limits([ScoredPicture("a", where, {"psa": scores})])["psa"]
    assert low == pytest.approx(0.005, abs=0.002)
    assert high == pytest.approx(0.995, abs=0.002)


def test_percentiles(tmp_path):
    limits = colour_limits([slide({"psa": [0, 0, 0, 5]})], "percentile")
    assert limits == {"psa": (0, 100)}
    with pytest.raises(OptionError, match="scale"):
        colour_limits([], "log")
    raw, ranked = (
        saved(ScoredPicture("a", places(SQUARE), {"psa": np.array([0, 0.01, 0.02, 1])}), tmp_path, scale=scale)
        for scale in ("raw", "percentile")
    )
    third = (49, 104, 142)  # viridis at 1/3
    assert share(raw, third) < 0.02 < share(ranked, third)


def test_labelled_tiles_have_a_frame(tmp_path):
    labels = np.array([True, True, False, False])
    with_frame, without = (
        saved(slide({"psa": [0, 1, 0, 1], "abmil": [0, 1, 0, 1]}, labelled=labelled), tmp_path)
        for labelled in (labels, None)
    )
    assert share(with_frame, RED) > 0.001 > share(without, RED)
    rows, columns = largest(is_colour(with_frame, RED))
    inside = is_colour(with_frame, RED)[rows.start + 20 : rows.stop - 20, columns.start + 20 : columns.stop - 20]
    assert not inside.any()  # the edge that two labelled tiles share is not drawn
    assert np.ptp(ends(columns)) / np.ptp(ends(rows)) == pytest.approx(2, abs=0.1)


def test_overlapping_tiles_lie_in_their_middle():
    overlapping = places(BLOCK, size=512.0, step=256.0)
    cells = cells_of(overlapping)
    assert (cells.step, cells.corner) == (256.0, (128.0, 128.0))
    assert cells.columns.max() == 5
    assert cells_of(places(BLOCK, size=100.0, step=256.0)) is None  # gaps between tiles are left as gaps


def test_what_does_not_fit_is_refused():
    with pytest.raises(ShapeError, match=r"'psa' must be \(4,\)"):
        slide({"psa": [0, 1]})
    with pytest.raises(ShapeError, match="labels"):
        slide({"psa": [0, 1, 2, 3]}, labelled=np.array([True]))
    overview = Overview(np.zeros((4, 4, 3), np.uint8), (0, 0, 4, 4), 0.5)
    with pytest.raises(OptionError, match="no known place"):
        ScoredPicture("a", places(SQUARE, unit="steps"), {}, overview)


def test_overview_shows_the_scanned_area(tmp_path):
    picture = np.full((300, 500, 3), 255, np.uint8)
    picture[100:200, 300:400] = GREEN
    Image.fromarray(picture).save(tmp_path / "slide.png")
    overview = Overview.of(tmp_path / "slide.png", 0.5)
    assert overview.extent_px0 == (0, 0, 500, 300)
    assert overview.extent_in("um") == (0, 0, 250, 150)
    found = np.argwhere(is_colour(overview.pixels.astype(int), GREEN))
    scale = overview.pixels.shape[1] / 500
    assert found.min(0) / scale == pytest.approx([100, 300], abs=1)


def test_a_slide_that_does_not_tell_its_resolution_has_an_overview(tmp_path):
    Image.fromarray(np.full((300, 500, 3), 200, np.uint8)).save(tmp_path / "slide.png")
    overview = Overview.of(tmp_path / "slide.png")
    assert overview.mpp is None
    assert overview.extent_px0 == (0, 0, 500, 300)
    assert (overview.has_place_in("px0"), overview.has_place_in("um")) == (True, False)
    (tmp_path / "broken.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"broken\.png"):
        Overview.of(tmp_path / "broken.png")
