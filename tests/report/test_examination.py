"""What a report says with features at hand: cases, heads, faithfulness, cost."""

import numpy as np
import pandas as pd
import pytest
import torch

from psamil import Bag, create_model
from psamil.evaluation.run_comparison import FinishedRun, compare_runs
from psamil.evaluation.sample_predictions import RunPredictions
from psamil.explain import OcclusionCurve
from psamil.files import read_json, write_json
from psamil.readers import find_bags
from psamil.report.cases import RunOnSlides, choose_cases, pictures_of
from psamil.report.examination import SLIDES_PER_FOLD, cost_of, examine
from psamil.report.examination_figures import (
    GRID,
    change_on_grid,
    cost_rows,
    examination_figures,
    faithfulness_rows,
    of_thousands,
)
from psamil.report.run_report import write_report
from psamil.training.saved_model import SavedModel
from psamil.training.settings import TrainingSettings
from psamil.training.timing import TIMING_FILE
from tests.evaluation.made_runs import make_run, make_splits
from tests.readers.layouts import N, corners, trident_attributes, write_trident
from tests.report.test_run_report import Tags

PSA = TrainingSettings(model="psa", model_options={"heads": 2, "head_dim": 4})
KNOWN_PER_FOLD = 5


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Two runs, features of some test slides of each fold, and labels of tiles."""
    folder, splits = tmp_path_factory.mktemp("study"), make_splits()
    make_run(folder / "psa", splits, signal=2.0, settings=PSA, radii=True)
    make_run(folder / "mean", splits, signal=0.5, seed=1)
    for fold in range(len(splits)):
        lines = [f'{{"epoch": {e}, "seconds": {9 - 4 * e}, "peak_memory_mb": {1000 + fold}}}\n' for e in range(3)]
        (folder / "psa" / "folds" / str(fold) / "seed-0" / TIMING_FILE).write_text("".join(lines))
    random = np.random.default_rng(0)
    (folder / "labels").mkdir()
    for fold in splits.folds:
        for slide in sorted(fold.test)[:KNOWN_PER_FOLD]:
            features = random.standard_normal((N, 2)).astype(np.float32)
            about = trident_attributes(slide=slide)
            write_trident(folder / "features", slide, features=features, coords=corners(512), about=about)
            np.save(folder / "labels" / f"{slide}.npy", np.arange(N) < 7)
    return folder


@pytest.fixture(scope="module")
def seen(study):
    runs = compare_runs([study / "psa", study / "mean"]).runs
    return examine(runs, features=study / "features", tile_labels=study / "labels", cases=2)


def run_on_slides(study, name: str) -> RunOnSlides:
    return RunOnSlides.of(FinishedRun.load(study / name), find_bags(study / "features").bags)


def test_cases_are_the_surest_right_and_wrong_slides(study):
    run = run_on_slides(study, "mean")
    table = pd.read_csv(study / "mean" / "predictions.csv").set_index("sample")
    known = table.loc[sorted(run.refs)]
    p_true = np.where(known["truth"] == "positive", known["prob_positive"], known["prob_negative"])
    rows = {slide: RunPredictions.of(study / "mean").of_slide(slide) for slide in known.index}
    wrong = np.array([rows[slide]["wrong"] for slide in known.index])
    assert 2 <= wrong.sum() <= len(wrong) - 2
    cases = choose_cases(run, 2)
    by_p = pd.Series(p_true, index=known.index)
    assert [case.slide for case in cases[:2]] == by_p[~wrong].nlargest(2).index.tolist()
    assert [case.slide for case in cases[2:]] == by_p[wrong].nsmallest(2).index.tolist()
    assert [case.why for case in cases] == ["most certainly right"] * 2 + ["most certainly wrong"] * 2
    every = choose_cases(run, 100)
    assert sorted(case.slide for case in every) == sorted(known.index)


def test_a_patient_with_several_slides_is_shown_once(study, tmp_path):
    folder = make_run(tmp_path / "run", make_splits(), signal=1.0)
    refs = find_bags(study / "features").bags
    whose = {ref.id: refs[i // 2].id for i, ref in enumerate(refs)}  # two slides each
    write_json(folder / "run.json", {**read_json(folder / "run.json"), "slides": whose})
    run = RunOnSlides.of(FinishedRun.load(folder), refs)
    assert sorted(run.refs) == sorted(whose)
    cases = choose_cases(run, 100)
    assert sorted(whose[case.slide] for case in cases) == sorted(set(whose.values()))
    assert run.predictions.of_slide(cases[0].slide) == run.predictions.rows[whose[cases[0].slide]]


def test_cases_of_numbers_are_those_of_small_and_large_errors(study, tmp_path):
    folder = make_run(tmp_path / "run", make_splits(), signal=1.0, kind="regression")
    run = RunOnSlides.of(FinishedRun.load(folder), find_bags(study / "features").bags)
    table = pd.read_csv(folder / "predictions.csv").set_index("sample").loc[sorted(run.refs)]
    errors = (table["value"] - table["truth"]).abs()
    cases = choose_cases(run, 3)
    assert [case.slide for case in cases] == [*errors.nsmallest(3).index, *errors.nlargest(3).index]
    assert cases[-1].why == "largest error"


def test_scores_are_by_models_that_did_not_learn_from_the_slide(study):
    run = run_on_slides(study, "psa")
    case = choose_cases(run, 1)[0]
    (fold,) = [k for k, split in enumerate(make_splits().folds) if case.slide in split.test]
    assert [path.parts[-3] for path in run.models(case.slide)] == [str(fold)]
    (picture,) = pictures_of(case, [run, run_on_slides(study, "mean")])
    assert list(picture.scores) == ["psa", "mean"]
    assert picture.notes["psa"].endswith("right")
    assert (picture.places.corners == corners(512)).all()


def test_the_tissue_is_shown_where_it_can_be_read(study, tmp_path):
    from PIL import Image

    runs = compare_runs([study / "psa"]).runs
    good, bad = (case.slide for case in choose_cases(run_on_slides(study, "psa"), 2)[:2])
    Image.fromarray(np.full((700, 700, 3), 240, np.uint8)).save(tmp_path / f"{good}.png")
    (tmp_path / f"{bad}.png").write_bytes(b"not a picture")
    seen = examine(runs, features=study / "features", slides=tmp_path, cases=2)
    pictures = {picture.title.partition(":")[0]: picture.overview for picture in seen.pictures}
    assert pictures[good] is not None
    assert pictures[bad] is None
    assert any(f"No tissue beside the heat map of {bad}" in sentence for sentence in seen.left_out)


def test_what_is_seen_of_each_run(seen):
    psa, mean = seen.runs
    assert list(psa.similarity) == [0, 1, 2]
    assert psa.similarity[0].shape == (1, 2, 2)
    assert mean.similarity == {}
    for run in seen.runs:
        assert len(run.occlusions) == len(run.costs) == 3 * SLIDES_PER_FOLD
    assert psa.parameters == sum(w.numel() for w in create_model("psa", 2, 1, **PSA.model_options).parameters())
    assert [picture.labelled.sum() for picture in seen.pictures] == [7] * len(seen.pictures)
    assert any("--slides" in sentence for sentence in seen.left_out)


def test_page_with_everything(study, seen, tmp_path):
    comparison = compare_runs([study / "psa", study / "mean"], names=["<psa>", "mean"])
    write_report(comparison, tmp_path / "index.html", examination=seen)
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    tags = Tags(page.replace('">\n<img', '"/>\n<img').replace('">\n<figcaption', '"/>\n<figcaption'))
    assert tags.open == []
    sources = [value for _, name, value in tags.attributes if name in ("src", "href", "xlink:href")]
    images = [value for value in sources if not value.startswith("#")]
    assert len(images) == len(seen.pictures)
    assert all(value.startswith("data:image/png;base64,") for value in images)
    for text in ("Similarity of heads", "Are the tile scores faithful?", "Cost", "Learned radii", "Right and wrong"):
        assert any(text in shown for shown in tags.texts), text
    ids = [value for _, name, value in tags.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_figures_that_do_not_apply_are_not_drawn(seen):
    titles = [figure.title for figure in examination_figures(seen.runs[1:])]
    assert titles == ["Are the tile scores faithful?"]
    assert examination_figures([]) == []


def test_missing_features_are_told(study, tmp_path):
    runs = compare_runs([study / "psa"]).runs
    nothing = examine(runs)
    assert nothing.runs == []
    assert "--features" in nothing.left_out[0]
    write_trident(tmp_path / "other", "unknown", coords=corners(512))
    assert "no feature file has the name" in examine(runs, features=tmp_path / "other").left_out[0]


def test_other_features_are_told_slide_by_slide(study, tmp_path):
    runs = compare_runs([study / "psa"]).runs
    slide = sorted(runs[0].splits.folds[0].test)[0]
    write_trident(tmp_path / "wide", slide, coords=corners(512), about=trident_attributes(slide=slide))
    wide = examine(runs, features=tmp_path / "wide", cases=1)
    assert any(f"not examined on {slide}" in sentence for sentence in wide.left_out)
    assert wide.pictures == []


def test_change_is_from_the_whole_bag():
    shares = GRID[1:]
    curve = OcclusionCurve("log-odds of a", 2.0, shares, 2 - shares, 2 - 0 * shares, np.stack([2 + shares, 2 - shares]))
    assert change_on_grid(curve, "top") == pytest.approx(-GRID)
    assert change_on_grid(curve, "random") == pytest.approx(0 * GRID)


def test_tables(seen):
    head, rows = cost_rows(seen.runs)
    assert [len(row) for row in rows] == [len(head)] * 2
    assert rows[0][2] == str(N)
    assert [row[-2:] for row in rows] == [["5", "1,002"], ["-", "-"]]  # the median of 9, 5 and 1; the highest
    head, rows = faithfulness_rows(seen.runs)
    assert [row[:2] for row in rows] == [["psa", "9"], ["mean", "9"]]
    assert [of_thousands(value) for value in (3, 1234, 2.5e9, 7e13)] == ["3", "1.23 k", "2.5 G", "70 T"]


def test_flops_of_a_layer_that_can_be_counted():
    """Mean pooling: both linear layers for each tile, which also gives its score, and the second one for the mean."""
    model = create_model("mean", 6, 1, hidden=4).eval()
    n = 50
    cost = cost_of(model, Bag(torch.randn(n, 6), torch.rand(n, 2)))
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    per_row = [2 * layer.in_features * layer.out_features for layer in layers]
    assert cost.tiles == n
    assert cost.flops == n * sum(per_row) + per_row[-1]
    assert cost.seconds > 0


def test_attention_is_counted(study):
    """With a larger radius, more pairs of tiles: more FLOPs."""
    xy = torch.cartesian_prod(torch.arange(12.0), torch.arange(12.0))
    bag = Bag(torch.randn(144, 2), xy)
    small, large = (
        cost_of(create_model("psa", 2, 1, heads=2, head_dim=4, k_init=k).eval(), bag).flops for k in (1.5, 5.0)
    )
    assert large > small
    job = study / "psa" / "folds" / "0" / "seed-0" / "model.safetensors"
    assert cost_of(SavedModel.load(job).model, bag).flops > 0
