"""Temperatures that were put in come out; curves agree with the calibration error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, softmax

from psamil.errors import OptionError, ShapeError
from psamil.evaluation.calibration import TEMPERATURES, calibrated_probabilities, fit_temperature, reliability_curve
from psamil.training.metrics import expected_calibration_error


def binary(temperature: float, n: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    true_logits = rng.normal(scale=2, size=n)
    return temperature * true_logits, (rng.random(n) < expit(true_logits)).astype(np.int64)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_binary_temperature_is_recovered(temperature: float) -> None:
    logits, labels = binary(temperature)
    assert fit_temperature(logits, labels) == pytest.approx(temperature, rel=0.05)


def test_multiclass_temperature_is_recovered() -> None:
    rng = np.random.default_rng(1)
    true_logits = rng.normal(scale=2, size=(20_000, 4))
    labels = (softmax(true_logits, axis=1).cumsum(1) < rng.random((20_000, 1))).sum(1)
    assert fit_temperature(3 * true_logits, labels) == pytest.approx(3, rel=0.05)


def test_two_columns_and_one_logit_agree() -> None:
    logits, labels = binary(2.0, n=500)
    columns = np.stack([-logits / 2, logits / 2], axis=1)
    temperature = fit_temperature(logits, labels)
    assert fit_temperature(columns, labels) == pytest.approx(temperature, rel=1e-4)
    probabilities = calibrated_probabilities(columns, temperature)
    np.testing.assert_allclose(probabilities[:, 1], calibrated_probabilities(logits, temperature))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(4, 30))
def test_minimum_of_a_fine_grid(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    logits, labels = rng.normal(scale=3, size=n), rng.integers(2, size=n)
    temperature = fit_temperature(logits, labels)

    def loss(t: np.ndarray) -> np.ndarray:
        return np.logaddexp(0, (1 - 2 * labels) * logits / t[:, None]).sum(1)

    if not ((logits > 0) == labels).all():
        grid = np.geomspace(*TEMPERATURES, 2000)
        assert loss(np.array([temperature]))[0] <= loss(grid).min() + 1e-6


def test_a_faultless_model_is_left_as_it_is() -> None:
    assert fit_temperature([-1.0, 2.0, 0.5], [0, 1, 1]) == 1
    assert fit_temperature(np.empty(0), []) == 1


def test_a_useless_model_loses_its_confidence() -> None:
    assert fit_temperature([5.0, -5.0], [0, 1]) == pytest.approx(TEMPERATURES[1], rel=1e-3)


def test_what_is_refused() -> None:
    with pytest.raises(OptionError, match="1 samples"):
        fit_temperature([np.nan, 1.0], [0, 1])
    with pytest.raises(ShapeError):
        fit_temperature([1.0, 2.0], [1])
    with pytest.raises(ShapeError):
        reliability_curve([1], [0.5, 0.5])


def test_reliability_curve_by_hand() -> None:
    curve = reliability_curve([0, 1, 1, 1], [0.1, 0.3, 0.5, 0.9], bins=2)
    np.testing.assert_allclose(curve.predicted, [0.3, 0.9])
    np.testing.assert_allclose(curve.observed, [2 / 3, 1])
    assert curve.counts.tolist() == [3, 1]
    assert np.isnan(reliability_curve([1], [0.9], bins=2).observed[0])


@pytest.mark.parametrize("classes", [1, 3])
def test_calibration_error_is_the_mean_gap(classes: int) -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(200, classes))
    labels = rng.integers(max(classes, 2), size=200)
    probabilities = calibrated_probabilities(logits[:, 0] if classes == 1 else logits, 1.0)
    curve = reliability_curve(labels, probabilities)
    gap = np.nansum(np.abs(curve.predicted - curve.observed) * curve.counts) / 200
    assert gap == pytest.approx(expected_calibration_error(labels, probabilities))
