"""Features that do not mean the same are told apart by their width and by the names of their columns."""

import inspect
from pathlib import Path

import pytest

from psamil.cohort.same_features import NAMING_FORMATS, difference, odd_slides
from psamil.errors import DataError
from psamil.readers import READERS, BagRef

A, B, C = (BagRef(name, Path(f"{name}.npz"), "npz") for name in "abc")


@pytest.mark.parametrize("name", READERS)
def test_formats_with_names_are_known(name: str) -> None:
    assert ("feature_names" in inspect.getsource(READERS[name])) == (name in NAMING_FORMATS)  # type: ignore[arg-type]


def test_most_slides_decide() -> None:
    assert odd_slides({A: 8, B: 8}, {A: None, B: ("x",)}) == {}  # names that are not said contradict nobody
    odd = odd_slides({A: 8, B: 5, C: 8}, {})
    assert {ref: error.cause for ref, error in odd.items()} == {B: "features are 5 wide, those of 2 other slides 8"}
    odd = odd_slides({A: 2, B: 2, C: 2}, {A: ("x", "y"), B: ("x", "z"), C: ("x", "y")})
    assert list(odd) == [B]
    assert "column 2 is 'z', there 'y'; give all slides the same columns" in str(odd[B])


def test_no_majority_is_an_error() -> None:
    with pytest.raises(DataError, match=r"a\.npz and b\.npz: features are 8 and 5 wide"):
        odd_slides({A: 8, B: 5}, {})
    with pytest.raises(DataError, match=r"not named alike: column 1 is 'x', there 'y'"):
        odd_slides({A: 1, B: 1}, {A: ("x",), B: ("y",)})


def test_difference() -> None:
    assert difference(("x", "y"), ("x", "q")) == "column 2 is 'q', there 'y'"
    assert difference(("x", "y"), ("x",)) == "1 columns, there 2"
