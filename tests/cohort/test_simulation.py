import csv
import inspect
import re

import h5py
import numpy as np
import pytest
from scipy.spatial import cKDTree
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from psamil.cohort.interaction import Interaction, draw_slide
from psamil.cohort.simulation import simulate
from psamil.errors import DataError, OptionError
from psamil.files import read_json
from psamil.readers import find_bags, open_bag


def rows_of(labels):
    with open(labels, newline="") as file:
        return list(csv.DictReader(file))


def drawn(range_steps, slides=40, n=600, share=0.02):
    """Half of the slides positive: (label, cells, phenotypes) of each."""
    for i in range(slides):
        yield (i % 2, *draw_slide(n, [Interaction(range_steps, bool(i % 2))], share, np.random.default_rng([5, i])))


def share_of_a_near_b(cells, phenotypes, radius):
    a, b = cells[phenotypes == 0], cells[phenotypes == 1]
    return np.mean(cKDTree(b).query(a)[0] <= radius + 1e-9)


@pytest.mark.parametrize("range_steps", [1, 2, 3.5, 5, 9])
def test_only_the_range_tells_the_classes_apart(range_steps):
    random = np.random.default_rng(0)
    labels, within, less, shuffled = [], [], [], []
    for label, cells, phenotypes in drawn(range_steps):
        labels.append(label)
        within.append(share_of_a_near_b(cells, phenotypes, range_steps))
        less.append(share_of_a_near_b(cells, phenotypes, range_steps / 2))
        shuffled.append(share_of_a_near_b(random.permutation(cells), phenotypes, range_steps))
        if not label:
            assert share_of_a_near_b(cells, phenotypes, 1.5 * range_steps + 0.5) == 0
    assert within == labels  # every A, or none
    assert set(less) == {0.0}  # nothing to see
    assert 0.3 < roc_auc_score(labels, shuffled) < 0.7


@pytest.mark.parametrize(("n", "range_steps"), [(50, 9), (200, 5), (700, 2)])
def test_composition_depends_on_the_number_of_tiles_alone(n, range_steps):
    slides = list(drawn(range_steps, 10, n))
    counts = {tuple(np.bincount(phenotypes, minlength=6)) for _, _, phenotypes in slides}
    assert len(counts) == 1
    ((a, b, *others),) = counts
    assert a == b == max(1, round(0.02 * n))
    assert min(others) > 0
    for _, cells, _ in slides:
        assert len(np.unique(cells, axis=0)) == n
        assert cells.min(0).tolist() == [0, 0]


def test_each_phenotype_alone_lies_the_same_in_both_classes():
    """The same random numbers with both labels: A does not move, B moves as a whole."""
    for i in range(5):
        pair = [draw_slide(500, [Interaction(4, label)], 0.02, np.random.default_rng(i)) for label in (False, True)]
        assert np.array_equal(pair[0][0], pair[1][0])
        for phenotype in (0, 1):
            of = [cells[phenotypes == phenotype] for cells, phenotypes in pair]
            assert np.array_equal(of[0] - of[0][0], of[1] - of[1][0])
        assert np.array_equal(pair[0][1] == 0, pair[1][1] == 0)
        assert not np.array_equal(pair[0][1] == 1, pair[1][1] == 1)


def test_each_phenotype_alone_lies_the_same_in_the_tissue():
    """A displacement of one length or another would bring B nearer to the edge in one of the classes."""
    labels, around = [], {0: [], 1: []}
    for label, cells, phenotypes in drawn(5, 160, 400):
        labels.append(label)
        for phenotype, means in around.items():
            near = cKDTree(cells).query_ball_point(cells[phenotypes == phenotype], 4, return_length=True)
            means.append(near.mean())
    for means in around.values():
        assert 0.39 < roc_auc_score(labels, means) < 0.61  # 2.4 standard errors


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    return simulate(tmp_path_factory.mktemp("simulated"), slides=120, tiles=300, range_steps=2, dim=16, seed=3).parent


def test_a_model_without_positions_is_at_chance(cohort):
    rows = rows_of(cohort / "labels.csv")
    bags = [open_bag(cohort / "20x_256px_0px_overlap" / "features_simulated" / f"{r['slide_id']}.h5") for r in rows]
    labels = np.array([row["label"] == "positive" for row in rows])
    means = np.stack([bag.features.double().mean(0).numpy() for bag in bags])
    spreads = np.stack([bag.features.double().std(0).numpy() for bag in bags])
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1))
    for statistics in (means, spreads, np.array([[bag.n] for bag in bags])):
        scores = cross_val_predict(model, statistics, labels, cv=10, method="decision_function")
        assert 0.35 < roc_auc_score(labels, scores) < 0.65


def test_the_layout_is_that_of_trident(cohort):
    found = find_bags(cohort)
    assert len(found.bags) == 120
    assert {ref.format for ref in found.bags} == {"trident"}
    assert not found.set_aside
    path = cohort / "20x_256px_0px_overlap" / "features_simulated" / "slide_00007.h5"
    with h5py.File(path) as file:
        assert set(file) == {"features", "coords"}
        assert file["features"].dtype == np.float16
        assert file["features"].chunks == (1, 16)
        assert file["features"].maxshape == (None, 16)
        assert dict(file["features"].attrs) == {
            "name": "slide_00007",
            "savetodir": "20x_256px_0px_overlap/features_simulated",
            "encoder": "simulated",
        }
        attributes = dict(file["coords"].attrs)
        assert file["coords"].dtype == np.int64
        coords = file["coords"][:]
    assert attributes.items() >= {"patch_size": 256, "patch_size_level0": 512, "overlap": 0}.items()
    assert attributes.items() >= {"level0_magnification": 40, "target_magnification": 20}.items()
    assert attributes["level0_width"] == coords[:, 0].max() + 512
    assert np.array_equal(np.lexsort(coords.T), np.arange(len(coords)))  # in rows
    (state,) = (cohort / "wsi_states").glob("slide_00007__*.json")
    assert read_json(state)["meta"]["mpp"] == 0.25
    bag = open_bag(path)
    assert (bag.step.length, bag.step.um) == (512, 128)


