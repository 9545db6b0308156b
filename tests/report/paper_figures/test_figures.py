"""Every figure from run directories: its files, and that they hold what the runs say."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pandas as pd
import pytest

from psamil.errors import DataError
from psamil.evaluation.run_comparison import read_history
from psamil.files import read_json
from psamil.recipes.paper_tables import list_recipes, read_recipe
from psamil.report.paper_figures import FIGURES
from psamil.report.paper_figures.ablations import draw_ablations
from psamil.report.paper_figures.cost import draw_cost, draw_cost_of
from psamil.report.paper_figures.dynamics import draw_dynamics
from psamil.report.paper_figures.log_axis import power_of_ten
from psamil.spatial.decays import DECAYS
from psamil.training.settings import TrainingSettings
from tests.evaluation.made_runs import make_run, make_splits

SMALL_PSA = {"heads": 2, "head_dim": 4}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder, splits = tmp_path_factory.mktemp("runs"), make_splits(folds=2)
    options = {
        "psa": {},
        "alpha-0": {"alpha": 0.0},
        "alpha-1": {"alpha": 1.0},
        "tau-0.1": {"tau": 0.1},
        "cauchy": {"decay": "cauchy"},
        "cauchy-0": {"decay": "cauchy", "alpha": 0.0},
    }
    made = {
        name: make_run(
            folder / name,
            splits,
            signal=1.0,
            seed=i,
            settings=TrainingSettings(model="psa", model_options={**SMALL_PSA, **of}),
            radii=True,
        )
        for i, (name, of) in enumerate(options.items())
    }
    return {**made, "mean": make_run(folder / "mean", splits, signal=0.0, seed=9)}


def psa_alone(runs):
    return {name: path for name, path in runs.items() if name != "mean"}


def read(paths: list[Path], name: str) -> tuple[pd.DataFrame, str]:
    """The CSV, and the text of the SVG, of a figure of three files."""
    png, svg, table = paths
    assert [path.name for path in paths] == [f"{name}.png", f"{name}.svg", f"{name}.csv"]
    assert png.read_bytes().startswith(b"\x89PNG")
    return pd.read_csv(table, float_precision="round_trip"), " ".join(ElementTree.parse(svg).getroot().itertext())


def test_every_figure_has_a_recipe_and_every_recipe_a_figure():
    assert sorted(FIGURES) == [name for name in list_recipes() if name.startswith("figure")]
    for name in ("alpha", "tau", "k-max", "heads"):
        values = [
            row.settings["model_options"][name.replace("-", "_")]
            for row in read_recipe(f"figure-{name}").models.values()
        ]
        assert len(set(values)) >= 3


def test_decays_meet_at_the_radius_or_have_the_same_theta(tmp_path):
    table, text = read(FIGURES["figure-decays"]({}, tmp_path), "figure-decays")
    assert set(table["decay"]) == set(DECAYS)
    ends = table.groupby(["panel", "decay"]).last()
    assert ends["prior"].to_numpy() == pytest.approx(1e-3)
    assert ends.loc["same K", "d_steps"].to_numpy() == pytest.approx(7)
    assert ends.loc["same θ", "theta"].to_numpy() == pytest.approx(1)
    assert ends.loc["same θ", "d_steps"].is_unique
    assert "10⁻³" in text


def test_dynamics_are_those_of_the_history(runs, tmp_path):
    paths = draw_dynamics(runs, tmp_path, planted_steps=[(2, 3.5), (7, 11)])
    table, text = read(paths, "figure-dynamics")
    assert list(table["run"].unique()) == list(psa_alone(runs))  # mean has no heads
    records = read_history(runs["psa"] / "folds" / "1" / "seed-0")
    of_job = table[(table["run"] == "psa") & (table["fold"] == 1)]
    for epoch, record in enumerate(records, start=1):
        rows = of_job[of_job["epoch"] == epoch]
        assert rows["radius_steps"].tolist() == record["radii_steps"][0]
        assert set(rows["head_similarity"]) == {record["head_similarity"]}
    assert "planted" in text
    assert "head 2" in text
    with pytest.raises(DataError, match="no run has heads"):
        draw_dynamics({"mean": runs["mean"]}, tmp_path)


def test_ablations_compare_what_differs_in_one_option_alone(runs, tmp_path):
    table, text = read(FIGURES["figure-alpha"](psa_alone(runs), tmp_path), "figure-alpha")
    lines = {key: line["run"].tolist() for key, line in table.groupby(["option", "decay"])}
    assert lines == {
        ("alpha", "gaussian"): ["alpha-0", "psa", "alpha-1"],
        ("alpha", "cauchy"): ["cauchy-0", "cauchy"],
        ("tau", "gaussian"): ["psa", "tau-0.1"],
    }
    auc = read_json(runs["alpha-1"] / "summary.json")["metrics"]["auc"]
    row = table.set_index("run").loc["alpha-1"]
    assert (row["value"], row["score"], row["low"], row["high"]) == (1.0, auc["mean"], auc["low"], auc["high"])
    assert "τ" in text
    assert "cauchy" in text
    assert not any("K_max" in word for word in text.split())  # no panel for what does not differ


def test_ablations_need_runs_of_psa_that_differ(runs, tmp_path):
    with pytest.raises(DataError, match="is no run of psa"):
        draw_ablations(runs, tmp_path)
    with pytest.raises(DataError, match="no two runs of psa differ in one of alpha, tau, k_max, heads alone"):
        draw_ablations({name: runs[name] for name in ("psa", "cauchy")}, tmp_path)


def test_cost_has_a_row_for_each_run_and_the_formula_of_psa(runs, tmp_path):
    chosen = {name: runs[name] for name in ("psa", "mean")}
    table, text = read(draw_cost(chosen, tmp_path, tiles=400, batch_slides=3, title="$x_1$"), "figure-cost")
    table = table.set_index("run")
    assert table.loc["psa", "score"] == read_json(runs["psa"] / "summary.json")["metrics"]["auc"]["mean"]
    assert table.loc["psa", "flops_by_formula"] == pytest.approx(table.loc["psa", "flops_per_batch"], rel=0.02)
    assert pd.isna(table.loc["mean", "flops_by_formula"])
    # mean: tiles of 2 numbers to 4, one output: 2 x 2 x 4 forward and for the weights; the head acts on one bag
    assert table.loc["mean", "parameters"] == 2 * 4 + 4 + 4 + 1
    assert table.loc["mean", "flops_per_batch"] == pytest.approx(3 * 400 * 2 * 16, rel=0.3)
    assert "3 slides of 400 tiles" in text
    assert "$x_1$" in text


def test_names_of_crowded_bubbles_are_apart(tmp_path):
    common = {"model": "mean", "metric": "auc", "parameters": 1000, "flops_per_batch": 1e9}
    rows = [{**common, "run": f"model-{i}", "score": 0.5 + 0.001 * i} for i in range(8)]
    table, text = read(draw_cost_of([*rows, {**common, "run": "undefined", "score": None}], tmp_path), "figure-cost")
    assert "undefined" in table["run"].tolist()
    assert "undefined" not in text
    names = [
        text for text in ElementTree.parse(tmp_path / "figure-cost.svg").iter() if (text.text or "")[:6] == "model-"
    ]
    assert len(names) == len(rows)
    for i, name in enumerate(names):
        for other in names[:i]:
            beside = name.get("style")[-5:] != other.get("style")[-5:]  # of them, one is left and one is right
            assert beside or abs(float(name.get("y")) - float(other.get("y"))) >= 7.5


def test_the_same_runs_give_the_same_bytes(runs, tmp_path):
    files = [draw_ablations(psa_alone(runs), tmp_path / name) for name in ("a", "b")]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def test_powers_of_ten():
    assert [power_of_ten(value) for value in (1e-3, 1.0, 1e12)] == ["10⁻³", "10⁰", "10¹²"]
