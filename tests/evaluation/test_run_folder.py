"""What a run says of where its features are."""

from pathlib import Path

import pytest

from psamil.errors import DataError
from psamil.evaluation.run_folder import features_of
from psamil.files import write_json


def test_features_are_where_they_were_in_training(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"features": str(tmp_path)})
    assert features_of(tmp_path) == tmp_path
    assert features_of(tmp_path, Path("elsewhere")) == Path("elsewhere")


@pytest.mark.parametrize("about", [{}, {"features": "/nowhere/features"}], ids=["not said", "gone"])
def test_unknown_features_are_asked_for(tmp_path: Path, about: dict[str, str]) -> None:
    write_json(tmp_path / "run.json", about)
    with pytest.raises(DataError, match="--features"):
        features_of(tmp_path)
