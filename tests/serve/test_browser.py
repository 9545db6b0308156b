"""The viewer in Chromium: what is on the screen, measured in its pixels, and a walk through all that it offers."""

import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from tests.serve.browser import (
    BOUNDS_PX0,
    COLUMNS,
    START_PX0,
    TILE_PX0,
    browser,
    chromium,
    make_study,
    served,
    tile_of,
    until,
)

ZOOMS = (2.0, 1.0, 0.61, 0.5, 0.25, 0.125, 0.083)  # screen pixels per level-0 pixel
TILES, HEADS = 200_000, 8
MOST_BYTES = 8 << 20
SHOWN = "performance.getEntriesByName('show').length > 0"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    chromium()
    folder = tmp_path_factory.mktemp("viewer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("PSAMIL_COMPILED", "0")  # compiling takes longer than all that is computed here
        runs, folders = make_study(folder)
        with served(runs, **folders) as found:
            yield found


@pytest.fixture(scope="module")
def chrome():
    with browser() as started:
        yield started


@pytest.fixture
def page(chrome, address):
    """A page on which nothing goes wrong: no error, no failed request, none to anywhere else, no breach of policy."""
    context = chrome.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    opened, faults = context.new_page(), []
    opened.on("console", lambda said: said.type in ("error", "warning") and faults.append(said.text))
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("request", lambda asked: asked.url.startswith((address, "blob:", "data:")) or faults.append(asked.url))
    opened.on("response", lambda answer: answer.status >= 400 and faults.append(f"{answer.status} {answer.url}"))
    opened.faults = faults
    yield opened
    assert faults == []
    context.close()


@pytest.fixture(scope="module")
def study(address, chrome):
    """Ids of slides and models by name."""
    context = chrome.new_context()
    told = context.request.get(f"{address}api/run").json()
    context.close()
    return {entry["name"]: entry["id"] for entry in (*told["slides"], *told["models"])}


def look(page, address, **state):
    """Opens the page in a state, or brings it there; returns the first pane, once everything is drawn."""
    if page.url.startswith(address):
        page.evaluate("performance.clearMeasures('show')")
    page.goto(f"{address}#" + "&".join(f"{key}={value}" for key, value in state.items()))
    until(page, SHOWN)
    return still(page)


def still(page):
    """(height, width, 3) the first pane, once nothing changes in it any more."""
    before, now = None, shot(page)
    while before is None or not np.array_equal(before, now):
        page.wait_for_timeout(80)
        before, now = now, shot(page)
    return now


def stage(page):
    """Upper left corner and size of the first pane, in pixels of the screen."""
    box = page.locator(".stage").first.bounding_box()
    return box["x"], box["y"], box["width"], box["height"]


def shot(page):
    """(height, width, 3) what is in the first pane."""
    x, y, width, height = stage(page)
    png = page.screenshot(clip={"x": x, "y": y, "width": width, "height": height})
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(float)


def edges(line):
    """Where a line of pixels passes from bright to dark or back, to a fraction of a pixel."""
    grey = line.mean(-1)
    middle = (grey.min() + grey.max()) / 2
    at = np.flatnonzero(np.diff(grey > middle))
    return at + (middle - grey[at]) / (grey[at + 1] - grey[at])


@pytest.mark.parametrize("name", ["plain", "uneven", "bounded"])
def test_tiles_lie_on_the_image_at_every_zoom(page, address, study, name):
    """Edges of the squares of the overlay and of those in the slide, seen one after the other at the same place."""
    start = np.array(START_PX0) + (BOUNDS_PX0 if name == "bounded" else (0, 0))
    x_px0, y_px0 = start + TILE_PX0 * np.array([8.5, 6.5]) + (3.3, -4.7)  # near the middle of a tile
    view = {"slide": study[name], "model": study["abmil"], "mode": "raw", "labels": 0, "x": x_px0, "y": y_px0}
    for zoom in ZOOMS:
        image = look(page, address, **view, opacity=0, zoom=zoom)
        overlay = look(page, address, **view, opacity=1, zoom=zoom)
        height, width = image.shape[:2]
        tile = zoom * TILE_PX0
        middle = np.array([width, height]) / 2 - zoom * np.array([3.3, -4.7])  # of tile (8, 6), on the screen
        # Whole tiles to each side of the middle that are in sight, without the corners, where bars and buttons are.
        across = min(7, int((width / 2 - 130) / tile)) if zoom < 1 else 1
        down = min(5, int((height / 2 - 130) / tile)) if zoom < 1 else 1
        for axis, count in ((0, across), (1, down)):
            first, last = (int(middle[axis] + side * (count + 0.35) * tile) for side in (-1, 1))
            row = round(middle[1 - axis])
            lines = [(seen[row] if axis == 0 else seen[:, row])[first:last] for seen in (image, overlay)]
            found, wanted = (edges(line) for line in lines)
            assert len(found) == len(wanted) == 2 * count, (zoom, axis)
            assert np.abs(found - wanted).max() < 1, (zoom, axis, found - wanted)
            # Both are where they should be, too: not shifted together.
            exact = middle[axis] - first + tile * (np.arange(2 * count) - count + 0.5) - 0.5
            assert np.abs(wanted - exact).max() < 1, (zoom, axis, wanted - exact)


@pytest.mark.parametrize("name", ["plain", "bounded"])
def test_a_click_finds_the_tile_that_is_seen(page, address, study, name):
    image = look(page, address, slide=study[name], model=study["abmil"], opacity=0, labels=0)
    left, top, width, height = stage(page)
    offset = BOUNDS_PX0 if name == "bounded" else (0, 0)
    for across, down in ((0.5, 0.5), (0.31, 0.4), (0.62, 0.66), (0.45, 0.27)):
        x, y = next(
            (x, y)
            for x, y in ((int(across * width) + d, int(down * height) + d) for d in range(50))
            if np.ptp(image[y - 4 : y + 5, x - 4 : x + 5], axis=(0, 1)).max() < 8  # not at an edge
        )
        page.mouse.click(left + x, top + y)
        tile = tile_of(np.median(image[y - 4 : y + 5, x - 4 : x + 5], axis=(0, 1)))
        page.wait_for_selector(f"#tile-facts h2:has-text('Tile {tile}')", timeout=5000)
        until(page, "document.querySelector('#tile-facts').textContent.includes('at pixel')")
        place = [
            start + more + TILE_PX0 * i
            for start, more, i in zip(START_PX0, offset, divmod(tile, COLUMNS)[::-1], strict=True)
        ]
        assert "at pixel {:,}, {:,}".format(*place) in page.locator("#tile-facts").inner_text()


def test_tiles_that_lie_anywhere_are_squares(page, address, study):
    """Cells without an image: as many squares of one colour as there are cells in sight, on white."""
    seen = look(page, address, slide=study["cells"], model=study["abmil"], mode="raw", opacity=1).reshape(-1, 3)
    colours, counts = np.unique(seen, axis=0, return_counts=True)
    squares = {tuple(colour): count for colour, count in zip(colours.astype(int), counts, strict=True)}
    low, high = squares[(68, 1, 84)], squares[(253, 231, 37)]  # the ends of viridis
    assert low > 10_000
    assert high > 10_000
    assert squares[(255, 255, 255)] > 10_000


def test_walk(page, address, study, tmp_path):
    page.goto(address)
    until(page, SHOWN)
    still(page)
    assert page.locator("#slide-list button").count() == 10

    # Find and pick a slide.
    page.keyboard.press("/")
    page.keyboard.type("plain")
    assert page.locator("#slide-list button").count() == 1
    page.locator("#slide-list button").click()
    page.wait_for_selector("h2.slide-name:text-is('plain')")
    until(page, SHOWN)
    still(page)
    assert "Predicted" in page.locator("#slide-facts").inner_text()
    assert page.locator("#slide-facts .classes li").count() == 2

    # Everything that is switched is switched without a request.
    asked = []
    page.on("request", lambda request: request.url.startswith("data:") or asked.append(request.url))
    before = shot(page)
    page.locator("#opacity").focus()
    page.locator("#stages .slide").first.focus()
    page.keyboard.press("1")
    until(page, "document.querySelector('select.layer').value === 'head-0'")
    page.wait_for_timeout(100)
    switched = shot(page)
    assert np.abs(switched - before).max() > 20
    page.keyboard.press("p")
    page.locator("#threshold").fill("75")
    page.wait_for_timeout(100)
    hidden = shot(page)
    assert "raw" in page.locator("#threshold-value").inner_text()
    assert np.abs(hidden - switched).max() > 20
    page.keyboard.press("t")
    assert asked == []

    # A tile, what its heads look at, and the circle of the radius.
    left, top, width, height = stage(page)
    page.mouse.click(left + width / 2, top + height / 2)
    page.wait_for_selector("#tile-facts .head.current")
    tile = page.locator("#tile-facts").inner_text()
    assert re.search(r"K = [\d.]+ tile steps \([\d.]+ µm\)", tile)
    assert re.search(r"spreads over [\d.]+ tiles", tile)
    assert page.locator("#tile-facts img").evaluate("image => image.decode().then(() => image.naturalWidth)") > 50
    page.wait_for_timeout(100)
    posterior = shot(page)
    page.get_by_text("Prior", exact=True).click()
    page.wait_for_timeout(100)
    assert page.evaluate("document.activeElement.value") == "prior"  # keys go on from there
    assert np.abs(shot(page) - posterior).max() > 20
    page.locator("#tile-facts .head").nth(1).click()

    # Two panes that move together.
    page.locator("#stages .slide").first.focus()
    page.keyboard.press("c")
    until(page, "document.querySelectorAll('.pane').length === 2")
    page.locator(".pane select.model").nth(1).select_option(study["abmil"])
    until(page, SHOWN)
    still(page)
    page.mouse.move(left + width * 0.75, top + height / 2)
    page.mouse.wheel(0, -300)
    until(page, "location.hash.includes('zoom=')")
    address_now, seen = "", b""
    while (address_now, seen) != (page.url, page.screenshot()):  # until neither changes any more
        address_now, seen = page.url, page.screenshot()
        page.wait_for_timeout(400)

    # Reloading restores all of it.
    assert all(part in address_now for part in ("tile=", "head=1", "row=prior", "threshold=75", "mode=raw", "@"))
    page.reload()
    until(page, SHOWN)
    still(page)
    page.wait_for_selector("#tile-facts .head.current")
    page.wait_for_timeout(400)
    assert page.url == address_now
    restored = np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("RGB")).astype(float)
    difference = np.abs(restored - np.asarray(Image.open(io.BytesIO(seen)).convert("RGB")))
    assert (difference.max(-1) > 40).mean() < 0.005

    # Files.
    with page.expect_download() as download:
        page.locator("#export-png").click()
    assert download.value.suggested_filename.startswith("plain")
    with Image.open(download.value.path()) as png:
        assert png.width > 600
        assert png.height > 650
    with page.expect_download() as download:
        page.locator("#export-geojson").click()
    content = download.value.path().read_bytes()
    assert json.loads(content)["type"] == "FeatureCollection"

    # The next slide by key; Back comes back.
    page.keyboard.press("Escape")
    page.locator("#filter").fill("")
    page.locator("#stages .slide").first.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("h2.slide-name:text-is('uneven')")
    page.go_back()
    page.wait_for_selector("h2.slide-name:text-is('plain')")
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()


