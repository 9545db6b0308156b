import numpy as np
import pytest
import torch

from psamil.errors import DataError
from psamil.readers import slideflow
from tests.readers import layouts_other as layouts

CENTRES_PX0 = layouts.CORNERS_PX0 + layouts.TILE_PX0 / 2


@pytest.mark.parametrize("index", ["npz", "npy"])
@pytest.mark.parametrize("config", [True, False])
def test_bag(tmp_path, index, config):
    path = layouts.write_slideflow(tmp_path / "bags", index, config)
    assert slideflow.recognise(path)
    assert slideflow.members(path) == [None]
    tiles = slideflow.read(path)
    layouts.assert_is_the_bag(tiles, CENTRES_PX0)
    assert (tiles.unit, tiles.encoder) == ("px0", "UNIFeatures" if config else None)
    assert "centres" in tiles.notes[0]
    layouts.assert_is_hollow(slideflow.read(path, with_features=False))


def test_bag_without_index(tmp_path):
    path = layouts.write_slideflow(tmp_path / "bags", index=None)
    assert slideflow.recognise(path)
    tiles = slideflow.read(path)
    layouts.assert_is_the_bag(tiles, None)
    assert tiles.notes == ("There are no positions: S1.index.npz is missing.",)


def test_other_files_are_not_recognised(tmp_path):
    torch.save(torch.ones(2, 3), tmp_path / "S1.pt")
    assert not slideflow.recognise(tmp_path / "S1.pt")
    path = layouts.write_slideflow(tmp_path / "bags")
    assert not slideflow.recognise(path.with_name("S1.index.npz"))


@pytest.mark.parametrize("index", ["npz", "npy"])
def test_pickled_index_is_refused(tmp_path, index):
    path = layouts.write_slideflow(tmp_path / "bags", index)
    objects = np.array([[object()]])
    np.savez(path.with_name("S1.index.npz"), objects) if index == "npz" else np.save(
        path.with_name("S1.index.npy"), objects
    )
    with pytest.raises(DataError, match=r"S1\.index\.np"):
        slideflow.read(path)


@pytest.mark.parametrize("index", ["npz", "npy"])
def test_damage(tmp_path, index):
    path = layouts.write_slideflow(tmp_path / "bags", index)
    positions = path.with_name(f"S1.index.{index}")
    content = positions.read_bytes()
    positions.write_bytes(content[:-40])
    with pytest.raises(DataError, match=rf"S1\.index\.{index}: is damaged"):
        slideflow.read(path)
    positions.write_bytes(content)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(DataError, match=r"S1\.pt: is damaged"):
        slideflow.read(path)


def test_wrong_rows(tmp_path):
    path = layouts.write_slideflow(tmp_path / "bags")
    np.savez(path.with_name("S1.index.npz"), CENTRES_PX0[:5])
    with pytest.raises(DataError, match="24 tiles and coordinates of 5"):
        slideflow.read(path)


def test_damaged_config(tmp_path):
    path = layouts.write_slideflow(tmp_path / "bags")
    path.with_name("bags_config.json").write_text("[]")
    with pytest.raises(DataError, match=r"bags_config\.json: does not hold a JSON object"):
        slideflow.read(path)
