import torch

import psamil
from psamil import Bag
from psamil.bag import PackedBags


def test_only_the_number_of_tiles_counts():
    torch.manual_seed(0)
    model = psamil.create_model("size", 3, 1)
    bags = [Bag(torch.randn(n, 3), torch.randn(n, 2)) for n in (10, 10, 1000, 0)]
    batch = PackedBags.of(bags)
    assert not model(batch).logits.any()  # it begins with no opinion, and with none of the wrong sign
    torch.nn.init.normal_(model.head.weight)
    output = model(batch)
    logits = output.logits[:, 0].tolist()
    assert logits[0] == logits[1] != logits[2]
    assert logits[2] == model.head.bias.item()  # log10(1) = 0
    assert output.logits.isfinite().all()
    assert output.tile_scores.shape == (1020,)
