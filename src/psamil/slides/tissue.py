"""Where there is tissue on a slide, from an overview of it and without a network.

Tissue is what is coloured. Its saturation is compared with a threshold after Otsu, which is kept within what H&E can
have: on an empty slide there is nothing to separate, and where everything is tissue, pale parts must not be lost.
Small holes are filled and small pieces left out. Taken away again are

- **pen marks**: blue, green, red and black. Haematoxylin and eosin both absorb green the most; inks do not;
- **black** borders of the scan;
- **blur**: with the sharpness r = E[(Δg)²] / E[(g − ḡ)²], where g is the grey value, ḡ its mean nearby and E the mean
  over a window. It compares fine with coarse texture and so does not depend on stain or contrast. At 8 µm per pixel,
  most tissue in focus of two slides has r between 1.2 and 12, and below 0.5 after a Gaussian blur with σ of 12 µm or
  more. An overview does not show weaker blur.

Sizes are in micrometres; the thresholds were set on overviews at 4 to 12 µm per pixel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from psamil.slides.slide import Slide

Mask = NDArray[np.bool_]
Plane = NDArray[np.float32]

OVERVIEW_UM = 8.0  # per pixel
LARGEST_OVERVIEW_PX = 2_500_000  # coarser beyond, so that memory and time do not grow with the slide

SATURATION_RANGE = (0.05, 0.10)  # glass lies below, pale stroma above
LEAST_PIECE_MM2 = 0.05
LEAST_PIECE_SHARE = 0.02  # of the overview: pieces of small crops are kept
LARGEST_HOLE_MM2 = 0.1
BRIDGED_GAP_UM = 32.0

LEAST_PEN_MM2 = 0.01
PEN_MARGIN_UM = 16.0

BLUR_SHARPNESS = 0.5
BLUR_WINDOW_UM = 200.0
LEAST_BLUR_MM2 = 0.05
LEAST_TEXTURE = 1.5  # grey values: without any texture, nothing says that it should be sharper
ROUNDING_VARIANCE = 20 / 12  # of Δg, by rounding grey values to whole numbers


@dataclass(frozen=True)
class Tissue:
    """A map of tissue over the whole of a slide, with what was taken away from it."""

    mask: Mask  # (h, w)
    mpp: float  # micrometres per pixel of the map
    pen: Mask  # (h, w) pen marks and black borders
    blurred: Mask  # (h, w)

    @property
    def area_mm2(self) -> float:
        return float(self.mask.sum()) * (self.mpp / 1000) ** 2

    @property
    def share(self) -> float:
        """Of the slide."""
        return float(self.mask.mean())

    @property
    def pen_share(self) -> float:
        """Of all that is not glass."""
        return self._share_of_foreground(self.pen)

    @property
    def blur_share(self) -> float:
        """Of all that is not glass."""
        return self._share_of_foreground(self.blurred)

    def _share_of_foreground(self, part: Mask) -> float:
        return float(part.sum()) / max(1, int((self.mask | self.pen | self.blurred).sum()))


def tissue_of(slide: Slide, *, reject_pens: bool = True, reject_blur: bool = True) -> Tissue:
    """Finds tissue in an overview of a slide."""
    mpp = overview_mpp(slide)
    return find_tissue(slide.overview(mpp), mpp, reject_pens=reject_pens, reject_blur=reject_blur)


def overview_mpp(slide: Slide) -> float:
    """8 µm per pixel, or as coarse as the size of the slide demands."""
    area_um2 = math.prod(slide.size_px0) * slide.mpp_px0**2
    return max(OVERVIEW_UM, slide.mpp_px0, math.sqrt(area_um2 / LARGEST_OVERVIEW_PX))


def find_tissue(image: NDArray[np.uint8], mpp: float, *, reject_pens: bool = True, reject_blur: bool = True) -> Tissue:
    """Finds tissue in an overview (h, w, 3) with mpp micrometres per pixel.

    Args:
        image: the overview.
        mpp: micrometres per pixel.
        reject_pens: leave out what has the colours of pens. Some stains have them, too, such as trichrome.
        reject_blur: leave out what is not in focus.
    """
    stained, pen = _stained_and_pen(image, mpp, reject_pens)
    found = _without_small_holes(_closed(stained & ~pen, BRIDGED_GAP_UM / 2, mpp), mpp) & ~pen
    pieces = _large(found, min(LEAST_PIECE_MM2, LEAST_PIECE_SHARE * found.size * (mpp / 1000) ** 2), mpp)
    blurred = _blurred(image, pieces, mpp) if reject_blur else np.zeros_like(pieces)
    return Tissue(pieces & ~blurred, mpp, pen, blurred)


def _stained_and_pen(image: NDArray[np.uint8], mpp: float, reject_pens: bool) -> tuple[Mask, Mask]:
    """What is coloured, as tissue or otherwise, and what of the picture is of a pen or a black border."""
    r, g, b = (ndimage.gaussian_filter(colour, OVERVIEW_UM / mpp / 2) for colour in _balanced(image))
    brightest = np.maximum(np.maximum(np.maximum(r, g), b), np.float32(1 / 255))
    saturation = 1 - np.minimum(np.minimum(r, g), b) / brightest
    black = brightest < 0.2
    threshold = np.clip(otsu_threshold(saturation), *SATURATION_RANGE)
    stained = (saturation > threshold) & ~black

    marks = [(black, (brightest < 0.4) & (saturation < 0.25))]
    if reject_pens:
        marks += _ink_colours(r, g, b, saturation)
    pen = np.zeros_like(black)
    for certain, possible in marks:
        pen |= _connected(possible | certain, _large(certain, LEAST_PEN_MM2, mpp))
    return stained, _grown(pen, PEN_MARGIN_UM, mpp)


def otsu_threshold(values: Plane, bins: int = 256) -> float:
    """The threshold in [0, 1] with the largest variance between the values above and below it."""
    counts, edges = np.histogram(values, bins=bins, range=(0, 1))
    centres = (edges[:-1] + edges[1:]) / 2
    below = np.cumsum(counts)
    sums = np.cumsum(counts * centres)
    above = below[-1] - below
    with np.errstate(divide="ignore", invalid="ignore"):
        between = below * above * (sums / below - (sums[-1] - sums) / above) ** 2
    return float(edges[1 + np.argmax(np.nan_to_num(between))])


def _balanced(image: NDArray[np.uint8]) -> list[Plane]:
    """Red, green and blue in [0, 1] relative to those of the glass, which has a cast on some scanners."""
    r, g, b = np.moveaxis(image, 2, 0)
    low, high = np.minimum(np.minimum(r, g), b), np.maximum(np.maximum(r, g), b)
    glass = (low >= 190) & (low < 254) & (high - low < 0.08 * high)  # whiter is what was not scanned
    white = np.full(3, 255.0)
    if glass.mean() >= 0.005:
        bright = glass & (low >= np.percentile(low[glass], 75))
        white = np.median(image[bright], axis=0)
    return [
        np.minimum(colour / np.float32(level), np.float32(1)) for colour, level in zip((r, g, b), white, strict=True)
    ]


def _ink_colours(r: Plane, g: Plane, b: Plane, saturation: Plane) -> list[tuple[Mask, Mask]]:
    """Places that have the colours of a pen beyond doubt, and those that could: blue or green, and red."""
    cold = ((g > 1.2 * r) & (saturation > 0.25)) | (b > 2.3 * np.maximum(r, g))
    pale_cold = (g > 1.04 * r) & (saturation > 0.08)
    difference = np.abs(g - b)
    red = (g < 0.3 * r) & (b < 0.35 * r) & (difference < 0.15 * r) & (r > 0.45)
    pale_red = (g < 0.65 * r) & (b < 0.75 * r) & (difference < 0.2 * r)
    return [(cold, pale_cold), (red, pale_red)]


def _blurred(image: NDArray[np.uint8], tissue: Mask, mpp: float) -> Mask:
    """Where the sharpness r is low. All means are over tissue alone: the edge to the glass is no texture."""
    if not tissue.any():
        return tissue
    grey = image @ np.array([0.299, 0.587, 0.114], np.float32)
    inside = ndimage.binary_erosion(tissue, iterations=2)
    weight = inside.astype(np.float32)
    coarse_px, window_px = 6.0, max(5, round(BLUR_WINDOW_UM / mpp))
    nearby = ndimage.gaussian_filter(grey * weight, coarse_px)
    nearby /= np.maximum(ndimage.gaussian_filter(weight, coarse_px), 1e-3)
    judged = ndimage.uniform_filter(weight, window_px)
    share = np.maximum(judged, 1e-3)
    fine = ndimage.uniform_filter(ndimage.laplace(grey) ** 2 * weight, window_px) / share
    texture = ndimage.uniform_filter((grey - nearby) ** 2 * weight, window_px) / share
    blurred = (fine - ROUNDING_VARIANCE < BLUR_SHARPNESS * texture) & (texture > LEAST_TEXTURE**2) & (judged > 0.2)
    return _large(_grown(blurred & inside, 2 * mpp, mpp) & tissue, LEAST_BLUR_MM2, mpp)


def _connected(mask: Mask, seeds: Mask) -> Mask:
    """The connected pieces that hold a seed."""
    if not seeds.any():
        return np.zeros_like(mask)
    labels, count = ndimage.label(mask, np.ones((3, 3)))
    kept = np.zeros(count + 1, bool)
    kept[labels[seeds]] = True
    return kept[labels]


def _large(mask: Mask, least_mm2: float, mpp: float) -> Mask:
    """The connected pieces with at least this area."""
    if not mask.any():
        return mask
    labels, _ = ndimage.label(mask, np.ones((3, 3)))
    areas_mm2 = np.bincount(labels.ravel()) * (mpp / 1000) ** 2
    areas_mm2[0] = 0
    return ((areas_mm2 >= least_mm2) & (areas_mm2 > 0))[labels]


def _without_small_holes(mask: Mask, mpp: float) -> Mask:
    labels, _ = ndimage.label(~mask)
    small = np.bincount(labels.ravel()) * (mpp / 1000) ** 2 <= LARGEST_HOLE_MM2
    borders = np.concatenate([labels[0], labels[-1], labels[:, 0], labels[:, -1]])
    small[borders] = False  # not enclosed
    small[0] = True  # the mask itself
    return small[labels]


def _closed(mask: Mask, radius_um: float, mpp: float) -> Mask:
    """Gaps of up to twice the radius are closed; the border of the picture is no gap."""
    radius = math.ceil(radius_um / mpp)
    padded = np.pad(mask, radius, mode="edge")
    return ndimage.binary_closing(padded, _disc(radius))[radius:-radius, radius:-radius]


def _grown(mask: Mask, radius_um: float, mpp: float) -> Mask:
    return ndimage.binary_dilation(mask, _disc(max(1, round(radius_um / mpp)))) if mask.any() else mask


def _disc(radius: int) -> Mask:
    x, y = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    return x**2 + y**2 <= (radius + 0.5) ** 2
