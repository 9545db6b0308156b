"""Labels of tiles from annotations of slides, as :mod:`psamil.cohort.tile_labels` reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from psamil.bag import Bag
from psamil.cohort.tables import quoted
from psamil.cohort.tile_labels import SlideLabels, save_labels
from psamil.errors import DataError, OptionError, one_of
from psamil.evaluation.localisation import ISOLATED_CELLS_UM
from psamil.readers import BagRef, TilePlaces, describe_bag, find_bags, slide_id, tile_places
from psamil.readers.hdf5 import CheckedH5
from psamil.slides.lesions import (
    Lesions,
    find_annotation,
    is_mask,
    lesions_of,
    overlaps,
    read_lesion_mask,
    read_outlines,
)
from psamil.slides.slide import find_slides
from psamil.slides.sources import open_source

LEAST_SHARE = 0.5  # of a positive tile that annotations cover
UNANNOTATED = ("leave out", "normal")


@dataclass(frozen=True)
class Labelling:
    """What :func:`label_tiles` did: how many slides, tiles and lesions there are."""

    annotated: int  # slides with a file
    unannotated: tuple[str, ...]  # those without
    policy: str  # what became of these
    least_share: float
    positive_tiles: int
    lesions: int
    isolated: int  # lesions that are too small to count
    without_tile: int  # lesions that count, but that no tile can find
    unmeasured: int  # slides with lesions whose resolution is not known: all of their lesions count

    def __str__(self) -> str:
        became = "count as normal" if self.policy == "normal" else "are left out"
        missing = f"; {len(self.unannotated)} without a file {became}: {quoted(self.unannotated)}"
        small = f", {self.isolated} of them isolated tumour cells, which do not count"
        told = [
            f"Annotations of {self.annotated} slides{missing if self.unannotated else ''}.",
            f"Lesions: {self.lesions}{small if self.isolated else ''}. "
            f"Positive are {self.positive_tiles} tiles, covered by at least {self.least_share:.0%}.",
        ]
        if self.without_tile:
            told.append(f"{self.without_tile} lesions have no tile and cannot be found; they count as missed.")
        if self.unmeasured:
            told.append(
                f"{self.unmeasured} slides with lesions do not tell micrometres per pixel: small lesions count there, "
                "and those close to each other stay apart."
            )
        return "\n".join(told)

    def about(self) -> dict[str, Any]:
        """For a record in JSON."""
        return asdict(self) | {"unannotated": len(self.unannotated)}


def label_tiles(
    features: Path | Iterable[BagRef],
    annotations: Path,
    out: Path,
    *,
    least_share: float = LEAST_SHARE,
    unannotated: str = "leave out",
    lesion_classes: Sequence[str] | None = None,
    slides: Path | None = None,
    mpp: float | None = None,
) -> Labelling:
    """Writes ``OUT/<slide>.npz`` for each slide: which of its tiles are positive, and of which lesion.

    Args:
        features: folder of features of any known format, or bags that were found in it.
        annotations: folder of ``<slide>.geojson``, ``<slide>.xml`` of ASAP, or masks (``<slide>.png``,
            ``<slide>_mask.tif``, ...).
        out: folder of the labels.
        least_share: of a tile that annotations must cover for it to be positive.
        unannotated: slides without a file: "leave out" writes no labels for them; "normal" means that there is
            nothing to outline.
        lesion_classes: classes of areas that are lesions; see :func:`psamil.slides.lesions.read_outlines`.
        slides: folder of slides, which masks need where the feature files do not know how large slides are.
        mpp: micrometres per level-0 pixel, where files do not tell.
    """
    if unannotated not in UNANNOTATED:
        raise one_of("policy for slides without annotations", unannotated, UNANNOTATED)
    if not 0 < least_share <= 1:
        raise OptionError(f"least_share is a share of a tile, above 0 and at most 1, not {least_share}")
    refs = list(find_bags(features).bags if isinstance(features, Path) else features)
    files = {ref.id: find_annotation(annotations, ref.id) for ref in refs}
    if refs and not any(files.values()):
        cause = f"has no annotations of any of the {len(refs)} slides"
        raise DataError(annotations, cause, f"name the files as slides: {refs[0].id}.geojson, .xml or _mask.tif")
    sizes = {} if slides is None else {slide_id(path): path for path in find_slides(slides)}
    done: list[SlideLabels] = []
    for ref in refs:
        file = files[ref.id]
        if file is None and unannotated == "leave out":
            continue
        labels = _labels(ref, file, least_share, lesion_classes, sizes.get(ref.id), mpp)
        save_labels(out / f"{ref.id}.npz", labels)
        done.append(labels)
    lengths = [np.array(list(labels.lesion_lengths_um.values())) for labels in done]
    unreachable = [
        sum(
            k not in labels.lesions and not length < ISOLATED_CELLS_UM for k, length in labels.lesion_lengths_um.items()
        )
        for labels in done
        if labels.lesions is not None
    ]
    return Labelling(
        annotated=sum(file is not None for file in files.values()),
        unannotated=tuple(ref.id for ref in refs if files[ref.id] is None),
        policy=unannotated,
        least_share=least_share,
        positive_tiles=sum(int(labels.positive.sum()) for labels in done),
        lesions=sum(map(len, lengths)),
        isolated=sum(int((of_slide < ISOLATED_CELLS_UM).sum()) for of_slide in lengths),
        without_tile=sum(unreachable),
        unmeasured=sum(bool(np.isnan(of_slide).any()) for of_slide in lengths),
    )


def label_slide(places: TilePlaces, lesions: Lesions, least_share: float = LEAST_SHARE) -> SlideLabels:
    """Labels of the tiles of one slide.

    A tile is positive if annotations cover at least this share of it. It belongs to the lesion that its centre lies in,
    as the challenge takes a detection by its point; a positive tile whose centre lies in none belongs to the lesion
    that covers most of it.

    Args:
        places: of the tiles, in level-0 pixels.
        lesions: of the slide.
        least_share: of a tile that is positive.
    """
    import shapely

    n = len(places.corners)
    squares = shapely.box(*places.corners.T, *(places.corners + places.size).T)
    tile, _, common = overlaps(squares, shapely.get_parts(lesions.annotated))
    share = np.bincount(tile, common, minlength=n) / places.size**2
    positive = share >= least_share - 1e-9  # half of a tile is half of it, whatever rounding says
    number = np.zeros(n, dtype=np.int64)
    tile, region, common = overlaps(squares[positive], lesions.regions)
    order = np.argsort(common, kind="stable")  # the largest comes last and stays
    number[np.flatnonzero(positive)[tile[order]]] = region[order] + 1
    centres = shapely.points(places.corners + places.size / 2)
    inside, region = shapely.STRtree(lesions.regions).query(centres, predicate="intersects")
    number[inside] = region + 1
    return SlideLabels(positive, number, dict(enumerate(lesions.lengths_um, start=1)))


def _labels(
    ref: BagRef,
    file: Path | None,
    least_share: float,
    classes: Sequence[str] | None,
    slide: Path | None,
    mpp: float | None,
) -> SlideLabels:
    about = describe_bag(ref, mpp=mpp)
    if file is None:
        return SlideLabels(np.zeros(about.n, dtype=bool), np.zeros(about.n, dtype=np.int64))
    xy = torch.zeros(about.n, 2) if about.xy is None else torch.from_numpy(about.xy)
    places = _in_px0(ref, tile_places(ref, Bag(torch.zeros(about.n, 1), xy, step=about.step)))
    if is_mask(file):
        annotated = read_lesion_mask(file, ref.id, _slide_size_px0(ref, file, slide), places.size)
    else:
        annotated = read_outlines(file, classes)
    return label_slide(places, lesions_of(annotated, places.mpp), least_share)


def _in_px0(ref: BagRef, places: TilePlaces) -> TilePlaces:
    if places.unit == "um" and places.mpp is not None:
        return TilePlaces(places.corners / places.mpp, places.size / places.mpp, "px0", places.mpp)
    if places.unit != "px0":
        cause = f"has places of tiles in {places.unit}, but annotations are in level-0 pixels"
        raise DataError(ref.path, cause, "label the tiles yourself (--tile-labels), or extract the features again")
    return places


def _slide_size_px0(ref: BagRef, mask: Path, slide: Path | None) -> tuple[int, int]:
    """Of the slide itself, or as features in TRIDENT's layout tell."""
    if slide is not None:
        source = open_source(slide)
        try:
            return source.level_sizes[0]
        finally:
            source.close()
    if ref.format == "trident" and ref.path.suffix == ".h5":
        with CheckedH5(ref.path) as file:
            known = file.attributes("coords") if "coords" in file.names else {}
        if "level0_width" in known and "level0_height" in known:
            return int(known["level0_width"]), int(known["level0_height"])
    cause = f"is a mask, and {ref.path.name} does not tell how large the slide is"
    raise DataError(mask, cause, "name the folder of the slides (--slides), or give GeoJSON")
