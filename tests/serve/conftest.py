import pytest

from tests.serve.cases import small_study


@pytest.fixture(scope="session")
def study(tmp_path_factory):
    return small_study(tmp_path_factory.mktemp("study"))
