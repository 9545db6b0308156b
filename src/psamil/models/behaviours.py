r"""What every model must do: one function per behaviour, for :func:`psamil.models.check_model` or alone.

>>> check_permutation(lambda: MyModel(384, 2), bags)

Each is a function of ``build``, which makes a new model, and of ordinary bags, and raises AssertionError. Results are
compared in float64 (``model.double()``), where a difference is a mistake and no rounding error; what concerns precision
and training is tried in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from psamil.bag import Bag, PackedBags
from psamil.models.output import ModelOutput

TOLERANCE = 1e-8  # in float64, relative to the largest of the expected values or 1
HALF_TOLERANCE = 2e-2  # of half-precision features against the same in float32: a model may compute in them
HALF_WEIGHTS_TOLERANCE = 0.1  # of a model in bfloat16, which has 3 digits, against float32

Builder = Callable[[], nn.Module]


def example_bags(in_dim: int) -> list[Bag]:
    """Ordinary bags: 300 tiles on a lattice, two slides over each other, a few tiles, positions anywhere.

    Positions are multiples of 1/16, so that moving them does not round.
    """
    generator = torch.Generator().manual_seed(0)

    def features(n: int) -> Tensor:
        return torch.randn(n, in_dim, generator=generator)

    def cells(n: int, side: int) -> Tensor:
        every = torch.cartesian_prod(torch.arange(side), torch.arange(side))
        return every[torch.randperm(side**2, generator=generator)[:n]].float()

    anywhere = torch.cartesian_prod(torch.arange(40), torch.arange(40))[torch.randperm(1600, generator=generator)[:25]]
    return [
        Bag(features(300), cells(300, 21), "lattice"),
        Bag(features(37), torch.cat((cells(20, 6), cells(17, 6))), "two slides", torch.tensor([0, 20, 37])),
        Bag(features(9), cells(9, 4), "a few tiles"),
        Bag(features(25), anywhere / 8 + 1 / 16, "anywhere"),
    ]


def check_shapes(build: Builder, bags: Sequence[Bag], n_out: int) -> None:
    """A ModelOutput with logits (b, n_out) and tile_scores (n,), floating point and finite."""
    torch.manual_seed(0)
    output = _predict(build().eval(), bags)
    if output.logits.shape[1] != n_out:
        raise AssertionError(f"logits must be ({len(bags)}, {n_out}), got {tuple(output.logits.shape)}")


def check_evidence(build: Builder, bags: Sequence[Bag]) -> None:
    """Tile evidence, where a model gives it, is (n, n_out), and each logit of a bag a mean of that of its tiles."""
    output = _predict(_model(build, bags, torch.float64), bags, torch.float64)
    if output.tile_evidence is None:
        return
    n, n_out = len(output.tile_scores), output.logits.shape[1]
    if output.tile_evidence.shape != (n, n_out):
        raise AssertionError(f"tile_evidence must be ({n}, {n_out}), got {tuple(output.tile_evidence.shape)}")
    of_bags = output.tile_evidence.split([bag.n for bag in bags])
    for bag, logits, evidence in zip(bags, output.logits, of_bags, strict=True):
        room = TOLERANCE * float(evidence.abs().max().clamp(min=1))
        if bool(((logits < evidence.amin(0) - room) | (logits > evidence.amax(0) + room)).any()):
            raise AssertionError(f"logits of bag {bag.id!r} lie outside the evidence of its tiles")


def check_permutation(build: Builder, bags: Sequence[Bag]) -> None:
    """Another order of the tiles of a slide, and of the slides of a bag: same logits, scores in the new order."""
    model = _model(build, bags, torch.float64)
    generator = torch.Generator().manual_seed(1)
    permuted, new_order, n_before = [], [], 0
    for bag in bags:
        slides = torch.arange(bag.n).split(bag.slides.diff().tolist())[::-1]
        order = torch.cat([tiles[torch.randperm(len(tiles), generator=generator)] for tiles in slides])
        offsets = torch.tensor([0, *map(len, slides)]).cumsum(0)
        permuted.append(Bag(bag.features[order], bag.xy[order], bag.id, offsets))
        new_order.append(order + n_before)
        n_before += bag.n
    before, after = _predict(model, bags, torch.float64), _predict(model, permuted, torch.float64)
    _assert_same("logits of permuted tiles", after.logits, before.logits)
    _assert_same("tile_scores of permuted tiles", after.tile_scores, before.tile_scores[torch.cat(new_order)])


def check_translation(build: Builder, bags: Sequence[Bag]) -> None:
    """Every slide moved by a way of its own: nothing changes, not even for slides of one bag."""
    model = _model(build, bags, torch.float64)
    moved, ways = [], 0
    for bag in bags:
        way = torch.repeat_interleave(bag.slides.diff()) + ways
        ways += len(bag.slides) - 1
        moved.append(replace(bag, xy=bag.xy + torch.stack((1000.25 - 300 * way, 77 * way - 40.5), 1)))
    _assert_same_output("of moved slides", _predict(model, moved, torch.float64), _predict(model, bags, torch.float64))


def check_batch(build: Builder, bags: Sequence[Bag]) -> None:
    """Bags packed together: the same as one after the other."""
    _assert_packing_does_not_matter(_model(build, bags, torch.float64), bags)


def check_single_tile(build: Builder, bags: Sequence[Bag]) -> None:
    """A bag of one tile: finite results and gradients, and the same among others."""
    one = Bag(bags[0].features[:1], bags[0].xy[:1], "one tile")
    _assert_finite(build, bags, [one])
    _assert_packing_does_not_matter(_model(build, bags, torch.float64), [one, bags[1], one])


def check_duplicates(build: Builder, bags: Sequence[Bag]) -> None:
    """Many tiles, or all, at one position, some with the same features: finite results and gradients."""
    features, xy = bags[0].features, bags[0].xy
    one_place = Bag(features, torch.zeros_like(xy), "all tiles in one place")
    twice = Bag(torch.cat((features, features)), torch.cat((xy, xy)), "all tiles twice")
    equal = Bag(features[:1].expand(9, -1), xy[:1].expand(9, -1), "nine equal tiles")
    for bag in (one_place, twice, equal):
        _assert_finite(build, bags, [bag])


def check_gradients(build: Builder, bags: Sequence[Bag]) -> None:
    """In training, in the first or the last epoch, every parameter gets a gradient; all are finite, none is just 0.

    The bias of a single output may have a gradient of 0: a softmax over tiles cancels it, up to rounding.
    """
    model = _model(build, bags, torch.float32)
    for epoch in (0, 1):
        _start_epoch(model, bags, epoch)
        _backward(model, bags)
        _assert_finite_gradients(model)
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if without:
        raise AssertionError(f"{len(without)} parameters get no gradient: {', '.join(without)}")
    zero = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.any()]
    zero = [name for name in zero if not (name.endswith("bias") and model.get_parameter(name).numel() == 1)]
    if zero:
        raise AssertionError(f"{len(zero)} parameters have a gradient of 0 for every bag: {', '.join(zero)}")


def check_deterministic(build: Builder, bags: Sequence[Bag]) -> None:
    """In evaluation mode, the same result again, to the last bit and whatever the state of the random generator."""
    model = _model(build, bags, torch.float32)
    torch.manual_seed(1)
    first = _predict(model, bags)
    torch.manual_seed(2)
    _assert_same_output("of a second pass in evaluation mode", _predict(model, bags), first, tolerance=0)


def check_state(build: Builder, bags: Sequence[Bag]) -> None:
    """After training, ``state_dict`` holds everything: a new model that loads it predicts the same."""
    model = _model(build, bags, torch.float32)
    _backward(model, bags)
    torch.manual_seed(1)
    fresh = build().eval()
    fresh.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, strict=True)
    _assert_same_output("of a new model with the same state", _predict(fresh, bags), _predict(model.eval(), bags), 0)


def check_inputs(build: Builder, bags: Sequence[Bag]) -> None:
    """Forward and backward leave the batch as it was."""
    model = _model(build, bags, torch.float32)
    batch = PackedBags.of(bags)
    before = {part: getattr(batch, part).clone() for part in ("features", "xy", "offsets", "slides")}
    with torch.no_grad():
        model(batch)
    _backward(model, batch)
    for part, values in before.items():
        _assert_same(f"{part} of the batch after a pass", getattr(batch, part), values, 0)


def check_half_features(build: Builder, bags: Sequence[Bag]) -> None:
    """float16 and bfloat16 features: as the same numbers in float32, up to rounding."""
    model = _model(build, bags, torch.float32)
    for dtype in (torch.float16, torch.bfloat16):
        half = [replace(bag, features=bag.features.to(dtype)) for bag in bags]
        of_half = _predict(model, half)
        of_single = _predict(model, half, torch.float32)
        _assert_same_output(f"of {dtype} features", of_half, of_single, HALF_TOLERANCE)


def check_half_weights(build: Builder, bags: Sequence[Bag]) -> None:
    """The model and its features in bfloat16: logits near those in float32, finite gradients."""
    model = _model(build, bags, torch.float32)
    half = [replace(bag, features=bag.features.to(torch.bfloat16)) for bag in bags]
    of_single = _predict(model, half, torch.float32)
    model = model.to(torch.bfloat16)
    of_half = _predict(model, half)
    _assert_same("logits of bfloat16 weights", of_half.logits, of_single.logits, HALF_WEIGHTS_TOLERANCE)
    _backward(model, half)
    _assert_finite_gradients(model)


def check_empty_bag(build: Builder, bags: Sequence[Bag]) -> None:
    """A bag without tiles: finite results and gradients, no change for others. So for slides without tiles."""
    empty = Bag(bags[0].features[:0], bags[0].xy[:0], "no tiles")
    _assert_finite(build, bags, [empty])
    _assert_finite(build, bags, [empty, bags[0], empty])
    model = _model(build, bags, torch.float64)
    _assert_packing_does_not_matter(model, [empty, bags[0], empty, bags[1], empty])
    empty_slides = replace(bags[0], slides=torch.tensor([0, 0, bags[0].n, bags[0].n]))
    before, after = (_predict(model, [bag], torch.float64) for bag in (bags[0], empty_slides))
    _assert_same_output("with slides without tiles", after, before)


CHECKS: dict[str, Callable[[Builder, Sequence[Bag]], None]] = {
    "evidence": check_evidence,
    "permutation": check_permutation,
    "translation": check_translation,
    "batch": check_batch,
    "single tile": check_single_tile,
    "duplicates": check_duplicates,
    "gradients": check_gradients,
    "deterministic": check_deterministic,
    "state": check_state,
    "inputs": check_inputs,
    "half features": check_half_features,
    "half weights": check_half_weights,
    "empty bag": check_empty_bag,
}
"""The checks that a model may declare exceptions from, by name."""


def _model(build: Builder, bags: Sequence[Bag], dtype: torch.dtype) -> nn.Module:
    """A new model in evaluation mode, always the same, as it is in the last epoch of training."""
    torch.manual_seed(0)
    model = build().to(dtype).eval()
    _start_epoch(model, bags, epoch=1)
    return model


@torch.no_grad()
def _start_epoch(model: nn.Module, bags: Sequence[Bag], epoch: int) -> None:
    """What the trainer does before an epoch of two, if the model asks for it."""
    start = getattr(model, "start_epoch", None)
    if start is not None:
        model.eval()
        start(epoch, 2, lambda: iter([PackedBags.of(bags[:2]), PackedBags.of(bags[2:])]))


@torch.no_grad()
def _predict(model: nn.Module, bags: Sequence[Bag], dtype: torch.dtype | None = None) -> ModelOutput:
    """Output for bags whose features are cast to ``dtype``; its form and finiteness are checked."""
    batch = PackedBags.of(bags)
    output = model(batch if dtype is None else replace(batch, features=batch.features.to(dtype)))
    _assert_sound(output, batch)
    return output


def _assert_sound(output: ModelOutput, batch: PackedBags) -> None:
    if not isinstance(output, ModelOutput):
        raise AssertionError(f"forward must return a ModelOutput, got {type(output).__name__}")
    if output.logits.ndim != 2 or len(output.logits) != len(batch):
        raise AssertionError(
            f"logits of {len(batch)} bags must be ({len(batch)}, n_out), got {tuple(output.logits.shape)}"
        )
    if output.tile_scores.shape != (batch.n,):
        raise AssertionError(
            f"tile_scores of {batch.n} tiles must be ({batch.n},), got {tuple(output.tile_scores.shape)}"
        )
    for name, values in (("logits", output.logits), ("tile_scores", output.tile_scores)):
        if not values.isfinite().all():
            raise AssertionError(f"{int((~values.isfinite()).sum())} of {values.numel()} {name} are not finite")


def _backward(model: nn.Module, bags: Sequence[Bag] | PackedBags) -> None:
    """A training pass as the trainer's, with a random loss; gradients are added up."""
    batch = bags if isinstance(bags, PackedBags) else PackedBags.of(bags)
    generator = torch.Generator().manual_seed(2)
    torch.manual_seed(3)
    model.train()
    output = model(batch)
    if getattr(model, "wants_classes", False):  # which it did not get, and must do without for other outcomes
        classes = torch.arange(len(batch)) % max(2, output.logits.shape[1])
        output = model(batch, classes)
    _assert_sound(output, batch)
    predictions = [(1.0, output.logits), *((extra.weight, extra.logits) for extra in output.extra_predictions.values())]
    loss = sum(output.auxiliary_losses.values(), torch.zeros(()))
    for weight, logits in predictions:
        loss = loss + weight * (logits.float() * torch.randn(logits.shape, generator=generator)).sum()
    loss.backward()


