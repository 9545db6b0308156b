"""Pieces of drawn tissue: nuclei, glands, nests of a tumour, lymphocytes, and the texture of stroma.

Everything is drawn as amounts of two stains, haematoxylin and eosin, in hundredths of an optical density. What colour
they give is decided later (:mod:`psamil.slides.procedural_tissue`), so that one piece can be stained in many ways.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

CELL_PX = 224  # side of a sprite: one cell of the lattice on which tissue is drawn
LARGEST_OUTLINE = 1.15  # of a rounded piece, over its radius
MARGIN_PX = 8  # that sprites leave free along the edges of their cell
TEXTURE_PX = 1024
NUCLEI_PER_KIND = 24

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Sprite:
    """What one cell of the lattice shows on top of the stroma."""

    haematoxylin: Floats  # (CELL_PX, CELL_PX)
    eosin: Floats
    cover: Floats  # from 0, where the stroma is seen, to 1

    def turned(self, quarters: int, mirrored: bool) -> Sprite:
        turned = [
            np.rot90(a[:, ::-1] if mirrored else a, quarters) for a in (self.haematoxylin, self.eosin, self.cover)
        ]
        return Sprite(*turned)


@dataclass(frozen=True)
class NucleusKind:
    """How nuclei of one kind of cell look."""

    radius_px: tuple[float, float]  # from and to
    elongation: tuple[float, float]  # longer over shorter axis
    darkness: tuple[float, float]
    texture: float  # relative spread of the darkness inside a nucleus
    rim: float  # how much darker the membrane is
    wobble: float  # of the outline, relative
    nucleoli: int  # at most


LYMPHOCYTE = NucleusKind((6.0, 7.5), (1.0, 1.15), (150, 185), 0.10, 0.05, 0.03, 0)
FIBROBLAST = NucleusKind((4.0, 5.5), (2.4, 4.0), (85, 130), 0.12, 0.10, 0.06, 0)
EPITHELIAL = NucleusKind((7.0, 8.5), (1.3, 1.7), (90, 120), 0.15, 0.25, 0.04, 1)
TUMOUR = NucleusKind((9.5, 14.0), (1.0, 1.5), (80, 135), 0.28, 0.35, 0.10, 2)


class Nuclei:
    """Ready-made nuclei of one kind, stamped wherever one is needed."""

    def __init__(self, kind: NucleusKind, random: np.random.Generator) -> None:
        self.stamps = [_nucleus(kind, 2 * math.pi * i / NUCLEI_PER_KIND, random) for i in range(NUCLEI_PER_KIND)]

    def put(
        self, haematoxylin: Floats, cover: Floats, x: float, y: float, angle: float, random: np.random.Generator
    ) -> None:
        """One whose longer axis has this angle, up to half a turn, and a few degrees of disorder."""
        turn = (angle % math.pi) / (2 * math.pi) * NUCLEI_PER_KIND + random.normal(0, 0.7)
        dark, inside = self.stamps[(round(turn) + NUCLEI_PER_KIND // 2 * int(random.integers(2))) % NUCLEI_PER_KIND]
        half = len(dark) // 2
        top, left = round(y) - half, round(x) - half
        rows = slice(max(top, 0), min(top + len(dark), haematoxylin.shape[0]))
        columns = slice(max(left, 0), min(left + len(dark), haematoxylin.shape[1]))
        if rows.start >= rows.stop or columns.start >= columns.stop:
            return
        part = (slice(rows.start - top, rows.stop - top), slice(columns.start - left, columns.stop - left))
        place = (rows, columns)
        haematoxylin[place] = haematoxylin[place] * (1 - inside[part]) + dark[part] * inside[part]
        np.maximum(cover[place], inside[part], out=cover[place])


def _nucleus(kind: NucleusKind, angle: float, random: np.random.Generator) -> tuple[Floats, Floats]:
    """Amount of haematoxylin, and how much of each pixel the nucleus covers."""
    radius, elongation = random.uniform(*kind.radius_px), random.uniform(*kind.elongation)
    half = math.ceil(radius * math.sqrt(elongation) * (1 + 2 * kind.wobble)) + 2
    y, x = np.mgrid[-half : half + 1, -half : half + 1].astype(np.float32)
    along = (x * math.cos(angle) + y * math.sin(angle)) / math.sqrt(elongation)
    across = (y * math.cos(angle) - x * math.sin(angle)) * math.sqrt(elongation)
    outline = _wavy(np.arctan2(across, along), kind.wobble, random)
    distance = np.hypot(along, across) / (radius * outline)  # 1 on the membrane
    inside = np.clip((1 - distance) * radius / 1.5 + 0.5, 0, 1)
    chromatin = gaussian_filter(random.standard_normal(x.shape), 1.3) * 3.5
    dark = random.uniform(*kind.darkness) * (1 + kind.texture * chromatin + kind.rim * (distance > 0.78))
    for _ in range(int(random.integers(kind.nucleoli + 1))):
        at = random.uniform(-0.4, 0.4, 2) * radius
        dark += 70 * np.exp(-((x - at[0]) ** 2 + (y - at[1]) ** 2) / 5)
    return np.clip(dark, 0, 255).astype(np.float32), inside.astype(np.float32)


def _wavy(angle: NDArray[np.floating], amount: float, random: np.random.Generator) -> NDArray[np.float64]:
    """Radius of a rounded outline around 1 in each direction."""
    waves = np.arange(2, 6)
    sizes, phases = random.normal(0, amount, 4) / np.sqrt(waves - 1), random.uniform(0, 2 * math.pi, 4)
    return np.asarray(1 + (sizes * np.cos(waves * angle[..., None] + phases)).sum(-1))


class SpriteBox:
    """Draws sprites; those of one box share its nuclei."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        kinds = {"lymphocyte": LYMPHOCYTE, "fibroblast": FIBROBLAST, "epithelial": EPITHELIAL, "tumour": TUMOUR}
        self.nuclei = {name: Nuclei(kind, random) for name, kind in kinds.items()}

    def stroma(self) -> Sprite:
        """A few spindle nuclei that lie along the fibres, and now and then a lymphocyte."""
        sprite, random = _empty(), self.random
        for _ in range(int(random.integers(8, 20))):
            x, y = random.uniform(0, CELL_PX, 2)
            kind, angle = ("fibroblast", random.normal(0.2, 0.5)) if random.random() < 0.8 else ("lymphocyte", 0.0)
            self._put(sprite, kind, x, y, angle)
        return sprite

    def lymphocytes(self) -> Sprite:
        """Many small dark nuclei, crowded in the middle."""
        sprite, random = self.stroma(), self.random
        reach = random.uniform(60, 95)
        x, y = CELL_PX / 2 + random.uniform(-1, 1, 2) * (CELL_PX / 2 - MARGIN_PX - 9 - reach)
        for u, v in _apart(reach / 1.8 * random.standard_normal((400, 2)), 12.0):
            if math.hypot(u, v) < reach:
                self._put(sprite, "lymphocyte", x + u, y + v, 0.0)
        return sprite

    def glands(self) -> Sprite:
        """One large gland or up to four small ones: a ring of nuclei, cytoplasm, an empty lumen."""
        sprite, random = self.stroma(), self.random
        several = random.random() < 0.5
        radii = random.uniform(32, 52, 4) if several else random.uniform(52, 84, 1)
        taken: list[tuple[float, float, float]] = []
        for radius in radii:
            for _ in range(20):
                free = LARGEST_OUTLINE * radius + MARGIN_PX
                x, y = random.uniform(free, CELL_PX - free, 2)
                if all(math.hypot(x - u, y - v) > 1.1 * (radius + r) for u, v, r in taken):
                    taken.append((x, y, radius))
                    self._gland(sprite, x, y, radius)
                    break
        return sprite

    def _gland(self, sprite: Sprite, x: float, y: float, radius: float) -> None:
        random = self.random
        wall = min(random.uniform(27, 35), 0.7 * radius)  # height of its cells
        rows, columns = np.mgrid[0:CELL_PX, 0:CELL_PX]
        angle, distance = np.arctan2(rows - y, columns - x), np.hypot(rows - y, columns - x)
        directions = np.linspace(-math.pi, math.pi, 361)
        outline = radius * np.clip(_wavy(directions, 0.08, random), 0.75, LARGEST_OUTLINE)
        depth = np.interp(angle, directions, outline) - distance  # into the gland
        lumen = np.clip((depth - wall * (1 + 0.08 * np.cos(angle * round(radius / 4)))) / 3, 0, 1)
        borders = 0.5 + 0.5 * np.cos(angle * round(2 * math.pi * radius / 13))  # of neighbouring cells
        mucin = np.exp(-((depth - 0.72 * wall) ** 2) / 60) * (1 - borders**2) * random.uniform(0, 1)
        eosin = (50 + 9 * borders**4 + 14 * np.exp(-((depth - wall) ** 2) / 8) - 32 * mucin) * (1 - lumen) + 3 * lumen
        haematoxylin = (14 - 6 * mucin) * (1 - lumen) + 3 * lumen * random.uniform(0, 1.5)
        _blend(sprite, 6.0, 36.0, np.clip(depth / 2 + 2, 0, 1))  # a thin pale line around the gland
        _blend(sprite, haematoxylin, eosin, np.clip(depth + 0.5, 0, 1))
        count = round(2 * math.pi * radius / 11.5)
        for turn in (np.arange(count) + random.uniform(-0.25, 0.25, count)) * 2 * math.pi / count - math.pi:
            inner = np.interp(turn, directions, outline) - random.uniform(9, 14)
            self._put(sprite, "epithelial", x + inner * math.cos(turn), y + inner * math.sin(turn), turn)

    def tumour(self) -> Sprite:
        """A lobed nest of large, crowded, uneven nuclei, here and there with a small lumen."""
        sprite, random = self.stroma(), self.random
        rows, columns = np.mgrid[0:CELL_PX, 0:CELL_PX]
        depth = np.full((CELL_PX, CELL_PX), -np.inf)
        for turn in random.uniform(0, 2 * math.pi) + np.arange(4) * math.pi / 2 + random.uniform(-0.4, 0.4, 4):
            radius = random.uniform(38, 58)
            away = random.uniform(0.5, 1.0) * (CELL_PX / 2 - MARGIN_PX - LARGEST_OUTLINE * radius)
            x, y = CELL_PX / 2 + away * math.cos(turn), CELL_PX / 2 + away * math.sin(turn)
            edge = radius * np.clip(_wavy(np.arctan2(rows - y, columns - x), 0.07, random), 0.8, LARGEST_OUTLINE)
            depth = np.maximum(depth, edge - np.hypot(rows - y, columns - x))
        cloud = gaussian_filter(random.standard_normal((CELL_PX, CELL_PX)), 4) * 8
        _blend(sprite, 5.0, 30.0, np.clip(depth / 2 + 2, 0, 1))
        _blend(sprite, 20 + 4 * cloud, 50 + 6 * cloud, np.clip(depth / 2 + 0.5, 0, 1))
        holes = [(*random.uniform(80, CELL_PX - 80, 2), random.uniform(9, 17)) for _ in range(random.integers(3))]
        for u, v, radius in holes:
            distance = np.hypot(columns - u, rows - v) / _wavy(np.arctan2(rows - v, columns - u), 0.12, random)
            _blend(sprite, 3.0, 4.0, np.clip((radius - distance) / 2 + 0.5, 0, 1))
        for u, v in _apart(random.uniform(0, CELL_PX, (900, 2)), 17.0):
            near_hole = any(math.hypot(u - a, v - b) < radius + 9 for a, b, radius in holes)
            if depth[int(v), int(u)] > 7 and not near_hole:
                self._put(sprite, "tumour", u, v, random.uniform(0, math.pi))
        return sprite

    def _put(self, sprite: Sprite, kind: str, x: float, y: float, angle: float) -> None:
        self.nuclei[kind].put(sprite.haematoxylin, sprite.cover, x, y, angle, self.random)


