"""Rows and bags matched by name, in the conventions of the field; what does not match is listed from both sides."""

from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psamil.cohort.matching import MatchReport, link_rows, match_bags
from psamil.cohort.near_names import near_names
from psamil.cohort.tables import Table, read_table
from psamil.errors import DataError
from psamil.readers import BagRef


def bags(*names: str) -> list[BagRef]:
    return [BagRef(name, Path("features") / f"{name}.h5", "trident") for name in names]


def table(**columns: list[object]) -> Table:
    return read_table(pd.DataFrame(columns))


def matched(labels: Table, found: list[BagRef], **options: object) -> tuple[dict[str, str], MatchReport]:
    """Patient of each matched bag, and the report of finding them."""
    links, _ = link_rows(labels, found, **options)  # type: ignore[arg-type]
    matches, report = match_bags(links, found)
    return {match.bag.id: match.patient for match in matches}, report


CONVENTIONS = {
    "CLAM": dict(case_id=["p1", "p1", "p2"], slide_id=["a", "b", "c.1"], label=["x", "x", "y"]),
    "SurvPath": dict(case_id=["p1", "p1", "p2"], slide_id=["a.svs", "b.svs", "c.1.svs"], survival_months=[1, 1, 2]),
    "slideflow": dict(slide=["a", "b", "c.1"], patient=["p1", "p1", "p2"], category=["x", "x", "y"]),
    "Patho-Bench": dict(case_id=["p1", "p1", "p2"], slide_id=["a", "b", "c.1"], OS_event=[1, 1, 0]),
    "authors": dict(patient_id=["p1", "p1", "p2"], slide_uuid=["a", "b", "c.1"], path=["q", "q", "q"]),
    "capitals": {"Case ID": ["p1", "p1", "p2"], "Slide-ID": ["a.ndpi", "b.ome.tif", "c.1.h5"]},
}


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_one_table_of_slides_and_patients(convention: str) -> None:
    found, report = matched(table(**CONVENTIONS[convention]), bags("a", "b", "c.1"))
    assert found == {"a": "p1", "b": "p1", "c.1": "p2"}
    assert report == MatchReport(matched=3)


def test_stamp_keeps_patients_and_slides_in_two_tables() -> None:
    clinical = table(PATIENT=["007", "8", "9"], isMSIH=["yes", "no", "no"])
    slides = table(PATIENT=["007", "8", "007", "10"], FILENAME=["x/a.h5", "b.h5", r"y\c.h5", "d.h5"])
    links, linked = link_rows(clinical, bags("a", "b", "c"), slide_table=slides)
    assert [(link.slide, link.patient, link.row) for link in links] == [
        ("x/a.h5", "007", 0),
        ("b.h5", "8", 1),
        (r"y\c.h5", "007", 0),
    ]
    assert linked.without_slide == ("9",)
    assert "'10'" in linked.notes[0]
    matches, report = match_bags(links, bags("a", "b", "c"))
    assert [match.bag.id for match in matches] == ["a", "b", "c"]
    assert report.without_bag == report.without_label == ()


def test_mangled_patient_ids_of_a_second_table_are_suggested() -> None:
    clinical = table(PATIENT=["7", "8"], y=["a", "b"])
    slides = table(PATIENT=["007", "8"], FILENAME=["a.h5", "b.h5"])
    _, report = link_rows(clinical, bags("a", "b"), slide_table=slides)
    assert report.near_misses == (("7", "007"),)


def test_the_two_tables_can_name_their_patients_differently() -> None:
    clinical, slides = table(subject=["1"], y=["a"]), table(case_id=["1"], FILENAME=["a.h5"])
    assert matched(clinical, bags("a"), slide_table=slides, patient_column="subject")[0] == {"a": "1"}


def test_slide_paths_without_patients() -> None:
    found, _ = matched(table(slide_path=["/data/x/a.pt", "/data/x/b.pt"], label=[0, 1]), bags("a", "b"))
    assert found == {"a": "a", "b": "b"}


