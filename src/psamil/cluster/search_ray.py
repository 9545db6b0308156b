"""Trials of a search by Ray Tune, on this computer or on a cluster.

- Our own sampler has drawn the trials, and Tune gets them as a fixed grid: the same are tried as without Ray.
- Each is a run in a folder of its own. A trial whose worker or node is lost is tried again and goes on with what is
  there; see :mod:`psamil.cluster.engine`, whose rules hold here, too.
- None is stopped early: in small cohorts, the first epochs say little about the last ones.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from psamil.cluster.engine import LOSSES, connected, refuse_too_much, run_attempt
from psamil.cluster.search import Search, TrialResult
from psamil.cluster.search_space import Trial
from psamil.errors import PsamilError


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
        notes = search.folder / ".ray"  # of Tune, for itself: what is kept of trials are their runs
        shutil.rmtree(notes, ignore_errors=True)
        how = {"task": secrets.token_hex(8), "cpus": cpus_per_job, "folder": os.getcwd()}
        work = tune.with_parameters(_run, search=search, trials=drawn, **how)
        tuner = tune.Tuner(
            tune.with_resources(work, {"cpu": cpus_per_job, "gpu": gpus_per_job}),
            param_space={"trial": tune.grid_search(list(drawn))},
            tune_config=tune.TuneConfig(metric="score", mode="max", reuse_actors=True),
            run_config=tune.RunConfig(
                name="trials",
                storage_path=str(notes.resolve()),
                failure_config=tune.FailureConfig(max_failures=LOSSES),
                callbacks=[told],
                verbose=0,
            ),
        )
        grid = tuner.fit()
        shutil.rmtree(notes, ignore_errors=True)
    if grid.errors:  # no error of psamil: a bug, which deserves its traceback, or workers that are lost again and again
        raise grid.errors[0]
    found = [(grid[i].metrics or {})["found"] for i in range(len(grid))]
    failures = [failure for _, failure in found if failure is not None]
    if failures:
        raise PsamilError(f"{len(failures)} of {len(trials)} trials failed, the others are done: {'; '.join(failures)}")
    results = {result.trial.number: result for result, _ in found}
    return [results[number] for number in drawn]


def _run(
    config: Mapping[str, Any], search: Search, trials: Mapping[int, Trial], task: str, cpus: int, folder: str
) -> dict[str, Any]:
    """A trial in a worker process: its result, or the reason why there is none, and the score that Tune wants."""
    trial = trials[config["trial"]]
    found = run_attempt(partial(search.run, trial), None, f"{task}-{trial.number}", cpus, folder)
    return {"found": found, "score": found[0].score if found[0] is not None else float("-inf")}
