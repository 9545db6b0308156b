"""The web application of the viewer. See docs/viewer.md for what it shows, and for who may see it.

GET /                                    the page; /static/NAME its files
GET /api/run                             runs and slides
GET /api/slides/ID                       one slide: picture, models, heads, layers
GET /api/slides/ID/overlay.bin?model=M   numbers of all tiles (:mod:`psamil.serve.overlay`)
GET /api/slides/ID/labels.bin            uint8 (n,) labels of tiles
GET /api/slides/ID/tiles/INDEX?model=M   one tile and what each head looks at from there; INDEX.jpg its picture
GET /api/slides/ID/image/L/C_R.jpg       a tile of the picture (:mod:`psamil.serve.pictures`)
GET /api/slides/ID/geojson?model=M&layer=KEY[&threshold_percentile=P]
                                         for QuPath: all tiles with their numbers, or regions of tiles from P on

Errors are JSON: {"error": "..."}.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import mimetypes
import re
import sys
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from psamil.errors import DataError, PsamilError
from psamil.explain.qupath import LARGE_BYTES
from psamil.files import without_nan
from psamil.serve.byte_cache import ByteCache
from psamil.serve.descriptions import describe_slide, describe_study
from psamil.serve.explained import Explained, Explainer
from psamil.serve.guard import HEADERS, LOOPBACK, Guard
from psamil.serve.overlay import pack_overlay
from psamil.serve.pictures import Pictures
from psamil.serve.study import StudiedRun, StudiedSlide, Study

STATIC = Path(__file__).with_name("static")
STATIC_ENDINGS = (".html", ".js", ".css", ".svg", ".png", ".txt")
MODELS, PICTURES = "models of the viewer", "pictures of the viewer"  # names of threads
PICTURE_THREADS = 4
OVERLAY_CACHE_BYTES = 64 << 20
WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
DECIMAL_NUMBER = re.compile(r"[0-9]{1,3}(\.[0-9]{1,6})?")

Result = TypeVar("Result")


def create_app(
    runs: Sequence[Path],
    *,
    features: Path | None = None,
    slides: Path | None = None,
    tile_labels: Path | None = None,
    hosts: Collection[str] | None = LOOPBACK,
    token: str | None = None,
) -> Starlette:
    """The viewer of some runs.

    Args:
        runs: run directories over the same slides.
        features: folder of their features; by default the one that the first run was trained on.
        slides: folder of the slides, for their pictures.
        tile_labels: folder of labels of tiles (``<slide>.npy``).
        hosts: names under which it may be asked; None for any, which needs a token.
        token: what a browser has to show once: ``/?token=...``.
    """
    return app_of(Study.open(runs, features, slides, tile_labels), hosts=hosts, token=token)


def app_of(study: Study, *, hosts: Collection[str] | None = LOOPBACK, token: str | None = None) -> Starlette:
    """The viewer of a study; see :func:`create_app`."""
    viewer = Viewer(study)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        viewer.close()

    slide = "/api/slides/{slide}"
    routes = {
        "/": viewer.page,
        "/static/{name}": viewer.static,
        "/api/run": viewer.run,
        slide: viewer.slide,
        f"{slide}/overlay.bin": viewer.overlay,
        f"{slide}/labels.bin": viewer.labels,
        f"{slide}/tiles/{{index}}.jpg": viewer.tile_picture,
        f"{slide}/tiles/{{index}}": viewer.tile,
        f"{slide}/image/{{level}}/{{column}}_{{row}}.jpg": viewer.image,
        f"{slide}/geojson": viewer.geojson,
    }
    app = Starlette(
        routes=[Route(path, endpoint, methods=["GET"]) for path, endpoint in routes.items()],
        middleware=[Middleware(Guard, hosts=hosts, token=token)],
        exception_handlers={HTTPException: _told, PsamilError: _unusable, Exception: _our_fault},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


class Viewer:
    """Answers requests. Models compute in one thread, slides are read in a few; the loop itself waits for neither."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._pictures = Pictures()
        self._explainer = Explainer(study, self._pictures)
        self._models = ThreadPoolExecutor(1, MODELS)
        self._readers = ThreadPoolExecutor(PICTURE_THREADS, PICTURES)
        self._free_readers = asyncio.Semaphore(PICTURE_THREADS)
        self._overlays: ByteCache[bytes] = ByteCache(OVERLAY_CACHE_BYTES, len)
        self._files = {path.name: path for path in sorted(STATIC.iterdir()) if path.suffix in STATIC_ENDINGS}

    def close(self) -> None:
        for pool in (self._models, self._readers):
            pool.shutdown(wait=False, cancel_futures=True)
        self._pictures.close()

    async def page(self, request: Request) -> Response:
        return await self._file(request, "index.html")

    async def static(self, request: Request) -> Response:
        return await self._file(request, request.path_params["name"])

    async def run(self, request: Request) -> Response:
        return _json(await self._in(self._models, describe_study, self._study))

    async def slide(self, request: Request) -> Response:
        return _json(await self._in(self._models, self._describe, self._slide(request)))

    async def overlay(self, request: Request) -> Response:
        slide, run = self._slide(request), self._run(request)
        packed = await self._in(self._models, self._packed, slide, run)
        headers = {"vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            packed = await self._in(self._readers, self._compressed, slide, run, packed)
            headers["content-encoding"] = "gzip"
        return _bytes(request, packed, "application/octet-stream", headers)

    async def labels(self, request: Request) -> Response:
        slide, run = self._slide(request), self._run(request)
        labels = await self._in(self._models, self._explainer.labels, slide, run)
        if labels is None:
            raise HTTPException(404, "this slide has no labels of tiles")
        return _bytes(request, labels.astype(np.uint8).tobytes(), "application/octet-stream")

    async def tile(self, request: Request) -> Response:
        slide, run = self._slide(request), self._run(request)
        explained = await self._in(self._models, self._explained, slide, run)
        index = _whole(request, "index", explained.n)
        return _json(await self._in(self._models, explained.tile, index))

    async def tile_picture(self, request: Request) -> Response:
        slide, run = self._slide(request), self._run(request)
        path = _picture(slide)
        explained = await self._in(self._models, self._explained, slide, run)
        if explained.pyramid is None:
            raise HTTPException(404, explained.picture_note)
        x, y = explained.places.corners[_whole(request, "index", explained.n)].tolist()
        jpeg = await self._read(request, self._pictures.tile_view, path, x, y, explained.places.size)
        return Response(jpeg, media_type="image/jpeg", headers={"cache-control": "no-store"})

    async def image(self, request: Request) -> Response:
        path = _picture(self._slide(request))
        place = [_whole(request, name) for name in ("level", "column", "row")]
        jpeg = await self._read(request, self._pictures.pyramid_tile, path, *place)
        if jpeg is None:
            raise HTTPException(404, "the picture has no such tile")
        return Response(jpeg, media_type="image/jpeg", headers={"cache-control": "no-store"})

    async def geojson(self, request: Request) -> Response:
        slide, run = self._slide(request), self._run(request)
        key, least = _parameter(request, "layer") or "scores", _percentile(request)
        explained = await self._in(self._models, self._explained, slide, run)
        if key not in explained.layers:
            raise HTTPException(404, "there is no such layer")
        content = await self._in(self._readers, explained.geojson, slide.name, key, least)
        kind = "tiles" if least is None else "regions"
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", f"{slide.name}-{run.name}-{key}-{kind}.geojson")
        media_type = "application/geo+json"
        if len(content) > LARGE_BYTES:  # QuPath reads both
            content, name, media_type = (
                await self._in(self._readers, gzip.compress, content),
                f"{name}.gz",
                "application/gzip",
            )
        headers = {"content-disposition": f'attachment; filename="{name}"', "cache-control": "no-store"}
        return Response(content, media_type=media_type, headers=headers)

    async def _file(self, request: Request, name: str) -> Response:
        if name not in self._files:
            raise HTTPException(404, "there is no such file")
        content = await self._in(self._readers, self._files[name].read_bytes)
        return _bytes(request, content, mimetypes.guess_type(name)[0] or "application/octet-stream")

    def _slide(self, request: Request) -> StudiedSlide:
        try:
            return self._study.slides[request.path_params["slide"]]
        except KeyError:
            raise HTTPException(404, "there is no such slide") from None

    def _run(self, request: Request) -> StudiedRun:
        run = self._study.runs.get(_parameter(request, "model") or next(iter(self._study.runs)))
        if run is None:
            raise HTTPException(404, "there is no such model")
        return run

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[..., Result], *args: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(pool, work, *args)

    async def _read(self, request: Request, work: Callable[..., Result], *args: Any) -> Result:
        """Work on a slide, unless nobody waits for it any more: who moves on quickly leaves many requests behind."""
        async with self._free_readers:
            if await request.is_disconnected():
                raise HTTPException(499, "the browser is gone")
            return await self._in(self._readers, work, *args)

    def _explained(self, slide: StudiedSlide, run: StudiedRun) -> Explained:
        return self._explainer.explain(slide, run)

    def _packed(self, slide: StudiedSlide, run: StudiedRun) -> bytes:
        def pack() -> bytes:
            explained = self._explained(slide, run)
            return pack_overlay(explained.places.corners, {key: v for key, (_, v) in explained.layers.items()})

        return self._overlays.get((slide.id, run.id), pack)

    def _compressed(self, slide: StudiedSlide, run: StudiedRun, packed: bytes) -> bytes:
        return self._overlays.get((slide.id, run.id, "gzip"), lambda: gzip.compress(packed, 1, mtime=0))

    def _describe(self, slide: StudiedSlide) -> dict[str, Any]:
        return describe_slide(slide, [(run, self._explained(slide, run)) for run in self._study.runs.values()])


def _picture(slide: StudiedSlide) -> Path:
    if slide.picture is None:
        raise HTTPException(404, "this slide has no picture")
    return slide.picture


def _parameter(request: Request, name: str) -> str | None:
    values = request.query_params.getlist(name)
    if len(values) > 1:
        raise HTTPException(400, f"{name} is given more than once")
    return values[0] if values else None


def _percentile(request: Request) -> float | None:
    text = _parameter(request, "threshold_percentile")
    if text is None:
        return None
    if not DECIMAL_NUMBER.fullmatch(text) or float(text) > 100:
        raise HTTPException(400, "threshold_percentile must be a number from 0 to 100")
    return float(text)


def _whole(request: Request, name: str, below: int | None = None) -> int:
    text = request.path_params[name]
    if not WHOLE_NUMBER.fullmatch(text) or (below is not None and int(text) >= below):
        raise HTTPException(404, f"there is no such {name}")
    return int(text)


def _json(content: Any) -> Response:
    return JSONResponse(without_nan(content), headers={"cache-control": "no-store"})


def _bytes(request: Request, content: bytes, media_type: str, headers: dict[str, str] | None = None) -> Response:
    """Kept by browsers, who ask each time whether it is still the same."""
    tag = f'W/"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
    shown = {"etag": tag, "cache-control": "private, no-cache", **(headers or {})}
    if tag in (part.strip() for part in request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers=shown)
    return Response(content, media_type=media_type, headers=shown)


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, {"cache-control": "no-store"})


async def _unusable(request: Request, error: Exception) -> Response:
    """A file that cannot be used. Who looks at slides learns why; whoever started the server, also where it is."""
    print(f"psamil: {error}", file=sys.stderr)
    cause = "; ".join(filter(None, (error.cause, error.remedy))) if isinstance(error, DataError) else str(error)
    return JSONResponse({"error": cause}, 422, {"cache-control": "no-store"})


async def _our_fault(request: Request, error: Exception) -> Response:
    """The traceback goes to whoever started the server."""
    return JSONResponse({"error": "the viewer failed; see the output of psamil serve"}, 500, HEADERS)
