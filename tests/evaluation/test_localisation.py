"""FROC, lesions and patch metrics against hand-worked examples and naive implementations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psamil.errors import OptionError, ShapeError
from psamil.evaluation.froc import FALSE_POSITIVES_PER_SLIDE, froc_curve
from psamil.evaluation.lesions import label_lesions, lesion_lengths_um, local_maxima
from psamil.evaluation.localisation import ScoredSlide, lesion_froc, patch_auc, patch_f1, tile_froc
from psamil.training.metrics import f1, roc_auc


def lattice(rows: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Positions and values of a picture of numbers."""
    values = np.array(rows, dtype=float)
    y, x = np.indices(values.shape)
    return np.stack([x.ravel(), y.ravel()], axis=1).astype(float), values.ravel()


def slide_of(scores: Sequence[Sequence[float]], positive: Sequence[Sequence[int]]) -> ScoredSlide:
    xy, values = lattice(scores)
    return ScoredSlide(xy, values, lattice(positive)[1].astype(bool))


def random_slides(seed: int, slides: int = 3, side: int = 6, share: float = 0.2) -> list[ScoredSlide]:
    rng = np.random.default_rng(seed)
    pictures = [(rng.random((side, side)) < share).astype(int) for _ in range(slides)]
    return [slide_of((picture + rng.normal(size=picture.shape)).round(1), picture) for picture in pictures]


def naive_froc(found: np.ndarray, false: np.ndarray, targets: int, slides: int) -> tuple[list[float], list[float]]:
    """Points (false positives per slide, sensitivity), one threshold after the other."""
    x, y = [0.0], [0.0]
    for threshold in sorted({*found.tolist(), *false.tolist()}, reverse=True):
        x.append(sum(score >= threshold for score in false) / slides)
        y.append(sum(score >= threshold for score in found) / targets)
    return x, y


def naive_sensitivity(x: list[float], y: list[float], at: float) -> float:
    reached = max(i for i in range(len(x)) if x[i] <= at)
    if reached == len(x) - 1:
        return y[-1]
    return y[reached] + (y[reached + 1] - y[reached]) * (at - x[reached]) / (x[reached + 1] - x[reached])


def test_froc_by_hand() -> None:
    """Two slides, four targets, one of them never found. Points (0, 1/4), (1/2, 1/4), (1/2, 3/4), (1, 3/4)."""
    curve = froc_curve([0.9, 0.6, 0.6], [0.7, 0.2], targets=4, slides=2)
    np.testing.assert_allclose(curve.false_positives, [0, 0, 0.5, 0.5, 1])
    np.testing.assert_allclose(curve.sensitivity, [0, 0.25, 0.25, 0.75, 0.75])
    np.testing.assert_allclose(curve.sensitivity_at([0, 0.25, 0.5, 8]), [0.25, 0.25, 0.75, 0.75])
    assert curve.score() == pytest.approx((0.25 + 5 * 0.75) / 6)
    assert curve.area() == pytest.approx((0.5 * 0.25 + 7.5 * 0.75) / 8)


def test_froc_cuts_a_tie_of_hits_and_misses_linearly() -> None:
    curve = froc_curve([0.5], [0.5] * 16, targets=1, slides=1)
    assert curve.score() == pytest.approx(np.mean(FALSE_POSITIVES_PER_SLIDE) / 16)
    assert curve.area() == pytest.approx(0.25)


def test_froc_without_targets_or_slides() -> None:
    assert np.isnan(froc_curve([], [0.5], targets=0, slides=1).score())
    assert np.isnan(froc_curve([], [0.5], targets=0, slides=1).area())
    assert froc_curve([], [], targets=3, slides=1).score() == 0
    with pytest.raises(OptionError):
        froc_curve([], [], targets=0, slides=0)
    with pytest.raises(OptionError):
        tile_froc([])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.05, 0.6))
def test_tile_froc_equals_the_naive_one(seed: int, share: float) -> None:
    slides = random_slides(seed, share=share)
    scores = np.concatenate([slide.scores for slide in slides])
    positive = np.concatenate([slide.positive for slide in slides])
    if positive.any():
        x, y = naive_froc(scores[positive], scores[~positive], int(positive.sum()), len(slides))
        curve = tile_froc(slides)
        expected = np.mean([naive_sensitivity(x, y, at) for at in FALSE_POSITIVES_PER_SLIDE])
        assert curve.score() == pytest.approx(expected)
        middles = np.arange(0.001, 8, 0.002)
        area = np.mean([naive_sensitivity(x, y, at) for at in middles])
        assert curve.area() == pytest.approx(area, abs=2e-3)


