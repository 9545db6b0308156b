"""Networks that are a network of timm and a little more: CONCH v1.5, CTransPath, and Virchow2's two readings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psamil.slides.encoders.timm_package import import_timm
from psamil.slides.encoders.weights import Weights, fill


class ClassAndMean(nn.Module):
    """The class token beside the mean of the patch tokens: twice as wide."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.network.forward_features(images)  # (b, class + registers + patches, dim)
        patches = tokens[:, self.network.num_prefix_tokens :]
        return torch.cat([tokens[:, 0], patches.mean(1)], dim=1)


class AttentionPooling(nn.Module):
    """One learned query that looks at all tokens through 8 heads."""

    def __init__(self, dim: int, token_dim: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Parameter(torch.zeros(1, dim))
        self.ln_k, self.ln_q = nn.LayerNorm(token_dim), nn.LayerNorm(dim)
        self.to_q, self.to_kv = nn.Linear(dim, dim, bias=False), nn.Linear(token_dim, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        q = self.to_q(self.ln_q(self.query)).expand(len(tokens), 1, -1)
        k, v = self.to_kv(self.ln_k(tokens)).chunk(2, dim=-1)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))  # (b, heads, tokens, d)
        return self.to_out(F.scaled_dot_product_attention(q, k, v).flatten(1))


class Conch(nn.Module):
    """The image side of CONCH v1.5: a ViT-L/16 for 448 px, attention pooling to 768, a normalisation.

    The names are those of the published weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trunk = import_timm().create_model(
            "vit_large_patch16_224", img_size=448, init_values=1.0, num_classes=0, global_pool=""
        )
        self.attn_pool_contrast = AttentionPooling(768, 1024)
        self.ln_contrast = nn.LayerNorm(768)

    def forward(self, images: Tensor) -> Tensor:
        return self.ln_contrast(self.attn_pool_contrast(self.trunk.forward_features(images)))


def conch_network(weights: Weights) -> nn.Module:
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith("trunk.head.")}
    with torch.device("meta"):
        network = Conch()
    position, wanted = weights.get("trunk.pos_embed"), network.trunk.pos_embed.shape[1]
    if position is not None and position.shape[1] != wanted:
        weights["trunk.pos_embed"] = resized_positions(position, round((wanted - 1) ** 0.5))
    return fill(network, weights)


def resized_positions(position: Tensor, side: int) -> Tensor:
    """Embeddings of a class token and a square of patches, (1, 1 + n, dim), for a square of another side."""
    old = round((position.shape[1] - 1) ** 0.5)
    square = position[:, 1:].unflatten(1, (old, old)).permute(0, 3, 1, 2).float()
    square = F.interpolate(square, size=(side, side), mode="bicubic")
    return torch.cat([position[:, :1].float(), square.flatten(2).transpose(1, 2)], dim=1)


class ConvolutionStem(nn.Module):
    """What CTransPath has in place of Swin's patch embedding: two 3 × 3 convolutions that halve, then a 1 × 1."""

    def __init__(self, embed_dim: int, norm_layer: Any = None, **unused: Any) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for width in (embed_dim // 8, embed_dim // 4):
            halved = nn.Conv2d(before, width, 3, stride=2, padding=1, bias=False)
            layers += [halved, nn.BatchNorm2d(width), nn.ReLU()]
            before = width
        self.proj = nn.Sequential(*layers, nn.Conv2d(before, embed_dim, 1))
        self.norm = norm_layer(embed_dim) if norm_layer else nn.Identity()
        self.grid_size = (56, 56)  # of 224 px

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.proj(images).permute(0, 2, 3, 1))


def ctranspath_network(weights: Weights) -> nn.Module:
    """A Swin-T with another stem. timm itself turns the names of older Swin checkpoints into its own."""
    timm = import_timm()
    network = timm.create_model("swin_tiny_patch4_window7_224", num_classes=0, embed_layer=ConvolutionStem)
    converted = timm.models.swin_transformer.checkpoint_filter_fn(weights, network)
    return fill(network, {name: tensor for name, tensor in converted.items() if not name.startswith("head.")})
