"""Tasks: what is fitted to the training part, and what becomes of parts that lack something."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psamil.cohort.outcomes import Classification, MultiLabel, Outcome, Regression, Survival
from psamil.errors import DataError, OptionError, ShapeError
from psamil.training import Task, metrics
from psamil.training.losses import survival_cross_entropy, survival_nll
from psamil.training.survival_task import bounds_between_bins


def two_classes(labels: list[int]) -> Classification:
    return Classification("msi", ("MSS", "MSI"), np.array(labels, dtype=np.int64))


def three_classes(labels: list[int]) -> Classification:
    return Classification("grade", ("low", "middle", "high"), np.array(labels, dtype=np.int64))


def two_labels(labels: list[list[int]]) -> MultiLabel:
    return MultiLabel(("kras", "braf"), np.array(labels, dtype=np.int64).reshape(-1, 2))


def numbers(values: list[float]) -> Regression:
    return Regression("tmb", np.array(values, dtype=np.float64))


def survival(times: list[float], events: list[int]) -> Survival:
    return Survival("months", "died", np.array(times, dtype=np.float64), np.array(events, dtype=bool))


TRAINING: dict[str, Outcome] = {
    "two classes": two_classes([0, 0, 0, 1]),
    "three classes": three_classes([0, 0, 1, 2, 2, 2]),
    "labels": two_labels([[0, 0], [1, 0], [1, 1], [1, 0]]),
    "number": numbers([1.0, 2.0, 6.0]),
    "survival": survival([1, 2, 3, 4, 5, 6, 7, 8], [1, 1, 0, 1, 1, 0, 1, 1]),
}


def logits_of(task: Task, outcome: Outcome, seed: int = 0) -> torch.Tensor:
    return torch.randn(len(outcome), task.n_out, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", TRAINING)
def test_every_task(name: str) -> None:
    outcome = TRAINING[name]
    task = Task.fit(outcome)
    targets, logits = task.targets(outcome), logits_of(task, outcome).requires_grad_()
    assert len(targets) == len(outcome)
    each = task.loss(logits, targets, "none")
    torch.testing.assert_close(task.loss(logits, targets), each.sum() / len(outcome))
    torch.testing.assert_close(task.loss(logits, targets, "sum"), each.sum())
    rows = torch.tensor([2, 0])
    torch.testing.assert_close(task.loss(logits[rows], targets[rows], "none"), each[rows])
    (slope,) = torch.autograd.grad(each.sum(), logits)
    assert slope.isfinite().all()
    columns = task.predictions(logits)
    assert all(column.dtype == np.float64 and column.shape == (len(outcome),) for column in columns.values())
    from_array = task.predictions(logits.detach().numpy())
    assert all(np.array_equal(columns[name], from_array[name]) for name in columns)
    restored = Task.from_json(json.loads(json.dumps(task.to_json())))
    assert restored == task
    assert task.sampling_weights(outcome) is None


@pytest.mark.parametrize("name", TRAINING)
def test_a_perfect_model_has_the_best_score(name: str) -> None:
    outcome = TRAINING[name]
    task = Task.fit(outcome)
    targets = task.targets(outcome)
    perfect = {
        "two classes": lambda: 10.0 * targets[:, None] - 5,
        "three classes": lambda: 10.0 * torch.eye(3)[targets],
        "labels": lambda: 10.0 * targets - 5,
        "number": lambda: targets[:, None].double(),
        "survival": lambda: -torch.tensor(outcome.times)[:, None].expand(-1, 4),
    }[name]()
    names = {"two classes": "auc", "three classes": "macro_auc", "labels": "macro_auc", "number": "-mae"}
    score_name, score = task.validation_score(outcome, perfect)
    assert score_name == names.get(name, "c_index")
    assert score == pytest.approx(0.0 if name == "number" else 1.0, abs=1e-6)
    worse_name, worse = task.validation_score(outcome, -perfect)
    assert worse_name == score_name
    assert worse < score


def test_class_weights_are_those_of_the_training_part() -> None:
    task = Task.fit(two_classes([0] * 9 + [1]))
    assert task.class_weights == pytest.approx((10 / 18, 5.0))
    one_batch = two_classes([0, 0])
    logits = torch.zeros(2, 1)
    assert float(task.loss(logits, task.targets(one_batch))) == pytest.approx(10 / 18 * math.log(2))
    weighted = Task.fit(TRAINING["labels"])
    assert sum(weighted.class_weights, ()) == pytest.approx((2.0, 2 / 3, 2 / 3, 2.0))


def test_balance_by_sampling() -> None:
    outcome = three_classes([0, 0, 1, 2, 2, 2])
    task = Task.fit(outcome, balance="sampling")
    assert task.class_weights == (1.0, 1.0, 1.0)
    weights = np.array(task.sampling_weights(outcome))
    assert [weights[outcome.labels == k].sum() for k in range(3)] == pytest.approx([1 / 3] * 3)
    labels = TRAINING["labels"]
    task = Task.fit(labels, balance="sampling")
    assert task.sampling_weights(labels) == pytest.approx([1 / 3, 1 / 6, 1 / 3, 1 / 6])  # none, kras, braf, kras
    assert Task.fit(TRAINING["survival"], balance="sampling").sampling_weights(TRAINING["survival"]) is None


def test_no_balance() -> None:
    task = Task.fit(two_classes([0, 0, 0, 1]), balance="none")
    assert task.class_weights == (1.0, 1.0)
    assert task.sampling_weights(two_classes([0, 0, 0, 1])) is None


def test_predicted_probabilities() -> None:
    columns = Task.fit(two_classes([0, 1])).predictions(torch.tensor([[0.0], [math.log(3)], [-800.0]]))
    assert list(columns) == ["prob_MSS", "prob_MSI"]
    assert columns["prob_MSI"] == pytest.approx([0.5, 0.75, 0.0])
    assert columns["prob_MSS"] == pytest.approx([0.5, 0.25, 1.0])
    columns = Task.fit(TRAINING["three classes"]).predictions(torch.tensor([[0.0, 0.0, math.log(2)]]))
    assert np.concatenate(list(columns.values())) == pytest.approx([0.25, 0.25, 0.5])
    assert list(columns) == ["prob_low", "prob_middle", "prob_high"]
    columns = Task.fit(TRAINING["labels"]).predictions(torch.tensor([[0.0, math.log(3)]]))
    assert {name: column.tolist() for name, column in columns.items()} == {
        "prob_kras": [0.5],
        "prob_braf": pytest.approx([0.75]),
    }


def test_numbers_are_standardised_by_the_training_part() -> None:
    task = Task.fit(numbers([1.0, 3.0]))
    assert (task.mean, task.std) == (2.0, 1.0)
    assert task.targets(numbers([5.0])).tolist() == [3.0]
    assert task.predictions(torch.tensor([[3.0]]))["value"].tolist() == [5.0]


def test_time_bins_of_the_training_part() -> None:
    training = survival([1, 2, 3, 4, 10, 0.5], [1, 1, 1, 1, 0, 0])
    task = Task.fit(training)
    assert task.edges == pytest.approx((0.5, 1.75, 2.5, 3.25, 10))
    assert task.n_out == 4
    later = survival([0.1, 1.75, 2.5, 99], [1, 0, 1, 0])  # bins hold their lower bound; outer bins hold the rest
    assert task.targets(later).tolist() == [[0, 1], [1, 0], [2, 1], [3, 0]]


def test_survival_predictions() -> None:
    task = Task.fit(TRAINING["survival"], bins=2)
    columns = task.predictions(torch.zeros(1, 2))
    assert list(columns) == ["risk", "survival_1", "survival_2"]
    assert [float(column[0]) for column in columns.values()] == pytest.approx([-0.75, 0.5, 0.25])


@pytest.mark.parametrize(("name", "function"), [("nll", survival_nll), ("ce", survival_cross_entropy)])
def test_survival_losses(name: str, function) -> None:
    outcome = TRAINING["survival"]
    task = Task.fit(outcome, survival_loss=name, event_weight=0.5)
    logits, targets = logits_of(task, outcome), task.targets(outcome)
    expected = function(logits, targets[:, 0], targets[:, 1], 0.5).mean()
    torch.testing.assert_close(task.loss(logits, targets), expected)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.one_of(st.integers(1, 5).map(float), st.floats(0.01, 1e4)), min_size=1, max_size=30), st.integers(1, 6)
)
def test_every_bin_holds_an_event(times: list[float], bins: int) -> None:
    bounds = bounds_between_bins(np.array(times), bins)
    assert (np.diff(bounds) > 0).all()
    assert len(bounds) < bins
    counts = np.bincount(np.searchsorted(bounds, times, side="right"), minlength=len(bounds) + 1)
    assert (counts > 0).all()


def test_equal_event_times_share_one_bin() -> None:
    task = Task.fit(survival([5, 5, 5, 7], [1, 1, 1, 0]))
    assert task.edges == (5.0, 7.0)
    assert task.n_out == 1
    one_event = survival([3, 5, 8], [0, 1, 0])
    task = Task.fit(one_event)
    assert task.loss(torch.zeros(3, 1), task.targets(one_event)).isfinite()


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (two_classes([0, 0]), r"column 'msi': the training part has no sample of class 'MSI' \(MSS 2 / MSI 0\); use"),
        (two_classes([]), "no sample of class 'MSS', 'MSI'"),
        (three_classes([0, 2]), "no sample of class 'middle'"),
        (Classification("one", ("a",), np.zeros(3, dtype=np.int64)), "one class only"),
        (two_labels([[1, 0], [0, 0]]), "column 'braf': the training part has 0 yes and 2 no of this label"),
        (two_labels([]), "column 'kras': the training part has 0 yes and 0 no"),
        (numbers([2.0, 2.0]), r"column 'tmb': the values of the training part do not differ \(2 values from 2 to 2"),
        (numbers([]), "do not differ"),
        (survival([1, 2], [0, 0]), r"column 'died': the training part has no event \(events 0 / censored 2\)"),
        (survival([], []), "has no event"),
    ],
)
def test_a_training_part_that_teaches_nothing_is_refused(training: Outcome, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Task.fit(training)


def test_a_class_of_one_sample_is_trained_on() -> None:
    outcome = three_classes([0] * 20 + [1] * 20 + [2])
    task = Task.fit(outcome)
    assert task.class_weights == pytest.approx((41 / 60, 41 / 60, 41 / 3))
    assert task.loss(torch.zeros(41, 3), task.targets(outcome)).isfinite()


@pytest.mark.parametrize(
    ("name", "validation"),
    [
        ("two classes", two_classes([1, 1, 1])),
        ("three classes", three_classes([2, 2])),
        ("labels", two_labels([[1, 0], [1, 0]])),
        ("survival", survival([1, 2, 3], [0, 0, 0])),
        ("survival", survival([3, 3], [1, 1])),
    ],
)
def test_a_validation_part_without_a_measure_is_judged_by_its_loss(name: str, validation: Outcome) -> None:
    task = Task.fit(TRAINING[name])
    logits = logits_of(task, validation)
    score_name, score = task.validation_score(validation, logits)
    assert score_name == "-loss"
    assert score == pytest.approx(-float(task.loss(logits, task.targets(validation))))


def test_a_validation_part_that_lacks_one_class_is_judged_by_the_others() -> None:
    task = Task.fit(TRAINING["three classes"])
    validation = three_classes([0, 0, 1, 1])
    logits = logits_of(task, validation)
    p = list(task.predictions(logits).values())
    expected = np.mean([metrics.roc_auc([1, 1, 0, 0], p[0]), metrics.roc_auc([0, 0, 1, 1], p[1])])
    assert task.validation_score(validation, logits) == ("macro_auc", pytest.approx(expected))


@pytest.mark.parametrize("name", TRAINING)
def test_a_model_that_diverged_has_no_score(name: str) -> None:
    outcome = TRAINING[name]
    task = Task.fit(outcome)
    score_name, score = task.validation_score(outcome, torch.full((len(outcome), task.n_out), torch.nan))
    assert math.isnan(score)
    assert score_name != "-loss"
    assert math.isnan(task.validation_score(outcome.take([]), torch.empty(0, task.n_out))[1])


def test_outcomes_of_another_cohort_are_matched_by_name() -> None:
    task = Task.fit(two_classes([0, 1]))
    other = Classification("status", ("MSI", "MSS", "unused"), np.array([0, 1, 1]))
    assert task.targets(other).tolist() == [1, 0, 0]
    unknown = Classification("status", ("MSI", "MSI-L"), np.array([0, 1]))
    with pytest.raises(
        DataError, match=r"column 'status': the model does not know class 'MSI-L'; its classes are 'MSS'"
    ):
        task.targets(unknown)
    task = Task.fit(TRAINING["labels"])
    other_order = MultiLabel(("braf", "tp53", "kras"), np.array([[1, 0, 0]]))
    assert task.targets(other_order).tolist() == [[0.0, 1.0]]
    with pytest.raises(DataError, match="the model predicts label 'kras' as well"):
        task.targets(MultiLabel(("braf",), np.array([[1]])))


def test_errors() -> None:
    task = Task.fit(TRAINING["three classes"])
    with pytest.raises(OptionError, match="the model predicts classification, the outcome is regression"):
        task.targets(numbers([1.0]))
    with pytest.raises(ShapeError, match=r"2 samples need logits of shape \(2, 3\), got \(2, 1\)"):
        task.loss(torch.zeros(2, 1), torch.tensor([0, 1]))
    with pytest.raises(OptionError, match="unknown reduction 'max'"):
        task.loss(torch.zeros(2, 3), torch.tensor([0, 1]), "max")
    with pytest.raises(OptionError, match="unknown kind of task None"):
        Task.from_json({})
    for options, message in [
        ({"balance": "both"}, "unknown balance 'both'; known: 'none', 'sampling', 'weights'"),
        ({"bins": 0}, "bins must be at least 1, got 0"),
        ({"event_weight": 1.5}, "event_weight must be from 0 to 1, got 1.5"),
        ({"survival_loss": "cox"}, "unknown survival_loss 'cox'; known: 'ce', 'nll'"),
        ({"n_bins": 3}, "unknown option of a task 'n_bins'; known: 'balance', 'bins', 'event_weight', 'survival_loss'"),
    ]:
        with pytest.raises(OptionError, match=message):
            Task.fit(TRAINING["survival"], **options)
