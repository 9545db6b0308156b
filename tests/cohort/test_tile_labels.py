"""Labels of tiles: one for each tile of the bag, whatever became of the file's tiles."""

import h5py
import numpy as np
import pytest

from psamil.cohort import BagCache, Cohort, simulate
from psamil.errors import DataError


@pytest.fixture
def folder(tmp_path):
    simulate(tmp_path / "cohort", slides=4, tiles=60, dim=4, slides_per_patient=2)
    return tmp_path / "cohort"


def cohort_of(folder, **options):
    return Cohort.open(folder, folder / "labels.csv", target="label", **options)


def labels_of(cohort, slide):
    ref = next(ref for sample in cohort.samples for ref in sample.bags if ref.id == slide)
    return cohort.labels_of_tiles(ref, cohort.load_slide(ref).n)


def test_labels_are_those_of_the_file(folder):
    cohort = cohort_of(folder).with_tile_labels(folder / "tiles")
    for slide in cohort.ids:
        assert (labels_of(cohort, slide) == np.load(folder / "tiles" / f"{slide}.npy")).all()
    np.save(folder / "tiles" / "slide_00000.npy", 7 * np.load(folder / "tiles" / "slide_00000.npy").astype(np.uint8))
    assert (labels_of(cohort, "slide_00000") == (np.load(folder / "tiles" / "slide_00000.npy") == 7)).all()
    (folder / "tiles" / "slide_00001.npy").unlink()
    assert labels_of(cohort_of(folder).with_tile_labels(folder / "tiles"), "slide_00001") is None
    assert labels_of(cohort_of(folder), "slide_00000") is None


@pytest.mark.parametrize("is_cached", [True, False])
def test_labels_of_dropped_tiles_are_dropped(folder, is_cached):
    with h5py.File(next(folder.glob("*/features_simulated/slide_00002.h5")), "a") as file:
        for tile in (3, 10):
            file["features"][tile] = np.nan
        n = len(file["features"])
    np.save(folder / "tiles" / "slide_00002.npy", np.arange(n) % 2)
    reading = {"non_finite": "drop"}
    options = {"cache": BagCache(folder.parent / "cache", **reading)} if is_cached else {"reading": reading}
    labels = labels_of(cohort_of(folder, **options).with_tile_labels(folder / "tiles"), "slide_00002")
    assert (labels == np.delete(np.arange(n) % 2 == 1, [3, 10])).all()
    np.save(folder / "tiles" / "slide_00002.npy", np.zeros(n - 2, bool))  # of the tiles that are left
    with pytest.raises(DataError, match=rf"slide_00002.npy: has {n - 2} labels, but .*slide_00002.h5 has {n} tiles"):
        cohort_of(folder, **options).with_tile_labels(folder / "tiles")


def test_labels_that_do_not_fit_are_refused_by_name(folder, tmp_path):
    path = folder / "tiles" / "slide_00003.npy"
    labels = np.load(path)
    for wrong, message in (
        (labels[:-1], f"has {len(labels) - 1} labels, but .* has {len(labels)} tiles"),
        (labels.astype(float), "is float64 of shape"),
        (labels[:, None], "is bool of shape"),
        (np.array([object()]), "cannot be read"),
        (labels.astype(np.int8) - 1, rf"has {int((~labels).sum())} labels below 0"),
    ):
        np.save(path, wrong, allow_pickle=True)
        with pytest.raises(DataError, match=rf"slide_00003.npy: {message}"):
            cohort_of(folder).with_tile_labels(folder / "tiles")
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match="holds no tile labels"):
        cohort_of(folder).with_tile_labels(tmp_path / "other")
    np.save(tmp_path / "other" / "stranger.npy", labels)
    with pytest.raises(
        DataError, match=r"no labels of any of the 4 slides; name the files as slides: slide_00000\.npy"
    ):
        cohort_of(folder).with_tile_labels(tmp_path / "other")


def test_two_files_of_a_slide_are_refused(folder):
    np.save(folder / "tiles" / "slide_00003.svs.npy", np.load(folder / "tiles" / "slide_00003.npy"))
    with pytest.raises(DataError, match=r"slide_00003\.svs\.npy: is of the same slide as slide_00003\.npy"):
        cohort_of(folder).with_tile_labels(folder / "tiles")


def test_slides_without_labels_are_noted(folder):
    assert "tile labels" not in str(cohort_of(folder).with_tile_labels(folder / "tiles"))
    (folder / "tiles" / "slide_00001.npy").unlink()
    note = "1 of 4 slides have no tile labels and do not count in localisation: 'slide_00001'."
    assert note in str(cohort_of(folder).with_tile_labels(folder / "tiles"))


def test_the_fingerprint_is_of_the_labels_of_the_slides(folder):
    labels = cohort_of(folder).with_tile_labels(folder / "tiles").tile_labels
    before = [labels.fingerprint(slides) for slides in (["slide_00000"], ["slide_00001"])]
    values = np.load(folder / "tiles" / "slide_00000.npy")
    np.save(folder / "tiles" / "slide_00000.npy", ~values)
    after = [labels.fingerprint(slides) for slides in (["slide_00000"], ["slide_00001"])]
    assert after[0] != before[0]
    assert after[1] == before[1]
