"""From raw slides to features: reading slides, finding tissue, laying tiles, and encoding them.

>>> with open_slide("slide.svs") as slide:
...     tiles = lay_tiles(slide, tissue_of(slide), TileGrid(mpp=0.5, size_px=224))
...     first = slide.read(*tiles.coords_px0[0], tiles.size_px, tiles.mpp)  # (224, 224, 3)
"""

from psamil.slides.slide import Slide, find_slides, open_slide
from psamil.slides.tiling import TileGrid, Tiles, lay_tiles
from psamil.slides.tissue import Tissue, find_tissue, tissue_of

__all__ = ["Slide", "TileGrid", "Tiles", "Tissue", "find_slides", "find_tissue", "lay_tiles", "open_slide", "tissue_of"]
