"""The history of training for other programs to show: TensorBoard and MLflow.

The history of a job is the truth, and a log is a copy of it: epochs that it has are not written again, and epochs that
it lacks, because a process was killed or nobody asked for a log before, are.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from psamil.errors import MissingExtraError, one_of

LOGGERS = ("tensorboard", "mlflow")
MLFLOW_ID_FILE = "mlflow_run_id"  # beside the history

Report = Callable[[dict[str, Any]], None]
Write = Callable[[int, dict[str, float]], None]
"""Takes an epoch, from 0, and its numbers."""


def check_loggers(names: Sequence[str]) -> None:
    """OptionError for an unknown one, MissingExtraError for one whose package is not there."""
    for name in names:
        if name not in LOGGERS:
            raise one_of("logger", name, LOGGERS)
        if find_spec(name) is None:
            raise MissingExtraError(name, name, f"a log for {name}")


@contextmanager
def with_logs(report: Report, names: Sequence[str], run: Path, job: str, history: Path) -> Iterator[Report]:
    """Gives a report that brings the logs of a job up to date with its history file first; they also are at the end."""
    opened = {"tensorboard": _tensorboard, "mlflow": _mlflow}
    with ExitStack() as open_logs:
        logs = [open_logs.enter_context(opened[name](run, job, history)) for name in names]

        def update() -> None:
            if logs and history.exists():
                records = [json.loads(line) for line in history.read_text(encoding="utf-8").splitlines()]
                for log in logs:
                    log.update(records)

        def update_and_report(record: dict[str, Any]) -> None:
            update()
            report(record)

        yield update_and_report
        update()


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line of the history by name; radii by layer and head, counted from 1."""
    named = {name.replace(" ", "/"): value for name, value in record.items() if isinstance(value, float)}
    for layer, radii in enumerate(record.get("radii_steps", [])):
        named |= {f"radius_steps/layer_{layer + 1}_head_{head + 1}": radius for head, radius in enumerate(radii)}
    return named


class _Log:
    """Knows how many epochs are written."""

    def __init__(self, write: Write, epochs: int = 0) -> None:
        self.write, self.epochs = write, epochs

    def update(self, records: Sequence[dict[str, Any]]) -> None:
        for record in records[self.epochs :]:
            self.write(record["epoch"], scalars(record))
            self.epochs += 1


@contextmanager
def _tensorboard(run: Path, job: str, history: Path) -> Iterator[_Log]:
    """``RUN/tensorboard/<job>``, written anew: what a killed process left of the last epoch cannot be known."""
    from torch.utils.tensorboard import SummaryWriter

    folder = run / "tensorboard" / job
    shutil.rmtree(folder, ignore_errors=True)
    with SummaryWriter(str(folder)) as writer:

        def write(epoch: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, epoch)
            writer.flush()

        yield _Log(write)


@contextmanager
def _mlflow(run: Path, job: str, history: Path) -> Iterator[_Log]:
    """On the server that ``MLFLOW_TRACKING_URI`` names, or in ``RUN/mlruns``; one MLflow run per job."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or (run / "mlruns").resolve().as_uri()
    if uri.startswith("file:"):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow prefers databases, which it needs more for
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client = MlflowClient(uri)
    run_id, epochs = _mlflow_run(client, run.resolve().name, job, history.with_name(MLFLOW_ID_FILE))

    def write(epoch: int, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        client.log_batch(run_id, [Metric(name, value, now, epoch) for name, value in values.items()])

    yield _Log(write, epochs)
    client.set_terminated(run_id)


def _mlflow_run(client: Any, experiment: str, job: str, remembered: Path) -> tuple[str, int]:
    """Id of the MLflow run of a job, and how many epochs it has; made unless the server has it."""
    from mlflow.exceptions import MlflowException

    if remembered.exists():
        run_id = remembered.read_text(encoding="utf-8")
        try:
            return run_id, len(client.get_metric_history(run_id, "loss"))
        except MlflowException:  # of another server, or deleted there
            remembered.unlink()
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment
    found = client.get_experiment_by_name(name)
    experiment_id = found.experiment_id if found is not None else client.create_experiment(name)
    run_id = client.create_run(experiment_id, run_name=job).info.run_id
    remembered.write_text(run_id, encoding="utf-8")
    return run_id, 0
