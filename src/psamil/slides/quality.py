"""What a person looks at before trusting features: a picture of each slide, and a row of numbers with warnings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from psamil.files import atomic_write
from psamil.slides.slide import Slide
from psamil.slides.tiling import Tiles
from psamil.slides.tissue import Tissue

LITTLE_TISSUE_MM2 = 0.5  # less than a core of a needle biopsy
LITTLE_TISSUE_SHARE = 0.005
MUCH_TISSUE_SHARE = 0.95  # of a slide that is larger than a crop
CROP_MM2 = 50.0
MUCH_TAKEN_AWAY = 0.2
MOST_ENLARGED = 1.1

PANEL_PX = 720  # longer side of each of the two
LARGEST_PX = 4_000_000  # of an overview: the scanned area can be a small part of it
LEAST_WIDTH_PX = 620  # for the legend
LEAST_TILE_PX = 4  # smaller ones would be nothing but lines
FADED, LATTICE_OPACITY = 150, 130  # of 255: what is outside of tiles, and their borders
TISSUE_COLOUR, PEN_COLOUR, BLUR_COLOUR, TILE_COLOUR = (0, 135, 60), (0, 110, 255), (255, 140, 0), (40, 40, 60)
WARNING_COLOUR = (190, 30, 30)
JPEG_QUALITY = 78


def quality_row(slide: Slide, tissue: Tissue, tiles: Tiles) -> dict[str, Any]:
    """A row of ``quality.csv``."""
    return {
        "slide": slide.name,
        "mpp": round(slide.mpp_px0, 5),
        "width_px0": slide.size_px0[0],
        "height_px0": slide.size_px0[1],
        "tissue_mm2": round(tissue.area_mm2, 3),
        "tissue_share": round(tissue.share, 4),
        "tiles": len(tiles),
        "pen_share": round(tissue.pen_share, 4),
        "blur_share": round(tissue.blur_share, 4),
        "warning": "; ".join(warnings_of(slide, tissue, tiles)),
    }


def warnings_of(slide: Slide, tissue: Tissue, tiles: Tiles) -> list[str]:
    """Why the slide should be looked at, worst first; empty for most slides."""
    slide_mm2 = math.prod(slide.bounds_px0[2:]) * (slide.mpp_px0 / 1000) ** 2
    share = tissue.area_mm2 / slide_mm2
    warnings = []
    if not tissue.mask.any():
        warnings.append("no tissue found")
    elif not len(tiles):
        warnings.append("no tile has enough tissue")
    elif tissue.area_mm2 < LITTLE_TISSUE_MM2 or share < LITTLE_TISSUE_SHARE:
        warnings.append(f"suspiciously little tissue: {tissue.area_mm2:.2g} mm², {share:.1%} of the scanned area")
    if share > MUCH_TISSUE_SHARE and slide_mm2 > CROP_MM2:
        warnings.append(f"{share:.0%} of the scanned area counts as tissue: is there no glass?")
    if tissue.pen_share > MUCH_TAKEN_AWAY:
        warnings.append(f"{tissue.pen_share:.0%} of what is not glass looks like pen marks or black borders")
    if tissue.blur_share > MUCH_TAKEN_AWAY:
        warnings.append(f"{tissue.blur_share:.0%} of what is not glass is out of focus")
    if is_enlarged(tiles.mpp, slide.mpp_px0):
        warnings.append(f"tiles of {tiles.mpp:.3g} µm per pixel are enlarged: it was scanned at {slide.mpp_px0:.3g} µm")
    return warnings


def is_enlarged(tile_mpp: float, mpp_px0: float) -> bool:
    """Whether tiles are asked for at a resolution that the scan does not have, by more than scanners differ."""
    return mpp_px0 > MOST_ENLARGED * tile_mpp


def qc_picture(slide: Slide, tissue: Tissue, tiles: Tiles, path: str | Path) -> None:
    """Draws the slide, and beside it the same with tissue, what was taken away from it, and tiles: PNG or JPEG."""
    plain = _scanned_area(slide)
    marked = _marked(plain, slide, tissue, tiles)
    picture = _joined(plain, marked, slide, _caption(slide, tissue, tiles))
    path = Path(path)
    with atomic_write(path) as temporary:
        if path.suffix.lower() == ".png":
            picture.quantize(255).save(temporary, format="PNG", optimize=True)
        else:
            picture.save(temporary, format="JPEG", quality=JPEG_QUALITY, optimize=True)


def _scanned_area(slide: Slide) -> Any:
    """A picture of the scanned area whose longer side has PANEL_PX pixels."""
    from PIL import Image

    x, y, width, height = slide.bounds_px0
    scale = PANEL_PX / max(width, height)
    mpp = max(slide.mpp_px0, slide.mpp_px0 / scale, slide.mpp_px0 * math.sqrt(math.prod(slide.size_px0) / LARGEST_PX))
    overview = Image.fromarray(slide.overview(mpp))
    across, down = overview.width / slide.size_px0[0], overview.height / slide.size_px0[1]
    box = (x * across, y * down, (x + width) * across, (y + height) * down)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return overview.resize(size, Image.Resampling.LANCZOS, box=box)


def _marked(plain: Any, slide: Slide, tissue: Tissue, tiles: Tiles) -> Any:
    from PIL import Image, ImageDraw

    scale = plain.width / slide.bounds_px0[2]
    side = tiles.size_px0 * scale
    inside = Image.new("L", plain.size, FADED)
    lattice = Image.new("L", plain.size)
    draw_inside, draw_lattice = ImageDraw.Draw(inside), ImageDraw.Draw(lattice)
    for x, y in ((tiles.coords_px0 - slide.bounds_px0[:2]) * scale).tolist():
        draw_inside.rectangle((x, y, x + side, y + side), fill=255)
        if side >= LEAST_TILE_PX:
            draw_lattice.rectangle((x, y, x + side, y + side), outline=LATTICE_OPACITY)
    marked = Image.composite(plain, Image.new("RGB", plain.size, "white"), inside)
    marked.paste(TILE_COLOUR, mask=lattice)
    masks = (tissue.mask, tissue.pen, tissue.blurred)
    found, pen, blurred = (_enlarged(mask, slide, plain.size) for mask in masks)
    marked.paste(PEN_COLOUR, mask=_opacity(pen, 150))
    marked.paste(BLUR_COLOUR, mask=_opacity(blurred, 150))
    outline = found & ~ndimage.binary_erosion(found, iterations=2, border_value=1)
    marked.paste(TISSUE_COLOUR, mask=_opacity(outline, 255))
    return marked


def _enlarged(mask: NDArray[np.bool_], slide: Slide, size: tuple[int, int]) -> NDArray[np.bool_]:
    """The scanned area of a mask at the size of the picture."""
    from PIL import Image

    x, y, width, height = slide.bounds_px0
    across, down = mask.shape[1] / slide.size_px0[0], mask.shape[0] / slide.size_px0[1]
    box = (x * across, y * down, (x + width) * across, (y + height) * down)
    return np.asarray(_opacity(mask, 255).resize(size, Image.Resampling.BILINEAR, box=box)) > 127


def _opacity(mask: NDArray[np.bool_], value: int) -> Any:
    from PIL import Image

    return Image.fromarray(mask.astype(np.uint8) * np.uint8(value))


def _caption(slide: Slide, tissue: Tissue, tiles: Tiles) -> list[str]:
    width, height = slide.bounds_px0[2:]
    facts = f"{width:,} x {height:,} px at {slide.mpp_px0:.4g} µm/px · tissue {tissue.area_mm2:.3g} mm² · "
    facts += f"{len(tiles):,} tiles of {tiles.size_px0 * slide.mpp_px0:.4g} µm"
    lines = [slide.name, facts, *warnings_of(slide, tissue, tiles)]
    return [text.replace("µ", "u").replace("²", "2") for text in lines]  # the font that comes with Pillow has neither


def _joined(plain: Any, marked: Any, slide: Slide, caption: list[str]) -> Any:
    """Both panels, one below the other where they are wide, with the caption above and the legend below."""
    from PIL import Image, ImageDraw, ImageFont

    font, gap, line = ImageFont.load_default(size=17), 14, 24
    stacked = plain.width > 1.6 * plain.height
    width = max(plain.width * (1 if stacked else 2) + gap * (2 if stacked else 3), LEAST_WIDTH_PX)
    top = gap + line * len(caption) + gap // 2
    below = top + plain.height * (2 if stacked else 1) + gap * (2 if stacked else 1)
    picture = Image.new("RGB", (width, below + line + gap), "white")
    draw = ImageDraw.Draw(picture)
    for i, text in enumerate(caption):
        colour = WARNING_COLOUR if i > 1 else "black"
        draw.text((gap, gap + line * i), _fitting(text, font, width - 2 * gap), fill=colour, font=font)
    picture.paste(plain, (gap, top))
    picture.paste(marked, (gap, top + plain.height + gap) if stacked else (2 * gap + plain.width, top))
    bar_mm = _round_length(0.3 * slide.bounds_px0[2] * slide.mpp_px0 / 1000)
    bar_px = bar_mm * 1000 / slide.mpp_px0 * plain.width / slide.bounds_px0[2]
    draw.rectangle((gap, below + line / 2 - 2, gap + bar_px, below + line / 2 + 2), fill="black")
    draw.text((gap + bar_px + 8, below), f"{bar_mm:g} mm", fill="black", font=font)
    x = gap + bar_px + 8 + font.getlength(f"{bar_mm:g} mm") + 30
    for text, colour in (
        ("tissue", TISSUE_COLOUR),
        ("tiles", TILE_COLOUR),
        ("pen or black", PEN_COLOUR),
        ("blurred", BLUR_COLOUR),
    ):
        draw.rectangle((x, below + 5, x + 14, below + 19), fill=colour)
        draw.text((x + 20, below), text, fill="black", font=font)
        x += 20 + font.getlength(text) + 22
    return picture


def _fitting(text: str, font: Any, width: float) -> str:
    """The text, or its beginning with an ellipsis."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


def _round_length(length: float) -> float:
    """The largest of 1, 2 and 5 times a power of ten that is not longer."""
    power = 10.0 ** math.floor(math.log10(length))
    return max(step * power for step in (1, 2, 5) if step * power <= length * (1 + 1e-9))
