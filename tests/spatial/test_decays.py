import math

import pytest
import torch

from psamil.errors import OptionError
from psamil.spatial import DECAYS, check_decay, get_decay, posterior_attention, posterior_attention_reference
from tests.spatial.cases import assert_same, gradients, inputs, positions


@pytest.mark.parametrize("name", DECAYS)
def test_every_decay_keeps_its_promises(name):
    check_decay(DECAYS[name])


def test_check_decay_finds_a_wrong_slope():
    class Wrong(type(DECAYS["gaussian"])):
        def slope(self, d2, theta):
            return d2 / theta

    with pytest.raises(AssertionError, match="slope is not d log f"):
        check_decay(Wrong())


def test_values_of_the_paper():
    one = torch.tensor(1.0, dtype=torch.float64)
    assert DECAYS["gaussian"].radius(one, 1e-3).item() == pytest.approx(3.717, abs=1e-3)
    assert DECAYS["cauchy"].radius(one, 1e-3).item() == pytest.approx(31.61, abs=1e-2)
    assert DECAYS["exponential"].radius(one, 1e-3).item() == pytest.approx(6.908, abs=1e-3)
    f_of_one_step = {name: [0.0] * 3 for name in DECAYS}
    for name, decay in DECAYS.items():
        theta = decay.theta_of_radius(torch.tensor([7.0, 15.0, 25.0]), 1e-3)
        f_of_one_step[name] = [round(f, 2) for f in decay.log_prior(torch.tensor(1.0), theta).exp().tolist()]
    assert f_of_one_step == {
        "gaussian": [0.87, 0.97, 0.99],
        "exponential": [0.37, 0.63, 0.76],
        "cauchy": [0.05, 0.18, 0.38],
    }


def test_a_fourth_decay_takes_one_object():
    class Laplace2:
        """f(d) = exp(-(d / s)^4)."""

        name = "quartic"

        def log_prior(self, d2, theta):
            return -(d2.square() / theta**4)

        def slope(self, d2, theta):
            return 4 * d2.square() / theta**5

        def radius(self, theta, tau):
            return theta * (-math.log(tau)) ** 0.25 if tau > 0 else theta * math.inf

        def theta_of_radius(self, radius, tau):
            return radius / (-math.log(tau)) ** 0.25

    decay = Laplace2()
    check_decay(decay)
    xy = positions("continuous", 60)
    q, k, v, grad = inputs(60, 2, 4)
    theta = decay.theta_of_radius(torch.tensor([2.0, 5.0], dtype=torch.float64), 1e-3)
    fast = gradients(posterior_attention, [q, k, v], theta, xy, grad, decay=decay)
    assert_same(
        fast, gradients(posterior_attention_reference, [q, k, v], theta, xy, grad, decay=decay), 1e-10, "quartic"
    )
    single = [t.float() for t in (q, k, v)]
    low = gradients(posterior_attention, single, theta.float(), xy, grad.float(), decay=decay)
    assert all(t.isfinite().all() for t in low)


def test_a_decay_object_stands_for_itself():
    class Mine(type(DECAYS["cauchy"])):
        pass

    mine = Mine()
    assert get_decay(mine) is mine
    assert get_decay("cauchy") is DECAYS["cauchy"]
    with pytest.raises(OptionError, match="unknown decay 'mine'"):
        get_decay("mine")


def test_check_decay_finds_a_wrong_embedding():
    class Wrong(type(DECAYS["gaussian"])):
        def embedding_scale(self, theta):
            return 2 / theta

    with pytest.raises(AssertionError, match="embedding_scale does not give log f"):
        check_decay(Wrong())
