"""``psamil serve``: runs in the browser, slide by slide."""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import socket
import sys
import threading
import webbrowser
from pathlib import Path

from rich.console import Console

from psamil.errors import MissingExtraError, OptionError
from psamil.serve.guard import LOOPBACK
from psamil.serve.study import Study

EVERYWHERE = ("0.0.0.0", "::")
STOP_S = 2  # that requests under way have to end
MOST_CONNECTIONS = 64


def serve(
    runs: list[Path],
    *,
    features: Path | None = None,
    slides: Path | None = None,
    tile_labels: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8765,
    open: bool = False,
) -> int:
    """Shows runs in the browser: slides with what the models look at in them, and why. Ctrl-C ends it.

    Example: psamil serve run --slides slides

    Everything stays on this computer, and nothing is written. Several runs are compared on the same slides.

    Args:
        runs: run directories of psamil train.
        features: folder of their features; by default the one that the first run was trained on.
        slides: folder of the slides, to see the tissue as well.
        tile_labels: folder of labels of single tiles (<slide>.npy, 0 for normal), to compare models with.
        host: address to listen at. Any other than the default lets other computers in, which need a token.
        port: to listen at; 0 takes one that is free.
        open: open the browser.
    """
    try:
        import uvicorn

        from psamil.serve.app import MODELS, PICTURES, app_of
    except ImportError as error:
        raise MissingExtraError("starlette and uvicorn", "serve", "the viewer") from error

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    listening = _listen(host, port)
    with listening:
        is_local = ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback
        token = None if is_local else secrets.token_urlsafe(24)
        study = Study.open(runs, features, slides, tile_labels)
        app = app_of(study, hosts=None if host in EVERYWHERE else (*LOOPBACK, host), token=token)
        _tell(study, slides, console)
        if token is not None:
            console.print(
                "Other computers can reach the viewer. It shows the slides to whoever has the address below with its "
                "token, and is not encrypted: use it in networks that you trust."
            )
        address = _address(host, listening.getsockname()[1], token)
        Console(highlight=False, soft_wrap=True).print(f"viewer: {address}  (Ctrl-C ends it)", markup=False)
        if open:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=STOP_S,
        )
        try:
            uvicorn.Server(config).run(sockets=[listening])
        except KeyboardInterrupt:  # which the server passes on, once it has ended
            console.print("viewer: ended")
    if any(thread.name.startswith((MODELS, PICTURES)) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # a model cannot be stopped in the middle of a slide, and has nothing to lose
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """A socket that others can connect to already."""
    if not 0 <= port <= 65535:
        raise OptionError(f"port must be from 0 to 65535, got {port}")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise OptionError(f"host {host!r} is no address of this computer") from error
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen()
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise OptionError(
                f"port {port} is in use; choose another with --port, or --port 0 for a free one"
            ) from error
        if error.errno == errno.EACCES:
            raise OptionError(f"port {port} is not yours to take; choose one above 1023 with --port") from error
        raise OptionError(f"cannot listen at {host!r}: {error.strerror}") from error
    return listening


def _address(host: str, port: int, token: str | None) -> str:
    name = socket.gethostname() if host in EVERYWHERE else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + ("" if token is None else f"?token={token}")


def _tell(study: Study, slides: Path | None, console: Console) -> None:
    pictures = sum(slide.picture is not None for slide in study.slides.values())
    labelled = sum(slide.has_labels for slide in study.slides.values())
    seen = f"{len(study.slides)} slides, {pictures} with a picture, {labelled} with labels of tiles"
    console.print(f"{seen}; runs: {', '.join(run.name for run in study.runs.values())}", markup=False)
    if study.outside:
        left_out = f"{study.outside} slides of {slides} are links that lead out of it, and are not shown"
        console.print(f"{left_out}: name the folder that they lead to", markup=False)
