"""Bags for models, and comparisons that several models share."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from psamil import Bag, PackedBags


def lattice_bag(n: int, side: int, in_dim: int, generator: torch.Generator, slides: Sequence[int] = ()) -> Bag:
    """n random tiles of a square lattice away from the origin, in float64."""
    cells = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    xy = cells[torch.randperm(side**2, generator=generator)[:n]].double() + 3
    x = torch.randn(n, in_dim, generator=generator, dtype=torch.float64)
    return Bag(x, xy, slides=torch.tensor(slides, dtype=torch.long))


def bags_at(places: Mapping[str, Tensor], dtype: torch.dtype, generator: torch.Generator) -> list[Bag]:
    """A bag of 6 random features per tile for every name; that of "two slides" has 7 tiles in each."""
    return [
        Bag(
            torch.randn(len(xy), 6, generator=generator, dtype=torch.float64).to(dtype),
            xy,
            name,
            torch.tensor([0, 7, 14]) if name == "two slides" else torch.tensor([0, len(xy)]),
        )
        for name, xy in places.items()
    ]


def assert_as_one_by_one(model: nn.Module, bags: Sequence[Bag], expected: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Logits and scores of packed bags, and gradients of logits, against logits and scores of each bag."""
    out = model(PackedBags.of(bags))
    logits = torch.stack([logits for logits, _ in expected])
    torch.testing.assert_close(out.logits, logits)
    torch.testing.assert_close(out.tile_scores, torch.cat([scores for _, scores in expected]))
    upstream = torch.randn_like(logits)
    parameters = dict(model.named_parameters())
    gradients = [torch.autograd.grad(z, list(parameters.values()), upstream) for z in (out.logits, logits)]
    for name, actual, wanted in zip(parameters, *gradients, strict=True):
        torch.testing.assert_close(actual, wanted, msg=lambda text, name=name: f"{name}: {text}")


def assert_trains_in_bfloat16(model: nn.Module, bags: Sequence[Bag]) -> None:
    """Under autocast: logits as in float32 up to rounding, and finite gradients."""
    model, batch = model.float(), PackedBags.of([Bag(bag.features.float(), bag.xy) for bag in bags])
    full = model(batch).logits
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch)
    torch.testing.assert_close(out.logits.float(), full, rtol=0.1, atol=0.05)
    out.logits.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
