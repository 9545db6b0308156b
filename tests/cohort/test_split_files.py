"""Split files of other tools: read as they are written by them, written and read back, fitted to a cohort."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psamil.cohort import Cohort, Split, Splits, fit_to_cohort, read_splits, write_splits
from psamil.errors import DataError, OptionError
from psamil.readers import BagRef, Found


def cohort_of(slides: dict[str, str], unit: str = "slide") -> Cohort:
    """Of slides and their patients, with bags that are never opened."""
    labels = pd.DataFrame({"slide_id": list(slides), "patient": list(slides.values())})
    labels["label"] = [patient[-1] for patient in labels["patient"]]
    return Cohort.open(
        Found(tuple(BagRef(name, Path(name), "clam") for name in slides)),
        labels,
        unit=unit,
        target="label",
        kind="classification",
    )


SLIDES = {"a1": "A", "a2": "A", "b1": "B", "c1": "C", "d1": "D"}

# Ids that CSV files and spreadsheets are known to mangle
IDS = st.lists(
    st.one_of(
        st.sampled_from(["007", "1e5", "1.0", "=A1", "-x", "'=q", "True", "a,b", "ü", "a b"]),
        st.text("ab01", min_size=1),
    ),
    unique=True,
    min_size=3,
    max_size=9,
)


@st.composite
def splits_of(draw: st.DrawFn, three_parts: bool) -> Splits:
    """One to three folds of some ids; of three parts or of two."""
    ids = draw(IDS)
    parts = ["train", "val", "test"] if three_parts else ["train", "test"]
    folds = []
    for number in range(draw(st.integers(1, 3))):
        part_of = draw(st.lists(st.sampled_from(parts), min_size=len(ids) - 1, max_size=len(ids) - 1))
        part_of = ["train", *part_of]
        folds.append(
            Split.of({p: [i for i, q in zip(ids, part_of, strict=True) if q == p] for p in parts}, str(number))
        )
    return Splits(tuple(folds))


@settings(deadline=None)
@given(splits_of(three_parts=True), st.sampled_from(["clam", "clam bool", "patho-bench"]))
def test_three_parts_come_back(tmp_path_factory: pytest.TempPathFactory, splits: Splits, format: str) -> None:
    path = tmp_path_factory.mktemp("splits") / ("k=all.tsv" if format == "patho-bench" else "")
    write_splits(splits, path, format, case_of_slide={id: f"case {id}" for id in splits[0].ids})
    assert read_splits(path).hash == splits.hash


@settings(deadline=None)
@given(splits_of(three_parts=False), st.sampled_from(["survpath", "stamp"]))
def test_two_parts_come_back(tmp_path_factory: pytest.TempPathFactory, splits: Splits, format: str) -> None:
    path = tmp_path_factory.mktemp("splits") / ("splits.json" if format == "stamp" else "")
    write_splits(splits, path, format)
    assert read_splits(path).hash == splits.hash


@pytest.mark.parametrize("format", ["survpath", "stamp"])
def test_tools_of_two_parts_get_validation_as_training(tmp_path: Path, format: str) -> None:
    write_splits(Splits((Split(("a",), ("b",), ("c",)),)), tmp_path / "splits.json", format)
    assert read_splits(tmp_path / "splits.json")[0].train == ("a", "b")
    assert read_splits(tmp_path / "splits.json")[0].test == ("c",)


def test_clam_files_as_clam_writes_them(tmp_path: Path) -> None:
    (tmp_path / "splits_0.csv").write_text(",train,val,test\n0,007,b,c\n1,a,,\n2,0012,,\n")
    (tmp_path / "splits_0_descriptor.csv").write_text(",train,val,test\nlabel,3,1,1\n")
    (tmp_path / "splits_10.csv").write_text(",train,val,test\n0,a,b,c\n")
    (tmp_path / "splits_2_bool.csv").write_text(",train,val,test\n007,True,False,False\nb,False,False,True\n")
    splits = read_splits(tmp_path)
    assert [fold.name for fold in splits.folds] == ["splits_0", "splits_2_bool", "splits_10"]
    assert splits[0] == Split(("0012", "007", "a"), ("b",), ("c",), "splits_0")
    assert splits[1] == Split(("007",), (), ("b",), "splits_2_bool")
    assert read_splits(tmp_path / "splits_10.csv")[0].test == ("c",)


def test_survpath_holds_out_what_it_calls_val(tmp_path: Path) -> None:
    (tmp_path / "splits_0.csv").write_text(",train,val\n0,TCGA-AA-0001,TCGA-AA-0003\n1,TCGA-AA-0002,\n")
    assert read_splits(tmp_path)[0] == Split(("TCGA-AA-0001", "TCGA-AA-0002"), (), ("TCGA-AA-0003",), "splits_0")


def test_patho_bench_by_slide_and_by_case(tmp_path: Path) -> None:
    path = tmp_path / "k=all.tsv"
    path.write_text(
        "case_id\tslide_id\tOS\tfold_0\tfold_1\nA\ta1\t3\ttrain\ttest\nA\ta2\t3\ttrain\ttest\nB\tb1\t0\ttest\ttrain\n"
    )
    assert read_splits(path)[1] == Split(("b1",), (), ("a1", "a2"), "fold_1")
    assert read_splits(path, sample_column="case_id")[0] == Split(("A",), (), ("B",), "fold_0")


def test_mil_baseline_columns(tmp_path: Path) -> None:
    (tmp_path / "splits_0.csv").write_text(
        "train_slide_path,train_label,val_slide_path,val_label,test_slide_path,test_label\n/x/a.pt,0,/x/b.pt,1,/x/c.pt,0\n"
    )
    assert read_splits(tmp_path)[0] == Split(("/x/a.pt",), ("/x/b.pt",), ("/x/c.pt",), "splits_0")


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("splits_0.csv", ",train,val,test\n0,a,a,b\n", "share 'a'"),
        ("splits_0.csv", ",train,val,test\n0,a,b,c\n1,a,,\n", "'a' stands twice in train"),
        ("splits_0.csv", "slide_id,label\na,1\n", "nobody to train on"),
        ("splits_0_bool.csv", ",train,val,test\na,yes,no,no\n", "'no', 'yes' where True or False"),
        ("splits.json", '{"splits": [{"train_patients": ["a"]}]}', "test_patients"),
        ("splits.json", '{"splits": []}', "no fold"),
        ("splits.json", "3", "not a file of splits"),
        ("k=all.tsv", "case_id\tslide_id\nA\ta\n", "no columns fold_0"),
        ("k=all.tsv", "case_id\tslide_id\tfold_0\nA\ta\tmaybe\n", "says 'maybe'"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, name: str, content: str, cause: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=cause) as caught:
        read_splits(tmp_path / name)
    assert name in str(caught.value)


def test_folders_without_splits_and_unknown_formats(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no files splits_0.csv"):
        read_splits(tmp_path)
    with pytest.raises(OptionError, match="unknown format of splits 'lightning'"):
        write_splits(Splits((Split(("a",)),)), tmp_path, "lightning")
    with pytest.raises(OptionError, match="give case_of_slide"):
        write_splits(Splits((Split(("a",)),)), tmp_path / "x.tsv", "patho-bench")
    with pytest.raises(OptionError, match="does not know 'a'"):
        write_splits(Splits((Split(("a",)),)), tmp_path / "x.tsv", "patho-bench", case_of_slide={})


def test_slides_with_extensions_are_fitted_to_slides() -> None:
    splits = Splits((Split(("x/a1.h5", "a2.svs", "gone.svs"), ("b1",), ("c1.pt",)),))
    fitted = fit_to_cohort(splits, cohort_of(SLIDES))
    assert fitted.splits[0] == Split(("a1", "a2"), ("b1",), ("c1",))
    assert fitted.unknown == ("gone.svs",)
    assert fitted.unused == ("d1",)


def test_patients_are_fitted_to_all_their_slides_and_slides_to_their_patient() -> None:
    by_patient = Splits((Split(("A", "B"), (), ("C", "D")),))
    assert fit_to_cohort(by_patient, cohort_of(SLIDES)).splits[0] == Split(("a1", "a2", "b1"), (), ("c1", "d1"))
    by_slide = Splits((Split(("a1", "a2", "b1"), (), ("c1",)),))
    assert fit_to_cohort(by_slide, cohort_of(SLIDES, "patient")).splits[0] == Split(("A", "B"), (), ("C",))


@pytest.mark.parametrize("unit", ["slide", "patient"])
def test_a_published_leak_is_an_error(unit: str) -> None:
    leak = Splits((Split(("a1", "b1"), (), ("a2", "c1"), "published"),))
    with pytest.raises(OptionError, match="'published': train and test share 'A'"):
        fit_to_cohort(leak, cohort_of(SLIDES, unit))
    fitted = fit_to_cohort(leak, cohort_of(SLIDES, unit), leaks="drop").splits[0]
    assert (fitted.train, fitted.test) == ((("b1",), ("a2", "c1")) if unit == "slide" else (("B",), ("A", "C")))
    with pytest.raises(OptionError, match="policy for leaks"):
        fit_to_cohort(leak, cohort_of(SLIDES, unit), leaks="ignore")


def test_splits_of_another_cohort_are_named() -> None:
    with pytest.raises(OptionError, match="it names 'x', the cohort has 'a1', 'a2'"):
        fit_to_cohort(Splits((Split(("x",), (), ("y",)),)), cohort_of(SLIDES))