def test_sorted_lists(page, address):
    page.goto(f"{address}#sort=error")
    until(page, SHOWN)
    still(page)
    names = page.locator("#slide-list .name").all_inner_texts()
    wrong = page.locator("#slide-list li").evaluate_all("all => all.map((li) => li.textContent.includes('wrong'))")
    assert wrong == sorted(wrong, reverse=True)
    page.locator("#sort").select_option("name")
    assert page.locator("#slide-list .name").all_inner_texts() == sorted(names)
    page.locator("#filter").fill("nothing has this name")
    assert page.locator("#slide-count").inner_text() == "No slide matches the filter."


def test_failures_are_told(chrome, address, study):
    """A slide that is gone, and a server that fails."""
    context = chrome.new_context()
    page = context.new_page()
    page.goto(f"{address}#slide=0123")
    page.wait_for_selector(".message:has-text('names a slide that is not here')")
    page.route("**/overlay.bin*", lambda route: route.fulfill(status=500, json={"error": "the disk is full"}))
    page.goto("about:blank")
    page.goto(f"{address}#slide={study['plain']}")
    page.wait_for_selector(".message:has-text('the disk is full')")
    page.unroute("**/overlay.bin*")
    page.locator(".message button").click()
    until(page, "performance.getEntriesByName('first-draw').length > 0")
    assert not page.locator(".message").is_visible()
    context.close()


