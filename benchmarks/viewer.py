"""The viewer on a slide of 200,000 tiles and 8 heads: size of its numbers, first draw and switch of heads, in Chromium.

    python benchmarks/viewer.py                    # needs chromium and playwright; some minutes
    python benchmarks/viewer.py --tiles 20000      # a smaller slide, to try it out

How it is measured:

- A run of psa with 8 heads that look 2.5 steps far is trained for one epoch on small slides; `psamil serve` shows it,
  with the large slide among its features. Nothing is made up in between: the server computes the explanation of the
  large slide. Its time grows with the square of the radius; what is measured in the browser does not depend on it.
- Server: seconds until the overlay is there for the first time, and from memory.
- First draw: from the begin of the navigation to the frame after the tiles are drawn, with the overlay in the memory
  of the server. It contains loading the page and the run, and transferring and decoding the overlay.
- Switch: from the key to the second frame after it, of each head; the median counts. A frame alone takes up to 17 ms.
- Moving: intervals between frames while the slide is zoomed by the wheel; the median counts.
"""

import argparse
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from attention import cpu_name, progress
from loading import claim

import psamil
from psamil.files import write_json

HEADS, DIM, RADIUS = 8, 16, 2.5
MOST_MB, MOST_SWITCH_MS = 8, 250
FRAMES = """async (key) => {
  const frame = () => new Promise(requestAnimationFrame);
  await frame();
  const begun = performance.now();
  document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  await frame();
  await frame();
  return performance.now() - begun;
}"""
INTERVALS = """async () => {
  const times = [];
  for (let i = 0; i < 40; i += 1) times.push(await new Promise(requestAnimationFrame));
  return times.slice(1).map((time, i) => time - times[i]);
}"""


def main() -> None:
    example = "example: python benchmarks/viewer.py --tiles 20000 --out quick-results"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], epilog=example)
    parser.add_argument("--tiles", type=int, default=200_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        progress("training")
        run, features = make_run(Path(folder), args.tiles)
        progress("serving")
        measured = measure(run, features)
    progress("")
    for name, value in measured.items():
        print(f"{name:<28}{value:>14,.1f}")
    about = {
        "tiles": args.tiles,
        "heads": HEADS,
        "radius_steps": RADIUS,
        "cpu": cpu_name(),
        "platform": platform.platform(),
    }
    requirements = [
        claim("MB of a slide", measured["overlay_bytes"] / 2**20, "<=", MOST_MB),
        claim("ms to another head", measured["switch_ms"], "<=", MOST_SWITCH_MS),
    ]
    write_json(args.out / "viewer.json", about | measured | {"requirements": requirements})


def make_run(folder: Path, tiles: int) -> tuple[Path, Path]:
    """A run on small slides, and its features together with those of the large slide, which it does not know."""
    random = np.random.default_rng(0)
    features = folder / "features"
    features.mkdir()
    names = [f"small_{i}" for i in range(8)]
    for name in (*names, "large"):
        n = tiles if name == "large" else 200
        row, column = np.divmod(np.arange(n), int(np.sqrt(1.25 * n)))
        values = random.standard_normal((n, DIM)).astype(np.float32)
        about = {"unit": "px0", "step": 224, "tile_size": 224, "mpp": 0.5}
        np.savez(features / f"{name}.npz", features=values, coords=np.stack([column, row], 1) * 224.0, **about)
    labels = pd.DataFrame({"slide": names, "label": ["negative", "positive"] * 4})
    options: dict[str, Any] = {
        "model": "psa",
        "model_options": {"heads": HEADS, "head_dim": 8, "k_init": RADIUS},
        "epochs": 1,
        "seeds": 1,
    }
    psamil.fit(features, labels, folder / "run", target="label", slide_column="slide", folds=2, **options)
    return folder / "run", features


def measure(run: Path, features: Path) -> dict[str, float]:
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "psamil", "serve", run, "--features", features, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        try:
            address = re.search(r"http://\S+", server.stdout.readline())[0]  # type: ignore[union-attr,index]
            path = shutil.which("chromium")
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            return measure_page(browser, address) | {"browser": float(browser.version.split(".")[0])}
        finally:
            server.terminate()


def measure_page(browser: Any, address: str) -> dict[str, float]:
    page = browser.new_page(viewport={"width": 1920, "height": 1080})
    run = page.request.get(f"{address}api/run").json()
    slide = next(slide["id"] for slide in run["slides"] if slide["name"] == "large")
    seconds, size = [], 0
    for _ in range(2):
        begun = time.perf_counter()
        answer = page.request.get(f"{address}api/slides/{slide}/overlay.bin", timeout=600_000)
        seconds.append(time.perf_counter() - begun)
        size = len(answer.body())
    page.goto(f"{address}#slide={slide}&opacity=1")
    while not page.evaluate("performance.getEntriesByName('first-draw').length"):
        page.wait_for_timeout(20)
    drawn = page.evaluate("performance.getEntriesByName('first-draw').map((e) => e.startTime + e.duration)[0]")
    page.wait_for_timeout(500)
    switches = [page.evaluate(FRAMES, str(head)) for head in (*range(1, HEADS + 1), 0)]
    page.mouse.move(900, 500)
    page.mouse.wheel(0, -400)
    intervals = page.evaluate(INTERVALS)
    return {
        "overlay_bytes": size,
        "server_first_s": seconds[0],
        "server_again_s": seconds[1],
        "first_draw_ms": drawn,
        "switch_ms": statistics.median(switches),
        "slowest_switch_ms": max(switches),
        "moving_frame_ms": statistics.median(intervals),
    }


if __name__ == "__main__":
    main()
