"""Heat maps: every tile one square of the colour of its score, in place."""

import base64
import io
import re

import numpy as np
import pytest

from psamil.report.heat_maps import ScoredPicture, heat_maps

Image = pytest.importorskip("PIL.Image")
VIRIDIS_ENDS = [(68, 1, 84), (253, 231, 37)]


def decoded(figure) -> np.ndarray:
    data = re.search(r'src="data:image/jpeg;base64,([^"]+)"', figure.element)[1]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")).astype(int)


def share(picture: np.ndarray, colour: tuple[int, int, int]) -> float:
    return float((np.abs(picture - colour).max(2) < 24).mean())


def slide(scores: dict[str, list[float]], **options) -> ScoredPicture:
    corners = np.array([[0.0, 0.0], [1000.0, 0.0], [0.0, 1000.0], [1000.0, 1000.0]])
    overview = np.full((40, 40, 3), (10, 200, 10), np.uint8)
    arrays = {run: np.array(values) for run, values in scores.items()}
    return ScoredPicture("a slide", overview, (2000.0, 2000.0), corners, 1000.0, arrays, **options)


def test_tiles_have_the_colours_of_their_scores():
    picture = decoded(heat_maps([slide({"psa": [0, 0, 0, 1]})], "what it shows"))
    low, high = (share(picture, colour) for colour in VIRIDIS_ENDS)
    assert low > 0.1
    assert 2.4 < low / high < 3.2  # three tiles and one, beside the colour bar
    assert share(picture, (10, 200, 10)) > 0.2  # the slide itself
    right = np.argwhere(np.abs(picture - VIRIDIS_ENDS[1]).max(2) < 24).mean(0)
    assert right[0] > np.argwhere(np.abs(picture - VIRIDIS_ENDS[0]).max(2) < 24).mean(0)[0]  # y points down


def test_colours_mean_the_same_in_all_slides_of_a_run():
    both = decoded(heat_maps([slide({"psa": [0, 0, 0, 0]}), slide({"psa": [9, 9, 9, 9]})], ""))
    upper, lower = both[: len(both) // 2], both[len(both) // 2 :]
    assert share(upper, VIRIDIS_ENDS[0]) > 0.1
    assert share(lower, VIRIDIS_ENDS[0]) < 0.01
    assert share(lower, VIRIDIS_ENDS[1]) > 0.1


def test_labelled_tiles_have_a_frame():
    red = (209, 73, 91)
    with_frame, without = (
        decoded(heat_maps([slide({"psa": [0, 1, 0, 1], "abmil": [0, 1, 0, 1]}, labelled=labelled)], ""))
        for labelled in (np.array([True, True, False, False]), None)
    )
    assert share(with_frame, red) > 0.001 > share(without, red)
