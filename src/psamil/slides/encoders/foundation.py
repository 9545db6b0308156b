"""Foundation models of pathology by name. The product ships none of their weights.

Names are those of TRIDENT, so that features of both lie in folders of the same name. Where the facts are from:

- H-optimus-0: its model card on the Hugging Face hub (call, normalisation, 0.5 um per pixel, float16, licence).
- UNI, Virchow2: the calls of their model cards as they are quoted in public code, and TRIDENT.
- UNI2-h, Prov-GigaPath, H-optimus-1, CONCH v1.5: architecture, options and normalisation from TRIDENT's loader for
  local files, which is published by the authors of UNI and CONCH. Prov-GigaPath takes the centre of 224 of 256 px.
- Lunit: architecture and licence from the hub pages of 1aurent's conversion; normalisation as in public code that
  uses it (the one its authors' README gives).
- Phikon-v2, Hibou: see :mod:`psamil.slides.encoders.dinov2_names`; normalisation from TRIDENT.
- CTransPath: 1aurent's conversion, a Swin-T with a convolution stem; 1 um per pixel is what its authors advise.
- Licences, gates and micrometres per pixel: the model cards, or public tables that quote them. 0.5 stands for 20x.

``dynamic_img_size`` of the model cards is left out: it matters for other sizes of input only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from psamil.errors import DataError
from psamil.slides.encoders.cards import EncoderCard
from psamil.slides.encoders.dinov2_names import dinov2_network
from psamil.slides.encoders.hub import ADDRESS, hub_file
from psamil.slides.encoders.preprocessing import Preprocessing
from psamil.slides.encoders.timm_package import import_timm
from psamil.slides.encoders.vision_towers import ClassAndMean, conch_network, ctranspath_network
from psamil.slides.encoders.weights import Weights, fill, read_weights

BIN, SAFE = "pytorch_model.bin", "model.safetensors"
NON_COMMERCIAL = "CC-BY-NC-ND-4.0, no commercial use"

IMAGENET = Preprocessing(224)
IMAGENET_BICUBIC = Preprocessing(224, interpolation="bicubic")
LUNIT = Preprocessing(224, (0.70322989, 0.53606487, 0.66096631), (0.21716536, 0.26081574, 0.20723464), "bicubic")
H_OPTIMUS = Preprocessing(224, (0.707223, 0.578729, 0.703617), (0.211883, 0.230117, 0.177517), "bicubic")
HIBOU = Preprocessing(224, (0.7068, 0.5755, 0.722), (0.195, 0.2316, 0.1816), "bicubic")

NetworkOf = Callable[[Weights], nn.Module]


def vit(architecture: str, *, swiglu: bool = False, class_and_mean: bool = False, **options: Any) -> NetworkOf:
    """A vision transformer of timm without its classifier, for 224 px."""

    def network(weights: Weights) -> nn.Module:
        timm = import_timm()
        packed = {"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": nn.SiLU} if swiglu else {}
        with torch.device("meta"):
            made = timm.create_model(
                architecture, img_size=224, num_classes=0, global_pool="token", **packed, **options
            )
        fill(made, weights)
        return ClassAndMean(made) if class_and_mean else made

    return network


VIRCHOW2: dict[str, Any] = {"init_values": 1e-5, "reg_tokens": 4, "mlp_ratio": 5.3375, "swiglu": True}
UNI2: dict[str, Any] = {
    "patch_size": 14,
    "depth": 24,
    "num_heads": 24,
    "embed_dim": 1536,
    "mlp_ratio": 2.66667 * 2,
    "init_values": 1e-5,
    "no_embed_class": True,
    "reg_tokens": 8,
    "swiglu": True,
}
GIGAPATH: dict[str, Any] = {"patch_size": 16, "embed_dim": 1536, "depth": 40, "num_heads": 24, "mlp_ratio": 5.33334}
H_OPTIMUS_VIT = vit("vit_giant_patch14_reg4_dinov2", init_values=1e-5)


def foundation_models() -> list[EncoderCard]:
    """The cards, in the order in which users are shown them."""
    lunit: dict[str, Any] = {
        "dim": 384,
        "preprocessing": LUNIT,
        "licence": "Lunit public licence, no commercial use",
        "gated": False,
    }
    half: dict[str, Any] = {"precision": "float16"}
    wide: dict[str, Any] = {"tile_px": 256}
    return [
        _card("lunit-vits8", "1aurent/vit_small_patch8_224.lunit_dino", SAFE, vit("vit_small_patch8_224"), **lunit),
        _card("lunit-vits16", "1aurent/vit_small_patch16_224.lunit_dino", SAFE, vit("vit_small_patch16_224"), **lunit),
        _card(
            "uni_v1", "MahmoodLab/UNI", BIN, vit("vit_large_patch16_224", init_values=1e-5), dim=1024, **half, **wide
        ),
        _card(
            "uni_v2",
            "MahmoodLab/UNI2-h",
            BIN,
            vit("vit_giant_patch14_224", **UNI2),
            dim=1536,
            precision="bfloat16",
            **wide,
        ),
        _card(
            "gigapath",
            "prov-gigapath/prov-gigapath",
            BIN,
            vit("vit_giant_patch14_dinov2", **GIGAPATH),
            dim=1536,
            preprocessing=Preprocessing(224, interpolation="bicubic", resize_px=256),
            licence="Apache-2.0, its card restricts use to research",
            **half,
            **wide,
        ),
        _card(
            "conch_v15",
            "MahmoodLab/conchv1_5",
            "pytorch_model_vision.bin",
            conch_network,
            dim=768,
            preprocessing=Preprocessing(448),
            tile_px=512,
            **half,
        ),
        _card(
            "virchow2",
            "paige-ai/Virchow2",
            BIN,
            vit("vit_huge_patch14_224", class_and_mean=True, **VIRCHOW2),
            dim=2560,
            preprocessing=IMAGENET_BICUBIC,
            **half,
        ),
        _card(
            "virchow2-cls",
            "paige-ai/Virchow2",
            BIN,
            vit("vit_huge_patch14_224", **VIRCHOW2),
            dim=1280,
            preprocessing=IMAGENET_BICUBIC,
            **half,
        ),
        _card(
            "phikon_v2",
            "owkin/phikon-v2",
            SAFE,
            dinov2_network,
            dim=1024,
            preprocessing=IMAGENET_BICUBIC,
            licence="Owkin licence, no commercial use",
            gated=False,
        ),
        _card(
            "hoptimus0",
            "bioptimus/H-optimus-0",
            BIN,
            H_OPTIMUS_VIT,
            dim=1536,
            preprocessing=H_OPTIMUS,
            licence="Apache-2.0",
            **half,
        ),
        _card("hoptimus1", "bioptimus/H-optimus-1", BIN, H_OPTIMUS_VIT, dim=1536, preprocessing=H_OPTIMUS, **half),
        _card("hibou_b", "histai/hibou-b", SAFE, dinov2_network, dim=768, preprocessing=HIBOU, licence="Apache-2.0"),
        _card("hibou_l", "histai/hibou-L", SAFE, dinov2_network, dim=1024, preprocessing=HIBOU, licence="Apache-2.0"),
        _card(
            "ctranspath",
            "1aurent/swin_tiny_patch4_window7_224.CTransPath",
            SAFE,
            ctranspath_network,
            dim=768,
            licence="GPL-3.0, its authors allow academic use only",
            gated=False,
            mpp=1.0,
            **wide,
        ),
    ]


def _card(
    name: str,
    repository: str,
    file: str,
    network: NetworkOf,
    *,
    dim: int,
    preprocessing: Preprocessing = IMAGENET,
    licence: str = NON_COMMERCIAL,
    gated: bool = True,
    mpp: float = 0.5,
    tile_px: int = 224,
    precision: str = "float32",
) -> EncoderCard:
    def build(weights: Path | None) -> nn.Module:
        import_timm()  # before gigabytes are downloaded
        path = weights or hub_file(repository, file, licence=licence, gated=gated)
        path = path / file if path.is_dir() else path
        try:
            return network(read_weights(path))
        except (ValueError, KeyError) as error:
            cause = f"does not hold the weights of {name} ({error})"
            raise DataError(path, cause, f"download {file} from {ADDRESS}/{repository}") from error

    return EncoderCard(
        name=name,
        dim=dim,
        preprocessing=preprocessing,
        build=build,
        source=f"{ADDRESS}/{repository}",
        licence=licence,
        gated=gated,
        mpp=mpp,
        tile_px=tile_px,
        precision=precision,
    )
