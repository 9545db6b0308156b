"""Cohorts whose label is a spatial interaction of known range, and nothing else.

Where the two phenotypes lie that interact is drawn by :mod:`psamil.cohort.interaction`, which also says why nothing but
their distance tells the classes apart. Here they get features as an encoder would give them, patients, hospitals with
their own stain, survival times and files in TRIDENT's layout.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from scipy.optimize import brentq

from psamil.cohort.interaction import OTHERS, Interaction, draw_slide
from psamil.errors import DataError, OptionError
from psamil.files import atomic_write
from psamil.readers.trident_writing import TridentSlide, feature_path, new_feature_file, write_state

MIN_TILES = 50
PARTS = {"train": 0.6, "val": 0.2, "test": 0.2}
MEDIAN_SURVIVAL_MONTHS = 60.0  # of negative patients
SEPARATION = 6.0  # distance of each phenotype's mean feature from the origin, in standard deviations of a feature
PATCH_PX, STEP_PX0, MPP = 256, 512, 0.25  # tiles of 256 px at 20x, on slides scanned at 40x
MAGNIFICATION, SLIDE_MAGNIFICATION = 20, 40


@dataclass(frozen=True)
class Patient:
    """What the label table says of one patient."""

    id: str
    positive: bool
    site: int
    part: str
    survival_months: float
    censored: bool


def simulate(
    out: Path,
    *,
    slides: int = 240,
    tiles: int = 1000,
    tile_spread: float = 0.2,
    range_steps: float = 5.0,
    second_range_steps: float | None = None,
    phenotype_share: float = 0.02,
    positive_share: float = 0.5,
    slides_per_patient: int = 1,
    sites: int = 4,
    stain_shift: float = 0.2,
    hazard_ratio: float = 4.0,
    censored_share: float = 0.3,
    dim: int = 32,
    name: str = "simulated",
    seed: int = 0,
) -> Path:
    """Writes a cohort in TRIDENT's layout whose label depends on how near two phenotypes are to each other.

    Example: psamil simulate cohort --slides 100 --range-steps 3

    ``OUT/20x_256px_0px_overlap/features_<name>/<slide>.h5`` are the bags, ``OUT/labels.csv`` has a row per slide,
    ``OUT/tiles/<slide>.npy`` says of each tile whether it takes part in an interaction. The label table is written
    last. The same arguments give the same bytes.

    Args:
        out: new folder of the cohort.
        slides: number of slides.
        tiles: median number of tiles of a slide, 50 to 50,000 and more.
        tile_spread: standard deviation of the logarithm of the number of tiles.
        range_steps: range of the interaction in tile steps (of 128 um).
        second_range_steps: range of a second interaction, of two other phenotypes. A positive slide then has one of the
            two, by the toss of a coin: whoever sees one range alone is right about half of them.
        phenotype_share: share of the tiles that have phenotype A; as many have B.
        positive_share: share of the patients that are positive.
        slides_per_patient: all slides of a patient are positive, or none.
        sites: number of hospitals; each shifts the features in its own way, whatever the label.
        stain_shift: size of the shifts of sites, in standard deviations of a feature; those of slides are half of it.
        hazard_ratio: hazard of death of positive patients over that of negative ones.
        censored_share: expected share of the patients whose death is not seen.
        dim: width of the features, which are float16.
        name: of the encoder that the features pretend to come from.
        seed: of all randomness.

    Returns:
        The label table.
    """
    _check(locals())
    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise DataError(out, "is not empty", "choose a new folder, or delete this one")
    patients = _draw_patients(
        math.ceil(slides / slides_per_patient), positive_share, sites, hazard_ratio, censored_share, seed
    )
    ranges = [range_steps] if second_range_steps is None else [range_steps, second_range_steps]
    phenotype_count = 2 * len(ranges) + len(OTHERS)
    appearance = Appearance.draw(phenotype_count, dim, sites, stain_shift, np.random.default_rng([seed, 1]))
    console = Console(stderr=True)
    rows = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for i in progress.track(range(slides), description="slides"):
            patient, slide = patients[i // slides_per_patient], f"slide_{i:05d}"
            random = np.random.default_rng([seed, 2, i])
            n = max(MIN_TILES, round(tiles * math.exp(tile_spread * random.standard_normal())))
            which = int(random.integers(len(ranges))) if len(ranges) > 1 else 0
            interactions = [Interaction(steps, patient.positive and which == i) for i, steps in enumerate(ranges)]
            cells, phenotypes = draw_slide(n, interactions, phenotype_share, random)
            features = appearance.features(phenotypes, patient.site, random)
            write_trident_bag(out, name, slide, features, cells * STEP_PX0)
            with atomic_write(out / "tiles" / f"{slide}.npy") as temporary, open(temporary, "wb") as file:
                np.save(file, (phenotypes // 2 == which) & patient.positive)
            rows.append(_label_row(patient, slide))
    with atomic_write(out / "labels.csv") as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return out / "labels.csv"


@dataclass(frozen=True, eq=False)
class Appearance:
    """How phenotypes look as features: a mean of each, the shift of each site, noise."""

    means: NDArray[np.float64]  # (phenotypes, dim)
    site_offsets: NDArray[np.float64]  # (sites, dim)
    site_gains: NDArray[np.float64]  # (sites, dim)
    stain_shift: float

    @staticmethod
    def draw(phenotypes: int, dim: int, sites: int, stain_shift: float, random: np.random.Generator) -> Appearance:
        means = random.standard_normal((phenotypes, dim))
        means *= SEPARATION / np.linalg.norm(means, axis=1, keepdims=True)
        offsets = stain_shift * random.standard_normal((sites, dim))
        gains = np.exp(0.1 * stain_shift * random.standard_normal((sites, dim)))
        return Appearance(means, offsets, gains, stain_shift)

    def features(self, phenotypes: NDArray[np.int64], site: int, random: np.random.Generator) -> NDArray[np.float16]:
        dim = self.means.shape[1]
        tiles = self.means[phenotypes] + random.standard_normal((len(phenotypes), dim))
        slide_offset = self.stain_shift / 2 * random.standard_normal(dim)
        return np.asarray(tiles * self.site_gains[site] + self.site_offsets[site] + slide_offset, dtype=np.float16)


def _draw_patients(
    n: int, positive_share: float, sites: int, hazard_ratio: float, censored_share: float, seed: int
) -> list[Patient]:
    random = np.random.default_rng([seed, 0])
    positive = random.permutation(n) < round(positive_share * n)
    parts = np.empty(n, dtype=object)
    for group in (positive, ~positive):  # each part has its share of both classes
        members = random.permutation(np.flatnonzero(group))
        bounds = (np.cumsum(list(PARTS.values()))[:-1] * len(members)).round().astype(int)
        for part, chosen in zip(PARTS, np.split(members, bounds), strict=True):
            parts[chosen] = part
    hazard = math.log(2) / MEDIAN_SURVIVAL_MONTHS * np.where(positive, hazard_ratio, 1.0)
    death = random.exponential(1 / hazard)
    end = random.exponential(1.0, n) / _rate_of_censoring(hazard, censored_share)
    site = random.integers(sites, size=n)
    return [
        Patient(f"case_{i:05d}", bool(positive[i]), int(site[i]), parts[i], min(death[i], end[i]), end[i] < death[i])
        for i in range(n)
    ]


def _rate_of_censoring(hazard: NDArray[np.float64], share: float) -> float:
    """Rate c of an exponential time of censoring with mean of c / (c + hazard), the chance to be censored, = share."""
    if share == 0:
        return 1e-12
    return float(brentq(lambda rate: np.mean(rate / (rate + hazard)) - share, 1e-12, 1e6))


def _label_row(patient: Patient, slide: str) -> dict[str, Any]:
    return {
        "case_id": patient.id,
        "slide_id": slide,
        "label": "positive" if patient.positive else "negative",
        "site": f"site_{patient.site}",
        "part": patient.part,
        "survival_months": f"{patient.survival_months:.3f}",
        "censorship": int(patient.censored),  # 1 = censored
    }


def write_trident_bag(
    out: Path, name: str, slide: str, features: NDArray[np.floating], coords_px0: NDArray[np.int64]
) -> Path:
    """Writes features and what is known of the slide as TRIDENT does: chunks of one tile, attributes, states."""
    width, height = (int(side) + STEP_PX0 for side in coords_px0.max(0, initial=0))
    about = TridentSlide(
        name=slide,
        size_px0=(width, height),
        mpp_px0=MPP,
        patch_px=PATCH_PX,
        patch_px0=STEP_PX0,
        overlap_px=0,
        magnification=MAGNIFICATION,
        slide_magnification=SLIDE_MAGNIFICATION,
    )
    with new_feature_file(out, about, name) as file:
        file.begin(features, coords_px0)
    write_state(out, about, f"{slide}.svs")
    return feature_path(out, about.tiling_folder, name, slide)


def _check(options: dict[str, Any]) -> None:
    """Names the first argument that is out of bounds."""
    bounds = {
        "slides": (2, math.inf),
        "tiles": (MIN_TILES, math.inf),
        "tile_spread": (0, 1),
        "range_steps": (1, 50),
        "second_range_steps": (1, 50),
        "phenotype_share": (0, 0.2),
        "positive_share": (0, 1),
        "slides_per_patient": (1, math.inf),
        "sites": (1, math.inf),
        "stain_shift": (0, math.inf),
        "hazard_ratio": (0.01, 100),
        "censored_share": (0, 0.95),
        "dim": (2, math.inf),
        "seed": (0, math.inf),
    }
    for option, (low, high) in bounds.items():
        if options[option] is not None and not low <= options[option] <= high:
            raise OptionError(f"{option} must be between {low:g} and {high:g}, got {options[option]:g}")
