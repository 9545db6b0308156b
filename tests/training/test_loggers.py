"""Logs for other programs: what they hold is the history, once."""

import json
import sys
from contextlib import ExitStack

import pytest

from psamil.errors import MissingExtraError, OptionError
from psamil.training import loggers
from psamil.training.loggers import check_loggers, scalars, with_logs

RECORDS = [
    {
        "epoch": epoch,
        "loss": 1.0 / (epoch + 1),
        "lr": 1e-3,
        "validation auc": 0.5 + epoch / 10,
        "radii_steps": [[2.0 + epoch, 3.0], [4.0, 5.5]],
    }
    for epoch in range(4)
]
NAMES = {"loss", "lr", "validation/auc", *(f"radius_steps/layer_{i}_head_{k}" for i in (1, 2) for k in (1, 2))}


def write_history(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def from_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard" / "fold 0, seed 1"))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def from_mlflow(run):
    from mlflow import MlflowClient

    client = MlflowClient((run / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name(run.name).experiment_id])  # one run for one job
    assert found.info.run_name == "fold 0, seed 1"
    histories = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    return {name: [(metric.step, metric.value) for metric in history] for name, history in histories.items()}


def assert_holds(found, records):
    assert found.keys() == NAMES
    for name, events in found.items():
        assert [step for step, _ in events] == [record["epoch"] for record in records], name
        assert [value for _, value in events] == pytest.approx([scalars(record)[name] for record in records]), name


@pytest.mark.parametrize(("name", "read"), [("tensorboard", from_tensorboard), ("mlflow", from_mlflow)])
def test_a_log_is_the_history_whatever_was_interrupted(tmp_path, monkeypatch, name, read):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    pytest.importorskip(name)
    run, reported = tmp_path / "run", []
    history = run / "folds" / "0" / "seed-1" / "history.jsonl"

    def job():
        return with_logs(reported.append, [name], run, "fold 0, seed 1", history)

    write_history(history, RECORDS[:1])  # trained before anybody asked for a log
    with ExitStack() as killed:
        report = killed.enter_context(job())
        write_history(history, RECORDS[:2])
        report(RECORDS[1])
        assert_holds(read(run), RECORDS[:2])  # at once, not only at the end
        write_history(history, RECORDS[:3])
        killed.pop_all()  # neither reported nor closed
    with job() as report:
        write_history(history, RECORDS)
        report(RECORDS[3])
    assert_holds(read(run), RECORDS)
    with job():
        pass  # finished already
    assert_holds(read(run), RECORDS)
    assert reported == [RECORDS[1], RECORDS[3]]


def test_an_mlflow_run_that_was_deleted_is_made_again(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "elsewhere").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    history = tmp_path / "run" / "history.jsonl"
    write_history(history, RECORDS)
    (tmp_path / "run" / loggers.MLFLOW_ID_FILE).write_text("0" * 32)
    with with_logs(print, ["mlflow"], tmp_path / "run", "fold 0", history):
        pass
    client = mlflow.MlflowClient((tmp_path / "elsewhere").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert found.info.status == "FINISHED"
    assert len(client.get_metric_history(found.info.run_id, "loss")) == 4


def test_without_loggers_nothing_is_written(tmp_path):
    seen = []
    with with_logs(seen.append, [], tmp_path, "fold 0", tmp_path / "history.jsonl") as report:
        report({"epoch": 0})
    assert seen == [{"epoch": 0}]
    assert not list(tmp_path.iterdir())


def test_loggers_are_checked_before_training(monkeypatch):
    with pytest.raises(OptionError, match="unknown logger 'wandb'; known: 'mlflow', 'tensorboard'"):
        check_loggers(["wandb"])
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtraError, match=r"a log for mlflow needs .* pip install 'psamil\[mlflow\]'"):
        check_loggers(["mlflow"])
    check_loggers([])
