"""Writes the TCGA region embeddings of HIPT (192 numbers per 4096 x 4096 region at 20x) as one file per slide.

    python examples/convert_tcga_hipt4k.py data/tcga_hipt4k cohorts/tcga --cohort BRCA

    cohorts/tcga/
      features/<slide>.npz     features (regions, 192) float16; positions were never published
      labels.csv               case_id, slide_id, and all columns of slides.csv.gz: labels, survival, published folds

Regions stand in the order of a raster, column after column: open them with positions="row order" for a line that at
least keeps neighbours along a column together.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from rich.progress import track


def convert(data: Path, out: Path, cohorts: list[str] | None = None) -> pd.DataFrame:
    """Writes the slides of these cohorts, or of all; returns the table of labels."""
    slides = pd.read_csv(data / "slides.csv.gz", dtype=str, keep_default_na=False)
    with np.load(data / "features_fp16.npz", allow_pickle=False) as archive:
        features, offsets = archive["X"], archive["ptr"]
    if len(slides) != len(offsets) - 1 or offsets[-1] != len(features):
        raise SystemExit(f"{data}: {len(slides)} slides do not fit {len(offsets) - 1} bags of {len(features)} regions")
    unknown = set(cohorts or ()) - set(slides["cohort"])
    if unknown:
        raise SystemExit(
            f"no cohort {', '.join(sorted(unknown))}; there are {', '.join(sorted(set(slides['cohort'])))}"
        )
    chosen = slides[slides["cohort"].isin(cohorts)] if cohorts else slides
    folder = out / "features"
    folder.mkdir(parents=True, exist_ok=True)
    for i, slide in track(list(chosen["slide"].items()), description="slides"):
        bag = features[offsets[i] : offsets[i + 1]]
        np.savez(folder / f"{slide}.npz", features=bag, encoder="HIPT 4K")
    labels = chosen.rename(columns={"patient": "case_id", "slide": "slide_id"})
    labels = labels[["case_id", *(name for name in labels.columns if name != "case_id")]]
    labels.to_csv(out / "labels.csv", index=False)
    return labels


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of features_fp16.npz and slides.csv.gz")
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--cohort", nargs="+", help="cohorts to write, such as BRCA LUNG; all if left out")
    arguments = parser.parse_args()
    labels = convert(arguments.data, arguments.out, arguments.cohort)
    print(f"wrote {len(labels)} slides of {labels['case_id'].nunique()} patients to {arguments.out}")
