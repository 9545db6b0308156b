"""`fit(engine=...)`: trainings are given away, and what comes back is the run that would have been made here."""

from pathlib import Path

import pytest

from psamil import fit
from psamil.cohort import simulate
from psamil.errors import OptionError
from psamil.evaluation.experiment import Training
from psamil.training.timing import TIMING_FILE

OF_A_CLUSTER = {"accelerator": "cuda", "devices": 64, "batch_samples": 64}  # more than there are here


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("engine")
    simulate(home / "cohort", slides=16, tiles=50, dim=4)
    return home


def fitted(home: Path, out: Path, **options):
    small = {"target": "label", "folds": 2, "seeds": 2, "epochs": 2, "model": "mean", "cache": home / "cache"}
    return fit(home / "cohort", home / "cohort" / "labels.csv", out, **{**small, **options})


def files_of(run: Path) -> dict[str, bytes]:
    files = [file for file in sorted(run.rglob("*")) if file.is_file() and file.name != TIMING_FILE]
    return {str(file.relative_to(run)): file.read_bytes() for file in files}


def test_trainings_by_an_engine_make_the_same_run(home, tmp_path):
    given: list[Training] = []

    def engine(cohort, trainings):
        given.extend(trainings)
        for training in reversed(trainings):
            training(cohort)

    here, there = fitted(home, tmp_path / "here"), fitted(home, tmp_path / "there", engine=engine)
    assert [training.name for training in given] == [f"fold {k}, seed {seed}" for k in (0, 1) for seed in (0, 1)]
    assert there.summary == here.summary
    assert files_of(tmp_path / "there") == files_of(tmp_path / "here")


def test_an_engine_that_does_nothing_leaves_everything_to_be_done(home, tmp_path):
    assert fitted(home, tmp_path, engine=lambda cohort, trainings: None).summary["finished"] == []
    assert fitted(home, tmp_path).summary["finished"] == [0, 1]


def test_devices_that_this_computer_lacks_are_for_the_engine_to_judge(home, tmp_path):
    asked = []
    fitted(home, tmp_path / "there", engine=lambda _, trainings: asked.extend(trainings), **OF_A_CLUSTER)
    assert {training.settings.devices for training in asked} == {64}
    with pytest.raises(OptionError, match=r"accelerator 'cuda' cannot be used here|devices is 64"):
        fitted(home, tmp_path / "here", **OF_A_CLUSTER)
    assert not (tmp_path / "here").exists()


def test_what_stops_every_computer_is_found_before_the_engine_is_asked(home, tmp_path):
    with pytest.raises(OptionError, match="unknown model"):
        fitted(home, tmp_path / "run", model="men", engine=lambda cohort, trainings: pytest.fail("was asked"))
