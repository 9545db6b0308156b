"""Small DINOv2 networks with reproducible weights, under the names of the package transformers.

Run as a script where transformers is installed, it writes ``dinov2_features.json``: what transformers computes.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

FEATURES = Path(__file__).with_name("dinov2_features.json")
SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
KINDS = {"plain": (0, False), "registers and SwiGLU": (4, True)}  # registers, SwiGLU


def made_weights(kind):
    """Names of transformers 4, in which the published files are written."""
    registers, swiglu = KINDS[kind]
    dim, hidden = 128, 344 if swiglu else 512  # as transformers rounds 2/3 of 4 x 128
    shapes = {
        "embeddings.cls_token": (1, 1, dim),
        "embeddings.mask_token": (1, dim),
        "embeddings.position_embeddings": (1, 17, dim),
        "embeddings.patch_embeddings.projection.weight": (dim, 3, 14, 14),
        "embeddings.patch_embeddings.projection.bias": (dim,),
        "layernorm.weight": (dim,),
        "layernorm.bias": (dim,),
    }
    if registers:
        shapes["embeddings.register_tokens"] = (1, registers, dim)
    for n in range(2):
        layer = f"encoder.layer.{n}"
        for part in ("attention.attention.query", "attention.attention.key", "attention.attention.value"):
            shapes |= {f"{layer}.{part}.weight": (dim, dim), f"{layer}.{part}.bias": (dim,)}
        shapes |= {f"{layer}.attention.output.dense.weight": (dim, dim), f"{layer}.attention.output.dense.bias": (dim,)}
        for part in ("1", "2"):
            shapes |= {f"{layer}.norm{part}.weight": (dim,), f"{layer}.norm{part}.bias": (dim,)}
            shapes[f"{layer}.layer_scale{part}.lambda1"] = (dim,)
        first, last = ("weights_in", "weights_out") if swiglu else ("fc1", "fc2")
        width = 2 * hidden if swiglu else hidden
        shapes |= {f"{layer}.mlp.{first}.weight": (width, dim), f"{layer}.mlp.{first}.bias": (width,)}
        shapes |= {f"{layer}.mlp.{last}.weight": (dim, hidden), f"{layer}.mlp.{last}.bias": (dim,)}
    draws = np.random.default_rng(7)
    return {name: torch.tensor(draws.normal(0.1, 0.3, shape), dtype=torch.float32) for name, shape in shapes.items()}


def made_images():
    return torch.tensor(np.random.default_rng(8).normal(size=(2, 3, 56, 56)), dtype=torch.float32)


def features_of_transformers(kind):
    import transformers

    registers, swiglu = KINDS[kind]
    name = "Dinov2WithRegisters" if registers else "Dinov2"
    options = SIZES | {"use_swiglu_ffn": swiglu} | ({"num_register_tokens": registers} if registers else {})
    with tempfile.TemporaryDirectory() as folder:
        getattr(transformers, f"{name}Config")(**options).save_pretrained(folder)
        save_file(made_weights(kind), Path(folder) / "model.safetensors", metadata={"format": "pt"})
        model, told = getattr(transformers, f"{name}Model").from_pretrained(folder, output_loading_info=True)
    assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    with torch.inference_mode():
        return model.eval()(made_images()).last_hidden_state[:, 0]


if __name__ == "__main__":
    FEATURES.write_text(json.dumps({kind: features_of_transformers(kind)[:, :16].tolist() for kind in KINDS}) + "\n")
