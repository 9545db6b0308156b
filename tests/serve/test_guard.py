"""What strangers may try. Through a real server and a bare socket: clients tidy up addresses before they send them."""

import builtins
import json
import os
import socket
import threading
import time
from contextlib import contextmanager

import pytest
import uvicorn

from psamil.serve.app import create_app
from psamil.serve.guard import HEADERS, LOOPBACK, Guard
from psamil.serve.study import opaque_id
from tests.slides.drawn import stained, write_slide

SECRET = b"only for those who own it"
SLIDE = opaque_id("s00")


@contextmanager
def served(app):
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http="h11", ws="none", log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    until = time.monotonic() + 30
    while not server.started and time.monotonic() < until:
        time.sleep(0.01)
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()


@pytest.fixture(scope="module")
def places(study, tmp_path_factory):
    """Slides inside, and secrets around them: in a sibling whose name begins alike, and behind a link."""
    root = tmp_path_factory.mktemp("root")
    (root / "slides").mkdir()
    (root / "slides-secret").mkdir()
    (root / "secret.txt").write_bytes(SECRET)
    (root / "slides" / "notes.txt").write_bytes(SECRET)
    (root / "slides-secret" / "secret.txt").write_bytes(SECRET)
    write_slide(root / "slides" / "s00.tif", stained(300, 400))
    write_slide(root / "slides-secret" / "s01.tif", stained(300, 400))
    (root / "slides" / "s01.tif").symlink_to(root / "slides-secret" / "s01.tif")
    return root


@pytest.fixture(scope="module")
def port(study, places):
    app = create_app([study.psa], slides=places / "slides", tile_labels=study.tile_labels)
    with served(app) as port:
        ask(port, f"/api/slides/{SLIDE}")
        yield port


def ask(port, target, *, method="GET", host="127.0.0.1", headers=()):
    """The bytes of a target as they are. Status, headers and content."""
    target = target if isinstance(target, bytes) else target.encode()
    lines = [method.encode() + b" " + target + b" HTTP/1.1", *((f"Host: {host}".encode(),) if host is not None else ())]
    lines += [line.encode() for line in headers] + [b"Connection: close", b"", b""]
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(b"\r\n".join(lines))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, content = answer.partition(b"\r\n\r\n")
    first, *rest = head.decode("latin-1").split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in rest), content


@pytest.fixture
def opened(monkeypatch):
    """Every path that is opened while a test runs."""
    seen = []
    open_file, open_descriptor = builtins.open, os.open

    def note(function):
        def noting(path, *args, **options):
            seen.append(str(path))
            return function(path, *args, **options)

        return noting

    monkeypatch.setattr(builtins, "open", note(open_file))
    monkeypatch.setattr("io.open", note(open_file))
    monkeypatch.setattr(os, "open", note(open_descriptor))
    return seen


def test_what_is_opened_is_seen(port, opened):
    assert ask(port, "/static/index.html")[0] == 200
    assert any(path.endswith("index.html") for path in opened)


UP = [
    "../secret.txt",
    "../../secret.txt",
    "../../../../../../../../etc/passwd",
    "../slides-secret/secret.txt",
    "notes.txt",
]
ENCODINGS = {
    "plain": lambda path: path,
    "slash": lambda path: path.replace("/", "%2f"),
    "dots": lambda path: path.replace(".", "%2e"),
    "all": lambda path: "".join(f"%{ord(sign):02x}" for sign in path),
    "twice": lambda path: path.replace("/", "%252f").replace(".", "%252e"),
    "backslash": lambda path: path.replace("/", "\\"),
    "encoded-backslash": lambda path: path.replace("/", "%5c"),
    "overlong": lambda path: path.replace("/", "%c0%af"),
    "nul": lambda path: path + "%00.jpg",
    "nul-before": lambda path: "index.html%00/" + path,
    "doubled": lambda path: path.replace("../", "....//"),
    "semicolon": lambda path: path.replace("../", "..;/"),
}
BEFORE = [
    "/",
    "/static/",
    "/api/slides/",
    f"/api/slides/{SLIDE}/",
    f"/api/slides/{SLIDE}/tiles/",
    f"/api/slides/{SLIDE}/image/0/",
]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("before", BEFORE, ids=["root", "static", "slides", "slide", "tiles", "image"])
def test_no_way_out(port, opened, encoding, before):
    for path in UP:
        status, headers, content = ask(port, before + ENCODINGS[encoding](path))
        assert 400 <= status < 500, path
        assert SECRET not in content
        assert b"root:" not in content
        if headers["content-type"] == "application/json":  # all but what the server itself cannot read
            assert set(json.loads(content)) == {"error"}
    assert not [path for path in opened if "secret" in path or "passwd" in path or "notes" in path]


