"""The package timm, imported where it is needed."""

from __future__ import annotations

from typing import Any

import torch

from psamil.errors import MissingExtraError, OptionError


def import_timm() -> Any:
    """The package, or the error that says how to get it."""
    try:
        import timm
        import timm.layers
        import timm.models
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("timm", "torchvision", "huggingface_hub"):
            raise
        raise MissingExtraError(str(error.name).split(".")[0], "encoders", "this encoder") from error
    except RuntimeError as error:  # of a torchvision built for another torch
        cause = (str(error).splitlines() or [""])[0]
        fits = f"install the torchvision that belongs to torch {torch.__version__}"
        raise OptionError(
            f"the package timm, which this encoder needs, cannot be imported ({cause}); {fits}"
        ) from error
    return timm
