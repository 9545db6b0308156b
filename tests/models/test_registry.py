import pytest

import psamil
from psamil.errors import OptionError
from psamil.models.psa import PSAMIL


def test_models_by_name():
    assert "psa" in psamil.list_models()
    assert psamil.list_models("no*") == []
    assert isinstance(psamil.create_model("psa", 8, 1, heads=2, head_dim=4), PSAMIL)
    with pytest.raises(OptionError, match="unknown model 'psamil'; known: 'abmil'"):
        psamil.create_model("psamil", 8, 1)
