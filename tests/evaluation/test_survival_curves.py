"""Kaplan-Meier and log-rank against hand-worked examples and lifelines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lifelines import KaplanMeierFitter
from lifelines.statistics import multivariate_logrank_test
from scipy import stats

from psamil.errors import OptionError, ShapeError
from psamil.evaluation.survival_curves import high_risk, kaplan_meier, log_rank


def cohort(seed: int, n: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Times with ties, events and three groups."""
    rng = np.random.default_rng(seed)
    groups = rng.integers(3, size=n)
    times = np.ceil(rng.exponential(8 + 4 * groups))
    return times, rng.random(n) < 0.6, groups


def test_kaplan_meier_by_hand() -> None:
    """Five at risk: an event at 1; at 2 an event and a censoring; at 4 a censoring; at 5 an event of the last."""
    curve = kaplan_meier([1, 2, 2, 4, 5], [1, 1, 0, 0, 1])
    np.testing.assert_allclose(curve.times, [1, 2, 4, 5])
    np.testing.assert_allclose(curve.survival, [4 / 5, 4 / 5 * 3 / 4, 3 / 5, 0], atol=1e-15)
    assert curve.at_risk.tolist() == [5, 4, 2, 1]
    assert curve.events.tolist() == [1, 1, 0, 1]
    assert curve.censored.tolist() == [0, 1, 1, 0]
    assert curve.median == 5
    np.testing.assert_allclose(curve.at([0.5, 1, 3, 99]), [1, 0.8, 0.6, 0], atol=1e-15)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 60))
def test_kaplan_meier_equals_lifelines(seed: int, n: int) -> None:
    times, events, _ = cohort(seed, n)
    curve, theirs = kaplan_meier(times, events), KaplanMeierFitter().fit(times, events)
    np.testing.assert_allclose(curve.survival, theirs.survival_function_.iloc[1:, 0], atol=1e-12)
    if not np.isclose(curve.survival, 0.5).any():  # where lifelines' rounding decides
        assert curve.median == theirs.median_survival_time_
    between = (curve.survival > 0) & (curve.survival < 1)
    bounds = theirs.confidence_interval_.iloc[1:].to_numpy()[between]
    np.testing.assert_allclose(np.stack([curve.low, curve.high], axis=1)[between], bounds, atol=1e-9)


@pytest.mark.parametrize("n", range(2, 60, 2))
def test_median_where_survival_is_a_half(n: int) -> None:
    assert kaplan_meier(np.arange(1, n + 1), np.ones(n)).median == n / 2


def test_nobody_dies_or_nobody_is_there() -> None:
    curve = kaplan_meier([1, 2], [0, 0])
    assert curve.survival.tolist() == curve.low.tolist() == curve.high.tolist() == [1, 1]
    assert curve.median == np.inf
    assert kaplan_meier([], []).at([3]).tolist() == [1]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_log_rank_of_three_groups_equals_lifelines(seed: int) -> None:
    times, events, groups = cohort(seed)
    ours, theirs = log_rank(times, events, groups), multivariate_logrank_test(times, groups, events)
    assert ours.degrees == 2
    assert ours.statistic == pytest.approx(theirs.test_statistic, rel=1e-6)
    assert ours.p_value == pytest.approx(theirs.p_value, rel=1e-6)


def test_log_rank_of_two_groups_equals_scipy() -> None:
    times, events, groups = cohort(7, 200)
    chosen = {g: stats.CensoredData.right_censored(times[groups == g], ~events[groups == g]) for g in (0, 2)}
    both = groups != 1
    ours = log_rank(times[both], events[both], groups[both])
    theirs = stats.logrank(chosen[0], chosen[2])
    assert ours.statistic == pytest.approx(theirs.statistic**2)
    assert ours.p_value == pytest.approx(theirs.pvalue)
    assert ours.p_value < 0.05


def test_log_rank_by_hand() -> None:
    """Times 1 (group a) and 2 (group b), both events: expected in a 1/2 at the first; variance 1/4; chi squared 1."""
    result = log_rank([1, 2], [True, True], ["a", "b"])
    assert result.statistic == pytest.approx(1)
    assert result.p_value == pytest.approx(stats.chi2.sf(1, 1))


def test_nothing_to_compare() -> None:
    assert np.isnan(log_rank([1, 2], [1, 1], ["a", "a"]).p_value)
    assert np.isnan(log_rank([1, 2], [0, 0], ["a", "b"]).p_value)
    assert np.isnan(log_rank([1, 2], [0, 1], ["a", "b"]).p_value)  # when b has its event, a is gone


def test_risk_groups_come_from_the_reference() -> None:
    assert high_risk([0.1, 2.0, 3.0], reference=[1, 2, 3]).tolist() == [False, False, True]
    with pytest.raises(OptionError, match="reference"):
        high_risk([0.1], reference=[])


def test_what_is_refused() -> None:
    with pytest.raises(OptionError, match="1 times are not finite"):
        kaplan_meier([1, np.nan], [1, 0])
    with pytest.raises(ShapeError):
        kaplan_meier([1, 2], [1])
    with pytest.raises(ShapeError):
        log_rank([1, 2], [1, 1], ["a"])
