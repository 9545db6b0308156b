"""timm imports torchvision, of which networks need next to nothing. Where there is none that fits this torch, tests
put a stand-in of the imported names in its place; the networks are timm's own."""

import enum
import importlib
import sys
import types

import pytest
from torch import nn


class StandIn(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (nn.Module,), {})


class InterpolationMode(enum.Enum):
    NEAREST, BILINEAR, BICUBIC, BOX, HAMMING, LANCZOS = range(6)


NAMES = ("", ".ops", ".ops.misc", ".datasets", ".transforms", ".transforms.functional", ".utils")


@pytest.fixture(scope="session")
def timm():
    if importlib.util.find_spec("timm") is None:
        pytest.skip("needs the package timm")
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.split(".")[0] in ("torchvision", "timm")]:
            del sys.modules[name]
        for name in NAMES:
            module = sys.modules[f"torchvision{name}"] = StandIn(f"torchvision{name}")
            module.InterpolationMode = InterpolationMode
            if name:
                parent, _, own = name.rpartition(".")
                setattr(sys.modules[f"torchvision{parent}"], own, module)
    return importlib.import_module("timm")
