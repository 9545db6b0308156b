"""FLOPs of a training batch: the count against formulas and against what is done, and nothing left out unseen."""

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from psamil.bag import Bag, PackedBags
from psamil.errors import OptionError
from psamil.models import create_model, list_models
from psamil.report.paper_figures.flop_counter import FORMULAS, flop_counter, slide_of, training_flops
from psamil.report.paper_figures.psa_flops import has_formula, lattice_pairs, psa_flops
from psamil.spatial import Layout
from tests.models.test_check import SMALL

PRODUCT = re.compile(r"mm$|mv$|dot$|conv|embedding_bag|attention|einsum|cdist|linalg|sparse|bilinear|addr$|ger$")
NO_PRODUCT = {"linalg_vector_norm"}


@pytest.mark.parametrize("decay", ["exponential", "gaussian", "cauchy"])
def test_the_count_of_psa_is_that_of_the_formulas(decay):
    bag = slide_of(1500, 64)
    model = create_model("psa", 64, 1, decay=decay, heads=3, head_dim=16, depth=2)
    parts = psa_flops(model, bag)
    count = training_flops(model, bag)
    assert count == pytest.approx(sum(part.both for part in parts), rel=0.02)
    attention = next(part.both for part in parts if part.part == "attention")
    assert attention > 0.2 * count  # else its formula would not be tested


@pytest.mark.parametrize("path", ["compiled", "lattice", "scattered"])
def test_forward_and_backward_are_counted_on_every_path(path, monkeypatch):
    if path != "compiled":
        monkeypatch.setenv("PSAMIL_COMPILED", "0")
    bag = slide_of(600, 16)
    model = create_model("psa", 16, 1, heads=2, head_dim=8)
    forward, both = 0, 0
    layout = Layout.of(bag.xy, path=path)
    with flop_counter() as counter:
        output = model(PackedBags.of(bag, layout))
        forward = counter.get_total_flops()
        output.logits.sum().backward()
        both = counter.get_total_flops()
    parts = psa_flops(model, bag)
    assert forward == pytest.approx(sum(part.forward for part in parts), rel=0.02)
    assert both - forward == pytest.approx(sum(part.backward for part in parts), rel=0.02)


@pytest.mark.parametrize("radius", [1.0, 2.5, 5.0])
def test_pairs_are_those_of_all_distances(radius):
    xy = slide_of(150, 2).xy[torch.rand(150, generator=torch.Generator().manual_seed(1)) < 0.7]
    assert lattice_pairs(xy, radius) == int((torch.cdist(xy.double(), xy.double()) <= radius + 1e-9).sum())
    with pytest.raises(OptionError, match="on a lattice"):
        lattice_pairs(xy + 0.3 * torch.rand(len(xy), 2), radius)


def test_there_is_no_formula_for_other_models():
    for model in (create_model("msa", 8, 1), create_model("psa", 8, 1, pooling="gated", head_dim=4)):
        assert not has_formula(model)
        with pytest.raises(OptionError, match="there is a formula for psa"):
            psa_flops(model, slide_of(20, 8))


def test_products_that_torch_does_not_count():
    matrix, vector = torch.randn(7, 5), torch.randn(5)
    table, pairs, starts = torch.randn(6, 3), torch.tensor([0, 2, 4, 5]), torch.tensor([0, 3])
    with flop_counter() as counter:
        matrix @ vector
        vector @ vector
        torch.nn.functional.embedding_bag(pairs, table, starts, mode="sum", per_sample_weights=torch.ones(4))
    assert counter.get_total_flops() == 2 * 7 * 5 + 2 * 5 + 2 * 4 * 3


def test_a_convolution_in_groups_costs_backward_twice_as_much_as_forward():
    x = torch.randn(2, 8, 9, 9, requires_grad=True)
    convolution = torch.nn.Conv2d(8, 8, 3, groups=8)
    with flop_counter() as counter:
        out = convolution(x)
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == 2 * 2 * 7 * 7 * 8 * 9
    assert counter.get_total_flops() == 3 * forward


class UncountedProducts(TorchDispatchMode):
    """Names of operators that multiply and have no formula."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        operator = function._overloadpacket
        name = str(operator).rpartition(".")[2]
        if PRODUCT.search(name) and name not in NO_PRODUCT and operator not in {**flop_registry, **FORMULAS}:
            self.names.add(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", list_models())
def test_no_product_of_any_model_is_left_out(name):
    torch.manual_seed(0)
    model, bag = create_model(name, 16, 1, **SMALL.get(name, {})), slide_of(60, 16)
    with UncountedProducts() as seen:
        flops = training_flops(model, bag)
    assert seen.names == set()
    assert flops > 0


def test_the_model_stays_as_it_was():
    model = create_model("abmil", 4, 1, hidden=8).eval()
    state = torch.random.get_rng_state()
    training_flops(model, Bag(torch.randn(9, 4, generator=torch.Generator()), torch.arange(18).view(9, 2)))
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)