def test_patients_inside_tcga_barcodes_stay_together() -> None:
    names = ["TCGA-05-4250-01Z-00-DX1.90F6", "TCGA-05-4250-01Z-00-DX2.11AA", "TCGA-06-0001-01Z-00-DX1.77"]
    assert set(matched(table(slide_id=names, label=[0, 0, 1]), bags(*names))[0].values()) == {
        "TCGA-05-4250",
        "TCGA-06-0001",
    }
    by_patient = table(patient_id=["TCGA-05-4250", "TCGA-09-9999"], msi=["MSI", "MSS"])
    links, report = link_rows(by_patient, bags(*names))
    assert [link.slide for link in links] == names[:2]
    assert report.without_slide == ("TCGA-09-9999",)


def test_barcodes_count_though_other_slides_have_none() -> None:
    names = ["TCGA-05-4250-01Z-00-DX1.90F6", "tcga-05-4250-01z-00-dx2.11aa", "CPTAC-1", "CPTAC-2"]
    labels = table(slide_id=names, label=[0, 0, 1, 1])
    assert matched(labels, bags(*names))[0] == dict(
        zip(names, ["TCGA-05-4250", "TCGA-05-4250", "CPTAC-1", "CPTAC-2"], strict=True)
    )
    note = link_rows(labels, bags(*names))[1].notes[0]
    assert "TCGA barcodes for 2 slides, and each of the 2 others counts as a patient" in note
    by_patient = table(case_id=["tcga-05-4250"], msi=["MSI"])
    assert matched(by_patient, bags(*names))[0] == dict.fromkeys(names[:2], "tcga-05-4250")


def test_patients_who_differ_only_in_capitals_are_refused() -> None:
    alike = table(slide_id=["a", "b", "c"], case_id=["TCGA-05-4250", "tcga-05-4250", "x"])
    cause = "differ only in capitals: 'TCGA-05-4250' and 'tcga-05-4250'; write each in one way"
    with pytest.raises(DataError, match=cause):
        matched(alike, bags("a", "b", "c"))
    with pytest.raises(DataError, match=cause):
        matched(table(case_id=["TCGA-05-4250", "tcga-05-4250"], y=[0, 1]), bags("a"))
    with pytest.raises(DataError, match=cause):
        matched(table(case_id=["TCGA-05-4250", "x"], y=[0, 1]), bags("a", "b"), slide_table=alike)


def test_bags_named_after_patients() -> None:
    found, report = matched(table(patient=["007", "8"], label=["a", "b"]), bags("007", "8", "9"))
    assert found == {"007": "007", "8": "8"}
    assert report.without_label == ("9",)


def test_what_does_not_match_is_listed_from_both_sides_with_near_misses() -> None:
    labels = table(slide_id=["a", "slide_01", "TCGA-AA-0001", "gone"], label=[0, 1, 0, 1])
    _, report = matched(labels, bags("a", "slide-1", "TCGA-AA-0001.90f6", "unlabelled"))
    assert report.without_bag == ("slide_01", "TCGA-AA-0001", "gone")
    assert report.without_label == ("TCGA-AA-0001.90f6", "slide-1", "unlabelled")
    assert dict(report.near_misses) == {"slide_01": "slide-1", "TCGA-AA-0001": "TCGA-AA-0001.90f6"}
    assert "3 slides of the table have no bag: 'slide_01'" in str(report)
    assert "3 bags have no label" in str(report)


def test_slides_whose_files_were_set_aside_are_told_apart_from_missing_ones() -> None:
    labels = table(slide_id=["slide_0.svs", "slide_1", "slide_2"], label=[0, 1, 0])
    links, _ = link_rows(labels, bags("slide_1", "slide_02"), set_aside={"slide_0"})
    _, report = match_bags(links, bags("slide_1", "slide_02"), {"slide_0"})
    assert (report.set_aside, report.without_bag) == (("slide_0.svs",), ("slide_2",))
    assert report.near_misses == (("slide_2", "slide_02"),)
    assert "1 slides of the table are left out, since their file was set aside: 'slide_0.svs'" in str(report)
    assert not report.is_complete
    by_patient = table(patient=["p", "q"], label=[0, 1])
    links, linked = link_rows(by_patient, bags("q"), set_aside={"p"})
    assert linked.without_slide == ()
    assert match_bags(links, bags("q"), {"p"})[1].set_aside == ("p",)


def test_other_capitals_match_where_there_is_no_doubt() -> None:
    found, report = matched(table(slide_id=["A-1F", "b"], label=[0, 1]), bags("a-1f", "b"))
    assert found.keys() == {"a-1f", "b"}
    assert "'A-1F'" in report.notes[0]


