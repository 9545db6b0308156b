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
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from psamil.slides.slide import Slide

Mask = NDArray[np.bool_]
Plane = NDArray[np.float32]
Labels = NDArray[np.signedinteger]
Place = tuple[slice, slice]

OVERVIEW_UM = 8.0  # per pixel
LARGEST_OVERVIEW_PX = 2_500_000  # coarser beyond, so that memory and time do not grow with the slide
BLOCK_PX = 512  # planes of numbers are made for squares of this side: whole are the picture, masks and labels alone

SATURATION_RANGE = (0.05, 0.10)  # glass lies below, pale stroma above
SATURATION_BINS = 256
LEAST_PIECE_MM2 = 0.05
LEAST_PIECE_SHARE = 0.02  # of the overview: pieces of small crops are kept
LARGEST_HOLE_MM2 = 0.1
BRIDGED_GAP_UM = 32.0

STAINED, BLACK, DARK, COLD, PALE_COLD, RED, PALE_RED = (1 << bit for bit in range(7))
MARKS = (
    (BLACK, DARK),
    (COLD, PALE_COLD),
    (RED, PALE_RED),
)  # colours of borders or a pen beyond doubt, and that could be
LEAST_PEN_MM2 = 0.01
PEN_MARGIN_UM = 16.0

BLUR_SHARPNESS = 0.5
BLUR_WINDOW_UM = 200.0
BLUR_EROSION_PX = 2
COARSE_PX = 6.0  # σ of the mean nearby
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
    del stained
    pieces = _large(found, min(LEAST_PIECE_MM2, LEAST_PIECE_SHARE * found.size * (mpp / 1000) ** 2), mpp)
    blurred = _blurred(image, pieces, mpp) if reject_blur else np.zeros_like(pieces)
    return Tissue(pieces & ~blurred, mpp, pen, blurred)


def _stained_and_pen(image: NDArray[np.uint8], mpp: float, reject_pens: bool) -> tuple[Mask, Mask]:
    """What is coloured, as tissue or otherwise, and what of the picture is of a pen or a black border."""
    colours = _colours(image, mpp)
    pen = np.zeros(colours.shape, bool)
    for certain, possible in MARKS if reject_pens else MARKS[:1]:
        seeds = _large(colours & certain != 0, LEAST_PEN_MM2, mpp)
        pen |= _connected(colours & (certain | possible) != 0, seeds)
    return colours & STAINED != 0, _grown(pen, PEN_MARGIN_UM, mpp)


def _colours(image: NDArray[np.uint8], mpp: float) -> NDArray[np.uint8]:
    """(h, w) what each pixel is by its colour: a sum of STAINED, BLACK and so on."""
    white, counts = _white(image), np.zeros(SATURATION_BINS, np.int64)
    for _, _, saturation, _ in _balanced(image, white, mpp):
        counts += np.histogram(saturation, SATURATION_BINS, (0, 1))[0]
    threshold = np.clip(otsu_threshold(counts), *SATURATION_RANGE)

    colours = np.zeros(image.shape[:2], np.uint8)
    for place, (r, g, b), saturation, brightest in _balanced(image, white, mpp):
        black = brightest < 0.2
        cold = ((g > 1.2 * r) & (saturation > 0.25)) | (b > 2.3 * np.maximum(r, g))
        difference = np.abs(g - b)
        red = (g < 0.3 * r) & (b < 0.35 * r) & (difference < 0.15 * r) & (r > 0.45)
        for colour, has_it in (
            (STAINED, (saturation > threshold) & ~black),
            (BLACK, black),
            (DARK, (brightest < 0.4) & (saturation < 0.25)),
            (COLD, cold),
            (PALE_COLD, (g > 1.04 * r) & (saturation > 0.08)),
            (RED, red),
            (PALE_RED, (g < 0.65 * r) & (b < 0.75 * r) & (difference < 0.2 * r)),
        ):
            colours[place] |= has_it * np.uint8(colour)
    return colours


def otsu_threshold(counts: NDArray[np.int64]) -> float:
    """The threshold with the largest variance between values above and below it, from counts in bins of [0, 1]."""
    edges = np.linspace(0, 1, len(counts) + 1)
    centres = (edges[:-1] + edges[1:]) / 2
    below = np.cumsum(counts)
    sums = np.cumsum(counts * centres)
    above = below[-1] - below
    with np.errstate(divide="ignore", invalid="ignore"):
        between = below * above * (sums / below - (sums[-1] - sums) / above) ** 2
    return float(edges[1 + np.argmax(np.nan_to_num(between))])


