"""Outcomes from columns: classes, labels, numbers, survival; the polarity of survival is said, never guessed."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psamil.cohort.outcome_columns import OutcomeColumns, read_outcome
from psamil.cohort.outcomes import Classification, MultiLabel, Regression, Survival, quartiles
from psamil.cohort.tables import Table, read_table
from psamil.errors import DataError, OptionError


def table(**columns: list[object]) -> Table:
    rows = len(next(iter(columns.values())))
    return read_table(pd.DataFrame({"row": range(rows), **columns}))  # no row is empty


def survival(columns: dict[str, list[object]], **options: str) -> Survival:
    outcome, _ = read_outcome(table(months=[1.0, 2.0, 3.0, 4.0], **columns), OutcomeColumns(time="months", **options))
    assert isinstance(outcome, Survival)
    return outcome


def test_two_classes() -> None:
    outcome, present = read_outcome(table(label=["MSS", "MSI", None, "MSS"]), OutcomeColumns())
    assert isinstance(outcome, Classification)
    assert (outcome.kind, outcome.classes, outcome.labels.tolist()) == ("binary", ("MSI", "MSS"), [1, 0, 1])
    assert present.tolist() == [True, True, False, True]
    assert outcome.describe() == "MSI 1 / MSS 2"
    assert [outcome[i] for i in range(3)] == ["MSS", "MSI", "MSS"]
    assert outcome.take([2, 1]).labels.tolist() == [1, 0]


def test_order_and_choice_of_classes() -> None:
    wanted = OutcomeColumns("grade", classes=("3", "1"))
    outcome, present = read_outcome(table(grade=[1, 2, 3, 1]), wanted)
    assert isinstance(outcome, Classification)
    assert outcome.labels.tolist() == [1, 0, 1]
    assert present.tolist() == [True, False, True, True]
    with pytest.raises(DataError, match=r"no class '4'.*'1', '2', '3'"):
        read_outcome(table(grade=[1, 2, 3]), OutcomeColumns("grade", classes=("1", "4")))


def test_numbered_classes_in_numerical_order_without_decimals() -> None:
    stages = ["10.0", "2.0", None, "1.0", "10.0", "2.0"]
    outcome, _ = read_outcome(table(stage=stages), OutcomeColumns("stage"))
    assert (outcome.kind, outcome.classes) == ("multiclass", ("1", "2", "10"))


def test_a_single_class_cannot_be_learned() -> None:
    with pytest.raises(DataError, match="only the class 'x'"):
        read_outcome(table(label=["x", "x", None]), OutcomeColumns())
    with pytest.raises(DataError, match="no value"):
        read_outcome(table(a=["s"], label=[None]), OutcomeColumns())


def test_numbers_are_regression_where_there_is_no_doubt() -> None:
    outcome, present = read_outcome(table(age=["1.5", None, "3"]), OutcomeColumns("age"))
    assert isinstance(outcome, Regression)
    assert outcome.values.tolist() == [1.5, 3.0]
    assert present.tolist() == [True, False, True]
    ages = table(age=list(range(40, 60)))
    with pytest.raises(DataError, match=r"20 different whole numbers.*kind="):
        read_outcome(ages, OutcomeColumns("age"))
    assert read_outcome(ages, OutcomeColumns("age", kind="regression"))[0].kind == "regression"
    assert len(read_outcome(ages, OutcomeColumns("age", kind="classification"))[0].classes) == 20


def test_numbers_with_a_decimal_comma_are_not_classes() -> None:
    data = table(value=["0,5", "1,25", "2", "-,5"])
    with pytest.raises(DataError, match=r"'-,5', '0,5', '1,25': numbers with a decimal comma.*with a point"):
        read_outcome(data, OutcomeColumns("value"))
    with pytest.raises(DataError, match=r"'0,5'.*not a number; write numbers with a point"):
        read_outcome(data, OutcomeColumns("value", kind="regression"))
    pairs = table(value=["0,5", "1,2", "0,5", "1,2"])  # can be classes, if somebody says so
    assert read_outcome(pairs, OutcomeColumns("value", kind="classification"))[0].kind == "binary"


def test_names_are_not_classes() -> None:
    data = table(remark=["a", "b", "c", "d", "d"])
    with pytest.raises(DataError, match=r"3 of the 4 classes of column 'remark' have one sample.*say kind="):
        read_outcome(data, OutcomeColumns("remark"))
    assert len(read_outcome(data, OutcomeColumns("remark", kind="classification"))[0].classes) == 4
    assert len(read_outcome(data, OutcomeColumns("remark", classes=("a", "b", "c")))[0].classes) == 3
    assert read_outcome(table(remark=["a", "b"]), OutcomeColumns("remark"))[0].kind == "binary"


def test_counts() -> None:
    labels = Classification("c", ("x", "y", "z"), np.array([2, 0, 2]))
    assert labels.counts() == {"x": 1, "y": 0, "z": 2}
    assert MultiLabel(("k", "t"), np.array([[1, 0], [1, 1]])).counts() == {"k": 2, "t": 1}
    assert Survival("t", "e", np.ones(3), np.array([True, False, False])).counts() == {"events": 1, "censored": 2}
    assert Regression("r", np.ones(3)).counts() == {}


def test_several_labels() -> None:
    data = table(kras=[1, 0, None, 1], tp53=["yes", "no", "yes", "no"])
    outcome, present = read_outcome(data, OutcomeColumns(("kras", "tp53")))
    assert isinstance(outcome, MultiLabel)
    assert outcome.labels.tolist() == [[1, 1], [0, 0], [1, 0]]
    assert present.tolist() == [True, True, False, True]
    assert outcome.describe() == "kras 2 / tp53 1 of 3"
    assert outcome.strata().tolist() == [1, 2, 0]  # the rarest label of a sample, or none


def test_the_target_is_not_guessed() -> None:
    with pytest.raises(DataError, match="'row', 'slide_id', 'subtype': which of them"):
        read_outcome(table(slide_id=["a"], subtype=["x"]), OutcomeColumns())


@pytest.mark.parametrize("column", ["event", "OS_event", "event_dss", "OSEvent", "event_observed", "PFS event status"])
def test_event_by_column_name(column: str) -> None:
    outcome = survival({column: [1, 0, 1, 0]})
    assert outcome.events.tolist() == [True, False, True, False]
    assert outcome.describe() == "events 2 / censored 2"


@pytest.mark.parametrize("column", ["censorship", "censorship_dss", "Censored", "is_censored"])
def test_censorship_by_column_name(column: str) -> None:
    assert survival({column: [1, 0, 0, 0]}).events.tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    "column",
    [
        *("event_free", "EventFree", "no_event", "not_censored", "event_free_survival", "censor_free", "!event"),
        *("adverse_events", "time_to_event", "event_or_censored", "event (1 = none)", "1-event", "death_censored"),
        *("non-event", "survival_event", "is_uncensored"),
    ],
)
def test_names_that_only_contain_the_word_are_refused(column: str) -> None:
    with pytest.raises(DataError, match=r"By name it could be none.*give event .1 = event seen. or censorship"):
        survival({column: [1, 0, 0, 0]})
    assert survival({column: [1, 0, 0, 0], "event": [0, 1, 1, 1]}).event_column == "event"


@pytest.mark.parametrize("column", ["not_censored", "event_free"])
def test_the_meaning_of_a_negation_can_be_said(column: str) -> None:
    assert survival({column: [1, 0, 0, 0]}, event=column).events.sum() == 1
    assert survival({column: [1, 0, 0, 0]}, censorship=column).events.sum() == 3


def test_the_column_of_times_is_not_the_event() -> None:
    data = table(event_status=[1, 0, 1, 0], vital_status=["Dead", "Alive", "Dead", "Alive"])
    with pytest.raises(DataError, match="which column"):
        read_outcome(data, OutcomeColumns(time="event_status"))


def test_polarity_by_option() -> None:
    assert survival({"status": [1, 0, 0, 0]}, event="status").events.sum() == 1
    assert survival({"status": [1, 0, 0, 0]}, censorship="status").events.sum() == 3


def test_words_keep_their_meaning_under_either_option() -> None:
    for option in ("event", "censorship"):
        outcome = survival({"vital": ["Dead", "Alive", "0:LIVING", "1:DECEASED"]}, **{option: "vital"})
        assert outcome.events.tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("columns", "options", "cause"),
    [
        ({"status": [1, 0, 1, 0]}, {}, "which column.*event .1 = event seen. or censorship"),
        ({"event": [1, 0, 1, 0], "censorship": [0, 1, 0, 1]}, {}, "'event', 'censorship'"),
        ({"censorship": [1, 0, 1, 0]}, {"event": "censorship"}, "1 means censored.*give censorship='censorship'"),
        ({"censorship_pfi": [1, 0, 1, 0]}, {"event": "censorship_pfi"}, "1 means censored"),
        ({"my_censored": [1, 0, 1, 0]}, {"event": "my_censored"}, "1 means censored"),
        ({"OS_event": [1, 0, 1, 0], "fold_0": ["train"] * 4}, {"censorship": "OS_event"}, "Patho-Bench"),
        ({"event": [1, 0, 1, 0], "PATIENT": list("abcd")}, {"censorship": "event"}, "STAMP"),
        ({"event": [1, 0, 1, 0], "patient_id": list("abcd"), "cohort": list("abcd")}, {}, "PSA-MIL"),
        ({"status": [1, 2, 1, 2]}, {"event": "status"}, "should hold 1 and 0.*'2'"),
    ],
)
def test_doubtful_polarity_is_refused(columns: dict[str, list[object]], options: dict[str, str], cause: str) -> None:
    with pytest.raises(DataError, match=cause):
        survival(columns, **options)


def test_the_authors_column_can_be_used_once_its_meaning_is_said() -> None:
    columns: dict[str, list[object]] = {"event": [1, 0, 0, 0], "patient_id": list("abcd"), "cohort": list("abcd")}
    assert survival(columns, censorship="event").events.sum() == 3
    assert survival(columns, event="event").events.sum() == 1


def test_survival_leaves_out_gaps_and_refuses_negative_times() -> None:
    data = table(t=[1.0, None, 3.0, 0.0], event=[1, 0, None, 0])
    outcome, present = read_outcome(data, OutcomeColumns(time="t"))
    assert present.tolist() == [True, False, False, True]
    assert [outcome[i] for i in range(2)] == [(1.0, True), (0.0, False)]
    with pytest.raises(DataError, match="1 negative times"):
        read_outcome(table(t=[1.0, -2.0], event=[1, 0]), OutcomeColumns(time="t"))


@pytest.mark.parametrize(
    "options",
    [
        {"target": "label", "time": "t"},
        {"event": "e"},
        {"time": "t", "event": "e", "censorship": "c"},
        {"kind": "guess"},
    ],
)
def test_contradicting_options(options: dict[str, str]) -> None:
    with pytest.raises(OptionError):
        OutcomeColumns(**options)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e4), unique=True, max_size=60), st.randoms(use_true_random=False))
def test_quartiles_are_even_and_follow_their_values(values: list[float], random: np.random.Generator) -> None:
    found = quartiles(np.array(values))
    counts = np.bincount(found, minlength=4)
    assert counts.max(initial=0) - counts.min() <= 1
    order = list(range(len(values)))
    random.shuffle(order)
    assert quartiles(np.array(values)[order]).tolist() == found[order].tolist()


def test_survival_strata_are_event_by_quartile() -> None:
    times, events = np.arange(16.0), np.arange(16) % 2 == 0
    strata = Survival("t", "e", times, events).strata()
    assert np.bincount(strata).tolist() == [2] * 8
    assert (strata[events] >= 4).all()
    assert (np.diff(strata[events]) >= 0).all()
