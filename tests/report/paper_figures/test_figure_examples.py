"""The examples behind the figures, on cohorts as small as they can be."""

import runpy
from pathlib import Path

import pandas as pd

from psamil.cohort import simulate
from psamil.evaluation.run_folder import read_run

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_two_ranges(tmp_path, capsys):
    example = runpy.run_path(str(EXAMPLES / "two_ranges.py"))
    assert len(example["SHOWN"]) == 5  # as in the docs
    assert set(example["SHOWN"]) < set(example["RUNS"])
    names = ("diversity loss, 0.001", "legacy")
    runs = {name: example["train"](tmp_path, name, slides=15, seeds=1, epochs=1, psa={"k_init": 3.0}) for name in names}
    options = read_run(runs["legacy"])["settings"]["model_options"]
    assert (options["preset"], options["k_init"]) == ("legacy", 3.0)
    example["tell"](runs)
    assert "final radii K" in capsys.readouterr().out


def test_ablations(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = runpy.run_path(str(EXAMPLES / "ablations.py"))
    names = list(example["variants"]({"heads": 3, **example["BASE"]}, ["alpha", "tau", "heads"]))
    expected = ["base", "alpha-0", "alpha-0.1", "tau-0.0001", "tau-0.01", "tau-0.1", "heads-1", "heads-2", "heads-6"]
    assert names == expected

    def tiny(folder, data, seed):
        simulate(folder, slides=12, tiles=50, range_steps=2, dim=8)
        model = {"model_options": {"heads": 2, "head_dim": 4}}
        common = {"features": str(folder), "labels": f"{folder}/labels.csv", "target": "label", "folds": 2, "val": 0.4}
        return {**common, "training": {"epochs": 1}, "models": {"psa": model, "abmil": {}}}

    example["COHORTS"]["simulated"] = tiny
    example["main"]("simulated", tmp_path, None, ["tau"], None)
    table = pd.read_csv(tmp_path / "simulated" / "figure-ablations.csv")
    assert table["value"].tolist() == [1e-4, 1e-3, 1e-2, 1e-1]
    assert table["run"].tolist() == ["tau-0.0001", "base", "tau-0.01", "tau-0.1"]
    assert read_run(tmp_path / "simulated" / "comparison" / "base")["seeds"] == 2