@pytest.mark.parametrize(
    "target",
    [
        b"/etc/passwd",
        b"//etc/passwd",
        b"/static//etc/passwd",
        b"/static/%2fetc%2fpasswd",
        b"file:///etc/passwd",
        b"http://127.0.0.1/../etc/passwd",
        b"http://elsewhere.example/api/run",
        b"/api/slides/%2fapi%2frun",
        b"/api/slides/" + SLIDE.encode() + b"%2foverlay.bin",
        b"/api/slides/" + SLIDE.upper().encode(),
        b"/api/slides/s00",
        b"/api/slides/s00.tif",
        b"/api/slides/" + SLIDE.encode() + b"/",
        b"/api/slides/" + SLIDE.encode() + b"/tiles/-1",
        b"/api/slides/" + SLIDE.encode() + b"/tiles/%31",
        b"/api/slides/" + SLIDE.encode() + b"/tiles/" + b"9" * 4000,
        b"/api/slides/" + SLIDE.encode() + b"/tiles/9999999999999999999999.jpg",
        b"/api/slides/" + SLIDE.encode() + b"/image/9/-1_0.jpg",
        b"/api/slides/" + SLIDE.encode() + b"/image/9/0_-1.jpg",
        b"/api/slides/" + SLIDE.encode() + b"/image/999999999/0_0.jpg",
        b"/api/slides/" + SLIDE.encode() + b"/image/9/999999999_999999999.jpg",
        b"/api/slides/" + SLIDE.encode() + b"/image/9/0_0.jpg%00",
        b"/api/slides/" + SLIDE.encode() + b"/image/9/0_0.svs",
        b"/api/slides/" + "\u0661".encode() + b"/tiles/1",
        b"/static/",
        b"/static",
        b"/static/.",
        b"/static/..",
        b"/static/app.py",
        b"/static/../app.py",
        b"/static/__pycache__",
        b"/api",
        b"/api/slides",
        b"/api/slides/",
        b"/?" + b"a" * 5000,
        b"/" + b"a" * 70000,
        b"*",
    ],
    ids=lambda target: target[-30:].decode("ascii", "replace"),
)
def test_what_is_not_there(port, opened, target):
    status, _, content = ask(port, target)
    assert 400 <= status < 500
    assert SECRET not in content
    assert not [path for path in opened if "passwd" in path or path.endswith(".py")]


def test_a_slide_behind_a_link_is_not_shown(port):
    outside = opaque_id("s01")
    assert json.loads(ask(port, f"/api/slides/{outside}")[2])["has_image"] is False
    for rest in ("image/0/0_0.jpg", "tiles/0.jpg"):
        assert ask(port, f"/api/slides/{outside}/{rest}")[0] == 404


def test_but_the_one_beside_it_is(port):
    status, headers, content = ask(port, f"/api/slides/{SLIDE}/image/0/0_0.jpg")
    assert (status, headers["content-type"], content[:2]) == (200, "image/jpeg", b"\xff\xd8")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get"])
def test_only_reading(port, method):
    status, headers, _ = ask(port, "/api/run", method=method)
    assert status == 405
    assert headers["allow"] == "get, head"


