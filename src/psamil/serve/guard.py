"""Requests that are refused before anything else is done, and headers that every answer has.

- Only GET and HEAD: nothing can be changed.
- Only plain paths: no percent signs, backslashes or names that begin with a dot, which no address of the viewer has.
- Only under a name of this computer. A page from elsewhere whose name is made to point here (DNS rebinding) is refused.
- With a token, only those who had it once in an address; a cookie then stands for it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
COOKIE = "psamil-token"
LONGEST_QUERY = 512
PLAIN_PATH = re.compile(rb"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*/?")
HOST = re.compile(r"(\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(:\d{1,5})?", re.IGNORECASE)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """Around an ASGI application.

    Args:
        app: what answers the requests that are let through.
        hosts: names under which it may be asked; None for any, which needs a token.
        token: what a browser has to show once.
    """

    def __init__(self, app: App, hosts: Collection[str] | None = LOOPBACK, token: str | None = None) -> None:
        if hosts is None and token is None:
            raise ValueError("a server that answers to any name needs a token")
        self._app, self._token = app, token
        self._hosts = None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return None  # web sockets: the server then refuses them
        refused = self._refusal(scope)
        if refused is not None:
            return await _answer(send, *refused)
        if self._token is not None and not self._has_cookie(scope):
            if scope["path"] == "/" and self._has_token(scope):
                cookie = f"{COOKIE}={self._token}; Path=/; HttpOnly; SameSite=Strict"
                return await _answer(send, 303, "", {"location": "/", "set-cookie": cookie})
            return await _answer(send, 403, "open the whole address that psamil serve has printed, with its token")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                had = {name for name, _ in message["headers"]}
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in had]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        return await self._app(scope, receive, send_with_headers)

    def _refusal(self, scope: Message) -> tuple[int, str] | None:
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "the viewer is read-only: only GET and HEAD are answered"
        hosts = _headers(scope, b"host")
        name = _host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None or (self._hosts is not None and name not in self._hosts):
            return 421, "the viewer does not answer under this name"
        if not PLAIN_PATH.fullmatch(scope["raw_path"].partition(b"?")[0]):
            return 404, "there is nothing here"
        if len(scope["query_string"]) > LONGEST_QUERY:
            return 414, "the address is too long"
        return None

    def _has_cookie(self, scope: Message) -> bool:
        try:
            found = SimpleCookie("; ".join(_headers(scope, b"cookie"))).get(COOKIE)
        except CookieError:
            return False
        return found is not None and self._is_token(found.value)

    def _has_token(self, scope: Message) -> bool:
        query = parse_qs(scope["query_string"].decode("latin-1"))
        return any(map(self._is_token, query.get("token", [])))

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(), (self._token or "").encode())


def _headers(scope: Message, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _host_name(header: str) -> str | None:
    """Without the port, which tunnels change."""
    match = HOST.fullmatch(header)
    return None if match is None else (match["v6"] or match["name"]).lower()


async def _answer(send: Send, status: int, error: str, headers: dict[str, str] | None = None) -> None:
    body = json.dumps({"error": error}).encode() if error else b""
    shown = {"content-type": "application/json", "content-length": str(len(body)), "cache-control": "no-store"}
    shown |= HEADERS | (headers or {})
    if status == 405:
        shown["allow"] = "GET, HEAD"
    raw = [(name.encode(), value.encode("latin-1")) for name, value in shown.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
