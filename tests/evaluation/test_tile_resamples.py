"""Resampled metrics of tiles: against the metrics of slides that are repeated."""

import numpy as np
import pytest

from psamil.evaluation import ScoredSlide, patch_auc, tile_froc
from psamil.evaluation.tile_resamples import PooledTiles, interval_over_folds, resampled_metrics


def slides(seed: int = 0, shift: float = 1.0) -> list[ScoredSlide]:
    """Six, three of them with positive tiles, whose scores are higher by ``shift``; some scores are equal."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(6):
        positive = rng.random(40) < (0.3 if i % 2 else 0.0)
        scores = np.round(rng.normal(size=40) + shift * positive, 1)
        scores[:2] = -np.inf, 3.0
        found.append(ScoredSlide(np.arange(80.0).reshape(40, 2), scores, positive))
    return found


@pytest.mark.parametrize("counts", [[1, 1, 1, 1, 1, 1], [2, 0, 3, 1, 0, 5], [0, 1, 0, 0, 0, 0]])
def test_metrics_are_those_of_repeated_slides(counts):
    every = slides()
    repeated = [slide for slide, count in zip(every, counts, strict=True) for _ in range(count)]
    found = PooledTiles.of(every).metrics(np.array(counts, dtype=float))
    assert found["patch_auc"] == pytest.approx(patch_auc(repeated))
    assert found["froc_tile@6"] == pytest.approx(tile_froc(repeated).score())


def test_without_positive_tiles_nothing_is_defined():
    found = PooledTiles.of(slides()).metrics(np.array([1.0, 0, 1, 0, 0, 0]))
    assert np.isnan(list(found.values())).all()
    assert resampled_metrics([], []) == {}


def test_an_interval_holds_the_value_and_is_narrower_for_more_slides():
    def interval(every):
        of = resampled_metrics(every, [f"p{i}" for i in range(len(every))])
        assert of == resampled_metrics(every, [f"p{i}" for i in range(len(every))])
        low, high = interval_over_folds([of["patch_auc"]])
        assert low < patch_auc(every) < high
        return high - low

    few = interval(slides())
    assert interval([slide for seed in range(8) for slide in slides(seed)]) < 0.6 * few


def test_slides_of_a_patient_are_drawn_together():
    same = resampled_metrics(slides(), ["one"] * 6)["patch_auc"]
    assert set(same) == {round(patch_auc(slides()), 6)}


def test_the_mean_over_folds_is_what_the_interval_is_of():
    assert interval_over_folds([[0.0, 1.0, np.nan], [1.0, 0.0, 0.5]]) == (0.5, 0.5)
    assert np.isnan(interval_over_folds([[np.nan, np.nan]])).all()