def _assert_finite_gradients(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            count = int((~parameter.grad.isfinite()).sum())
            raise AssertionError(f"{count} of {parameter.numel()} numbers of the gradient of {name} are not finite")


def _assert_finite(build: Builder, bags: Sequence[Bag], special: Sequence[Bag]) -> None:
    """Predictions and gradients of special bags, for a model that has seen the others."""
    model = _model(build, bags, torch.float32)
    try:
        _predict(model, special)
        _backward(model, special)
        _assert_finite_gradients(model)
    except Exception as error:
        raise AssertionError(f"with {', '.join(bag.id for bag in special)}: {error_text(error)}") from error


def _assert_packing_does_not_matter(model: nn.Module, bags: Sequence[Bag]) -> None:
    alone = [_predict(model, [bag], torch.float64) for bag in bags]
    together = _predict(model, bags, torch.float64)
    _assert_same("logits of packed bags", together.logits, torch.cat([output.logits for output in alone]))
    _assert_same("tile_scores of packed bags", together.tile_scores, torch.cat([out.tile_scores for out in alone]))


def _assert_same_output(what: str, actual: ModelOutput, expected: ModelOutput, tolerance: float = TOLERANCE) -> None:
    _assert_same(f"logits {what}", actual.logits, expected.logits, tolerance)
    _assert_same(f"tile_scores {what}", actual.tile_scores, expected.tile_scores, tolerance)


def _assert_same(what: str, actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
    if not expected.numel():
        return
    error = (actual.double() - expected.double()).abs()
    scale = max(1.0, float(expected.abs().max()))
    if not float(error.max()) <= tolerance * scale:
        raise AssertionError(
            f"{what} differ by up to {error.max():.2e} (mean {error.mean():.2e}), allowed {tolerance * scale:.0e}; "
            f"shape {tuple(actual.shape)}, {int((error > tolerance * scale).sum())} values differ"
        )


def error_text(error: Exception) -> str:
    """What an error says; its kind too, if it is none of ours."""
    return str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
