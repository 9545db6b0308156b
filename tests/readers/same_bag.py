"""What every test of a format asks: did the file open to the bag that all of them hold?"""

import numpy as np

from psamil.bag import Bag
from tests.readers.layouts import CELLS, FEATURES


def assert_same_bag(bag: Bag, dtype: str = "float32") -> None:
    assert str(bag.features.dtype) == f"torch.{dtype}"
    np.testing.assert_array_equal(bag.features.float().numpy(), FEATURES)
    np.testing.assert_allclose(bag.xy.numpy(), CELLS - CELLS.min(0), atol=1e-6)
