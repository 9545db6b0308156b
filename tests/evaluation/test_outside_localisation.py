"""FROC and patch metrics against outside implementations: MONAI's FROC, made from the CAMELYON16 challenge's code,
and scikit-learn.

Where MONAI (and the challenge) differ from us:

- They leave the lowest of all scores out of the curve. A lesion that is not found counts there as one of score 0, which
  is then the lowest, and nothing is lost; but where every lesion is found, so is the last point of the curve. We keep
  it. A further score of 0, which is what a lesion not found would add, makes both the same.
- A lesion not found has the score 0, so scores must be above 0. Ours may be any numbers.
- Scores of hits are rounded to float32, scores of false positives are not: scores here are float32 to begin with.
"""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, roc_auc_score

from psamil.evaluation.froc import FALSE_POSITIVES_PER_SLIDE
from psamil.evaluation.lesions import label_lesions, local_maxima
from psamil.evaluation.localisation import ScoredSlide, lesion_froc, patch_auc, patch_f1, tile_froc

with warnings.catch_warnings():  # of what MONAI imports; not ours
    warnings.simplefilter("ignore")
    monai = pytest.importorskip("monai.metrics.froc")

SIDE = 9


def random_slides(seed, share, levels):
    """Lattices of tiles with lesions, some of them isolated cells; few levels of scores make many ties."""
    rng = np.random.default_rng(seed)
    y, x = np.indices((SIDE, SIDE))
    xy = np.stack([x.ravel(), y.ravel()], axis=1).astype(float)
    slides = []
    for _ in range(rng.integers(2, 5)):
        positive = rng.random(SIDE**2) < share
        lesions = label_lesions(xy, positive)
        lengths = {k: float(rng.choice([100.0, 274.9, 275.0, 900.0, np.nan])) for k in range(1, lesions.max() + 1)}
        scores = np.float32((1 + rng.integers(0, levels, SIDE**2)) / levels * np.where(positive, 1.0, 0.8))
        slides.append(ScoredSlide(xy, scores.astype(float), positive, lesions, lengths))
    return slides


def monai_score(cases, slides, at=FALSE_POSITIVES_PER_SLIDE):
    """Of (scores, x, y, mask of numbers, numbers to leave out) for each slide; NaN without targets."""
    found = [monai.compute_fp_tp_probs(s.astype(np.float32), y, x, mask, out) for s, x, y, mask, out in cases]
    false, hits = (np.concatenate([one[i] for one in found]).astype(np.float32) for i in (0, 1))
    targets = sum(one[2] for one in found)
    if not targets:
        return np.nan
    curve = monai.compute_froc_curve_data(false, np.append(hits, np.float32(0)), targets, slides)
    return monai.compute_froc_score(*curve, eval_thresholds=at)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 0.3), st.sampled_from([3, 10, 1000]))
def test_lesion_froc_is_monais(seed, share, levels):
    slides = random_slides(seed, share, levels)
    cases = []
    for slide in slides:
        detections = local_maxima(slide.xy, slide.scores, 1.5)
        x, y = slide.xy[detections].astype(int).T
        small = [k for k, length in slide.lesion_lengths_um.items() if length < 275]
        cases.append((slide.scores[detections], x, y, slide.lesions.reshape(SIDE, SIDE), small))
    expected = monai_score(cases, len(slides))
    assert lesion_froc(slides).score() == pytest.approx(expected, nan_ok=True)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 0.6), st.sampled_from([3, 10, 1000]))
def test_tile_froc_is_monais_with_a_target_for_each_tile(seed, share, levels):
    slides = random_slides(seed, share, levels)
    cases = []
    for slide in slides:
        numbers = (np.cumsum(slide.positive) * slide.positive).reshape(SIDE, SIDE)
        cases.append((slide.scores, *slide.xy.astype(int).T, numbers, []))
    assert tile_froc(slides).score() == pytest.approx(monai_score(cases, len(slides)), nan_ok=True)
    at = (0.1, 3.0, 20.0)
    expected = monai_score(cases, len(slides), at)
    assert tile_froc(slides).score(at) == pytest.approx(expected, nan_ok=True)


def test_the_last_point_of_the_curve_that_monai_leaves_out():
    """One lesion at 0.5, one false positive at 0.9: it is found, if late. MONAI's curve ends before."""
    xy, scores = np.array([[0.0, 0.0], [5.0, 0.0]]), np.array([0.5, 0.9])
    slide = ScoredSlide(xy, scores, np.array([True, False]))
    mask = np.array([[1, 0, 0, 0, 0, 0]])
    false, hits, targets = monai.compute_fp_tp_probs(scores, np.array([0, 0]), np.array([0, 5]), mask)
    theirs = monai.compute_froc_score(*monai.compute_froc_curve_data(false, hits.astype(float), targets, 1))
    assert theirs == 0
    assert lesion_froc([slide]).score() == pytest.approx(4 / 6)  # at 1, 2, 4 and 8 false positives


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.05, 0.9), st.sampled_from([2, 10, 1000]))
def test_patch_metrics_are_those_of_scikit_learn(seed, share, levels):
    slides = random_slides(seed, share, levels)
    truth, scores = (np.concatenate([getattr(s, name) for s in slides]) for name in ("positive", "scores"))
    assert patch_auc(slides) == pytest.approx(roc_auc_score(truth, scores))
    for threshold in (0.0, 0.41, float(scores.max())):
        assert patch_f1(slides, threshold) == pytest.approx(f1_score(truth, scores >= threshold))
    mixed = [slide for slide in slides if 0 < slide.positive.sum() < SIDE**2]
    assert patch_auc(slides, "per slide") == pytest.approx(
        np.mean([roc_auc_score(slide.positive, slide.scores) for slide in mixed])
    )