def naive_lesions(xy: np.ndarray, positive: np.ndarray) -> list[set[int]]:
    """Flood fill."""
    left, lesions = set(np.flatnonzero(positive).tolist()), []
    while left:
        lesion, edge = set(), [left.pop()]
        while edge:
            tile = edge.pop()
            lesion.add(tile)
            near = {other for other in left if np.abs(xy[other] - xy[tile]).max() <= 1}
            left -= near
            edge += near
        lesions.append(lesion)
    return lesions


@given(st.integers(0, 10_000), st.floats(0, 0.6))
def test_lesions_equal_flood_fill(seed: int, share: float) -> None:
    (slide,) = random_slides(seed, slides=1, side=8, share=share)
    numbers = label_lesions(slide.xy, slide.positive)
    assert ((numbers > 0) == slide.positive).all()
    ours = {frozenset(np.flatnonzero(numbers == k).tolist()) for k in range(1, numbers.max() + 1)}
    assert ours == {frozenset(lesion) for lesion in naive_lesions(slide.xy, slide.positive)}


def naive_maxima(xy: np.ndarray, scores: np.ndarray, radius: float) -> list[int]:
    left, kept = list(range(len(xy))), []
    while left:
        best = min(left, key=lambda tile: (-scores[tile], xy[tile, 1], xy[tile, 0]))
        kept.append(best)
        left = [tile for tile in left if np.linalg.norm(xy[tile] - xy[best]) > radius]
    return kept


@given(st.integers(0, 10_000), st.sampled_from([0.0, 1.0, 1.5, 2.3]))
def test_maxima_equal_the_naive_ones(seed: int, radius: float) -> None:
    (slide,) = random_slides(seed, slides=1)
    assert local_maxima(slide.xy, slide.scores, radius).tolist() == naive_maxima(slide.xy, slide.scores, radius)


def test_maxima_do_not_depend_on_the_order_of_tiles() -> None:
    (slide,) = random_slides(3, slides=1)
    order = np.random.default_rng(0).permutation(len(slide.xy))
    first, second = (local_maxima(slide.xy[o], slide.scores[o], 1.5) for o in (np.arange(len(order)), order))
    np.testing.assert_array_equal(slide.xy[first], slide.xy[order][second])


@settings(deadline=None)
@given(st.integers(0, 10_000), st.floats(0.05, 0.4))
def test_lesion_froc_equals_the_naive_one(seed: int, share: float) -> None:
    slides, found, false, targets = random_slides(seed, side=8, share=share), [], [], 0
    for slide in slides:
        lesions = naive_lesions(slide.xy, slide.positive)
        targets += len(lesions)
        detections = naive_maxima(slide.xy, slide.scores, 1.5)
        hits = [[slide.scores[tile] for tile in detections if tile in lesion] for lesion in lesions]
        found += [max(hit) for hit in hits if hit]
        false += [slide.scores[tile] for tile in detections if not slide.positive[tile]]
    if targets:
        x, y = naive_froc(np.array(found), np.array(false), targets, len(slides))
        expected = np.mean([naive_sensitivity(x, y, at) for at in FALSE_POSITIVES_PER_SLIDE])
        assert lesion_froc(slides).score() == pytest.approx(expected)


def test_lesion_froc_by_hand() -> None:
    """Two lesions: one found at 0.9 (0.8 beside it is silenced), one hidden behind the false 0.7; a normal slide."""
    tumour = slide_of([[0.9, 0.8, 0, 0.7, 0.6]], [[1, 1, 0, 0, 1]])
    normal = slide_of([[0.1, 0.0]], [[0, 0]])
    curve = lesion_froc([tumour, normal])
    np.testing.assert_allclose(curve.thresholds, [np.inf, 0.9, 0.7, 0.1])
    np.testing.assert_allclose(curve.sensitivity, [0, 0.5, 0.5, 0.5])
    np.testing.assert_allclose(curve.false_positives, [0, 0, 0.5, 1])


