"""``psamil evaluate``: a run on another cohort, without any fitting and without its own patients."""

import numpy as np
import pandas as pd
import pytest

import psamil
from psamil.cli import main
from psamil.cohort import simulate
from psamil.files import read_json
from psamil.readers import find_bags, open_bag, tile_places
from tests.slides.outlines import square, write_geojson


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Not that of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("evaluate")
    for seed, name in enumerate(("cohort", "other")):
        simulate(home / name, slides=12, tiles=60, dim=8, seed=seed)
    table = pd.read_csv(home / "other" / "labels.csv", dtype=str)
    for file in (home / "other").glob("*/features_simulated/*.h5"):
        file.rename(file.with_name(f"other-{file.name}"))
    table = table.assign(case_id="other-" + table["case_id"], slide_id="other-" + table["slide_id"])
    table.rename(columns={"label": "subtype"}).to_csv(home / "other" / "labels.csv", index=False)
    small = {"model": "mean", "model_options": {"hidden": 4}, "epochs": 1}
    psamil.fit(home / "cohort", home / "cohort/labels.csv", home / "run", target="label", folds=2, seeds=1, **small)
    return home


def evaluate(capsys, home, cohort, *args):
    """Exit code, standard output and standard error."""
    features = home / cohort
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *map(str, (features, features / "labels.csv", "--run", home / "run", *args))])
    told = capsys.readouterr()
    return ended.value.code, told.out, told.err


def test_another_cohort(capsys, home, tmp_path):
    code, told, errors = evaluate(capsys, home, "other", "--out", tmp_path / "out", "--target", "subtype")
    assert code == 0
    result = read_json(tmp_path / "out" / "metrics.json")
    auc = result["metrics"]["auc"]
    assert f"{auc['estimate']:.3f}" in told
    assert f"{auc['low']:.3f} to {auc['high']:.3f}" in told
    assert "12 slides of 12 patients" in errors
    assert "Overlap" not in errors
    assert len(pd.read_csv(tmp_path / "out" / "predictions.csv")) == 12


def test_the_cohort_of_the_run_itself(capsys, home, tmp_path):
    """Its columns are known to the run."""
    code, _, errors = evaluate(capsys, home, "cohort", "--out", tmp_path / "out")
    assert code == 2
    assert "12 samples of 12 patients were in the training data of the run" in errors
    assert not (tmp_path / "out").exists()
    code, _, errors = evaluate(capsys, home, "cohort", "--out", tmp_path / "out", "--overlap", "allow")
    assert code == 0
    assert "this is no external validation" in errors
    code, _, errors = evaluate(capsys, home, "cohort", "--out", tmp_path / "none", "--overlap", "leave out")
    assert code == 2
    assert "no sample is left" in errors


def test_columns_of_the_run_that_the_table_lacks(capsys, home, tmp_path):
    code, _, errors = evaluate(capsys, home, "other", "--out", tmp_path / "out")
    assert code == 2
    assert "label" in errors


def test_results_are_not_mixed(capsys, home):
    code, _, errors = evaluate(capsys, home, "other", "--out", home / "run", "--target", "subtype")
    assert code == 2
    assert "is not an empty folder" in errors


def test_labels_of_some_tiles(capsys, home, tmp_path):
    (tmp_path / "tiles").mkdir()
    for file in sorted((home / "other" / "tiles").iterdir())[2:]:
        (tmp_path / "tiles" / f"other-{file.name}").write_bytes(file.read_bytes())
    words = ("--out", tmp_path / "out", "--target", "subtype", "--tile-labels", tmp_path / "tiles")
    code, told, errors = evaluate(capsys, home, "other", *words)
    assert code == 0
    assert "2 of 12 slides have no tile labels" in errors
    assert "Localisation, 10 of 12 slides" in told
    found = read_json(tmp_path / "out" / "metrics.json")["localisation"]
    assert (
        found["metrics"]["patch_auc"]["low"]
        <= found["metrics"]["patch_auc"]["estimate"]
        <= found["metrics"]["patch_auc"]["high"]
    )
    assert (found["slides"], found["labelled_slides"]) == (12, 10)
    assert f"{found['metrics']['patch_auc']['estimate']:.3f}" in told
    assert found["metrics"]["patch_f1"]["estimate"] is None  # the run has no threshold of tiles


def outline_labels(home, folder):
    """GeoJSON with the squares of labelled tiles, of all slides but two; what they should give."""
    folder.mkdir()
    expected = {}
    for ref in find_bags(home / "other").bags[2:]:
        positive = np.load(home / "other" / "tiles" / f"{ref.id.removeprefix('other-')}.npy")
        expected[ref.id] = positive
        places = tile_places(ref, open_bag(ref))
        outlines = [("Tumor", square(x, y, places.size)) for x, y in places.corners[positive].tolist()]
        write_geojson(folder / f"{ref.id}.geojson", *outlines)
    return expected


@pytest.mark.parametrize(("policy", "labelled"), [("leave out", 10), ("normal", 12)])
def test_annotations(capsys, home, tmp_path, policy, labelled):
    """Labels of tiles are those from which the annotations were made; lesions are counted as outlined."""
    expected = outline_labels(home, tmp_path / "annotations")
    words = ("--target", "subtype", "--annotations", tmp_path / "annotations", "--unannotated", policy)
    code, told, errors = evaluate(capsys, home, "other", "--out", tmp_path / "out", *words)
    assert code == 0, errors
    assert "2 without a file" in errors
    assert f"Localisation, {labelled} of 12 slides" in told
    found = read_json(tmp_path / "out" / "metrics.json")["localisation"]
    assert found["labelled_slides"] == labelled
    assert found["annotations"]["positive_tiles"] == sum(int(positive.sum()) for positive in expected.values())
    assert found["annotations"]["policy"] == policy
    assert found["annotations"]["lesions"] > found["annotations"]["isolated"]
    if policy == "leave out":  # the same by labels of tiles
        (tmp_path / "tiles").mkdir()
        for slide, positive in expected.items():
            np.save(tmp_path / "tiles" / f"{slide}.npy", positive)
        words = ("--target", "subtype", "--tile-labels", tmp_path / "tiles")
        assert evaluate(capsys, home, "other", "--out", tmp_path / "again", *words)[0] == 0
        again = read_json(tmp_path / "again" / "metrics.json")["localisation"]["metrics"]
        for metric in ("patch_auc", "patch_auc_per_slide", "froc_tile@6", "aufroc_tile@8"):
            assert found["metrics"][metric] == again[metric]
        assert 0 <= found["metrics"]["froc_lesion"]["estimate"] <= 1


def test_annotations_or_labels_of_tiles(capsys, home, tmp_path):
    words = ("--target", "subtype", "--annotations", tmp_path, "--tile-labels", tmp_path)
    code, _, errors = evaluate(capsys, home, "other", "--out", tmp_path / "out", *words)
    assert code == 2
    assert "give one of them" in errors
