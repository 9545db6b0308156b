"""Writes cells with positions (CODEX of colorectal cancer, MIBI of breast cancer) as one file per image.

    python examples/convert_cells.py data/crc_codex_schurch2020 cohorts/crc
    python examples/convert_cells.py data/tnbc_mibi_keren2018 cohorts/tnbc

    cohorts/crc/
      features/<image>.npz     features (cells, types + markers): the type one-hot, then markers where there are any;
                               coords (cells, 2) in pixels; feature_names
      labels.csv               case_id, slide_id, label, n_cells

An input folder holds cells.npz (ptr, xy, cell_type, [markers_bits]), bags.csv and cell_types.txt, [markers.txt].
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from rich.progress import track

CRC_GROUPS = {"1": "CLR", "2": "DII"}  # Crohn's-like reaction, diffuse inflammatory infiltration
TNBC_LABELS = {"0": "mixed", "1": "compartmentalised"}


def label_table(bags: pd.DataFrame) -> pd.DataFrame:
    """Ids and labels, whose columns the two data sets name differently."""
    if "group" in bags:
        columns = {"case_id": "CRC-" + bags["patient"].str.zfill(2), "slide_id": bags["image"]}
        return pd.DataFrame({**columns, "label": bags["group"].map(CRC_GROUPS), "n_cells": bags["n_cells"]})
    patients = "TNBC-" + bags["Person"].str.zfill(2)
    labels = bags["label"].map(TNBC_LABELS)
    return pd.DataFrame({"case_id": patients, "slide_id": patients, "label": labels, "n_cells": bags["n_cells"]})


def cell_features(cells: dict[str, np.ndarray], data: Path) -> tuple[np.ndarray, list[str]]:
    """(cells, types + markers) of zeros and ones, and their names."""
    types = (data / "cell_types.txt").read_text().split()
    parts, names = [np.eye(len(types), dtype=np.uint8)[cells["cell_type"]]], types
    if "markers_bits" in cells:
        markers = (data / "markers.txt").read_text().split()
        parts.append(np.unpackbits(cells["markers_bits"], axis=1)[:, : len(markers)])
        names = types + markers
    return np.concatenate(parts, 1), names


def convert(data: Path, out: Path) -> pd.DataFrame:
    """Writes all images; returns the table of labels."""
    labels = label_table(pd.read_csv(data / "bags.csv", dtype=str))
    with np.load(data / "cells.npz", allow_pickle=False) as archive:
        cells = {name: archive[name] for name in archive.files}
    features, names = cell_features(cells, data)
    offsets = cells["ptr"]
    if len(labels) != len(offsets) - 1 or not labels["slide_id"].is_unique or labels["label"].isna().any():
        raise SystemExit(f"{data}: bags.csv does not fit the {len(offsets) - 1} bags of cells.npz")
    folder = out / "features"
    folder.mkdir(parents=True, exist_ok=True)
    for i, image in track(list(enumerate(labels["slide_id"])), description="images"):
        bag = slice(offsets[i], offsets[i + 1])
        facts = {"unit": "px", "continuous": True, "feature_names": names}
        np.savez_compressed(folder / f"{image}.npz", features=features[bag], coords=cells["xy"][bag], **facts)
    labels.to_csv(out / "labels.csv", index=False)
    return labels


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of cells.npz and bags.csv")
    parser.add_argument("out", type=Path, help="folder to write to")
    arguments = parser.parse_args()
    labels = convert(arguments.data, arguments.out)
    counts = ", ".join(f"{label} {n}" for label, n in labels["label"].value_counts().items())
    patients = labels["case_id"].nunique()
    print(f"wrote {len(labels)} images of {patients} patients to {arguments.out}; images per label: {counts}")