def _white(image: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Red, green and blue of the glass, which has a cast on some scanners; 255 each where there is hardly any."""
    darkest = np.zeros(256, np.int64)  # how often a pixel of glass has this as its lowest colour
    for inner, _, _ in _blocks(image.shape[:2]):
        low, glass = _glass(image[inner])
        darkest += np.bincount(low[glass], minlength=256)
    if darkest.sum() < 0.005 * math.prod(image.shape[:2]):
        return np.full(3, 255.0)
    least = _quantile(darkest, 0.75)
    colours = np.zeros((3, 256), np.int64)
    for inner, _, _ in _blocks(image.shape[:2]):
        low, glass = _glass(image[inner])
        bright = image[inner][glass & (low >= least)]
        colours += [np.bincount(values, minlength=256) for values in bright.T]
    return np.array([_quantile(counts, 0.5) for counts in colours])


def _glass(image: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], Mask]:
    """The lowest colour of each pixel, and whether it could be one of glass; whiter is what was not scanned."""
    low, high = image.min(axis=2), image.max(axis=2)
    return low, (low >= 190) & (low < 254) & (high - low < 0.08 * high)


def _quantile(counts: NDArray[np.int64], share: float) -> float:
    """Of whole numbers that are there as often as counted; linear between neighbours."""
    place = share * (counts.sum() - 1)
    below, above = np.searchsorted(np.cumsum(counts), [math.floor(place), math.ceil(place)], side="right")
    return float(below + (above - below) * (place - math.floor(place)))


def _balanced(
    image: NDArray[np.uint8], white: NDArray[np.float64], mpp: float
) -> Iterator[tuple[Place, list[Plane], Plane, Plane]]:
    """For each block its place, smoothed red, green and blue in [0, 1] relative to white, saturation and brightness."""
    sigma = OVERVIEW_UM / mpp / 2
    for inner, outer, cut in _blocks(image.shape[:2], _reach(sigma)):
        colours = [
            ndimage.gaussian_filter(np.minimum(image[outer][..., i] / np.float32(white[i]), np.float32(1)), sigma)[cut]
            for i in range(3)
        ]
        brightest = np.maximum(np.maximum.reduce(colours), np.float32(1 / 255))
        yield inner, colours, 1 - np.minimum.reduce(colours) / brightest, brightest


def _blurred(image: NDArray[np.uint8], tissue: Mask, mpp: float) -> Mask:
    """Where the sharpness r is low."""
    window_px = max(5, round(BLUR_WINDOW_UM / mpp))
    blurred = np.zeros_like(tissue)
    for inner, outer, cut in _blocks(tissue.shape, BLUR_EROSION_PX + _reach(COARSE_PX) + window_px // 2 + 1):
        if tissue[inner].any():
            blurred[inner] = _without_sharpness(image[outer], tissue[outer], window_px)[cut]
    return _large(_grown(blurred, 2 * mpp, mpp) & tissue, LEAST_BLUR_MM2, mpp)


def _without_sharpness(image: NDArray[np.uint8], tissue: Mask, window_px: int) -> Mask:
    """All means are over tissue alone: the edge to the glass is no texture."""
    grey = image @ np.array([0.299, 0.587, 0.114], np.float32)
    inside = ndimage.binary_erosion(tissue, iterations=BLUR_EROSION_PX)
    weight = inside.astype(np.float32)
    nearby = ndimage.gaussian_filter(grey * weight, COARSE_PX)
    nearby /= np.maximum(ndimage.gaussian_filter(weight, COARSE_PX), 1e-3)
    judged = ndimage.uniform_filter(weight, window_px)
    share = np.maximum(judged, 1e-3)
    fine = ndimage.uniform_filter(ndimage.laplace(grey) ** 2 * weight, window_px) / share
    texture = ndimage.uniform_filter((grey - nearby) ** 2 * weight, window_px) / share
    blurred = (fine - ROUNDING_VARIANCE < BLUR_SHARPNESS * texture) & (texture > LEAST_TEXTURE**2) & (judged > 0.2)
    return blurred & inside


def _reach(sigma: float) -> int:
    """How many pixels away a Gaussian filter of scipy looks."""
    return math.ceil(4 * sigma)


def _blocks(shape: tuple[int, ...], margin_px: int = 0) -> Iterator[tuple[Place, Place, Place]]:
    """Squares that cover a picture: their places, the same with a margin, and the places within these."""
    for top in range(0, shape[0], BLOCK_PX):
        for left in range(0, shape[1], BLOCK_PX):
            inner = slice(top, top + BLOCK_PX), slice(left, left + BLOCK_PX)
            first = max(0, top - margin_px), max(0, left - margin_px)
            outer = slice(first[0], top + BLOCK_PX + margin_px), slice(first[1], left + BLOCK_PX + margin_px)
            height, width = min(BLOCK_PX, shape[0] - top), min(BLOCK_PX, shape[1] - left)
            y, x = top - first[0], left - first[1]
            yield inner, outer, (slice(y, y + height), slice(x, x + width))


def _connected(mask: Mask, seeds: Mask) -> Mask:
    """The connected pieces that hold a seed."""
    if not seeds.any():
        return np.zeros_like(mask)
    labels, count = ndimage.label(mask, np.ones((3, 3)))
    kept = np.zeros(count + 1, bool)
    for place, _, _ in _blocks(mask.shape):
        kept[labels[place][seeds[place]]] = True
    return _looked_up(kept, labels)


def _large(mask: Mask, least_mm2: float, mpp: float) -> Mask:
    """The connected pieces with at least this area."""
    if not mask.any():
        return mask
    labels, count = ndimage.label(mask, np.ones((3, 3)))
    areas_mm2 = _areas_px(labels, count) * (mpp / 1000) ** 2
    areas_mm2[0] = 0
    return _looked_up((areas_mm2 >= least_mm2) & (areas_mm2 > 0), labels)


def _without_small_holes(mask: Mask, mpp: float) -> Mask:
    labels, count = ndimage.label(~mask)
    small = _areas_px(labels, count) * (mpp / 1000) ** 2 <= LARGEST_HOLE_MM2
    borders = np.concatenate([labels[0], labels[-1], labels[:, 0], labels[:, -1]])
    small[borders] = False  # not enclosed
    small[0] = True  # the mask itself
    return _looked_up(small, labels)


def _areas_px(labels: Labels, count: int) -> NDArray[np.int64]:
    """Of each label; numpy would make 64-bit numbers of all labels at once."""
    areas = np.zeros(count + 1, np.int64)
    for place, _, _ in _blocks(labels.shape):
        areas += np.bincount(labels[place].ravel(), minlength=count + 1)
    return areas


def _looked_up(table: Mask, labels: Labels) -> Mask:
    """``table[labels]``, block by block for the same reason."""
    found = np.empty(labels.shape, bool)
    for place, _, _ in _blocks(labels.shape):
        found[place] = table[labels[place]]
    return found


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
