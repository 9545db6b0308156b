"""An encoder for tests of the demo: colours of a tile in rough places."""

from torch import nn

from psamil.slides.encoders import Preprocessing


def small_encoder() -> tuple[nn.Module, Preprocessing]:
    return nn.Flatten(), Preprocessing(4)
