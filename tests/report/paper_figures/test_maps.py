"""Maps of several runs: of which slides, with which scores."""

import shutil

import numpy as np
import pandas as pd
import pytest

from psamil import fit
from psamil.cohort import simulate
from psamil.errors import DataError
from psamil.evaluation.predictor import Member, Predictor
from psamil.explain import models_for
from psamil.readers import find_bags, open_bag
from psamil.report.paper_figures.maps import draw_maps
from psamil.training.settings import TrainingSettings


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A cohort and two runs on its two folds."""
    home = tmp_path_factory.mktemp("maps")
    simulate(home / "cohort", slides=12, tiles=50, dim=8, range_steps=2)
    runs = {}
    for name in ("mean", "abmil"):
        settings = TrainingSettings(model=name, model_options={"hidden": 4}, epochs=1)
        told = {"target": "label", "folds": 2, "val": 0.4, "training": settings}
        fit(home / "cohort", home / "cohort" / "labels.csv", home / name, **told)
        runs[name.upper()] = home / name
    return home, runs


def test_slides_are_chosen_by_the_size_of_their_lesion_and_scores_are_of_models_that_did_not_learn_from_them(
    trained, tmp_path
):
    home, runs = trained
    files = draw_maps(runs, tmp_path, tile_labels=home / "cohort" / "tiles")
    assert [file.name for file in files[::2]] == [
        *(f"figure-maps-{size}.png" for size in ("median", "small", "large")),
        "figure-maps.csv",
    ]
    assert all(file.exists() for file in files)
    sizes = {file.stem: int(np.load(file).sum()) for file in (home / "cohort" / "tiles").glob("*.npy")}
    rising = sorted(size for size in sizes.values() if size)
    table = pd.read_csv(files[-1], float_precision="round_trip")
    of_slide = table.query("run == 'ABMIL'").groupby(["size", "slide"])["lesion"].sum()
    found = {size: lesion for (size, slide), lesion in of_slide.items() if lesion == sizes[slide]}
    n = len(rising)
    assert found == {"small": rising[n // 4], "median": rising[n // 2], "large": rising[3 * n // 4]}
    slide = table["slide"].iloc[0]
    (ref,) = (ref for ref in find_bags(home / "cohort").bags if ref.id == slide)
    model = Predictor([Member.load(of.path) for of in models_for(runs["ABMIL"], slide)])
    expected = model.predict(open_bag(ref)).tile_scores.numpy()
    assert table.query("run == 'ABMIL' and slide == @slide")["score"].to_numpy() == pytest.approx(expected)


def test_of_few_lesions_none_is_shown_twice(trained, tmp_path):
    home, runs = trained
    (tmp_path / "tiles").mkdir()
    lesions = [file for file in sorted((home / "cohort" / "tiles").glob("*.npy")) if np.load(file).any()]
    shutil.copy(lesions[0], tmp_path / "tiles")
    moved = shutil.copytree(home / "cohort", tmp_path / "moved")
    files = draw_maps(runs, tmp_path, tile_labels=tmp_path / "tiles", features=moved)
    assert [file.name for file in files] == ["figure-maps-median.png", "figure-maps-median.svg", "figure-maps.csv"]


def test_labels_without_a_lesion_are_named(trained, tmp_path):
    home, runs = trained
    shutil.copytree(home / "cohort" / "tiles", tmp_path / "tiles")
    for file in (tmp_path / "tiles").glob("*.npy"):
        np.save(file, np.zeros_like(np.load(file)))
    with pytest.raises(DataError, match="labels no tile of a test slide of these runs as lesion"):
        draw_maps(runs, tmp_path, tile_labels=tmp_path / "tiles")
