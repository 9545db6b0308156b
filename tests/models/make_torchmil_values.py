"""Writes torchmil_values.json, which tests of ABMIL and Sm-MIL are held against.

    pip install --no-deps --target torchmil-1.0.2 torchmil==1.0.2 tensordict orjson pyvers torchmetrics \\
        lightning-utilities
    python -m tests.models.make_torchmil_values torchmil-1.0.2

torchmil is no dependency of the tests: it is wrong elsewhere, and brings what is not needed. It is used here as its
documentation has it, in float64, with the input and weights of outside.py. The adjacency is made here, by hand.
"""

import argparse
import importlib.metadata
import sys
from pathlib import Path

import torch
from torch import Tensor

from psamil.files import write_json
from tests.models.outside import TORCHMIL_FILE, XY, fill, wave


def normalised_adjacency() -> Tensor:
    """D^-1/2 A D^-1/2 of tiles that touch, with corners."""
    distance = (XY[:, None] - XY).abs().amax(2)
    adjacency = ((distance > 0) & (distance <= 1)).double()
    degree = adjacency.sum(1)
    return adjacency / (degree[:, None] * degree).sqrt()


@torch.no_grad()
def values() -> dict[str, dict[str, Tensor]]:
    from torchmil.models.abmil import ABMIL
    from torchmil.nn import SmTransformerEncoder
    from torchmil.nn.attention.sm_attention_pool import SmAttentionPool
    from torchmil.nn.sm import Sm

    a_hat, x = normalised_adjacency()[None], wave(1, 7, 8, k=0.37)
    found = {
        "sm approximate 0.5": {"g": Sm(mode="approx", alpha=0.5).double()(wave(1, 7, 2), a_hat)[0]},
        "sm exact 0.9": {"g": Sm(mode="exact", alpha=0.9).double()(wave(1, 7, 2), a_hat)[0]},
    }
    for where in ("early", "mid", "late"):
        pool = SmAttentionPool(8, 3, act="tanh", sm_where=where).double()
        fill([None, *list(pool.parameters())[1:]])  # the first is the coefficient of Sm
        z, f = pool(x, a_hat, return_att=True)
        found[f"sm pool {where}"] = {"z": z[0], "f": f[0]}
    encoder = SmTransformerEncoder(8, att_dim=8, n_heads=4, n_layers=2, add_self=True).double()
    fill([None if name.endswith("coef") else parameter for name, parameter in encoder.named_parameters()])
    pool = SmAttentionPool(8, 3, act="tanh", sm_where="early").double()
    fill([None, *list(pool.parameters())[1:]])
    z, f = pool(encoder(x, a_hat), a_hat, return_att=True)
    found["sm transformer"] = {"z": z[0], "f": f[0]}
    for kind, gated in (("plain", False), ("gated", True)):
        abmil = ABMIL(in_shape=(8,), att_dim=3, gated=gated).double()
        fill(list(abmil.parameters()))
        logit, f = abmil(x, return_att=True)
        found[f"abmil {kind}"] = {"logits": logit, "f": f[0]}
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torchmil", type=Path, help="folder that it was installed into")
    sys.path.append(str(parser.parse_args().torchmil))
    stored = {name: {key: value.tolist() for key, value in of.items()} for name, of in values().items()}
    write_json(TORCHMIL_FILE, {"torchmil": importlib.metadata.version("torchmil"), "values": stored})