def test_head_has_no_content(port):
    status, headers, content = ask(port, "/api/run", method="HEAD")
    assert (status, content) == (200, b"")
    assert int(headers["content-length"]) > 100


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:80", "localhost:8765", "LOCALHOST", "[::1]:9000"])
def test_names_of_this_computer(port, host):
    assert ask(port, "/api/run", host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "evil.example:8765",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "127.0.0.1@evil.example",
        ),
        *("", "localhost:", "localhost:x", "127.0.0.1, evil.example", "[::1", "0.0.0.0", "192.168.0.1", "localhost/"),
    ],
)
def test_other_names(port, host):
    status, _, content = ask(port, "/api/run", host=host)
    assert 400 <= status < 500
    assert b"slides" not in content


def test_no_name_or_two(port):
    assert 400 <= ask(port, "/api/run", host=None)[0] < 500
    assert 400 <= ask(port, "/api/run", headers=["Host: evil.example"])[0] < 500


def test_others_cannot_speak_for_a_proxy(port):
    forwarded = ["X-Forwarded-Host: 127.0.0.1", "Forwarded: host=127.0.0.1", "X-Original-URL: /api/run"]
    assert ask(port, "/api/run", host="evil.example", headers=forwarded)[0] == 421
    assert ask(port, "/nothing", headers=forwarded)[0] == 404


@pytest.mark.parametrize(
    "span", ["bytes=0-3", "bytes=-1", "bytes=0-99999999999999", "bytes=5-1", "bytes=0-1,0-1,0-1", "x"]
)
@pytest.mark.parametrize("rest", ["overlay.bin", "image/0/0_0.jpg"])
def test_ranges_change_nothing(port, span, rest):
    whole = ask(port, f"/api/slides/{SLIDE}/{rest}")
    status, headers, content = ask(port, f"/api/slides/{SLIDE}/{rest}", headers=[f"Range: {span}"])
    assert (status, content) == (200, whole[2])
    assert "content-range" not in headers


@pytest.mark.parametrize("target", ["/", "/api/run", f"/api/slides/{SLIDE}/overlay.bin", "/nothing", "/a%2fb"])
def test_headers(port, target):
    _, headers, _ = ask(port, target)
    for name, value in HEADERS.items():
        assert headers[name] == value.lower()
    for part in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"):
        assert part in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert "access-control-allow-origin" not in headers
    assert headers["cache-control"] in ("no-store", "private, no-cache")


def test_no_web_socket(port):
    upgrade = [
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        "Sec-WebSocket-Version: 13",
    ]
    assert ask(port, "/nothing", headers=upgrade)[0] == 404


@pytest.fixture(scope="module")
def guarded(study):
    with served(create_app([study.psa], hosts=None, token="T0ken-of-this-time")) as port:
        yield port


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/api/run",
        "/static/index.html",
        "/?token=",
        "/?token=wrong",
        "/?token=%00",
        "/api/run?token=T0ken-of-this-time",
    ],
)
def test_nothing_without_the_token(guarded, target):
    status, headers, content = ask(guarded, target)
    assert status == 403
    assert "set-cookie" not in headers
    assert b"token" in content


@pytest.mark.parametrize(
    "cookie",
    [
        "psamil-token=",
        "psamil-token=wrong",
        "psamil-token",
        "other=T0ken-of-this-time",
        "\x01=;;",
        "psamil-token=T0ken-of-this-time-",
    ],
)
def test_nothing_with_other_cookies(guarded, cookie):
    assert 400 <= ask(guarded, "/api/run", headers=[f"Cookie: {cookie}"])[0] < 500


def test_the_token_becomes_a_cookie(guarded):
    status, headers, content = ask(guarded, "/?token=T0ken-of-this-time", host="any.example")
    assert (status, headers["location"], content) == (303, "/", b"")
    cookie, *attributes = headers["set-cookie"].split("; ")
    assert set(attributes) == {"path=/", "httponly", "samesite=strict"}
    value = "psamil-token=T0ken-of-this-time"
    assert cookie == value.lower()
    for target in ("/", "/api/run"):
        assert ask(guarded, target, headers=[f"Cookie: a=b; {value}"])[0] == 200


def test_any_name_needs_a_token():
    with pytest.raises(ValueError, match="needs a token"):
        Guard(lambda *args: None, hosts=None)
    assert set(LOOPBACK) == {"127.0.0.1", "localhost", "::1"}
