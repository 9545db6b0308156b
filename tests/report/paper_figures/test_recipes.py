"""Every recipe of a figure end to end, as users start it, on a small simulated cohort."""

import base64

import pandas as pd
import pytest

from psamil.cli import main
from psamil.cohort import simulate
from psamil.recipes.paper_tables import read_recipe
from psamil.report.paper_figures import FIGURES
from tests.models.test_check import SMALL

ROWS = {  # of many, some
    "figure-alpha": ["gaussian-alpha-0", "gaussian-alpha-0.1", "cauchy-alpha-0", "cauchy-alpha-0.1"],
    "figure-tau": ["gaussian-tau-0.001", "gaussian-tau-0.1"],
    "figure-cost": ["bayes_mil", "psa-gaussian"],
    "figure-maps": ["abmil", "psa-gaussian"],
}


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures") / "cohort"
    simulate(folder, slides=12, tiles=50, tile_spread=0.0, dim=8, range_steps=2)
    return folder


@pytest.mark.parametrize("name", sorted(set(FIGURES) - {"figure-decays"}))
def test_every_recipe_is_trained_and_drawn(name, cohort, tmp_path):
    recipe = read_recipe(name)
    rows = ROWS.get(name, list(recipe.models))
    sizes = [
        f"{row}.model_options.{option}={value}"
        for row in rows
        for option, value in SMALL.get(recipe.models[row].settings.get("model", row), {}).items()
    ]
    options = ["study.classes=[negative, positive]", "study.folds=2", "study.val=0.4", "training.epochs=1", *sizes]
    (of,) = recipe.cohorts
    paths = ["--features", f"{of}={cohort}", "--labels", f"{of}={cohort / 'labels.csv'}", "--out", str(tmp_path)]
    if name == "figure-maps":  # needs them; others may have them
        options.append(f"{of}.tile_labels={cohort / 'tiles'}")
    else:
        paths += ["--tile-labels", f"{of}={cohort / 'tiles'}"]
    words = ["reproduce", name, *paths, "--models", *rows, "--options", *options, f"study.cache={cohort.parent / 'c'}"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code
    drawn = [name] if name != "figure-maps" else [f"{name}-{size}" for size in ("small", "median", "large")]
    page = (tmp_path / name / "index.html").read_text()
    for file in drawn:
        assert (tmp_path / name / of / f"{file}.svg").stat().st_size > 5_000
        picture = (tmp_path / name / of / f"{file}.png").read_bytes()
        assert len(picture) > 5_000
        assert base64.b64encode(picture).decode() in page
    titles = {recipe.models[row].title for row in rows}
    assert set(pd.read_csv(tmp_path / name / of / f"{name}.csv")["run"]) == titles
