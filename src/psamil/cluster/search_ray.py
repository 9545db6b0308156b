"""Trials of a search by Ray Tune, on this computer or on a cluster.

- Our own sampler has drawn the trials, and Tune gets them as a fixed grid: the same are tried as without Ray.
- Each is a run in a folder of its own. A trial whose worker or node is lost is tried again and goes on with what is
  there; see :mod:`psamil.cluster.engine`, whose rules hold here, too.
- Tune kills the worker of a trial that shall end, which would leave its locks. Trials are therefore told by a file,
  which they look for after every step.
- None is stopped early: in small cohorts, the first epochs say little about the last ones.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from psamil.cluster.engine import LOSSES, STOP_S, connected, refuse_too_much, run_attempt
from psamil.cluster.search import Search, TrialResult
from psamil.cluster.search_space import Trial
from psamil.errors import PsamilError

STOP_FILE, AT_WORK = "stop", ".at-work"


def run_trials(
    search: Search,
    trials: Sequence[Trial],
    *,
    address: str | None = None,
    cpus_per_job: int = 1,
    gpus_per_job: float = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> list[TrialResult]:
    """Runs all trials and gives their results, in their order.

    Args:
        search: of an outer fold.
        trials: whose numbers differ.
        address: of a Ray cluster; "auto" is the one that this node belongs to, None starts one on this computer.
        cpus_per_job: that Ray reserves, and the number of threads that a trial computes with.
        gpus_per_job: that Ray reserves; less than 1 shares one among trials.
        tell: called with one line for each trial that is over.

    Raises:
        PsamilError: when all other trials are done, with the reason of those that could not be run.
    """
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # which would print tables of its own
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"  # which would go on as if trials that were stopped had ended
    with connected(address) as ray:
        refuse_too_much(ray.nodes(), cpus_per_job, gpus_per_job)
        from ray import tune

        class Told(tune.Callback):
            """Tells what is over."""

            tell: Callable[[str], None]

            def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
                result, failure = trial.last_result["found"]
                self.tell(failure or str(result))

            def __getstate__(self) -> dict[str, Any]:
                return {}  # Tune saves its callbacks; who is told lives in this process only

        told = Told()
        told.tell = tell
        drawn = {trial.number: trial for trial in trials}
        notes = (search.folder / ".ray").resolve()  # of Tune and of this module: what is kept of trials are their runs
        shutil.rmtree(notes, ignore_errors=True)
        notes.mkdir(parents=True)
        how = {"task": secrets.token_hex(8), "cpus": cpus_per_job, "folder": os.getcwd(), "notes": notes}
        work = tune.with_parameters(_run, search=search, trials=drawn, **how)
        tuner = tune.Tuner(
            tune.with_resources(work, {"cpu": cpus_per_job, "gpu": gpus_per_job}),
            param_space={"trial": tune.grid_search(list(drawn))},
            tune_config=tune.TuneConfig(metric="score", mode="max", reuse_actors=True),
            run_config=tune.RunConfig(
                name="trials",
                storage_path=str(notes),
                failure_config=tune.FailureConfig(max_failures=LOSSES),
                callbacks=[told],
                verbose=0,
            ),
        )
        try:
            grid = tuner.fit()
        except BaseException:
            _stop(notes)
            raise
        finally:
            shutil.rmtree(notes, ignore_errors=True)
        results, failures = {}, []
        for i in range(len(grid)):
            of_trial = grid[i].metrics or {}
            if isinstance(grid[i].error, ray.exceptions.RayActorError):
                reason = f"its worker was lost again and again: {' '.join(str(grid[i].error).split())}"
                failures.append(f"trial {(grid[i].config or {})['trial']}: {reason}")
            elif grid[i].error is not None or "bug" in of_trial:  # no error of psamil: it deserves its traceback
                raise grid[i].error or of_trial["bug"].as_instanceof_cause()
            elif of_trial["found"][1] is not None:
                failures.append(of_trial["found"][1])
            else:
                results[of_trial["found"][0].trial.number] = of_trial["found"][0]
    if failures:
        raise PsamilError(f"{len(failures)} of {len(trials)} trials failed, the others are done: {'; '.join(failures)}")
    return [results[number] for number in drawn]


def _run(
    config: Mapping[str, Any],
    search: Search,
    trials: Mapping[int, Trial],
    task: str,
    cpus: int,
    folder: str,
    notes: Path,
) -> dict[str, Any]:
    """A trial in a worker process: its result, or the reason why there is none, and the score that Tune wants.

    A bug is a result, too: Tune would try the trial again, and it would come again.
    """
    from ray.exceptions import RayTaskError

    trial = trials[config["trial"]]
    at_work = notes / f"{trial.number}{AT_WORK}"
    at_work.touch()  # before the look at the other file: the driver waits for whoever has not seen it
    try:
        _leave_if_stopped(notes)
        work = partial(search.run, trial, after_step=partial(_leave_if_stopped, notes))
        found = run_attempt(work, None, f"{task}-{trial.number}", cpus, folder)
    except Exception as error:
        bug = RayTaskError(f"trial {trial.number}", traceback.format_exc(), error)
        return {"found": (None, f"{type(error).__name__}: {error}"), "bug": bug, "score": float("-inf")}
    finally:
        at_work.unlink(missing_ok=True)
    return {"found": found, "score": found[0].score if found[0] is not None else float("-inf")}


def _leave_if_stopped(notes: Path) -> None:
    if (notes / STOP_FILE).exists():
        raise KeyboardInterrupt


def _stop(notes: Path) -> None:
    """Has the trials let go of their locks."""
    (notes / STOP_FILE).touch()
    deadline = time.monotonic() + STOP_S
    while any(notes.glob(f"*{AT_WORK}")) and time.monotonic() < deadline:
        time.sleep(0.05)
