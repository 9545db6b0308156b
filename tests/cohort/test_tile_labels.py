"""Labels of tiles: one for each tile of the bag, whatever became of the file's tiles."""

import h5py
import numpy as np
import pytest

from psamil.cohort import BagCache, Cohort, simulate
from psamil.cohort.tile_labels import SlideLabels, save_labels
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


def with_lesions(cohort, slide):
    ref = next(ref for sample in cohort.samples for ref in sample.bags if ref.id == slide)
    return cohort.lesions_of_tiles(ref, cohort.load_slide(ref).n)


def test_labels_with_lesions(folder):
    """What save_labels writes reads back; a file without numbers of lesions has none."""
    path = folder / "tiles" / "slide_00000.npy"
    n = len(np.load(path))
    path.unlink()
    numbers = np.arange(n) % 3
    save_labels(path.with_suffix(".npz"), SlideLabels(numbers == 2, numbers, {1: 100.0, 2: np.nan, 3: 300.0}))
    cohort = cohort_of(folder).with_tile_labels(folder / "tiles")
    found = with_lesions(cohort, "slide_00000")
    assert (found.positive == (numbers == 2)).all()
    assert (found.lesions == numbers).all()
    assert found.lesion_lengths_um == pytest.approx({1: 100.0, 2: np.nan, 3: 300.0}, nan_ok=True)
    assert (labels_of(cohort, "slide_00000") == found.positive).all()
    plain = with_lesions(cohort, "slide_00001")
    assert plain.lesions is None
    assert not plain.lesion_lengths_um


def test_lesions_of_dropped_tiles_are_dropped(folder):
    with h5py.File(next(folder.glob("*/features_simulated/slide_00002.h5")), "a") as file:
        file["features"][3] = np.nan
        n = len(file["features"])
    (folder / "tiles" / "slide_00002.npy").unlink()
    save_labels(
        folder / "tiles" / "slide_00002.npz",
        SlideLabels(np.ones(n, bool), np.arange(n), dict.fromkeys(range(1, n), 1.0)),
    )
    found = with_lesions(
        cohort_of(folder, reading={"non_finite": "drop"}).with_tile_labels(folder / "tiles"), "slide_00002"
    )
    assert (found.lesions == np.delete(np.arange(n), 3)).all()
    assert len(found.lesion_lengths_um) == n - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lesions": None}, "lacks 'lesions"),
        ({"lesions": [0, 1, 2]}, "has a lesion 2, but lengths of 1"),
        ({"lesions": [0, 1]}, "has 3 positive, 2 lesions"),
        ({"lesions": [0.0, 1.0, 0.5]}, "is float64 of shape"),
        ({"lesion_lengths_um": [["a"]]}, "lengths of"),
    ],
    ids=["missing", "unmeasured", "fewer", "fractions", "text"],
)
def test_labels_with_lesions_that_do_not_fit(folder, change, message):
    arrays = {"positive": [True, False, True], "lesions": [1, 0, 1], "lesion_lengths_um": [5.0]} | change
    (folder / "tiles" / "slide_00003.npy").unlink()
    np.savez(folder / "tiles" / "slide_00003.npz", **{k: np.array(v) for k, v in arrays.items() if v is not None})
    with pytest.raises(DataError, match=f"slide_00003.npz: .*{message}"):
        cohort_of(folder).with_tile_labels(folder / "tiles")


def test_a_broken_archive_is_refused(folder):
    (folder / "tiles" / "slide_00003.npy").unlink()
    (folder / "tiles" / "slide_00003.npz").write_bytes(b"PK\x03\x04 and nothing more")
    with pytest.raises(DataError, match=r"slide_00003\.npz: cannot be read"):
        cohort_of(folder).with_tile_labels(folder / "tiles")
