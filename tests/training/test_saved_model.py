"""Saved models: a strict round trip without pickle, and clear words for files that do not fit."""

import pickle

import pytest
import torch

from psamil.bag import Bag, PackedBags
from psamil.errors import DataError
from psamil.models import create_model, list_models
from psamil.training.class_tasks import ClassificationTask
from psamil.training.saved_model import SavedModel
from psamil.training.state import read_tensors, write_tensors

OPTIONS = {"psa": {"heads": 2, "head_dim": 4, "decay": "cauchy"}, "abmil": {"hidden": 4, "gated": False}}
TASK = ClassificationTask(("no", "yes"), (0.1 + 0.2, 1.5), "weights")


def saved(path, name="psa", in_dim=3):
    options = OPTIONS.get(name, {})
    settings = {"model": name, "model_options": options}
    model = create_model(name, in_dim, 1, **options)
    SavedModel(model, TASK, {"settings": settings, "in_dim": in_dim, "step_um": None}).save(path)
    return model


@pytest.mark.parametrize("name", list_models())
def test_a_model_comes_back(name, tmp_path):
    model = saved(tmp_path / "model", name)
    loaded = SavedModel.load(str(tmp_path / "model"))
    assert loaded.task == TASK
    assert loaded.about["in_dim"] == 3
    assert not loaded.model.training
    batch = PackedBags.of(Bag(torch.randn(5, 3), torch.arange(10.0).view(5, 2)))
    with torch.no_grad():
        assert torch.equal(model.eval()(batch).logits, loaded.model(batch).logits)
    SavedModel(loaded.model, loaded.task, loaded.about).save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "model").read_bytes()


def changed(path, **about):
    tensors, before = read_tensors(path, "")
    write_tensors(path, tensors, before | about)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"format": "psamil model 99"}, "is no model of this version"),
        ({"settings": {"model": "mine", "model_options": {}}}, "unknown model 'mine'.*import the code that registers"),
        ({"settings": {"model": "psa", "model_options": {"wings": 2}}}, "wings"),
        ({"settings": None}, "does not fit"),
        ({"in_dim": 4}, "size mismatch"),
        ({"in_dim": "many"}, "does not fit"),
        ({"task": {"kind": "fortune"}}, "unknown kind of task 'fortune'"),
        ({"task": None}, "does not fit"),
        ({"task": {"kind": "classification", "odd": 1}}, "does not fit"),
    ],
)
def test_files_that_do_not_fit_are_refused_in_one_line(about, message, tmp_path):
    saved(tmp_path / "model")
    changed(tmp_path / "model", **about)
    with pytest.raises(DataError, match=message) as error:
        SavedModel.load(tmp_path / "model")
    assert "\n" not in str(error.value)


def test_weights_must_be_complete_and_no_more(tmp_path):
    saved(tmp_path / "model")
    tensors, about = read_tensors(tmp_path / "model", "")
    fewer = {name: tensor for name, tensor in tensors.items() if name != "head.weight"}
    for other in (fewer, tensors | {"more": torch.zeros(1)}):
        write_tensors(tmp_path / "other", other, about)
        with pytest.raises(DataError, match=r"head\.weight|more"):
            SavedModel.load(tmp_path / "other")


def test_a_pickle_is_refused(tmp_path):
    (tmp_path / "model").write_bytes(pickle.dumps({"weights": [1]}))
    with pytest.raises(DataError, match=r"no file of psamil.*train it again"):
        SavedModel.load(tmp_path / "model")