def test_tile_labels(cohort):
    for row in rows_of(cohort / "labels.csv")[:20]:
        tiles = np.load(cohort / "tiles" / f"{row['slide_id']}.npy")
        bag = open_bag(cohort / "20x_256px_0px_overlap" / "features_simulated" / f"{row['slide_id']}.h5")
        assert len(tiles) == bag.n
        assert tiles.sum() == (row["label"] == "positive") * 2 * round(0.02 * bag.n)


def test_the_label_table(tmp_path):
    labels = simulate(
        tmp_path / "new",
        slides=200,
        tiles=50,
        range_steps=1,
        positive_share=0.2,
        slides_per_patient=2,
        sites=3,
        censored_share=0.5,
        hazard_ratio=10,
        dim=2,
    )
    rows = rows_of(labels)
    assert list(rows[0]) == ["case_id", "slide_id", "label", "site", "part", "survival_months", "censorship"]
    cases = {row["case_id"]: row for row in rows}
    assert len(cases) == 100
    assert len({row["slide_id"] for row in rows}) == 200
    for row in rows:
        assert {**row, "slide_id": ""} == {**cases[row["case_id"]], "slide_id": ""}
    positive = np.array([case["label"] == "positive" for case in cases.values()])
    assert positive.sum() == 20
    for part, share in (("train", 0.6), ("val", 0.2), ("test", 0.2)):
        inside = np.array([case["part"] == part for case in cases.values()])
        assert (positive & inside).sum() == round(20 * share)
        assert (~positive & inside).sum() == round(80 * share)
    assert {case["site"] for case in cases.values()} == {"site_0", "site_1", "site_2"}
    months = np.array([float(case["survival_months"]) for case in cases.values()])
    censored = np.array([case["censorship"] == "1" for case in cases.values()])
    assert 0.35 < censored.mean() < 0.65
    assert roc_auc_score(positive, -months) > 0.7


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    def contents(name, seed):
        simulate(tmp_path / name, slides=4, tiles=60, range_steps=2, seed=seed)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        assert not [path for path in files if path.suffix == ".tmp"]
        return {path.relative_to(tmp_path / name): path.read_bytes() for path in files}

    first = contents("a", 0)
    assert contents("b", 0) == first
    assert contents("c", 1) != first


@pytest.mark.parametrize(("n", "range_steps"), [(50, 2), (50, 9), (50_000, 9)])
def test_sizes(n, range_steps):
    cells, phenotypes = draw_slide(n, [Interaction(range_steps, True)], 0.02, np.random.default_rng(0))
    assert len(cells) == n
    assert share_of_a_near_b(cells, phenotypes, range_steps) == 1


def test_two_interactions_are_independent():
    """Of either, only its own presence tells; the same random numbers give the same places of all but its own B."""
    for i in range(8):
        slides = {
            (near, far): draw_slide(600, [Interaction(2, near), Interaction(6, far)], 0.02, np.random.default_rng(i))
            for near in (False, True)
            for far in (False, True)
        }
        first = slides[False, False][1]
        for (near, far), (cells, phenotypes) in slides.items():
            assert np.bincount(phenotypes)[:4].tolist() == [12] * 4
            assert share_of_a_near_b(cells, phenotypes, 2) == near
            assert share_of_a_near_b(cells, phenotypes - 2, 6) == far
            assert np.array_equal(phenotypes == 1, first == 1) == (not near)
            assert np.array_equal(phenotypes == 3, first == 3) == (not far)
            assert all(np.array_equal(phenotypes == a, first == a) for a in (0, 2))


def test_a_positive_slide_has_one_of_two_interactions(tmp_path):
    labels = simulate(tmp_path / "two", slides=24, tiles=300, range_steps=2, second_range_steps=5, dim=8, sites=1)
    which = []
    for row in rows_of(labels):
        tiles = np.load(tmp_path / "two" / "tiles" / f"{row['slide_id']}.npy")
        bag = open_bag(tmp_path / "two" / "20x_256px_0px_overlap" / "features_simulated" / f"{row['slide_id']}.h5")
        assert tiles.sum() == (row["label"] == "positive") * 2 * round(0.02 * bag.n)
        if tiles.any():  # of the first interaction, every tile has a partner within its range
            apart = np.sort(cKDTree(bag.xy[tiles]).query(bag.xy[tiles], k=len(bag.xy[tiles]))[0], axis=1)[:, 1:]
            which.append(bool((apart <= 2 + 1e-6).any(1).all()))
    assert len(which) == 12
    assert 2 <= sum(which) <= 10  # a coin


def test_what_cannot_be(tmp_path):
    with pytest.raises(OptionError, match="10 tiles of each phenotype do not fit on 50 tiles with a range of 9"):
        draw_slide(50, [Interaction(9, True)], 0.2, np.random.default_rng(0))
    with pytest.raises(OptionError, match="tiles must be between 50 and inf, got 3"):
        simulate(tmp_path, tiles=3)
    (tmp_path / "mine").touch()
    with pytest.raises(DataError, match="is not empty; choose a new folder"):
        simulate(tmp_path)


def test_every_argument_is_documented():
    documented = re.findall(r"^    (\w+): ", inspect.getdoc(simulate), re.MULTILINE)
    assert documented == list(inspect.signature(simulate).parameters)
