"""Real cohorts, from their files to bags with labels. They are not part of the repository: absent, the tests skip."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from psamil.cohort import Cohort, k_fold, splits_from_columns
from tests.real_data import DATA

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="no data folder; PSAMIL_DATA names it")


def convert(script, *args):
    subprocess.run([sys.executable, str(ROOT / "examples" / script), *map(str, args)], check=True, capture_output=True)


def test_lesions_among_decoys(tmp_path):
    script, out = DATA / "semireal_camelyon.py", tmp_path / "camelyon"
    options = ["--slides", "8", "--tiles", "200", "--decoys", "--seed", "3"]
    subprocess.run([sys.executable, str(script), str(out), *options], check=True, capture_output=True)
    cohort = Cohort.open(out, out / "labels.csv", target="label")
    assert len(cohort) == 8
    assert not cohort.set_aside
    for sample in cohort.samples:
        bag = cohort.load(sample)
        assert bag.step.length == 1024
        assert (bag.xy == bag.xy.round()).all()
        assert len(np.load(out / "tiles" / f"{sample.id}.npy")) == len(bag)
    assert {split.name for split in splits_from_columns(cohort).folds} == {"part"}


@pytest.mark.parametrize(
    ("name", "target", "bags", "patients"),
    [("crc_codex_schurch2020", "label", 140, 35), ("tnbc_mibi_keren2018", "label", 33, 33)],
)
def test_cells(tmp_path, name, target, bags, patients):
    convert("convert_cells.py", DATA / name, tmp_path / "cells")
    cohort = Cohort.open(tmp_path / "cells", tmp_path / "cells" / "labels.csv", target=target)
    assert (len(cohort), len(set(cohort.patients))) == (bags, patients)
    assert cohort.outcome.kind == "binary"
    bag = cohort.load(cohort.samples[0])
    assert bag.step.source == "spacing"
    assert bag.features.sum(1).min() >= 1  # a type each
    by_patient = Cohort.open(tmp_path / "cells", tmp_path / "cells" / "labels.csv", target=target, unit="patient")
    assert len(by_patient) == patients
    assert len(k_fold(by_patient, 5)) == 5


def test_slides_without_positions(tmp_path):
    convert("convert_tcga_hipt4k.py", DATA / "tcga_hipt4k", tmp_path / "hipt")
    cohort = Cohort.open(
        tmp_path / "hipt",
        tmp_path / "hipt" / "labels.csv",
        target="msi_status",
        classes=["MSS", "MSI"],
        reading={"positions": "row order"},
    )
    assert cohort.outcome.describe() == "MSS 504 / MSI 81"
    bag = cohort.load(cohort.samples[0])
    assert bag.features.shape[1] == 192
    assert (bag.xy[:, 1] == 0).all()