def test_slide_of_200_000_tiles(page, address, study):
    """Its numbers are small enough, and another head is drawn at once."""
    from psamil.serve.overlay import pack_overlay

    random = np.random.default_rng(0)
    columns = 500
    row, column = np.divmod(np.arange(TILES), columns)
    keys = ["scores", *(f"head-{i}" for i in range(HEADS))]
    packed = pack_overlay(np.stack([column, row], 1) * 224.0, {key: random.standard_normal(TILES) for key in keys})
    assert len(packed) < MOST_BYTES

    def enlarged(route):
        told = route.fetch().json()
        side = 224.0 * columns
        told |= {
            "n": TILES,
            "width": side,
            "height": 0.8 * side,
            "bounds": [0, 0, side, 0.8 * side],
            "tile_size": 224.0,
        }
        told |= {"image": None, "has_image": False, "labels": False}
        model = told["models"][0]
        model["heads"] = (model["heads"] * HEADS)[:HEADS]
        model["layers"] = [{"key": key, "label": key, "low": 0, "high": 1} for key in keys]
        route.fulfill(json=told)

    page.route(f"**/api/slides/{study['bare_0']}", enlarged)
    page.route("**/overlay.bin*", lambda route: route.fulfill(body=packed))
    before = look(page, address, slide=study["bare_0"], opacity=1)
    page.evaluate("performance.clearMeasures()")
    page.keyboard.press("8")
    until(page, SHOWN)
    page.wait_for_timeout(200)
    assert np.abs(shot(page) - before).max() > 50
    assert page.evaluate("performance.getEntriesByName('show')[0].duration") < 1000  # 30 ms on a machine with time
