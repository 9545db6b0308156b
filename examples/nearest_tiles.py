"""Does an encoder see tissue? Tiles of a slide, each beside the tiles whose features are nearest to its own.

    psamil extract slide.svs --out features
    python examples/nearest_tiles.py slide.svs features --out nearest.png

Likeness is the cosine of features from which their mean was taken. Neighbouring tiles are left out: they would be alike
for any encoder. One picture of one slide is no measurement; it shows whether something is badly wrong.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from psamil import find_bags, open_bag
from psamil.readers import slide_id, trident
from psamil.slides.extraction_record import read_extraction
from psamil.slides.slide import open_slide

SHOWN_PX, FRAME_PX = 112, 3
APART_STEPS = 1.5  # nearer tiles touch


def nearest(features: torch.Tensor, xy: torch.Tensor, query: int, count: int) -> list[int]:
    """Of the tiles that do not touch the query, those with the most similar features."""
    centred = torch.nn.functional.normalize(features.float() - features.float().mean(0), dim=1)
    likeness = centred @ centred[query]
    likeness[torch.cdist(xy[query, None], xy)[0] < APART_STEPS] = -torch.inf
    return likeness.topk(count).indices.tolist()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slide", type=Path)
    parser.add_argument("features", type=Path, help="folder that psamil extract has written")
    parser.add_argument("--out", type=Path, default=Path("nearest.png"))
    parser.add_argument("--rows", type=int, default=6, help="tiles chosen at random")
    parser.add_argument("--mpp", type=float, help="micrometres per pixel, where the slide does not tell")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    made = read_extraction(arguments.features)
    (ref,) = [ref for ref in find_bags(arguments.features).bags if ref.id == slide_id(arguments.slide)]
    bag, coords = open_bag(ref), trident.read(ref.path, with_features=False).coords
    if made is None or coords is None:
        raise SystemExit(f"{arguments.features}: psamil extract has not made these features")
    chosen = torch.randperm(bag.n, generator=torch.Generator().manual_seed(arguments.seed))[: arguments.rows].tolist()
    rows = []
    with open_slide(arguments.slide, arguments.mpp) as slide:
        for query in chosen:
            shown = []
            for tile in [query, *nearest(bag.features, bag.xy, query, 5)]:
                pixels = slide.read(*coords[tile].tolist(), made.tile_px, made.mpp)
                small = Image.fromarray(pixels).resize((SHOWN_PX, SHOWN_PX), Image.Resampling.LANCZOS)
                shown.append(np.asarray(ImageOps.expand(small, FRAME_PX, "black" if tile == query else "white")))
            rows.append(np.concatenate(shown, 1))
    Image.fromarray(np.concatenate(rows)).save(arguments.out)
    print(f"{bag.n} tiles; wrote {arguments.out}")
