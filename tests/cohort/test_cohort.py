"""Cohorts: samples with their bags and outcomes, patients of several slides, damage, fingerprints, real tables."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from psamil.bag import Bag
from psamil.cohort import BagCache, Cohort, Survival, k_fold, splits_from_columns
from psamil.cohort import cache as cache_module
from psamil.cohort.cohort import join_slides
from psamil.errors import DataError, OptionError
from psamil.files import unwritable
from psamil.readers import BagRef, Found
from tests.real_data import DATA

TILES = np.stack(np.meshgrid(np.arange(4), np.arange(3)), -1).reshape(-1, 2) * 256


def write_bag(folder: Path, name: str, *, dim: int = 8, features: np.ndarray | None = None, mpp: float = 0.5) -> None:
    folder.mkdir(exist_ok=True)
    if features is None:
        features = np.random.default_rng(sum(name.encode())).normal(size=(len(TILES), dim)).astype(np.float32)
    np.savez(folder / f"{name}.npz", features=features, coords=TILES[: len(features)], unit="px0", step=256, mpp=mpp)


@pytest.fixture
def features(tmp_path: Path) -> Path:
    for name in ("a1", "a2", "b1", "c1", "d1"):
        write_bag(tmp_path / "features", name)
    return tmp_path / "features"


LABELS = pd.DataFrame(
    {
        "case_id": ["A", "B", "A", "C", "D", "E"],  # rows of a patient need not be neighbours
        "slide_id": ["a1.svs", "b1.svs", "a2.svs", "c1.svs", "d1.svs", "e1.svs"],
        "label": ["x", "y", "x", "y", None, "x"],
        "site": ["s1", "s2", "s1", "s2", "s2", "s1"],
        "survival_months": [1.0, 2.0, 1.0, 4.0, 5.0, 6.0],
        "censorship": [0, 1, 0, 1, 0, 1],
        "fold_0": ["train", "val", "train", "test", "test", "train"],
    }
)


def test_slides(features: Path) -> None:
    cohort = Cohort.open(features, LABELS)
    assert cohort.ids == ("a1", "a2", "b1", "c1")
    assert cohort.patients == ("A", "A", "B", "C")
    assert cohort.sites == ("s1", "s1", "s2", "s2")
    assert [sample.outcome for sample in cohort.samples] == ["x", "x", "y", "y"]
    assert cohort.outcome.categories()[1].tolist() == [0, 0, 1, 1]
    assert cohort.report.without_outcome == ("d1",)
    assert cohort.report.without_bag == ("e1.svs",)
    assert "4 slides of 3 patients: x 2 / y 2" in str(cohort)
    bag = cohort.load(cohort.samples[0])
    assert (bag.id, bag.n, bag.slide_ids) == ("a1", 12, ("a1",))


def test_patients_have_all_their_slides_and_these_stay_apart(features: Path) -> None:
    cohort = Cohort.open(features, LABELS, unit="patient")
    assert cohort.ids == ("A", "B", "C")
    bag = cohort.load(cohort.samples[0])
    slides = Cohort.open(features, LABELS)
    one, two = (slides.load(sample) for sample in slides.samples[:2])
    assert (bag.id, bag.n, bag.slide_ids) == ("A", 24, ("a1", "a2"))
    assert bag.slides.tolist() == [0, 12, 24]
    assert torch.equal(bag.features, torch.cat([one.features, two.features]))
    assert torch.equal(bag.xy, torch.cat([one.xy, two.xy]))
    assert bag.step == one.step
    assert bag.step_um == pytest.approx(128.0)
    assert cohort.load(cohort.samples[1]).id == "B"


def test_steps_that_differ_are_not_passed_off_as_one() -> None:
    bags = [
        Bag(torch.zeros(2, 3), torch.tensor([[0, 0], [1, 0]]), name, step_um=um)
        for name, um in (("a", 128.0), ("b", 64.0))
    ]
    joined = join_slides(bags, "p")
    assert joined.step_um is None
    assert joined.slide_ids == ("a", "b")
    assert join_slides([bags[0], bags[0]], "p").step_um == 128.0


def test_survival_and_other_columns(features: Path) -> None:
    cohort = Cohort.open(features, LABELS, time="survival_months", unit="patient")
    assert isinstance(cohort.outcome, Survival)
    assert cohort.outcome.events.tolist() == [True, False, False, True]
    assert "events 2 / censored 2" in str(cohort)
    assert cohort.column("fold_0") == ("train", "val", "test", "test")
    assert splits_from_columns(cohort)[0].test == ("C", "D")


def test_rows_of_a_patient_that_disagree_are_refused(features: Path) -> None:
    wrong = LABELS.assign(
        label=["x", "y", "y", "y", "x", "x"], fold_0=["train", "val", "test", "test", "test", "train"]
    )
    with pytest.raises(DataError, match="rows of 'A' contradict each other: x, y"):
        Cohort.open(features, wrong, unit="patient")
    assert len(Cohort.open(features, wrong)) == 5  # slides may differ
    cohort = Cohort.open(features, wrong, time="survival_months", unit="patient")
    with pytest.raises(DataError, match="'fold_0' has different values for 'A': 'test', 'train'"):
        splits_from_columns(cohort)
    with pytest.raises(OptionError, match="share 'A'"):
        splits_from_columns(Cohort.open(features, wrong))


def test_a_gap_is_filled_by_another_row_of_the_patient(features: Path) -> None:
    cohort = Cohort.open(features, LABELS.assign(label=["x", "y", None, "y", None, "x"]), unit="patient")
    assert cohort.samples[0].outcome == "x"
    assert len(cohort.samples[0].bags) == 2


def test_stamp_tables(features: Path, tmp_path: Path) -> None:
    pd.DataFrame({"PATIENT": ["A", "B", "C"], "isMSIH": ["yes", "no", "no"]}).to_excel(tmp_path / "c.xlsx", index=False)
    slides = pd.DataFrame({"PATIENT": ["A", "B", "A", "C"], "FILENAME": ["x/a1.h5", "b1.h5", "y/a2.h5", "c1.h5"]})
    slides.to_csv(tmp_path / "slides.csv", index=False)
    cohort = Cohort.open(
        features, tmp_path / "c.xlsx", slide_table=tmp_path / "slides.csv", target="isMSIH", unit="patient"
    )
    assert [(sample.id, sample.outcome, len(sample.bags)) for sample in cohort.samples] == [
        ("A", "yes", 2),
        ("B", "no", 1),
        ("C", "no", 1),
    ]


def test_nothing_matches(features: Path) -> None:
    labels = pd.DataFrame({"slide_id": ["A1", "A-2"], "label": ["x", "y"]}).assign(slide_id=["z1", "a_01"])
    with pytest.raises(DataError, match=r"none of the 5 bags match a row.*\n(.*\n)*.*'a_01'; was 'a1' meant"):
        Cohort.open(features, labels)


def test_damaged_slides_are_set_aside_or_refused(features: Path) -> None:
    whole = (features / "a2.npz").read_bytes()
    cohort = Cohort.open(features, LABELS, unit="patient")
    (features / "a2.npz").write_bytes(whole[: len(whole) // 2])
    shutil.copy(features / "a2.npz", features / "b1.npz")
    with pytest.raises(DataError, match="b1"):
        cohort.load(cohort.samples[1])
    with pytest.raises(DataError, match="a2"):
        cohort.checked("refuse")
    good = cohort.checked()
    assert good.ids == ("A", "C")
    assert good.load(good.samples[0]).slide_ids == ("a1",)
    assert sorted(entry.path.name for entry in good.set_aside) == ["a2.npz", "b1.npz"]
    assert good.outcome.categories()[1].tolist() == [0, 1]
    assert "set aside" in str(good)
    with pytest.raises(OptionError, match="policy for damaged slides"):
        cohort.checked("ignore")


def test_everything_damaged(features: Path) -> None:
    cohort = Cohort.open(features, LABELS)
    for path in features.iterdir():
        path.write_bytes(b"")
    with pytest.raises(DataError, match="no slide of the cohort can be used"):
        cohort.checked()


def test_features_of_another_width_are_set_aside(features: Path) -> None:
    write_bag(features, "b1", dim=5)
    good = Cohort.open(features, LABELS).checked()
    assert good.ids == ("a1", "a2", "c1")
    assert "5 wide, those of 3 other slides 8" in good.set_aside[0].reason
    write_bag(features, "c1", dim=5)
    with pytest.raises(DataError, match="8 and 5 wide"):
        Cohort.open(features, LABELS).checked()


def test_slides_of_different_precision_are_kept_and_loaded_in_the_widest(features: Path) -> None:
    write_bag(features, "a2", features=np.ones((12, 8), np.float16))
    cohort = Cohort.open(features, LABELS, unit="patient")
    assert cohort.load(cohort.samples[0]).features.dtype == torch.float32  # of a float32 and a float16 slide
    write_bag(features, "b1", features=np.ones((12, 8), np.float16))
    cohort = Cohort.open(features, LABELS, unit="patient")
    good = cohort.checked()
    assert good.ids == cohort.ids
    assert {good.load(sample).features.dtype for sample in good.samples} == {torch.float32}
    assert "Features are float16 and float32; all are loaded as float32" in str(good)
    slides = Cohort.open(features, LABELS).select(["a1", "c1"])
    assert slides.checked() is slides


def write_cells(folder: Path, name: str, columns: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    xy = np.random.default_rng(0).uniform(0, 1000, (30, 2))
    values = {column: np.full(30, float(column[2:])) for column in columns}
    pd.DataFrame({"x": xy[:, 0], "y": xy[:, 1], **values}).to_csv(folder / f"{name}.csv", index=False)


def test_columns_of_other_names_are_not_joined_by_position(tmp_path: Path) -> None:
    for name in ("a1", "b1", "c1"):
        write_cells(tmp_path / "cells", name, ["CD3", "CD8"])
    write_cells(tmp_path / "cells", "a2", ["CD8", "CD3"])
    cohort = Cohort.open(tmp_path / "cells", LABELS, unit="patient")
    with pytest.raises(DataError, match=r"a2\.csv: features are named otherwise.*column 1 is 'CD8', there 'CD3'"):
        cohort.load(cohort.samples[0])
    good = cohort.checked()
    assert [entry.path.name for entry in good.set_aside] == ["a2.csv"]
    assert good.load(good.samples[0]).slide_ids == ("a1",)
    write_cells(tmp_path / "cells", "b1", ["CD8", "CD3"])
    with pytest.raises(DataError, match="not named alike"):
        Cohort.open(tmp_path / "cells", LABELS).checked()


def test_a_cache_that_is_full_removes_no_slide(features: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise unwritable(tmp_path / "entry.bag", OSError(errno.ENOSPC, "No space left on device"))

    monkeypatch.setattr(cache_module, "write_entry", full)
    cohort = Cohort.open(features, LABELS, cache=BagCache(tmp_path / "cache"))
    with pytest.warns(UserWarning, match="the disk is full.*read from their files") as told:
        good = cohort.checked()
    assert len(told) == 1
    assert good is cohort


def test_slides_that_were_set_aside_are_not_called_missing(features: Path) -> None:
    (features / "e1.npz").write_bytes(b"PK damaged")
    report = Cohort.open(features, LABELS).report
    assert (report.set_aside, report.without_bag) == (("e1.svs",), ())


def test_non_finite_features_by_policy(features: Path) -> None:
    features_with_nan = np.ones((12, 8), np.float32)
    features_with_nan[3, 2] = np.nan
    write_bag(features, "b1", features=features_with_nan)
    cohort = Cohort.open(features, LABELS)
    assert [entry.path.name for entry in cohort.checked().set_aside] == ["b1.npz"]
    dropping = Cohort.open(features, LABELS, reading={"non_finite": "drop"})
    assert dropping.checked() is dropping
    assert dropping.load(dropping.samples[2]).n == 11


class CountingCache:
    def __init__(self) -> None:
        self.loaded: list[str] = []

    def load(self, bag: BagRef) -> Bag:
        self.loaded.append(bag.id)
        return Bag(torch.zeros(1, 2), torch.zeros(1, 2), bag.id)


def test_bags_come_from_the_cache(features: Path) -> None:
    cache = CountingCache()
    cohort = Cohort.open(features, LABELS, unit="patient", cache=cache)
    assert cohort.load(cohort.samples[0]).n == 2
    cohort.checked()
    assert cache.loaded == ["a1", "a2", "a1", "a2", "b1", "c1"]
    with pytest.raises(OptionError, match="belong to the cache"):
        Cohort.open(features, LABELS, cache=cache, reading={"non_finite": "zero"})


def test_fingerprint(features: Path, tmp_path: Path) -> None:
    cohort = Cohort.open(features, LABELS)
    print_of = cohort.fingerprint()
    assert Cohort.open(features, LABELS.sample(frac=1, random_state=1)).fingerprint() == print_of
    relabelled = LABELS.assign(label=["y", "y", "x", "y", None, "x"])
    assert Cohort.open(features, relabelled).fingerprint() != print_of
    assert Cohort.open(features, LABELS.assign(case_id=list("ABXCDE"))).fingerprint() != print_of
    assert cohort.select(["a1", "b1"]).fingerprint() != print_of
    by_content = cohort.fingerprint(content=True)
    shutil.copytree(features, tmp_path / "copy")
    copy = Cohort.open(tmp_path / "copy", LABELS)
    os.utime(tmp_path / "copy" / "a1.npz", (1, 1))
    assert copy.fingerprint() != print_of
    assert copy.fingerprint(content=True) == by_content
    write_bag(tmp_path / "copy", "a1", features=np.zeros((12, 8), np.float32))
    assert copy.fingerprint(content=True) != by_content


def test_selecting(features: Path) -> None:
    cohort = Cohort.open(features, LABELS).select(["c1", "a2"])
    assert cohort.ids == ("a2", "c1")
    assert cohort.column("slide_id") == ("a2.svs", "c1.svs")
    assert [cohort.outcome[i] for i in range(2)] == ["x", "y"]
    with pytest.raises(OptionError, match="no sample 'q'"):
        cohort.select(["q"])


def test_odd_names_stay_what_they_are(tmp_path: Path) -> None:
    names = ["007", "7", "slides", "ü x", "1.0"]
    for name in names:
        write_bag(tmp_path / "f", name)
    (tmp_path / "labels.csv").write_text("slide_id,label\n" + "".join(f"{n},{i % 2}\n" for i, n in enumerate(names)))
    cohort = Cohort.open(tmp_path / "f", tmp_path / "labels.csv")
    assert {sample.id: sample.outcome for sample in cohort.samples} == dict(zip(names, "01010", strict=True))


def open_tcga(**options: object) -> Cohort:
    """The table of the TCGA slides, with bags that are named and never opened."""
    path = DATA / "tcga_hipt4k" / "slides.csv.gz"
    if not path.exists():
        pytest.skip(f"{path} is not here; PSAMIL_DATA names the data folder")
    names = pd.read_csv(path, usecols=["slide"])["slide"]
    bags = tuple(sorted(BagRef(name, Path(f"{name}.pt"), "clam") for name in names))
    return Cohort.open(Found(bags), path, **options)  # type: ignore[arg-type]


def test_tcga_subtypes_on_the_published_folds() -> None:
    cohort = open_tcga(target="oncotree", classes=["LUAD", "LUSC"])
    assert len(cohort) > 900
    assert len(cohort.report.without_outcome) == cohort.report.matched - len(cohort)
    with pytest.raises(OptionError, match="'fold0': train and val share 'TCGA-33-4532'"):  # as they were published
        splits_from_columns(cohort)
    splits = splits_from_columns(cohort, leaks="drop")
    assert len(splits) == 10
    for fold in splits.folds:
        published = [id for id, part in zip(cohort.ids, cohort.column(fold.name), strict=True) if part == "test"]
        assert fold.test == tuple(published)
        assert len(fold.train) > 700


def test_tcga_survival_by_patient() -> None:
    cohort = open_tcga(time="survival_months", censorship="censorship", unit="patient")
    table = pd.read_csv(DATA / "tcga_hipt4k" / "slides.csv.gz").dropna(subset=["survival_months", "censorship"])
    table = table.groupby("patient").first()
    events = int((table["censorship"] == 0).sum())
    assert cohort.outcome.describe() == f"events {events} / censored {len(table) - events}"
    splits = k_fold(cohort, 5, repeats=2)
    splits.check(cohort)
    shares = [cohort.select(fold.test).outcome.categories()[1].mean() for fold in splits.folds]
    assert np.ptp(shares) < 0.005
    with pytest.raises(DataError, match="1 means censored"):
        open_tcga(time="survival_months", event="censorship")
    with pytest.raises(DataError, match="'censorship', 'censorship_dss'"):
        open_tcga(time="survival_months")


def test_tcga_msi_by_patient() -> None:
    with pytest.warns(UserWarning, match="'Indeterminate' has 3"):
        k_fold(open_tcga(target="msi_status", unit="patient"), 5)
    cohort = open_tcga(target="msi_status", classes=["MSS", "MSI"], unit="patient")
    splits = k_fold(cohort, 5)
    rare = [np.bincount(cohort.select(fold.test).outcome.categories()[1]).tolist() for fold in splits.folds]
    assert np.ptp(np.array(rare), axis=0).max() <= 1
