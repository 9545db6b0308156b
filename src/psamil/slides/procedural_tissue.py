"""Pictures of drawn tissue: which cell of a lattice shows what, and the colours of a stain.

Light that passes optical densities adds up: with amounts c_H and c_E of haematoxylin and eosin, and the colours v_H and
v_E of the two, a pixel has the colour 255 exp(-c_H v_H - c_E v_E).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from psamil.slides.procedural_sprites import CELL_PX, TEXTURE_PX, Floats, Sprite, SpriteBox, fibres

HAEMATOXYLIN, EOSIN = (0.563, 0.720, 0.406), (0.216, 0.801, 0.558)  # optical densities of red, green and blue
GLASS = 245  # brightness of the empty slide
FIELD_PER_CELL = 28  # points of the outline and of slow changes across a cell
SPRITES_PER_KIND = 16
STROMA, GLANDS, LYMPHOCYTES, TUMOUR = range(4)

Cells = NDArray[np.int64]  # (rows, columns) what each cell shows


@dataclass(frozen=True, eq=False)
class Stain:
    """The colours of the two dyes, with their strength."""

    haematoxylin: NDArray[np.float64]  # (3,)
    eosin: NDArray[np.float64]

    @staticmethod
    def draw(random: np.random.Generator, spread: float, around: Stain | None = None) -> Stain:
        """Another one, whose strength differs by about ``spread`` and whose hue by a fraction of it."""
        known = (np.array(HAEMATOXYLIN), np.array(EOSIN)) if around is None else (around.haematoxylin, around.eosin)
        drawn = [v * math.exp(random.normal(0, spread)) * np.exp(random.normal(0, spread / 3, 3)) for v in known]
        return Stain(*drawn)

    def colours(self) -> NDArray[np.uint8]:
        """(256, 256, 3) by hundredths of haematoxylin and of eosin."""
        density = np.arange(256)[:, None] / 100
        passed = np.exp(-density * self.haematoxylin)[:, None] * np.exp(-density * self.eosin)[None]
        return np.asarray((GLASS * passed).round(), dtype=np.uint8)


@dataclass(frozen=True, eq=False)
class Palette:
    """Sprites of each kind and two textures, drawn once."""

    sprites: dict[int, list[Sprite]]
    textures: tuple[Floats, Floats]

    @staticmethod
    @cache
    def draw(seed: int) -> Palette:
        random = np.random.default_rng([seed, 0])
        box = SpriteBox(random)
        makers = {STROMA: box.stroma, GLANDS: box.glands, LYMPHOCYTES: box.lymphocytes, TUMOUR: box.tumour}
        sprites = {kind: [make() for _ in range(SPRITES_PER_KIND)] for kind, make in makers.items()}
        return Palette(sprites, (fibres(random), fibres(random).T.copy()))


def paint(
    cells: Cells, outline: Floats, palette: Palette, stain: Stain, random: np.random.Generator
) -> NDArray[np.uint8]:
    """The picture (height, width, 3).

    Args:
        cells: what each cell of CELL_PX shows.
        outline: (rows * FIELD_PER_CELL, columns * FIELD_PER_CELL) above 0 where there is tissue.
        palette: to draw with.
        stain: of this slide.
        random: for all that varies.
    """
    from PIL import Image

    rows, columns = cells.shape
    colours = stain.colours().reshape(-1, 3)
    picture = np.full((rows * CELL_PX, columns * CELL_PX, 3), GLASS, dtype=np.uint8)
    direction, density = (
        Image.fromarray(smooth_field((rows * FIELD_PER_CELL, columns * FIELD_PER_CELL), FIELD_PER_CELL, random))
        for _ in range(2)
    )
    starts = random.integers(TEXTURE_PX, size=(2, 2))
    for row, column in np.argwhere(cells >= 0):
        box = tuple(FIELD_PER_CELL * side for side in (column, row, column + 1, row + 1))
        turn, dense, edge = (
            np.asarray(field.resize((CELL_PX, CELL_PX), Image.Resampling.BILINEAR, box))
            for field in (direction, density, Image.fromarray(outline))
        )
        angle = (turn + 1) * (math.pi / 4)
        first, second = (
            _window(texture, start[0] + row * CELL_PX, start[1] + column * CELL_PX)
            for texture, start in zip(palette.textures, starts, strict=True)
        )
        texture = first * np.cos(angle) + second * np.sin(angle)
        eosin = 46 + 10 * dense + 8 * texture
        eosin *= np.clip((texture + 2.4) * 2, 0.25, 1)  # clefts between strands
        haematoxylin = 5 + 1.5 * texture
        choices = palette.sprites[int(cells[row, column])]
        sprite = choices[int(random.integers(len(choices)))].turned(int(random.integers(4)), bool(random.integers(2)))
        haematoxylin += (sprite.haematoxylin - haematoxylin) * sprite.cover
        eosin += (sprite.eosin - eosin) * sprite.cover
        amounts = [np.clip(amount, 0, 255).astype(np.uint16) for amount in (haematoxylin, eosin)]
        index = np.where(edge + 0.01 * texture > 0, (amounts[0] << 8) + amounts[1], 0)
        picture[row * CELL_PX : (row + 1) * CELL_PX, column * CELL_PX : (column + 1) * CELL_PX] = colours[index]
    return picture


def smooth_field(shape: tuple[int, int], across: int, random: np.random.Generator) -> Floats:
    """Hills and valleys of this width, from about -1 to 1."""
    from PIL import Image

    points = random.uniform(-1, 1, [math.ceil(side / across) + 2 for side in shape]).astype(np.float32)
    return np.asarray(Image.fromarray(points).resize((shape[1], shape[0]), Image.Resampling.BICUBIC))


def _window(texture: Floats, top: int, left: int) -> Floats:
    """(CELL_PX, CELL_PX) of a texture that goes on forever."""
    rows, columns = (np.arange(first, first + CELL_PX) % TEXTURE_PX for first in (top, left))
    return texture[rows[:, None], columns]
