"""Files from the Hugging Face hub, or one line that says what to download, from where, and where to put it."""

from __future__ import annotations

import logging
from pathlib import Path

from psamil.errors import DataError, MissingExtraError

ADDRESS = "https://huggingface.co"


def hub_file(repository: str, file: str, *, licence: str, gated: bool) -> Path:
    """A file of a repository: from the cache of this computer, else from the net."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "encoders", "an encoder of the Hugging Face hub") from error
    try:
        return Path(huggingface_hub.hf_hub_download(repository, file, local_files_only=True))
    except (OSError, LocalEntryNotFoundError):
        pass  # not downloaded yet
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)  # it tells every attempt; one line at the end is enough
    try:
        return Path(huggingface_hub.hf_hub_download(repository, file))
    except GatedRepoError as error:
        cause = "cannot be downloaded without permission"
        raise DataError(f"{ADDRESS}/{repository}", cause, how_to_get(repository, file, licence, gated=True)) from error
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError, ValueError, RuntimeError) as error:
        cause = "is neither on this computer nor could it be downloaded"
        remedy = how_to_get(repository, file, licence, gated=gated)
        raise DataError(f"{ADDRESS}/{repository}/{file}", cause, remedy) from error
    finally:
        log.setLevel(level)


def how_to_get(repository: str, file: str, licence: str, *, gated: bool) -> str:
    """What a user has to do, in one line."""
    ask = "ask for access on that page, run `hf auth login`, then " if gated else ""
    return (
        f"{ask}run `hf download {repository} {file}` where there is a network, "
        f"or copy the file here and name it as the encoder's weights (licence: {licence})"
    )
