"""Tables of predictions: they come back from their files as they were, and nothing is chosen on the test part."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest

from psamil.cohort import Classification, MultiLabel, Regression, Survival
from psamil.evaluation.experiment import write_table
from psamil.evaluation.scores import (
    by_fold_and_patient,
    by_patient,
    prediction_table,
    read_predictions,
    score,
    temperature_of,
    threshold_of,
)
from psamil.training.tasks import Task

LABELS = np.array([0, 1, 0, 1, 1, 0])


@dataclass
class Samples:
    """What a table needs of a cohort."""

    outcome: object
    ids: tuple[str, ...] = ("007", "1e5", "NA", "=a", "-1", "nan")
    patients: tuple[str, ...] = ("1", "2", "3", "3", "+x", "")


OUTCOMES = {
    "two classes": Classification("label", ("0", "1"), LABELS),
    "odd names": Classification("label", ("NA", "=1+1"), LABELS),
    "three classes": Classification("label", ("a", "-b", "None"), np.array([0, 1, 2, 0, 1, 2])),
    "labels": MultiLabel(("er", "-pr"), np.stack([LABELS, 1 - LABELS], axis=1)),
    "number": Regression("age", np.array([0.1, 1e-9, 3.0, 4.5, -2.0, 1 / 3])),
    "survival": Survival("time", "event", np.array([1.0, 2, 3, 4, 5, 1 / 3]), LABELS.astype(bool)),
}


def table_of(outcome, logits=None, **options):
    task = Task.fit(outcome)
    if logits is None:
        logits = np.random.default_rng(0).normal(size=(6, task.n_out))
    return task, prediction_table(Samples(outcome), task, logits, part="test", **options)


@pytest.mark.parametrize("name", OUTCOMES)
def test_tables_come_back_bit_by_bit(name, tmp_path):
    task, table = table_of(OUTCOMES[name])
    write_table(tmp_path / "table.csv", table)
    read = read_predictions(tmp_path / "table.csv")
    assert list(read) == list(table)
    for column in table:
        assert read[column].tolist() == table[column].tolist(), column
    assert score(read, task) == score(table, task) or np.isnan(list(score(table, task).values())).any()
    for line in (tmp_path / "table.csv").read_text().splitlines():
        assert not any(cell.startswith(("=", "@", "+x")) for cell in line.split(","))


@pytest.mark.parametrize("name", OUTCOMES)
def test_every_outcome_has_scores(name):
    task, table = table_of(OUTCOMES[name])
    scores = score(table, task)
    assert scores
    assert all(isinstance(value, float) for value in scores.values())


def test_probabilities_are_calibrated_and_logits_are_not():
    logits = np.array([[-3.0], [4.0], [1.0], [2.0], [-1.0], [0.0]])
    _, table = table_of(OUTCOMES["two classes"], logits, temperature=2.0)
    assert table["logit_0"].tolist() == logits[:, 0].tolist()
    np.testing.assert_allclose(table["prob_1"], 1 / (1 + np.exp(-logits[:, 0] / 2)))


def test_temperature_is_fitted_where_there_are_classes():
    logits = np.array([[-9.0], [9.0], [9.0], [9.0], [9.0], [-9.0]])  # one sample very wrong
    task = Task.fit(OUTCOMES["two classes"])
    assert temperature_of(task, OUTCOMES["two classes"], logits) > 2
    assert temperature_of(task, OUTCOMES["two classes"].take([]), np.empty((0, 1))) == 1
    labels = Task.fit(OUTCOMES["labels"])
    assert temperature_of(labels, OUTCOMES["labels"], np.hstack([logits, -logits])) > 2
    for name in ("number", "survival"):
        task = Task.fit(OUTCOMES[name])
        assert temperature_of(task, OUTCOMES[name], np.zeros((6, task.n_out))) == 1


def test_the_threshold_separates_validation():
    task, table = table_of(OUTCOMES["two classes"], np.array([[-3.0], [-1.0], [-3.0], [-1.0], [-1.0], [-3.0]]))
    threshold = threshold_of(table, task)
    assert score(table, task, threshold)["balanced_accuracy"] == 1
    assert score(table, task, 0.5)["balanced_accuracy"] == 0.5
    assert threshold_of(table[table["truth"] == "1"], task) == 0.5  # one class only
    assert threshold_of(table[:0], task) == 0.5
    for name in ("three classes", "number"):
        task, table = table_of(OUTCOMES[name])
        assert threshold_of(table, task) == 0.5


def test_patients_are_the_mean_of_their_slides():
    outcome = Classification("label", ("no", "yes"), np.array([0, 1, 0, 0, 1, 1]))
    _, table = table_of(outcome)
    patients = by_patient(table)
    assert len(patients) == 5
    slides = table[table["patient"] == "3"]
    assert patients.set_index("patient").loc["3", "prob_yes"] == pytest.approx(slides["prob_yes"].mean())
    _, contradictory = table_of(OUTCOMES["two classes"])
    pd.testing.assert_frame_equal(by_patient(contradictory), contradictory)


def test_slides_that_differ_in_one_fold_do_not_keep_those_of_others_apart():
    rows = [(0, "a", "no", 0.2), (0, "a", "no", 0.4), (1, "b", "no", 0.5), (1, "b", "yes", 0.7), (1, "c", "no", 0.1)]
    table = pd.DataFrame(rows, columns=["fold", "patient", "truth", "prob_yes"]).assign(part="test")
    table["sample"] = [f"s{i}" for i in range(5)]
    found = by_fold_and_patient(table)
    assert found["patient"].tolist() == ["a", "b", "b", "c"]
    assert found["prob_yes"].tolist() == pytest.approx([0.3, 0.5, 0.7, 0.1])
    assert len(by_patient(table)) == 5
