"""DINOv2 networks as the package transformers saves them, as networks of timm.

Phikon-v2 and Hibou are published in that form. All sizes are read off the weights, heads are 64 wide as in every
DINOv2 network, and no code of the publisher is run. The names differ, with n the number of a block:

=======================================================  ==========================
transformers                                             timm
=======================================================  ==========================
encoder.layer.n.attention.attention.{query, key, value}  blocks.n.attn.qkv, joined
encoder.layer.n.attention.output.dense                   blocks.n.attn.proj
encoder.layer.n.layer_scale1.lambda1                     blocks.n.ls1.gamma
encoder.layer.n.mlp.{weights_in, weights_out} (SwiGLU)   blocks.n.mlp.{fc1, fc2}
embeddings.register_tokens                               reg_token
=======================================================  ==========================

With registers, timm keeps the position of the class token in the class token itself.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import nn

from psamil.slides.encoders.timm_package import import_timm
from psamil.slides.encoders.weights import Weights, fill

HEAD_WIDTH = 64
RENAMED = (
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.register_tokens$", "reg_token"),
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^encoder\.layer\.(\d+)\.", r"blocks.\1."),
    (r"\.attention\.attention\.(query|key|value)\.", r".attn.\1."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"\.mlp\.weights_in\.", ".mlp.fc1."),
    (r"\.mlp\.weights_out\.", ".mlp.fc2."),
    (r"^layernorm\.", "norm."),
)


def dinov2_network(weights: Weights) -> nn.Module:
    """The network in evaluation form: images to the class token after the last normalisation."""
    timm = import_timm()
    packed = "encoder.layer.0.mlp.weights_in.weight" in weights
    weights = with_timm_names(weights)
    dim, _, patch_px, _ = weights["patch_embed.proj.weight"].shape
    options: dict[str, Any] = {"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": nn.SiLU} if packed else {}
    registers = weights["reg_token"].shape[1] if "reg_token" in weights else 0
    grid = math.isqrt(weights["pos_embed"].shape[1] - (registers == 0))
    with torch.device("meta"):
        network = timm.models.VisionTransformer(
            img_size=grid * patch_px,
            patch_size=patch_px,
            embed_dim=dim,
            depth=len({name.split(".")[1] for name in weights if name.startswith("blocks.")}),
            num_heads=dim // HEAD_WIDTH,
            mlp_ratio=weights["blocks.0.mlp.fc1.weight"].shape[0] / dim,
            init_values=1.0,
            reg_tokens=registers,
            no_embed_class=registers > 0,
            num_classes=0,
            **options,
        )
    return fill(network, weights)


def with_timm_names(weights: Weights) -> Weights:
    """The same tensors under the names that timm gives them."""
    renamed = {}
    for name, tensor in weights.items():
        for pattern, replacement in RENAMED:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    renamed.pop("embeddings.mask_token", None)  # of training
    for name in [name for name in renamed if ".attn.query." in name]:
        parts = [renamed.pop(name.replace(".query.", f".{part}.")) for part in ("query", "key", "value")]
        renamed[name.replace(".query.", ".qkv.")] = torch.cat(parts)
    if "reg_token" in renamed:
        renamed["cls_token"] = renamed["cls_token"] + renamed["pos_embed"][:, :1]
        renamed["pos_embed"] = renamed["pos_embed"][:, 1:]
    return renamed
