import torch

import psamil
from psamil import Bag
from psamil.bag import PackedBags


def test_only_the_number_of_tiles_counts():
    torch.manual_seed(0)
    model = psamil.create_model("size", 3, 1)
    bags = [Bag(torch.randn(n, 3), torch.randn(n, 2)) for n in (10, 10, 1000, 0)]
    output = model(PackedBags.of(bags))
    logits = output.logits[:, 0].tolist()
    assert logits[0] == logits[1] != logits[2]
    assert logits[2] == model.head.bias.item()  # log10(1) = 0
    assert output.logits.isfinite().all()
    assert output.tile_scores.shape == (1020,)
