"""A viewer in a real browser: slides whose tiles tell their own index, runs over them, a server, and Chromium.

The tiles of every slide lie on a lattice that begins somewhere. They alternate between bright and dark, like a
checkerboard; red tells the column and green the row. Features tell bright from dark and nothing else, so that the
scores of abmil are the same checkerboard.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

TILE_PX0, MPP = 112, 0.5
COLUMNS, ROWS = 17, 14
START_PX0 = 29, 17  # of the lattice in the drawn part of a slide
DRAWN_PX0 = 2072, 1776  # 560 x 480 times 3.7
BOUNDS_PX0 = 333, 481  # of the slide that was not scanned as a whole, in WHOLE_PX0
WHOLE_PX0 = 3034, 2590  # 820 x 700 times 3.7
COLOUR_STEP = 6


def chromium() -> str:
    """The path of the browser. Tests are skipped where there is none; in CI there must be one."""
    pytest.importorskip("playwright")
    path = shutil.which("chromium")
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("CI has no chromium to open the viewer in")
        pytest.skip("no chromium to open the viewer in")
    return path


@contextmanager
def browser() -> Iterator:
    """Chromium, without a window."""
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@contextmanager
def served(runs: list[Path], **folders: Path) -> Iterator[str]:
    """The address of the viewer of these runs, in a thread; folders as for :func:`psamil.serve.app.create_app`."""
    import uvicorn

    from psamil.serve.app import create_app

    config = uvicorn.Config(create_app(runs, **folders), http="h11", ws="none", log_level="warning")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        server.should_exit = True
        thread.join(20)


def until(page, expression: str, seconds: float = 20) -> None:
    """Waits for something to be true in the page. (Playwright's own way is evaluated where the page's policy holds.)"""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"not within {seconds} s: {expression}"
        page.wait_for_timeout(30)


def lattice() -> np.ndarray:
    """(n, 2) columns and rows of the tiles, row by row."""
    row, column = np.divmod(np.arange(COLUMNS * ROWS), COLUMNS)
    return np.stack([column, row], 1)


def checkerboard() -> np.ndarray:
    """(height, width, 3) the drawn part of a slide."""
    image = np.full((DRAWN_PX0[1], DRAWN_PX0[0], 3), 255, np.uint8)
    for column, row in lattice():
        x, y = START_PX0[0] + column * TILE_PX0, START_PX0[1] + row * TILE_PX0
        base = 140 if (column + row) % 2 else 10
        colour = base + COLOUR_STEP * column, base + COLOUR_STEP * row, base
        image[y : y + TILE_PX0, x : x + TILE_PX0] = colour
    return image


def tile_of(colour: np.ndarray) -> int:
    """The index of the tile that has this colour in the slide."""
    base = 140 if colour.mean() > 100 else 10
    column, row = np.rint((colour[:2] - base) / COLOUR_STEP).astype(int)
    return int(row * COLUMNS + column)


def draw_slides(folder: Path) -> None:
    """Without bounds; with levels 1 and 3.7; and as a scanner of Leica writes it, with an offset and both levels."""
    import tifffile
    from PIL import Image

    from psamil.slides.pyramid import write_pyramid

    folder.mkdir()
    image = checkerboard()
    smaller = np.asarray(Image.fromarray(image).resize((560, 480), Image.Resampling.BOX))
    write_pyramid(folder / "plain.tif", image, MPP)
    options = {"tile": (256, 256), "photometric": "rgb", "metadata": None, "resolutionunit": "CENTIMETER"}
    with tifffile.TiffWriter(folder / "uneven.tif") as file:
        for i, level in enumerate((image, smaller)):
            resolution = 1e4 / (MPP * DRAWN_PX0[0] / level.shape[1])
            file.write(level, subfiletype=int(i > 0), resolution=(resolution, resolution), **options)
    macro = np.full((256, 256, 3), 255, np.uint8)
    with tifffile.TiffWriter(folder / "bounded.scn", bigtiff=True) as file:
        for i, level in enumerate((macro, image, smaller)):
            file.write(
                level, description=_leica_xml() if i == 0 else None, resolution=(1e4 / MPP, 1e4 / MPP), **options
            )


def _leica_xml() -> str:
    """A collection with its overview (directory 0) and one scanned area with two levels (1 and 2)."""
    nm = round(MPP * 1000)

    def scanned(place, size, levels):
        sizes = "".join(f'<dimension sizeX="{w}" sizeY="{h}" r="{r}" ifd="{i}"/>' for r, (w, h, i) in enumerate(levels))
        return (
            f'<image><creationDate>2020-01-01T00:00:00Z</creationDate><device model="made" version="1"/><pixels>{sizes}'
            f'</pixels><view sizeX="{size[0] * nm}" sizeY="{size[1] * nm}" offsetX="{place[0] * nm}" '
            f'offsetY="{place[1] * nm}"/><scanSettings><objectiveSettings><objective>20</objective></objectiveSettings>'
            "<illuminationSettings><illuminationSource>brightfield</illuminationSource></illuminationSettings>"
            "</scanSettings></image>"
        )

    images = scanned((0, 0), WHOLE_PX0, [(256, 256, 0)])
    images += scanned(BOUNDS_PX0, DRAWN_PX0, [(*DRAWN_PX0, 1), (560, 480, 2)])
    width, height = (side * nm for side in WHOLE_PX0)
    name = "http://www.leica-microsystems.com/scn/2010/10/01"
    return f'<scn xmlns="{name}"><collection sizeX="{width}" sizeY="{height}">{images}</collection></scn>'


def write_features(folder: Path) -> pd.DataFrame:
    """Of the drawn slides, of some without an image, and of one with cells that lie anywhere. Returns the labels."""
    folder.mkdir()
    random = np.random.default_rng(0)
    names = ["plain", "uneven", "bounded", "cells", *(f"bare_{i}" for i in range(6))]
    for i, name in enumerate(names):
        places = lattice()
        if name.startswith("bare"):
            places = places[random.random(len(places)) < 0.8]
        start = np.array(START_PX0) + (BOUNDS_PX0 if name == "bounded" else (0, 0))
        coords = (start + places * TILE_PX0).astype(np.float64)
        if name == "cells":
            coords += random.uniform(-20, 20, coords.shape)
        side = places.sum(1) % 2
        features = np.stack([side, 1 - side, np.full(len(side), i % 2), np.ones(len(side))], 1).astype(np.float32)
        about = {"unit": "px0", "step": TILE_PX0, "tile_size": TILE_PX0, "mpp": MPP}
        if name == "cells":
            about = {"unit": "px0", "step": TILE_PX0, "mpp": MPP, "continuous": True}
        np.savez(folder / f"{name}.npz", features=features, coords=coords, **about)
    return pd.DataFrame({"slide": names, "label": ["negative" if i % 2 else "positive" for i in range(len(names))]})


def make_study(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """Slides, features, labels of tiles and the runs psa and abmil. Returns what :func:`served` takes."""
    import psamil

    draw_slides(folder / "slides")
    labels = write_features(folder / "features")
    (folder / "tile-labels").mkdir()
    np.save(folder / "tile-labels" / "plain.npy", (lattice()[:, 0] >= 12).astype(np.uint8))
    options = {"psa": {"heads": 2, "head_dim": 4, "k_init": 2.0}, "abmil": {"hidden": 4}}
    for model, own in options.items():
        psamil.fit(
            *(folder / "features", labels, folder / model),
            cache=folder / "cache",
            target="label",
            slide_column="slide",
            folds=2,
            seeds=1,
            model=model,
            model_options=own,
            epochs=1,
        )
    folders = {"features": folder / "features", "slides": folder / "slides", "tile_labels": folder / "tile-labels"}
    return [folder / model for model in options], folders