def test_names_that_differ_only_in_capitals_are_kept_apart() -> None:
    found, report = matched(table(slide_id=["s", "S", "T"], label=[0, 1, 1]), bags("s", "S", "t", "T"))
    assert found.keys() == {"s", "S", "T"}
    assert report.without_label == ("t",)
    assert "S and s" in report.notes[0]
    found, report = matched(table(slide_id=["x", "X"], label=[0, 1]), bags("x"))  # X is not x
    assert found.keys() == {"x"}
    assert report.without_bag == ("X",)
    assert matched(table(slide_id=["yY"], label=[0]), bags("yy", "YY"))[0] == {}


def test_two_bags_of_one_name_are_refused_with_their_places() -> None:
    twice = [BagRef("a", Path("uni/a.h5"), "trident"), BagRef("a", Path("conch/a.h5"), "trident")]
    with pytest.raises(DataError, match=r"uni/a.h5, conch/a.h5: 2 bags are called 'a'"):
        matched(table(slide_id=["a"], label=[0]), twice)


def test_a_slide_of_two_patients_is_refused() -> None:
    with pytest.raises(DataError, match="two patients in the table, 'p' and 'q'"):
        matched(table(slide_id=["a", "a.svs"], patient=["p", "q"]), bags("a"))


def test_columns_are_recognised_or_named_but_not_guessed() -> None:
    with pytest.raises(DataError, match=r"'patient_id', 'case_id' could all be the patient.*patient_column"):
        matched(table(patient_id=["p"], case_id=["c"], slide_id=["a"]), bags("a"))
    both = table(patient_id=["p"], case_id=["c"], slide_id=["a"])
    assert matched(both, bags("a"), patient_column="case_id")[0] == {"a": "c"}
    with pytest.raises(DataError, match="'image', 'label' is known to name slides or patients"):
        matched(table(image=["a"], label=[0]), bags("a"))
    assert matched(table(image=["a"], label=[0]), bags("a"), slide_column="image")[0] == {"a": "a"}
    with pytest.raises(DataError, match="no column 'imgae'"):
        matched(table(image=["a"], label=[0]), bags("a"), slide_column="imgae")


def test_slides_without_a_patient_are_refused_and_rows_without_a_slide_are_noted() -> None:
    with pytest.raises(DataError, match="column 'patient' is empty for 'b'"):
        matched(table(slide_id=["a", "b"], patient=["p", None]), bags("a", "b"))
    _, report = link_rows(table(slide_id=["a", None], label=[0, 1]), bags("a"))
    assert "1 rows" in report.notes[0]


NAMES = st.lists(st.text("ab0.-_ ü", min_size=1, max_size=5), unique=True, max_size=12)


@settings(deadline=None)
@given(NAMES, NAMES)
def test_every_row_and_every_bag_is_accounted_for(rows: list[str], names: list[str]) -> None:
    rows = [row for row in rows if row.strip()]
    found = bags(*names)
    labels = table(slide_id=["x", *rows])
    links, _ = link_rows(labels, found)
    matches, report = match_bags(links, found)
    assert {link.slide for link in links} == {labels.texts("slide_id")[match.row] for match in matches} | set(
        report.without_bag
    )
    assert {match.bag.id for match in matches} | set(report.without_label) == set(names)
    assert not {match.bag.id for match in matches} & set(report.without_label)


@pytest.mark.parametrize(
    ("wanted", "known", "expected"),
    [
        ("slide 7", ["Slide_007", "slide_8"], "Slide_007"),
        ("12.0", ["12", "13"], "12"),
        ("P1", ["P1_HE", "P10_HE"], "P1_HE"),
        ("P1_HE_2", ["P1", "P2"], "P1"),
        ("patient_alpha_north", ["patient_alpha_nroth"], "patient_alpha_nroth"),
        ("a", ["b"], None),
    ],
)
def test_near_names(wanted: str, known: list[str], expected: str | None) -> None:
    assert near_names({wanted: wanted}, known) == (() if expected is None else ((wanted, expected),))


def test_near_names_of_long_lists_take_no_time() -> None:
    wanted = {f"left-{i}": f"left-{i}" for i in range(5000)}
    assert near_names(wanted, [f"right-{i + 5000}" for i in range(5000)]) == ()
