"""Weights of kinds that meet: those of the models, under the names of the features."""

import numpy as np
import pytest
import torch

from psamil.evaluation.run_comparison import FinishedRun
from psamil.files import read_json, write_json
from psamil.report.meeting_figures import meetings, names_of, weights_of
from psamil.report.run_figures import figures_of
from psamil.training.saved_model import SavedModel
from psamil.training.settings import TrainingSettings
from tests.evaluation.made_runs import make_run, make_splits


@pytest.fixture(scope="module", params=["binary", "three"])
def folder(request, tmp_path_factory):
    settings = TrainingSettings(model="psa", model_options={"heads": 2, "head_dim": 4, "arrangement": True})
    run = tmp_path_factory.mktemp("runs") / "psa"
    make_run(run, make_splits(), signal=3.0, kind=request.param, settings=settings, radii=True)
    for fold in range(3):
        path = run / "folds" / str(fold) / "seed-0" / "model.safetensors"
        saved = SavedModel.load(path)
        torch.nn.init.constant_(saved.model.arrangement.learned, 0.1 * (fold + 1))
        saved.save(path)
    return run


def test_weights_are_those_of_all_models_summed_over_heads(folder):
    run = FinishedRun.load(folder)
    weights = weights_of(run)
    assert weights.shape == (3, run.task.n_out, 2, 2)
    np.testing.assert_allclose(weights[:, 0, 0, 1], 2 * 4 * np.array([0.1, 0.2, 0.3]), rtol=1e-6)


def test_names_are_those_of_the_features_or_numbers(folder):
    assert names_of(FinishedRun.load(folder), 2) == ["1", "2"]
    about = read_json(folder / "run.json")
    write_json(folder / "run.json", {**about, "feature_names": ["tumour cells", "B cells"]})
    run = FinishedRun.load(folder)
    assert names_of(run, 2) == ["tumour cells", "B cells"]
    assert names_of(run, 3) == ["1", "2", "3"]
    write_json(folder / "run.json", about)


def test_the_report_has_the_figure_where_there_is_an_arrangement(folder, tmp_path):
    assert "Kinds that meet" in [figure.title for figure in figures_of([FinishedRun.load(folder)])]
    plain = FinishedRun.load(make_run(tmp_path / "mean", make_splits(), signal=0.0))
    assert weights_of(plain) is None
    assert meetings([plain]) is None
