"""Exported models on the Hugging Face hub: ``hf://owner/name``, or ``hf://owner/name@revision``.

Only safetensors, JSON and Markdown go up and come down: no code, no pickle.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from psamil.errors import DataError, MissingExtraError, OptionError

ADDRESS = "https://huggingface.co"
EXTRA = "hub"
PATTERNS = ["*.safetensors", "*.json", "*.md"]
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
REMOTE = re.compile(r"hf:/{1,2}([^@]*)(?:@(.+))?")  # a pathlib.Path makes one slash of two


def local_folder(path: str | Path) -> Path:
    """The path itself; for models on the hub, the folder of this computer to which they were downloaded."""
    found = REMOTE.fullmatch(Path(path).as_posix())
    if found is None:
        return Path(path)
    repository, revision = found.groups()
    check_repository(repository)
    hub = hub_package()
    login = f"check the name; if it is private or gated, run `hf auth login` ({ADDRESS}/{repository})"
    elsewhere = f"run `hf download {repository} --local-dir FOLDER` where there is a network and name the folder"
    with _failures(f"hf://{repository}", "is neither on this computer nor could it be downloaded", login, elsewhere):
        return Path(hub.snapshot_download(repository, revision=revision, allow_patterns=PATTERNS))


def push(folder: Path, repository: str, *, private: bool) -> str:
    """Uploads a folder of exported models; makes the repository if there is none. Returns its address.

    Models that the repository had before and the folder does not have are removed from it; its history keeps them.
    """
    check_repository(repository)
    hub = hub_package()
    login = "run `hf auth login` with a token that may write there"
    elsewhere = f"{folder} is complete: run `hf upload {repository} {folder}` where there is a network"
    with _failures(f"{ADDRESS}/{repository}", "could not be written", login, elsewhere):
        hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=PATTERNS,
            delete_patterns="folds/*",
            commit_message="Models exported by psamil",
        )
    return f"{ADDRESS}/{repository}"


def check_repository(repository: str) -> None:
    """OptionError for a name that the hub cannot have."""
    if not REPOSITORY.fullmatch(repository):
        raise OptionError(f"a repository of the hub is named owner/name, got {repository!r}")


def hub_package() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", EXTRA, "sharing models on the Hugging Face hub") from error
    return huggingface_hub


@contextlib.contextmanager
def _failures(what: str, cause: str, login: str, elsewhere: str) -> Iterator[None]:
    """One line for whatever the hub or the network refuses."""
    from huggingface_hub import errors

    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)  # it tells every attempt; one line at the end is enough
    refused = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.GatedRepoError)
    try:
        yield
    except refused as error:
        raise DataError(what, f"{cause}: it does not exist, or not for you", login) from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        known = login if status in (401, 403) else elsewhere
        raise DataError(what, f"{cause}: the hub answers {status}", known) from error
    except Exception as error:  # of the network: their types depend on the version of huggingface_hub
        raise DataError(what, f"{cause} ({type(error).__name__})", elsewhere) from error
    finally:
        log.setLevel(level)
