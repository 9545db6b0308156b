"""``psamil serve`` as a user starts it."""

import http.client
import os
import queue
import re
import signal
import socket
import subprocess
import sys

import pytest
from starlette.testclient import TestClient

from psamil.cli import main
from psamil.cli.serve import serve
from tests.serve.cases import small_study


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return small_study(tmp_path_factory.mktemp("study"))


class Started:
    """The command in a process of its own, from its address on."""

    def __init__(self, *options):
        command = [sys.executable, "-m", "psamil", "serve", *map(str, options), "--port", "0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self):
        self.line = self.process.stdout.readline()
        found = re.search(r"http://(?P<host>[^:/]+):(?P<port>\d+)/(?P<rest>\S*)", self.line)
        assert found, self.process.communicate(timeout=60)
        self.host, self.port, self.rest = found["host"], int(found["port"]), found["rest"]
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=60)

    def ask(self, target, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", target, headers=headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, dict(answer.getheaders()), content

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


def test_from_start_to_end(study):
    with Started(study.psa, study.abmil, "--slides", study.slides) as server:
        assert (server.host, server.rest) == ("127.0.0.1", "")
        assert server.ask("/")[0] == 200
        status, headers, content = server.ask("/api/run")
        assert status == 200
        assert b'"psa"' in content
        assert b'"abmil"' in content
        assert "server" not in {name.lower() for name in headers}
        code, _, err = server.stop()
    assert code == 0
    assert "12 slides, 2 with a picture" in err
    assert "Traceback" not in err


def refused(capsys, *options):
    with pytest.raises(SystemExit) as ended:
        main(["serve", *map(str, options)])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_busy_port(study, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"psamil: port {port} is in use" in refused(capsys, study.psa, "--port", port)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "70000"], "port must be from 0 to 65535"),
        (["--host", "no such host", "--port", "0"], "no address of this computer"),
        (["--host", "203.0.113.7", "--port", "0"], "cannot listen at"),
        (["--features", "/nowhere", "--port", "0"], "does not exist"),
        (["--slides", "/nowhere", "--port", "0"], "does not exist"),
        (["--tile-labels", "/nowhere", "--port", "0"], "holds no tile labels"),
    ],
    ids=["port", "name", "address", "features", "slides", "labels"],
)
def test_what_cannot_be(study, capsys, options, said):
    assert said in refused(capsys, study.psa, *options)


def test_no_run(tmp_path, capsys):
    assert "is no run directory" in refused(capsys, tmp_path, "--port", "0")


def test_without_the_packages(study, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "psamil[serve]" in refused(capsys, study.psa, "--port", "0")


@pytest.fixture
def not_serving(monkeypatch):
    """A server that ends at once; what it was made of."""
    import uvicorn

    made = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: made.append((self.config, sockets)))
    return made


def test_other_computers_need_the_token(study, not_serving, capsys):
    serve([study.psa], host="0.0.0.0", port=0)
    out, err = capsys.readouterr()
    assert "Other computers can reach the viewer" in err
    token = re.search(r"/(\?token=[\w-]{32}) ", out)[1]
    ((config, _),) = not_serving
    with TestClient(config.app, base_url="http://any.example") as client:
        assert client.get("/api/run").status_code == client.get("/?token=other").status_code == 403
        assert client.get(f"/{token}").status_code == 200  # by way of a cookie
        assert client.get("/api/run").status_code == 200
    serve([study.psa], host="0.0.0.0", port=0)
    assert token not in capsys.readouterr().out


def test_this_computer_needs_none(study, not_serving, capsys):
    serve([study.psa], host="localhost", port=0)
    out, err = capsys.readouterr()
    assert re.search(r"http://localhost:\d+/ ", out)
    assert "Other computers" not in err
    ((config, _),) = not_serving
    with TestClient(config.app, base_url="http://127.0.0.1") as client:
        assert client.get("/api/run").status_code == 200
        assert client.get("/api/run", headers={"host": "evil.example"}).status_code == 421


def test_browser(study, not_serving, monkeypatch):
    asked = queue.Queue()
    monkeypatch.setattr("webbrowser.open", asked.put)
    assert serve([study.psa], port=0, open=True) == 0
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", asked.get(timeout=10))
    assert serve([study.psa], port=0) == 0
    assert asked.empty()
    config, _ = not_serving[-1]
    assert not config.proxy_headers


def test_links_out_of_the_folder_are_told(study, tmp_path, not_serving, capsys):
    (tmp_path / "slides").mkdir()
    (tmp_path / "slides" / "s00.tif").symlink_to(study.slides / "s00.tif")
    serve([study.psa], slides=tmp_path / "slides", port=0)
    assert "1 slides of" in capsys.readouterr().err