def test_isolated_tumour_cells_do_not_count() -> None:
    xy, scores = lattice([[0.9, 0, 0.8, 0, 0.7]])
    lesions = np.array([1, 0, 2, 0, 0])
    slide = ScoredSlide(xy, scores, lesions > 0, lesions, {1: 100.0, 2: 300.0})
    curve = lesion_froc([slide], radius_steps=1.0)
    np.testing.assert_allclose(curve.thresholds, [np.inf, 0.8, 0.7])
    np.testing.assert_allclose(curve.sensitivity, [0, 1, 1])
    np.testing.assert_allclose(curve.false_positives, [0, 0, 1])
    unmeasured = lesion_froc([ScoredSlide(xy, scores, lesions > 0, lesions)], radius_steps=1.0)
    np.testing.assert_allclose(unmeasured.sensitivity, [0, 0.5, 1, 1])


def test_a_lesion_without_a_tile_is_missed() -> None:
    """Four lesions: two found, one on no tile; the last, on no tile either, is of isolated cells and does not count."""
    xy, scores = lattice([[0.9, 0, 0.8, 0, 0.7]])
    lesions = np.array([1, 0, 0, 0, 2])
    slide = ScoredSlide(xy, scores, lesions > 0, lesions, {1: np.nan, 2: 400.0, 3: 300.0, 4: 100.0})
    curve = lesion_froc([slide], radius_steps=1.0)
    np.testing.assert_allclose(curve.thresholds, [np.inf, 0.9, 0.8, 0.7])
    np.testing.assert_allclose(curve.sensitivity, [0, 1 / 3, 1 / 3, 2 / 3])
    np.testing.assert_allclose(curve.false_positives, [0, 0, 1, 1])


def test_lengths_of_lesions() -> None:
    """A single tile is 4/sqrt(12) steps long, a row of n tiles n times that: n²/12 is its second moment."""
    xy, lesions = lattice([[1, 0, 2, 2, 2], [0, 0, 0, 0, 0], [0, 3, 0, 0, 0], [0, 0, 3, 0, 0]])
    lengths = lesion_lengths_um(xy, lesions.astype(int), step_um=100)
    assert lengths[1] == pytest.approx(400 / np.sqrt(12))
    assert lengths[2] == pytest.approx(3 * 400 / np.sqrt(12))
    assert lengths[3] == pytest.approx(400 * np.sqrt(1 / 2 + 1 / 12))  # two tiles by their corners


def test_patch_metrics_pooled_and_per_slide() -> None:
    slides = [*random_slides(1), slide_of([[5.0, 6.0]], [[0, 0]])]
    truth = [slide.positive for slide in slides]
    scores = [slide.scores for slide in slides]
    assert patch_auc(slides) == roc_auc(np.concatenate(truth), np.concatenate(scores))
    assert patch_auc(slides, "per slide") == pytest.approx(
        np.mean([roc_auc(y, s) for y, s in itertools.islice(zip(truth, scores, strict=True), 3)])
    )
    assert patch_f1(slides, 0.5) == f1(np.concatenate(truth), np.concatenate(scores) >= 0.5)
    assert patch_f1(slides, 0.5, "per slide") == pytest.approx(
        np.mean([f1(y, s >= 0.5) for y, s in itertools.islice(zip(truth, scores, strict=True), 3)])
    )
    assert np.isnan(patch_auc([]))
    assert np.isnan(patch_auc(slides[3:], "per slide"))


def test_what_is_refused() -> None:
    xy, scores = lattice([[0.1, 0.2]])
    positive = np.array([True, False])
    with pytest.raises(ShapeError, match="positive"):
        ScoredSlide(xy, scores, positive[:1])
    with pytest.raises(OptionError, match="1 of 2 tile scores are NaN"):
        ScoredSlide(xy, np.array([0.1, np.nan]), positive)
    with pytest.raises(OptionError, match="needs lesions"):
        ScoredSlide(xy, scores, positive, lesion_lengths_um={1: 3.0})
    with pytest.raises(OptionError, match="'per slide'"):
        patch_auc([ScoredSlide(xy, scores, positive)], "slides")
    with pytest.raises(OptionError, match="radius"):
        local_maxima(xy, scores, -1)


def test_large_slide_is_fast_enough() -> None:
    rng = np.random.default_rng(0)
    xy, _ = lattice(np.zeros((200, 200)))
    positive = np.abs(xy - 100).max(1) < 20
    slide = ScoredSlide(xy, rng.normal(size=len(xy)) + 3 * positive, positive)
    assert lesion_froc([slide]).sensitivity[-1] == 1
