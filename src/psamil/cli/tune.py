"""``psamil tune``: a search of settings by nested cross-validation."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from psamil.cli.engine import ENGINE_OPTIONS, chosen_engine, stopped_by_sigterm
from psamil.cluster.engine import Tell, connected
from psamil.cluster.search import (
    RUN_FOLDER,
    Search,
    TrialResult,
    claim,
    fold_folder,
    read_trials,
    summarise_search,
)
from psamil.cluster.search_ray import run_trials
from psamil.cluster.search_space import Range, Trial, draw_trials, read_space
from psamil.cluster.trainings import training_jobs
from psamil.cohort import BagCache, Cohort, Splits, k_fold, read_splits
from psamil.cohort.split_files import fit_to_cohort
from psamil.errors import OptionError
from psamil.evaluation.run import Run, fit
from psamil.recipes import DEFAULT_RECIPE
from psamil.report.paper_figures.figure_files import require_matplotlib
from psamil.report.search_figures import save_trials
from psamil.training.settings import TrainingSettings

OF_THE_SEARCH = ("space", "trials", "inner", "search_seed", *ENGINE_OPTIONS)
OF_EACH_FOLD = ("out", "splits", "fold", "training", "recipe")


def tune(
    features: Path,
    labels: Path,
    out: Path,
    *,
    space: Path,
    trials: int = 20,
    inner: int = 4,
    search_seed: int = 0,
    target: str | list[str] | None = None,
    kind: str = "auto",
    classes: list[str] | None = None,
    time: str | None = None,
    event: str | None = None,
    censorship: str | None = None,
    unit: str = "slide",
    slide_table: Path | None = None,
    slide_column: str | None = None,
    patient_column: str | None = None,
    site_column: str | None = None,
    folds: int = 5,
    val: float = 0.2,
    split_seed: int = 0,
    by_site: bool = False,
    splits: Path | None = None,
    fold: int | None = None,
    seeds: int = 1,
    training: TrainingSettings = TrainingSettings(),  # noqa: B008 (frozen)
    recipe: str = DEFAULT_RECIPE,
    um_per_step: float | None = None,
    non_finite: str = "error",
    positions: str = "file",
    damaged: str = "set aside",
    cache: Path | None = None,
    engine: str = "local",
    address: str | None = None,
    cpus_per_job: int = 1,
    gpus_per_job: float = 0,
) -> int:
    """Searches settings by nested cross-validation: each outer fold chooses on inner folds, and is then tested once.

    Example: psamil tune features labels.csv tuned --target subtype --space space.yaml --trials 20

    OUT/fold-<k>/trials.csv has the trials of an outer fold, OUT/fold-<k>/best.yaml its choice (for psamil train
    --config), OUT/summary.json the test metrics over the outer folds, OUT/trials.png a picture. Called again, it goes
    on.

    Args:
        features: folder of features of any known format.
        labels: table of labels: CSV, TSV, XLSX or Parquet.
        out: folder of the search; one that exists is gone on with.
        space: YAML file of settings with a list of values or a range for each, such as {lr: {low: 1e-5, high: 1e-3,
            log: true}, batch_samples: {low: 4, high: 16}, model_options.heads: [1, 2, 4], task.balance: [weights,
            sampling]}. Names are those of --training, with a dot before what is inside of model_options or task.
        trials: drawn from the space, the same for every outer fold; fewer where the space has no more.
        inner: number of inner folds, on which each trial is trained and tested.
        search_seed: of the trials that are drawn.
        target: column of classes or numbers; several are yes/no labels. By default one called label, category or value.
        kind: of a target: "classification" or "regression", where there is a doubt.
        classes: their order; of two, the second is the positive one. Samples of other classes are left out.
        time: column of survival times, instead of a target.
        event: column where 1 means that the event was seen.
        censorship: column where 1 means censored.
        unit: what is predicted: "slide" or "patient".
        slide_table: second table that says which slides a patient has.
        slide_column: column of slide names, where its name does not tell.
        patient_column: column of patients, where its name does not tell.
        site_column: column of hospitals, where its name does not tell.
        folds: number of outer folds.
        val: share of the patients outside of a test part that choose the epoch, in outer and inner folds.
        split_seed: of the splits.
        by_site: all patients of a site stay in one part.
        splits: file or folder of outer splits (ours, CLAM, STAMP, SurvPath, Patho-Bench) instead of new ones.
        fold: work on this outer fold alone, for instance in a job array.
        seeds: trainings per fold, of trials as well, whose predictions are averaged; 1 whatever the recipe says.
        training: settings that all trials share.
        recipe: settings to begin with, see psamil train.
        um_per_step: gives physical positions: one step is this many micrometres.
        non_finite: what to do with tiles that have NaN or infinite features: "error", "drop" or "zero".
        positions: "file"; "row order" for files without coordinates; "shuffled" as a control.
        damaged: slides that cannot be read: "set aside" or "refuse".
        cache: folder of the cache; by default in the user's cache folder.
        engine: "local" runs trials one after the other, "ray" the same ones side by side by Ray Tune, on a Ray cluster.
        address: of the Ray cluster; "auto" is that of this node. Without it, one is started on this computer.
        cpus_per_job: with Ray, the CPUs and threads of a trial.
        gpus_per_job: with Ray, the graphics cards of a trial; 0.5 lets two trials share one.
    """
    options = {name: value for name, value in locals().items() if name not in (*OF_THE_SEARCH, *OF_EACH_FOLD)}
    tell = partial(Console(stderr=True, highlight=False).print, markup=False)
    require_matplotlib()
    run_jobs = chosen_engine(engine, address, cpus_per_job, gpus_per_job, tell)
    found = read_space(space)
    drawn = draw_trials(found, trials, search_seed)
    cohort, outer = _data(options, splits)
    tell(str(cohort))
    if fold is not None and not 0 <= fold < len(outer):
        raise OptionError(f"fold must be from 0 to {len(outer) - 1}, got {fold}")
    wanted = {"space": {name: asdict(of) for name, of in found.items()}, "trials": trials, "inner": inner}
    wanted |= {
        "search_seed": search_seed,
        "seeds": seeds,
        "recipe": recipe,
        "training": training.to_json(),
        "splits": outer.hash,
    }
    claim(out, wanted)
    how: dict[str, Any] = {
        "inner": inner,
        "val": val,
        "seed": split_seed,
        "by_site": by_site,
        "seeds": seeds,
        "recipe": recipe,
    }
    ray: dict[str, Any] = {"address": address, "cpus_per_job": cpus_per_job, "gpus_per_job": gpus_per_job}
    with ExitStack() as of_ray:
        calls: dict[str, Any] = {}
        if run_jobs is not None:
            of_ray.enter_context(stopped_by_sigterm())
            of_ray.enter_context(connected(address))  # once for all folds
            calls["engine"] = lambda cohort, trainings: run_jobs(training_jobs(cohort, trainings))
        for k in range(len(outer)) if fold is None else [fold]:
            tell(f"outer fold {k}: {len(drawn)} trials on {inner} inner folds")
            search = Search.of(cohort, outer[k], training, fold_folder(out, k), **how)
            if run_jobs is None:
                results = _one_by_one(search, drawn, tell)
            else:
                results = run_trials(search, drawn, **ray, tell=tell)
            best = search.choose(results)
            tell(f"chosen: {best}")
            run, settings = search.folder / RUN_FOLDER, search.settings(best.trial)
            fit(**options, out=run, splits=outer, fold=k, training=settings, **calls)
    summary = summarise_search(out, len(outer))
    logarithmic = [name for name, of in found.items() if isinstance(of, Range) and of.log]
    tables = {k: read_trials(out, k) for k in summary["finished"]}
    save_trials(tables, out / "trials", names=list(found), logarithmic=logarithmic)
    _tell(Run(out, summary), list(found), Console(highlight=False))
    return 0


def _data(options: dict[str, Any], splits: Path | None) -> tuple[Cohort, Splits]:
    """The cohort and its outer splits, as :func:`psamil.fit` makes them."""
    of_cache = ("um_per_step", "non_finite", "positions")
    not_of_cohort = (*of_cache, "cache", "damaged", "folds", "val", "split_seed", "by_site", "seeds")
    cache = BagCache(options["cache"], **{name: options[name] for name in of_cache})
    of_cohort = {name: value for name, value in options.items() if name not in not_of_cohort}
    cohort = Cohort.open(**of_cohort, cache=cache).checked(options["damaged"])
    if splits is not None:
        return cohort, fit_to_cohort(read_splits(splits), cohort).splits
    how = {"val": options["val"], "seed": options["split_seed"], "by_site": options["by_site"]}
    return cohort, k_fold(cohort, options["folds"], **how)


def _one_by_one(search: Search, trials: list[Trial], tell: Tell) -> list[TrialResult]:
    results = []
    for trial in trials:
        results.append(search.run(trial))
        tell(str(results[-1]))
    return results


def _tell(run: Run, names: list[str], console: Console) -> None:
    """Prints what each outer fold has chosen, and the test metrics over them."""
    chosen = run.summary["chosen"]
    metric = next(iter(chosen.values()))["metric"]
    table = Table("outer fold", "trial", *names, f"inner {metric}", f"test {metric}", title_justify="left")
    table.title = "Chosen settings"
    for (k, row), test in zip(chosen.items(), run.summary["metrics"][metric]["per_fold"], strict=True):
        inner, tested = ("-" if number is None else f"{number:.3f}" for number in (row["mean"], test))
        table.add_row(k, str(row["trial"]), *(Text(str(row[name])) for name in names), inner, tested)
    console.print(table)
    console.print(str(run), markup=False)
    console.print(f"folder: {run.folder}", markup=False)