def _empty() -> Sprite:
    nothing = np.zeros((CELL_PX, CELL_PX), dtype=np.float32)
    return Sprite(nothing, np.full_like(nothing, 45.0), nothing.copy())


Amount = float | NDArray[np.floating]


def _blend(sprite: Sprite, haematoxylin: Amount, eosin: Amount, share: NDArray[np.floating]) -> None:
    """Paints over what is there."""
    share = share.astype(np.float32)
    for layer, amount in ((sprite.haematoxylin, haematoxylin), (sprite.eosin, eosin)):
        layer += (amount - layer) * share
    np.maximum(sprite.cover, share, out=sprite.cover)


def _apart(points: NDArray[np.float64], distance: float) -> list[tuple[float, float]]:
    """Those that are not too near to one before them."""
    kept: list[tuple[float, float]] = []
    free = np.ones(len(points), dtype=bool)
    for i, (x, y) in enumerate(points):
        if free[i]:
            kept.append((float(x), float(y)))
            free &= (points[:, 0] - x) ** 2 + (points[:, 1] - y) ** 2 >= distance**2
    return kept


def fibres(random: np.random.Generator) -> Floats:
    """(TEXTURE_PX, TEXTURE_PX) wavy strands that go on without a seam at the edges; mean 0, standard deviation 1."""
    ky, kx = np.fft.fftfreq(TEXTURE_PX)[:, None] * 2 * math.pi, np.fft.rfftfreq(TEXTURE_PX)[None, :] * 2 * math.pi

    def noise(length_px: float, width_px: float) -> NDArray[np.floating]:
        passed = np.exp(-((kx * length_px) ** 2 + (ky * width_px) ** 2) / 2)
        white = random.standard_normal(passed.shape) + 1j * random.standard_normal(passed.shape)
        field = np.fft.irfft2(white * passed, s=(TEXTURE_PX, TEXTURE_PX))
        return np.asarray(field / field.std())

    strands = noise(22, 3.0) + 0.8 * noise(40, 9) + 0.5 * noise(3, 1.5)
    bend = (16 * noise(45, 45)).round().astype(int)
    rows, columns = np.indices(bend.shape)
    waved = strands[(rows + bend) % TEXTURE_PX, columns]
    return ((waved - waved.mean()) / waved.std()).astype(np.float32)
