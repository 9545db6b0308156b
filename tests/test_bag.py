import numpy as np
import pytest
import torch

from psamil import Bag, PackedBags
from psamil.errors import ShapeError


def bag(n: int, name: str, **options) -> Bag:
    return Bag(torch.randn(n, 4), torch.rand(n, 2), name, **options)


def test_packing_and_splitting():
    bags = [bag(3, "a"), bag(0, "empty"), bag(5, "b", slides=torch.tensor([0, 2, 5]))]
    packed = PackedBags.of(bags)
    assert packed.offsets.tolist() == [0, 3, 3, 8]
    assert packed.slides.tolist() == [0, 3, 3, 5, 8]
    assert packed.ids == ("a", "empty", "b")
    assert (len(packed), packed.n) == (3, 8)
    assert packed.bag_of_tile.tolist() == [0, 0, 0, 2, 2, 2, 2, 2]
    for part, original in zip(packed.split(packed.features), bags, strict=True):
        assert part.equal(original.features)


def test_one_bag_is_a_batch():
    single = bag(3, "a", step_um=256.0)
    assert PackedBags.of(single).features.equal(single.features)
    assert single.slides.tolist() == [0, 3]


def test_precision_is_kept():
    half = Bag(torch.zeros(2, 4, dtype=torch.float16), torch.zeros(2, 2))
    assert PackedBags.of(half).features.dtype == torch.float16


def test_arrays_and_lists_become_tensors():
    made = Bag(np.zeros((3, 4), dtype=np.float32), [[0, 0], [1, 0], [2, 0]], "s", slides=[0, 2, 3])
    assert made.features.dtype == torch.float32
    assert made.slides.tolist() == [0, 2, 3]
    assert repr(made) == "Bag('s', 3 tiles x 4, 2 slides)"


def test_float16_bags_pack_under_autocast():
    half = [Bag(torch.zeros(2, 4, dtype=torch.float16), torch.zeros(2, 2)) for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        assert PackedBags.of(half).features.dtype == torch.float16


def test_errors_name_the_bag():
    with pytest.raises(ShapeError, match="bag 's1': 1 tiles have NaN or infinite positions"):
        Bag(torch.zeros(2, 4), torch.tensor([[0.0, float("nan")], [1.0, 0.0]]), "s1")
    with pytest.raises(ShapeError, match="bag 's1': step_um must be positive"):
        Bag(torch.zeros(1, 4), torch.zeros(1, 2), "s1", step_um=-1.0)
    with pytest.raises(ShapeError, match=r"bag 's1': 3 tiles need xy of shape \(3, 2\), got \(2, 2\)"):
        Bag(torch.zeros(3, 4), torch.zeros(2, 2), "s1")
    with pytest.raises(ShapeError, match="bag 's1': features must be"):
        Bag(torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 2), "s1")
    with pytest.raises(ShapeError, match="bag 's1': slides must be offsets that rise from 0 to 3"):
        Bag(torch.zeros(3, 4), torch.zeros(3, 2), "s1", slides=torch.tensor([0, 4, 3]))
    with pytest.raises(ShapeError, match="agree in feature width"):
        PackedBags.of([bag(3, "a"), Bag(torch.zeros(3, 5), torch.zeros(3, 2))])
    with pytest.raises(ShapeError, match="at least one bag"):
        PackedBags.of([])


def test_a_bag_without_tiles_may_be_of_any_width():
    empty = Bag(torch.empty(0, 0), torch.empty(0, 2), "empty")
    batch = PackedBags.of([empty, bag(3, "a"), empty])
    assert batch.offsets.tolist() == [0, 0, 3, 3]
    assert batch.features.shape == (3, bag(3, "a").features.shape[1])
    assert PackedBags.of(empty).n == 0
