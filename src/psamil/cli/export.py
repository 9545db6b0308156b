"""``psamil export``: the models of a run as a folder to share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from psamil.errors import OptionError
from psamil.evaluation.export import Job, export_run
from psamil.evaluation.hub import check_repository, hub_package
from psamil.evaluation.hub import push as upload


def export(
    run: Path,
    *,
    to: Path,
    fold: int | None = None,
    licence: str | None = None,
    push: str | None = None,
    public: bool = False,
) -> Path:
    """Writes the models of a run as a folder to share: weights, model card, how features must be made; no patients.

    Example: psamil export run --to my-model --licence cc-by-nc-4.0

    The folder is in the layout of the Hugging Face hub and holds safetensors, JSON and Markdown, nothing that is run.
    It says nothing about who was in the data. Other verbs take it as --run; so do they take hf://owner/name.

    Args:
        run: finished run directory.
        to: the new folder.
        fold: export the models of this fold alone.
        licence: for the card, as the hub writes it: "apache-2.0", "cc-by-nc-4.0", "other". Without it, the card says
            that there is none yet.
        push: owner/name of a repository of the hub to upload the folder to. One that does not exist is made, private.
        public: make it public instead.

    Returns:
        The folder.
    """
    if public and push is None:
        raise OptionError("--public is for a repository of the hub: name it with --push owner/name")
    if push is not None:  # known before the work begins
        check_repository(push)
        hub_package()
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def track(jobs: Sequence[Job]) -> Iterable[Job]:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            yield from bar.track(jobs, description="exporting models")
        if console.is_terminal:
            console.print("Intervals over patients for the card ...")

    export_run(run, to, fold=fold, licence=licence, repository=push, progress=track)
    if licence is None:
        console.print(f"The card names no licence yet: give --licence, or write it into {to / 'README.md'}.")
    if push is not None:
        address = upload(to, push, private=not public)
        console.print(f"uploaded to {address}", markup=False)
    return to
