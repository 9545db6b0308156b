"""Slides of a patient become one row; nothing is lost, mixed or averaged away."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from psamil.errors import OptionError
from psamil.evaluation.patients import patient_predictions


def table() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "sample": ["s1", "s2", "s3", "s4"],
            "patient": ["b", "a", "b", "b"],
            "fold": [0, 0, 0, 1],
            "part": ["test", "test", "test", "validation"],
            "label": ["yes", "no", "yes", "yes"],
            "prob_no": [0.8, 0.3, 0.6, 0.5],
            "prob_yes": [0.2, 0.7, 0.4, 0.5],
            "seconds": [1.0, 2.0, 3.0, 4.0],
        }
    )


def test_means_within_fold_and_part() -> None:
    patients = patient_predictions(table(), ["label"])
    assert list(patients.columns) == ["fold", "part", "patient", "slides", "label", "prob_no", "prob_yes"]
    assert patients["patient"].tolist() == ["a", "b", "b"]
    assert patients["slides"].tolist() == [1, 2, 1]
    np.testing.assert_allclose(patients["prob_yes"], [0.7, 0.3, 0.5])


def test_order_of_rows_does_not_matter() -> None:
    shuffled = table().iloc[[3, 1, 2, 0]]
    pd.testing.assert_frame_equal(patient_predictions(shuffled, ["label"]), patient_predictions(table(), ["label"]))


def test_survival_and_chosen_columns() -> None:
    risks = pd.DataFrame({"patient": ["a", "a", "b"], "time": [3.0, 3.0, 4.0], "event": [1, 1, 0], "risk": [-1, -3, 0]})
    patients = patient_predictions(risks, ["time", "event"])
    assert patients["risk"].tolist() == [-2.0, 0.0]
    assert patients["time"].tolist() == [3.0, 4.0]
    assert patient_predictions(table(), ["label"], ["seconds"])["seconds"].tolist() == [2.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("column", "row", "value", "message"),
    [
        ("label", 2, "no", "slides of patient 'b' differ in 'label'"),
        ("prob_no", 1, np.nan, "sample 's2' has no patient or no finite prediction"),
        ("patient", 1, None, "sample 's2' has no patient"),
    ],
)
def test_what_is_refused(column: str, row: int, value: object, message: str) -> None:
    predictions = table()
    predictions.loc[row, column] = value
    with pytest.raises(OptionError, match=message):
        patient_predictions(predictions, ["label"])


def test_missing_columns_are_named() -> None:
    with pytest.raises(OptionError, match="'grade'"):
        patient_predictions(table(), ["grade"])
    with pytest.raises(OptionError, match="prob_"):
        patient_predictions(table()[["patient", "label"]], ["label"])
