"""The name of a slide, from the name of any file that stands for it: scan, features, or an entry of a label table."""

from __future__ import annotations

from pathlib import PurePath

# Only these are taken off: names of TCGA slides contain dots that belong to the name.
SLIDE_EXTENSIONS = (
    *(".svs", ".ndpi", ".ndpis", ".mrxs", ".tif", ".tiff", ".ome", ".qptiff", ".btf", ".vms", ".vmu", ".vsi", ".scn"),
    *(".bif", ".czi", ".svslide", ".isyntax", ".i2syntax", ".dcm", ".dicom", ".jpg", ".jpeg", ".png", ".sdpc", ".kfb"),
)
TABLE_EXTENSIONS = (".parquet", ".pq", ".csv", ".tsv", ".h5ad", ".gz")
ARRAY_EXTENSIONS = (".h5", ".hdf5", ".pt", ".pth", ".zarr", ".npz", ".npy")
KNOWN_EXTENSIONS = SLIDE_EXTENSIONS + TABLE_EXTENSIONS + ARRAY_EXTENSIONS


def slide_id(name: str | PurePath) -> str:
    """The file's name without folders and without known extensions, however many: ``a/b.c.ome.tif.h5`` is ``b.c``."""
    stem = PurePath(name).name
    while True:
        extension = next((known for known in KNOWN_EXTENSIONS if stem.lower().endswith(known)), None)
        if extension is None or len(extension) == len(stem):
            return stem
        stem = stem[: -len(extension)]
