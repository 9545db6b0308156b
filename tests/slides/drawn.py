"""Small slides that tests draw: pyramidal TIFF files, and one in Leica's format with an offset to the scanned area."""

import numpy as np
import tifffile
from scipy import ndimage

GLASS = (243, 241, 243)


def stained(height, width, seed=0, grain_px=16):
    """(h, w, 3) like tissue in H&E: pink, with purple grains."""
    rng = np.random.default_rng(seed)
    cells = rng.random((height // grain_px + 1, width // grain_px + 1, 1)) < 0.4
    grains = np.kron(cells, np.ones((grain_px, grain_px, 1)))[:height, :width]
    colours = np.array([225, 150, 190]) + grains * (np.array([110, 70, 150]) - np.array([225, 150, 190]))
    return np.clip(colours + rng.normal(0, 4, colours.shape), 0, 255).astype(np.uint8)


def glass(height, width, seed=0):
    noise = np.random.default_rng(seed).normal(0, 1.5, (height, width, 3))
    return np.clip(GLASS + noise, 0, 255).astype(np.uint8)


def waves(height, width):
    """(h, w, 3) smooth, and different everywhere: what a resampled pixel must be is known between pixels, too."""
    return wave_values(np.arange(width) + 0.5, np.arange(height) + 0.5)


def wave_values(x, y):
    """At places x and y, where pixel 0 has its centre at 0.5."""
    values = [
        128 + 100 * np.sin(x / 37)[None] * np.cos(y / 53)[:, None],
        128 + 100 * np.cos(x / 71)[None] * np.ones_like(y)[:, None],
        128 + 100 * np.ones_like(x)[None] * np.sin(y / 41)[:, None],
    ]
    return np.rint(np.stack(values, axis=2)).astype(np.uint8)


def halved(image):
    """Each pixel the mean of 2 x 2."""
    pixels = image[: image.shape[0] // 2 * 2, : image.shape[1] // 2 * 2].astype(np.float32)
    total = pixels[::2, ::2] + pixels[1::2, ::2] + pixels[::2, 1::2] + pixels[1::2, 1::2]
    return np.rint(total / 4).astype(np.uint8)


def write_slide(path, image, mpp=0.5, levels=2, **options):
    """A tiled TIFF that OpenSlide opens, each level half as large as the one before."""
    resolution = {} if mpp is None else dict(resolution=(10000 / mpp, 10000 / mpp), resolutionunit="CENTIMETER")
    options = dict(tile=(128, 128), photometric="rgb", metadata=None) | resolution | options
    with tifffile.TiffWriter(path) as file:
        for level in range(levels):
            file.write(image, subfiletype=int(level > 0), **options)
            image = halved(image)
    return path


def write_offset_slide(path, image, offset_px0, size_px0, mpp=0.5):
    """Leica's format: the image, of which there are two levels, lies somewhere on a large slide."""
    nm = 1000 * mpp
    whole, macro = [round(side * nm) for side in size_px0], np.full((256, 512, 3), 255, np.uint8)
    part = [round(side * nm) for side in (image.shape[1], image.shape[0])]
    place = [round(side * nm) for side in offset_px0]
    description = f"""<?xml version="1.0"?>
    <scn xmlns="http://www.leica-microsystems.com/scn/2010/10/01">
    <collection sizeX="{whole[0]}" sizeY="{whole[1]}"><barcode></barcode>
    {_leica_image([macro], 0, whole, (0, 0), 1)}{_leica_image([image, halved(image)], 1, part, place, 20)}
    </collection></scn>"""
    options = dict(tile=(128, 128), photometric="rgb", metadata=None)
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        file.write(macro, description=description, **options)
        file.write(image, resolution=(10000 / mpp, 10000 / mpp), resolutionunit="CENTIMETER", **options)
        file.write(halved(image), subfiletype=1, **options)
    return path


def _leica_image(levels, first_page, size_nm, place_nm, objective):
    sizes = [(level.shape[1], level.shape[0]) for level in levels]
    dimensions = [
        f'<dimension sizeX="{width}" sizeY="{height}" r="{i}" ifd="{first_page + i}"/>'
        for i, (width, height) in enumerate(sizes)
    ]
    return f"""<image><creationDate>2020-01-01T00:00:00Z</creationDate><device model="Leica SCN400"/>
    <pixels sizeX="{sizes[0][0]}" sizeY="{sizes[0][1]}">{"".join(dimensions)}</pixels>
    <view sizeX="{size_nm[0]}" sizeY="{size_nm[1]}" offsetX="{place_nm[0]}" offsetY="{place_nm[1]}"/>
    <scanSettings><objectiveSettings><objective>{objective}</objective></objectiveSettings><illuminationSettings>
    <numericalAperture>0.4</numericalAperture><illuminationSource>brightfield</illuminationSource>
    </illuminationSettings></scanSettings></image>"""


def blurred(image, sigma_px):
    return np.rint(ndimage.gaussian_filter(image.astype(np.float32), (sigma_px, sigma_px, 0))).astype(np.uint8)
