import pandas as pd
import pytest
import torch

from psamil.errors import DataError
from psamil.readers import psa_authors
from tests.readers import layouts_other as layouts


@pytest.mark.parametrize(("place", "member"), [("S1/S1.pt", None), ("tile_embeddings/S1/tile_embeddings.tensor", "S1")])
def test_bag(tmp_path, place, member):
    path = layouts.write_psa_authors(tmp_path / place)
    assert psa_authors.recognise(path)
    assert psa_authors.members(path) == [member]
    tiles = psa_authors.read(path, member)
    layouts.assert_is_the_bag(tiles, layouts.COLUMN_AND_ROW)
    assert (tiles.unit, tiles.nominal_step) == ("steps", 1)
    layouts.assert_is_hollow(psa_authors.read(path, with_features=False))


def test_other_files_are_not_recognised(tmp_path):
    torch.save(torch.ones(2, 3), tmp_path / "S1.pt")
    assert not psa_authors.recognise(tmp_path / "S1.pt")


@pytest.mark.parametrize(
    ("table", "cause"),
    [
        ({"path": ["3_4.jpg"]}, "24 tiles and coordinates of 1"),
        ({"path": ["a/tile-3-4.jpg"] * 24}, "24 tiles without row and column, such as 'a/tile-3-4.jpg'"),
        ({"tile": ["3_4.jpg"]}, "no column 'path'"),
    ],
)
def test_tables_that_do_not_fit(tmp_path, table, cause):
    path = layouts.write_psa_authors(tmp_path / "S1/S1.pt")
    pd.DataFrame(table).to_csv(path.with_name("df_slide.csv"), index=False)
    with pytest.raises(DataError, match=cause):
        psa_authors.read(path)


def test_truncated_tensor(tmp_path):
    path = layouts.write_psa_authors(tmp_path / "S1/S1.pt")
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(DataError, match=r"S1\.pt: is damaged"):
        psa_authors.read(path)


def test_windows_paths(tmp_path):
    path = layouts.write_psa_authors(tmp_path / "S1/S1.pt")
    table = pd.read_csv(path.with_name("df_slide.csv"))
    table["path"] = table["path"].str.replace("/", "\\").str.replace(".jpg", "_tumour.png")
    table.to_csv(path.with_name("df_slide.csv"), index=False)
    layouts.assert_is_the_bag(psa_authors.read(path), layouts.COLUMN_AND_ROW)
