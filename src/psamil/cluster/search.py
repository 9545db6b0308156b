"""Search of settings by nested cross-validation: every outer fold chooses its own, without its test part.

OUT/
  search.json                    the space and how it is searched; another search needs another folder
  fold-<k>/trials/trial-<i>/     a run of trial i on the inner folds, as psamil train leaves it
  fold-<k>/trials.csv            settings, metric, mean and standard deviation over the inner folds, status
  fold-<k>/best.yaml             the chosen settings, for psamil train --config
  fold-<k>/run/                  the run of outer fold k with them
  predictions.csv                test predictions of the outer folds
  summary.json                   their metrics, as in a run, and what each of them has chosen

Inner folds are made of the training and validation part of an outer fold. The search is given a cohort of these
samples alone, and cannot read the others. Each inner fold has a test part of its own, which scores a trial: the
validation part of an inner fold has chosen the epoch already, and its score is the best of many epochs, which would
favour trials of many and unsteady ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from psamil.cluster.search_space import Trial
from psamil.cohort import Cohort, Split, Splits, k_fold
from psamil.errors import BusyError, DataError, OptionError
from psamil.evaluation.experiment import WAIT_S, cross_validate, test_metrics, write_table
from psamil.evaluation.run_comparison import LOWER_IS_BETTER, FinishedRun
from psamil.evaluation.run_folder import RUN_FILE, SUMMARY_FILE, finished_folds
from psamil.files import Lock, atomic_write, read_json, write_json
from psamil.training.settings import TrainingSettings

SEARCH_FILE, TRIALS_FILE, BEST_FILE, RUN_FOLDER = "search.json", "trials.csv", "best.yaml", "run"
CHOSEN, FINISHED = "chosen", "finished"  # status of a trial; of others it says why they failed


@dataclass(frozen=True)
class TrialResult:
    """A trial on the inner folds."""

    trial: Trial
    status: str
    metric: str = ""
    mean: float | None = None  # over the test parts of the inner folds; None where the metric is not defined
    sd: float | None = None

    @property
    def score(self) -> float:
        """Higher is better; below all others for a trial without one."""
        if self.mean is None:
            return float("-inf")
        return -self.mean if self.metric in LOWER_IS_BETTER else self.mean

    def __str__(self) -> str:
        sd = "" if self.sd is None else f" ± {self.sd:.3f}"
        said = self.status if self.mean is None else f"{self.metric} {self.mean:.3f}{sd}"
        return f"trial {self.trial.number}: {said} ({self.trial})"


@dataclass(frozen=True, eq=False)
class Search:
    """The search of one outer fold."""

    cohort: Cohort  # of the training and validation part of the outer fold; of nobody else
    inner: Splits
    training: TrainingSettings  # what the trials share
    folder: Path
    seeds: int = 1
    recipe: str | None = None  # where training began

    @staticmethod
    def of(
        cohort: Cohort,
        outer: Split,
        training: TrainingSettings,
        folder: Path,
        *,
        inner: int = 4,
        val: float = 0.2,
        seed: int = 0,
        by_site: bool = False,
        seeds: int = 1,
        recipe: str | None = None,
    ) -> Search:
        """Args:
        cohort: everybody.
        outer: the fold whose test part is kept out.
        training: settings that the trials share.
        folder: of the outer fold.
        inner: number of inner folds.
        val, seed, by_site: of their validation parts, see :func:`psamil.cohort.k_fold`.
        seeds: trainings per inner fold.
        recipe: with which training began, whose settings may differ between models.
        """
        known = cohort.select(outer.train + outer.val)
        folds = k_fold(known, inner, val=val, seed=seed, by_site=by_site)
        return Search(known, folds, training, folder, seeds, recipe)

    def settings(self, trial: Trial) -> TrainingSettings:
        """Those of a trial."""
        return trial.settings(self.training, self.recipe)

    def run(self, trial: Trial, after_step: Callable[[], None] = lambda: None) -> TrialResult:
        """Trains and tests on the inner folds, or goes on with it. A finished trial is not done again.

        Args:
            trial: its settings.
            after_step: called after each step of the optimiser.
        """
        folder = self.folder / "trials" / f"trial-{trial.number}"
        how: dict[str, Any] = {"seeds": self.seeds, "on_step": lambda *_: after_step()}
        try:
            cross_validate(self.cohort, self.inner, self.settings(trial), folder, **how)
        except OptionError as error:  # settings that do not go together, or with which training diverges
            return TrialResult(trial, f"failed: {error}")
        run = FinishedRun.load(folder)
        if len(run.summary["finished"]) < len(self.inner):
            raise BusyError(folder, "other processes are at some of its folds", "call again when they have ended")
        row = run.summary["metrics"][run.headline]
        return TrialResult(trial, FINISHED, run.headline, row["mean"], row["sd"])

    def choose(self, results: Sequence[TrialResult]) -> TrialResult:
        """The trial of the highest mean score, of equal ones the first. Writes ``trials.csv`` and ``best.yaml``."""
        # rounded: means of the same numbers may differ in their last bits
        best = max(results, key=lambda result: round(result.score, 9))
        if best.mean is None:
            raise OptionError(f"no trial has a score; {results[0]}")
        rows = [
            {
                "trial": result.trial.number,
                **{name: _cell(value) for name, value in result.trial.values.items()},
                "metric": result.metric,
                "mean": result.mean,
                "sd": result.sd,
                "status": CHOSEN if result is best else result.status,
            }
            for result in results
        ]
        write_table(self.folder / TRIALS_FILE, pd.DataFrame(rows))
        with atomic_write(self.folder / BEST_FILE) as temporary:
            chosen: dict[str, Any] = {"recipe": self.recipe} if self.recipe else {}
            chosen |= {"seeds": self.seeds, "training": self.settings(best.trial).to_json()}
            text = yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True)
            temporary.write_text(f"# {best}\n{text}", encoding="utf-8")
        return best


def claim(out: Path, wanted: dict[str, Any]) -> None:
    """Makes the folder of a search, or refuses one of another: whose test parts may have been looked at already."""
    wanted = json.loads(json.dumps(wanted))  # as it reads back
    if not (out / SEARCH_FILE).exists():
        write_json(out / SEARCH_FILE, wanted)
    found = read_json(out / SEARCH_FILE)
    differing = [name for name in wanted if found.get(name) != wanted[name]]
    if differing:
        cause = f"is a search with other {', '.join(differing)}"
        raise DataError(out, cause, f"choose a new folder, or the options it was made with (they are in {SEARCH_FILE})")


def fold_folder(out: Path, fold: int) -> Path:
    return out / f"fold-{fold}"


def summarise_search(out: Path, folds: int) -> dict[str, Any]:
    """Of the outer folds that are finished, by whichever process. Writes ``summary.json`` and ``predictions.csv``."""
    with Lock(out / ".summary.lock", wait_s=WAIT_S):
        runs = {k: fold_folder(out, k) / RUN_FOLDER for k in range(folds)}
        jobs = {k: finished_folds(run, folds).get(k) for k, run in runs.items() if (run / RUN_FILE).exists()}
        finished = {k: of_fold for k, of_fold in jobs.items() if of_fold}
        summary: dict[str, Any] = {"folds": folds, "finished": sorted(finished), "metrics": {}, "chosen": {}}
        if finished:
            summary["metrics"] = test_metrics(out, finished)
        for k in finished:
            trials = read_trials(out, k)
            chosen = trials[trials["status"] == CHOSEN].iloc[0]
            summary["chosen"][str(k)] = json.loads(chosen.to_json(double_precision=15))
        write_json(out / SUMMARY_FILE, summary)
    return summary


def read_trials(out: Path, fold: int) -> pd.DataFrame:
    """``trials.csv`` of an outer fold. Settings of which one is null keep it and stay as they are, also numbers."""
    empty = {name: [""] for name in ("metric", "mean", "sd")}  # of failed trials
    path = fold_folder(out, fold) / TRIALS_FILE
    table = pd.read_csv(path, keep_default_na=False, na_values=empty, float_precision="round_trip")
    for name in table:
        if name != "status" and (table[name] == "null").any():
            table[name] = pd.Series([_value(cell) for cell in table[name]], dtype=object)
    return table


def _cell(value: Any) -> str:
    """Texts as they are, other values as JSON: numbers with the digits that were drawn, null, lists."""
    return value if isinstance(value, str) else json.dumps(value)


def _value(cell: str) -> Any:
    """What :func:`_cell` has made this of; a text that looks like another value is taken for it."""
    try:
        return json.loads(cell)
    except ValueError:
        return cell
