import numpy as np
import pytest

from psamil.readers import open_bag
from psamil.readers.trident_writing import (
    TridentSlide,
    feature_path,
    magnification_of_slide,
    magnification_of_tiles,
    new_feature_file,
    tiling_folder,
    write_state,
)


@pytest.mark.parametrize(
    ("mpp", "expected"),
    [
        (0.1, 80),
        (0.16, 60),
        (0.199, 60),
        (0.2, 40),
        (0.25, 40),
        (0.3, 20),
        (0.5, 20),
        (1.0, 10),
        (2.0, 5),
        (5.0, 2),
        (40, 1),
    ],
)
def test_nominal_magnifications(mpp, expected):
    assert magnification_of_slide(mpp) == expected


@pytest.mark.parametrize(
    ("mpp", "expected", "folder"),
    [
        (0.5, 20, "20x_256px_0px_overlap"),
        (0.25, 40, "40x_256px_0px_overlap"),
        (0.3, 33.333333, "33.3333x_256px_0px_overlap"),
    ],
)
def test_magnifications_of_tiles(mpp, expected, folder):
    assert magnification_of_tiles(mpp) == expected
    assert type(magnification_of_tiles(mpp)) is type(expected)
    assert tiling_folder(magnification_of_tiles(mpp), 256, 0) == folder


def slide_of(**options):
    about = dict(
        name="a",
        size_px0=(9000, 8000),
        mpp_px0=0.265,
        patch_px=224,
        patch_px0=423,
        overlap_px=0,
        magnification=20,
        slide_magnification=40,
    )
    return TridentSlide(**(about | options))


@pytest.mark.parametrize("rows", [(7, 0, 5), (0, 12), (12,), (0,)], ids=str)
def test_features_grow(tmp_path, rows, caplog):
    """The side in level-0 pixels is believed where magnifications give another, 448."""
    n = sum(rows)
    features = np.random.default_rng(0).normal(size=(n, 6)).astype(np.float32)
    coords = np.stack(np.divmod(np.arange(n), 4), 1) * 423
    with new_feature_file(tmp_path, slide_of(), "mine", chunk_rows=4) as file:
        file.begin(features[: rows[0]], coords)
        begun = rows[0]
        for more in rows[1:]:
            file.append(features[begun : begun + more])
            begun += more
    write_state(tmp_path, slide_of(), "a.svs")
    bag = open_bag(feature_path(tmp_path, slide_of().tiling_folder, "mine", "a"))
    assert (bag.features.numpy() == features).all()
    assert (bag.xy.numpy() * 423 == coords).all()
    if n:
        assert (bag.step.length, bag.step.source, bag.step.mpp) == (423, "metadata", 0.265)
    assert not caplog.messages


def test_an_error_leaves_no_file(tmp_path):
    def fail():
        with new_feature_file(tmp_path, slide_of(), "mine") as file:
            file.begin(np.zeros((2, 3), np.float32), np.zeros((2, 2), np.int64))
            raise RuntimeError("a reader died")

    with pytest.raises(RuntimeError, match="a reader died"):
        fail()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
