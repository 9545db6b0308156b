"""Small slides of noise on white, and an encoder that is quick: for tests of what happens around them.

python -m tests.slides.made_slides SLIDES OUT    # extracts them, for tests that kill it
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

TILE_PX, MPP = 64, 0.5


def draw(path: Path, side_px: int = 512, margin_px: int = 64, mpp: float = MPP, seed: int = 0) -> Path:
    """A square of coloured noise; a margin of half its side leaves a white slide."""
    from psamil.slides.pyramid import write_pyramid

    image = np.full((side_px, side_px, 3), 245, np.uint8)
    inside = side_px - 2 * margin_px
    if inside > 0:
        # Coarse and fine texture: what is blurred is not taken for tissue.
        random = np.random.default_rng(seed)
        coarse = random.integers(-30, 30, (inside // 16 + 1,) * 2).repeat(16, 0).repeat(16, 1)[:inside, :inside]
        noise = coarse + random.integers(-30, 30, (inside, inside))
        image[margin_px:-margin_px, margin_px:-margin_px] = np.clip([190, 100, 160] + noise[..., None], 0, 255)
    write_pyramid(path, image, mpp)
    return path


def tiny_encoder(name: str = "tiny", input_px: int = 8):
    """The mean colour of a tile and its upper left pixels, in a fixed random mixture."""
    import torch

    from psamil.slides.encoders import Encoder, Preprocessing

    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * input_px**2, 12))
    torch.nn.init.normal_(network[1].weight, generator=torch.Generator().manual_seed(0))
    torch.nn.init.zeros_(network[1].bias)
    return Encoder(name, network, Preprocessing(input_px))


def tiny_grid(**options):
    from psamil.slides.tiling import TileGrid

    return TileGrid(**{"mpp": MPP, "size_px": TILE_PX, **options})


def extract_all(slides: Path, out: Path, **options):
    from psamil.slides.extraction import extract
    from psamil.slides.slide import find_slides

    options = {"encoder": tiny_encoder(), "grid": tiny_grid(), "batch": 8, **options}
    return extract(find_slides(slides), out, options.pop("encoder"), options.pop("grid"), **options)


if __name__ == "__main__":
    extract_all(Path(sys.argv[1]), Path(sys.argv[2]))
