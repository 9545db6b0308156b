import numpy as np
import pytest

from psamil.readers import TilePlaces
from psamil.serve.explained import Explainer, output_names
from psamil.serve.pictures import Pictures
from psamil.serve.study import Study
from psamil.training.class_tasks import MultiLabelTask
from tests.evaluation.made_runs import TASKS
from tests.slides.drawn import stained, write_slide

CORNERS = np.array([[100.0, 50.0], [164.0, 50.0]])


@pytest.fixture
def place(study, tmp_path):
    """Puts places onto the picture of s00, which is scanned at so many micrometres per pixel."""
    shown = Pictures()

    def on_picture(places, mpp):
        write_slide(tmp_path / "s00.tif", stained(300, 400), mpp=mpp)
        opened = Study.open([study.psa], slides=tmp_path)
        slide = next(slide for slide in opened.slides.values() if slide.name == "s00")
        return Explainer(opened, shown)._on_picture(slide, places)

    yield on_picture
    shown.close()


def test_level_0_pixels_stay(place):
    places, pyramid, note = place(TilePlaces(CORNERS, 64.0, "px0"), mpp=0.5)
    np.testing.assert_array_equal(places.corners, CORNERS)
    assert (places.size, places.unit, places.mpp) == (64, "px0", pytest.approx(0.5))  # which the picture tells
    assert (pyramid.width, pyramid.height, note) == (400, 300, "")


def test_micrometres_become_level_0_pixels(place):
    places, pyramid, _ = place(TilePlaces(CORNERS, 64.0, "um"), mpp=0.25)
    np.testing.assert_allclose(places.corners, CORNERS * 4)
    assert (places.unit, places.size) == ("px0", pytest.approx(256))
    assert pyramid is not None


@pytest.mark.parametrize(("unit", "mpp"), [("px", 0.5), ("steps", 0.5), ("um", None)])
def test_places_that_cannot_be_put_onto_the_picture(place, unit, mpp):
    before = TilePlaces(CORNERS, 64.0, unit)
    places, pyramid, note = place(before, mpp=mpp)
    assert places is before
    assert pyramid is None
    assert "do not say where" in note


@pytest.mark.parametrize("kind", TASKS)
def test_every_output_has_a_name(kind):
    names = output_names(TASKS[kind])
    assert len(names) == TASKS[kind].n_out
    assert len(set(names)) == len(names)


def test_names_of_outputs():
    assert output_names(TASKS["binary"]) == ["positive"]
    assert output_names(TASKS["three"]) == ["0", "1", "NA"]
    assert output_names(MultiLabelTask(("x", "y"), ((1.0, 1.0),) * 2, "none")) == ["x", "y"]
