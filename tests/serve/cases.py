"""A small study to look at: slides with pictures, features, labels of tiles, and runs of two models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

import psamil
from psamil.readers.trident_writing import TridentSlide, new_feature_file, write_state
from tests.slides.drawn import waves, write_offset_slide, write_slide

TILE_PX0, MPP = 64, 0.5
SIZE_PX0 = 801, 703  # width and height: no power of two divides them
OFFSET_PX0 = 300, 200  # of the scanned area, for a slide that has one
WHOLE_PX0 = 1301, 1103


@dataclass(frozen=True)
class StudyFiles:
    features: Path
    slides: Path
    tile_labels: Path
    psa: Path
    abmil: Path

    def options(self):
        return {"features": self.features, "slides": self.slides, "tile_labels": self.tile_labels}


def small_study(folder: Path) -> StudyFiles:
    """Twelve slides s00 to s11. s00 and s01 have pictures, s01 with an offset; all but s11 have labels of tiles."""
    files = StudyFiles(*(folder / name for name in ("features", "slides", "tile-labels", "psa", "abmil")))
    for made in (files.slides, files.tile_labels):
        made.mkdir(parents=True)
    rows = ["slide,label"]
    for i in range(12):
        name, coords = f"s{i:02d}", lattice(OFFSET_PX0 if i == 1 else (0, 0), seed=i)
        write_features(files.features, name, coords, seed=i)
        rows.append(f"{name},{'ab'[i % 2]}")
        if i < 11:
            np.save(files.tile_labels / f"{name}.npy", coords[:, 0] > 400)
    write_slide(files.slides / "s00.tif", waves(*SIZE_PX0[::-1]), MPP, levels=3)
    write_offset_slide(files.slides / "s01.scn", waves(*SIZE_PX0[::-1]), OFFSET_PX0, WHOLE_PX0, MPP)
    labels = folder / "labels.csv"
    labels.write_text("\n".join(rows) + "\n")
    options = {"target": "label", "folds": 2, "seeds": 1, "cache": folder / "cache", "epochs": 2}
    sizes = {"heads": 2, "head_dim": 4, "k_init": 2.0}
    psamil.fit(files.features, labels, files.psa, model="psa", model_options=sizes, **options)
    psamil.fit(files.features, labels, files.abmil, model="abmil", **options)
    return files


def lattice(offset_px0, seed, columns=12, rows=10):
    """(n, 2) corners of most tiles of a lattice."""
    x, y = np.meshgrid(np.arange(columns), np.arange(rows))
    cells = np.stack([x.ravel(), y.ravel()], axis=1)
    kept = np.random.default_rng(seed).random(len(cells)) < 0.8
    return (cells[kept] * TILE_PX0 + np.asarray(offset_px0)).astype(np.int64)


def write_features(out: Path, name: str, coords, seed: int, dim: int = 6) -> None:
    features = np.random.default_rng(seed).standard_normal((len(coords), dim)).astype(np.float32)
    slide = TridentSlide(name, SIZE_PX0, MPP, TILE_PX0, TILE_PX0, 0, 20, 20)
    with new_feature_file(out, slide, "drawn") as file:
        file.begin(features, coords)
    write_state(out, slide, name)
