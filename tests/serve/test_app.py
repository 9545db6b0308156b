import functools
import gzip
import io
import json
import shutil
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

from psamil.evaluation.scores import read_predictions
from psamil.explain.explaining import explain_bag
from psamil.explain.models_of import models_for
from psamil.readers import find_bags, open_bag
from psamil.serve import app, explained
from psamil.serve.app import create_app
from psamil.serve.study import opaque_id
from psamil.training.saved_model import SavedModel
from tests.serve.cases import OFFSET_PX0, lattice
from tests.serve.test_overlay import unpack

S00, S01, S11 = (f"/api/slides/{opaque_id(name)}" for name in ("s00", "s01", "s11"))


@pytest.fixture(scope="module")
def client(study):
    with TestClient(create_app([study.psa, study.abmil], **study.options()), base_url="http://localhost") as client:
        yield client


@pytest.fixture(scope="module")
def bare(study):
    """From features alone."""
    with TestClient(create_app([study.psa]), base_url="http://localhost") as client:
        yield client


def model_ids(client):
    return [model["id"] for model in client.get("/api/run").json()["models"]]


def test_run(client, study):
    told = client.get("/api/run").json()
    assert told["task"] == {"kind": "classification", "classes": ["a", "b"]}
    assert [(model["name"], model["model"]) for model in told["models"]] == [("psa", "psa"), ("abmil", "abmil")]
    assert [slide["name"] for slide in told["slides"]] == [f"s{i:02d}" for i in range(12)]
    for model, run in zip(told["models"], (study.psa, study.abmil), strict=True):
        table = read_predictions(run / "predictions.csv").set_index("sample")
        for slide in told["slides"]:
            of_model = slide["by_model"][model["id"]]
            assert of_model["values"]["prob_b"] == pytest.approx(table.loc[slide["name"], "prob_b"])
            assert of_model["truth"] == table.loc[slide["name"], "truth"]
            assert of_model["fold"] == table.loc[slide["name"], "fold"]


def test_slide_with_an_offset(client):
    told = client.get(S01).json()
    assert (told["width"], told["height"]) == (1301, 1103)
    assert told["image"]["bounds"] == [*OFFSET_PX0, 801, 703]
    assert told["bounds"][:2] == list(OFFSET_PX0)
    assert (told["unit"], told["mpp"], told["tile_size"], told["step"]) == ("px0", 0.5, 64, 64)
    psa, abmil = told["models"]
    assert [head["name"] for head in psa["heads"]] == ["head 1", "head 2"]
    assert psa["heads"][0]["radius_um"] == pytest.approx(psa["heads"][0]["radius_steps"] * 32)
    assert [layer["key"] for layer in psa["layers"]] == ["scores", "evidence", "head-0", "head-1"]
    assert abmil["heads"] == []


def test_the_model_that_did_not_learn_from_the_slide_speaks(client, study):
    (bag,) = (open_bag(ref) for ref in find_bags(study.features).bags if ref.id == "s01")
    expected = explain_bag(SavedModel.load(models_for(study.psa, "s01")[0].path), bag)
    header, corners, layers = unpack(client.get(f"{S01}/overlay.bin").content)
    assert header["n"] == bag.n
    np.testing.assert_array_equal(corners, lattice(OFFSET_PX0, seed=1))
    scores = expected.tile_scores.numpy()
    np.testing.assert_allclose(layers["scores"], scores, atol=np.ptp(scores) / 65535)
    received = expected.heads[1].received.numpy()
    np.testing.assert_allclose(layers["head-1"], received, atol=np.ptp(received) / 65535)


def test_overlay_of_another_model(client):
    psa, abmil = model_ids(client)
    assert client.get(f"{S00}/overlay.bin?model={psa}").content == client.get(f"{S00}/overlay.bin").content
    other = unpack(client.get(f"{S00}/overlay.bin?model={abmil}").content)[0]
    assert "head-0" not in [layer["key"] for layer in other["layers"]]


def test_overlay_is_compressed_and_asked_for_once(client):
    plain = client.get(f"{S00}/overlay.bin", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    with client.stream("GET", f"{S00}/overlay.bin", headers={"accept-encoding": "gzip"}) as packed:
        raw = b"".join(packed.iter_raw())
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(raw) == plain.content
    tag = plain.headers["etag"]
    again = client.get(f"{S00}/overlay.bin", headers={"accept-encoding": "identity", "if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
    other = client.get(f"{S01}/overlay.bin", headers={"accept-encoding": "identity", "if-none-match": tag})
    assert other.status_code == 200


def test_labels(client):
    labels = np.frombuffer(client.get(f"{S00}/labels.bin").content, np.uint8)
    np.testing.assert_array_equal(labels, lattice((0, 0), seed=0)[:, 0] > 400)
    assert client.get(f"{S11}/labels.bin").status_code == 404


def test_tile(client):
    told = client.get(f"{S01}/tiles/17").json()
    x, y = lattice(OFFSET_PX0, seed=1)[17]
    assert (told["index"], told["x"], told["y"], told["size"]) == (17, x, y, 64)
    corners = lattice(OFFSET_PX0, seed=1)
    for head in told["heads"]:
        near = np.hypot(*(corners[head["neighbours"]] - [x, y]).T) / 64
        assert near.max() <= head["radius_steps"] * 1.0001
        assert len(head["neighbours"]) == head["neighbour_count"]
        assert head["shown_share"] == pytest.approx(1)
        for column in ("posterior", "prior", "likelihood"):
            assert sum(head[column]) == pytest.approx(1)
        assert head["posterior"] == sorted(head["posterior"], reverse=True)
    header, _, layers = unpack(client.get(f"{S01}/overlay.bin").content)
    for key, value in told["scores"].items():
        (of_layer,) = (layer for layer in header["layers"] if layer["key"] == key)
        assert value == pytest.approx(layers[key][17], abs=(of_layer["high"] - of_layer["low"]) / 65535)


def test_only_the_strongest_neighbours_are_told(client, monkeypatch):
    whole = client.get(f"{S00}/tiles/40").json()["heads"][1]
    monkeypatch.setattr(explained, "MOST_NEIGHBOURS", 3)
    part = client.get(f"{S00}/tiles/40").json()["heads"][1]
    assert part["neighbours"] == whole["neighbours"][:3]
    assert part["shown_share"] == pytest.approx(sum(whole["posterior"][:3]))
    assert part["neighbour_count"] == whole["neighbour_count"] > 3


def test_pictures(client):
    level = client.get(S00).json()["image"]["levels"] - 1
    for address, size in ((f"{S00}/image/{level}/0_0.jpg", (511, 511)), (f"{S00}/tiles/3.jpg", (384, 384))):
        answer = client.get(address)
        assert answer.headers["content-type"] == "image/jpeg"
        assert Image.open(io.BytesIO(answer.content)).size == size


def test_features_alone(bare):
    told = bare.get(S01).json()
    assert told["image"] is None
    assert not told["has_image"]
    assert (told["width"], told["height"]) == (OFFSET_PX0[0] + 768, OFFSET_PX0[1] + 640)
    for address in (f"{S01}/tiles/3.jpg", f"{S01}/image/3/0_0.jpg", f"{S01}/labels.bin"):
        assert bare.get(address).status_code == 404


def test_geojson_of_tiles_counts_from_the_scanned_area(client, bare):
    tiles = client.get(f"{S01}/geojson").json()["features"]
    corners = np.array([tile["geometry"]["coordinates"][0][0] for tile in tiles])
    np.testing.assert_array_equal(corners + OFFSET_PX0, lattice(OFFSET_PX0, seed=1))
    numbers = tiles[5]["properties"]["measurements"]
    assert numbers["tile score"] == pytest.approx(client.get(f"{S01}/tiles/5").json()["scores"]["scores"], rel=1e-6)
    without = bare.get(f"{S01}/geojson").json()["features"]
    assert without[0]["geometry"]["coordinates"][0][0] == list(map(int, lattice(OFFSET_PX0, seed=1)[0]))


@pytest.mark.parametrize(("least", "share"), [("0", 1.0), ("50", 0.5), ("100", 1 / 88)])
def test_geojson_of_regions(client, least, share):
    answer = client.get(f"{S00}/geojson?layer=head-1&threshold_percentile={least}")
    assert 's00-psa-head-1-regions.geojson"' in answer.headers["content-disposition"]
    regions = answer.json()["features"]
    assert sum(region["properties"]["measurements"]["Tiles"] for region in regions) == round(88 * share)


def test_large_geojson_is_compressed(client, monkeypatch):
    plain = client.get(f"{S00}/geojson")
    monkeypatch.setattr(app, "LARGE_BYTES", 1000)
    packed = client.get(f"{S00}/geojson")
    assert 's00-psa-scores-tiles.geojson.gz"' in packed.headers["content-disposition"]
    assert "content-encoding" not in packed.headers  # it is to be saved as it is
    assert gzip.decompress(packed.content) == plain.content


@pytest.mark.parametrize(
    "text", ["-1", "101", "nan", "inf", "1e1", "", "0x10", "1_0", "50&threshold_percentile=60", "9" * 400]
)
def test_thresholds_that_are_none(client, text):
    answer = client.get(f"{S00}/geojson?threshold_percentile={text}")
    assert answer.status_code == 400
    assert "threshold_percentile" in answer.json()["error"]


@pytest.mark.parametrize(
    "rest",
    [
        *(
            "/tiles/88",
            "/tiles/-1",
            "/tiles/1e1",
            "/tiles/99999999999999999999",
            "/tiles/01",
            "/tiles/1.5",
            "/tiles/x.jpg",
        ),
        *("/image/11/0_0.jpg", "/image/10/2_0.jpg", "/image/-1/0_0.jpg", "/image/10/-1_0.jpg", "/image/10/0_0.png"),
        *("/image/10/99999999999_0.jpg", "/image/10/0.jpg", "/overlay.bin?model=nobody", "/geojson?layer=nothing", "/"),
    ],
)
def test_what_is_not_there(client, rest):
    answer = client.get(S00 + rest)
    assert answer.status_code == 404
    assert set(answer.json()) == {"error"}


def test_page_and_its_files(client):
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert client.get("/static/index.html").content == page.content
    script = client.get("/static/openseadragon.min.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert client.get("/static/__init__.py").status_code == 404
    assert client.get("/static").status_code == client.get("/static/").status_code == 404


def test_two_who_ask_for_the_same_slide_compute_once(study, monkeypatch):
    asked, released = [], threading.Event()

    def slow(*args, **options):
        asked.append(threading.current_thread().name)
        assert released.wait(30)
        return explain_bag(*args, **options)

    monkeypatch.setattr(explained, "explain_bag", slow)
    with TestClient(create_app([study.psa]), base_url="http://localhost") as client:
        answers = []
        ask = functools.partial(client.get, f"{S00}/overlay.bin")
        threads = [threading.Thread(target=lambda: answers.append(ask().content)) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert client.get("/").status_code == 200  # who does not need the models does not wait for them
        assert not answers
        released.set()
        for thread in threads:
            thread.join()
    assert len(asked) == 1
    assert asked[0].startswith("models")
    assert len(set(answers)) == 1
    assert len(answers) == 3


def test_models_share_the_features_of_a_slide(study, monkeypatch):
    read = []
    monkeypatch.setattr(explained, "open_bag", lambda *args, **options: read.append(1) or open_bag(*args, **options))
    with TestClient(create_app([study.psa, study.abmil]), base_url="http://localhost") as client:
        assert len(client.get(S00).json()["models"]) == 2
    assert read == [1]


def test_runs_of_the_same_name(study, tmp_path):
    shutil.copytree(study.psa, tmp_path / "other" / "psa")
    with TestClient(create_app([study.psa, tmp_path / "other" / "psa"]), base_url="http://localhost") as client:
        names = [model["name"] for model in client.get("/api/run").json()["models"]]
    assert names == [f"{study.psa.parent.name}/psa", "other/psa"]


def test_features_that_cannot_be_read(study, tmp_path, capsys):
    copy = tmp_path / "features" / "s00.h5"
    (original,) = (ref.path for ref in find_bags(study.features).bags if ref.id == "s00")
    copy.parent.mkdir()
    copy.write_bytes(original.read_bytes())
    with TestClient(create_app([study.psa], features=copy.parent), base_url="http://localhost") as client:
        copy.unlink()
        answer = client.get(S00)
    assert answer.status_code == 422
    assert str(tmp_path) not in answer.text
    assert str(copy) in capsys.readouterr().err


def test_a_picture_that_cannot_be_read(study, tmp_path):
    (tmp_path / "s00.tif").write_bytes(b"II*\0 but no more")
    with TestClient(create_app([study.psa], slides=tmp_path), base_url="http://localhost") as client:
        told = client.get(S00).json()
        assert told["has_image"] is False
        assert told["image_note"].startswith("the picture is ")
        assert client.get(f"{S00}/overlay.bin").status_code == 200
        assert client.get(f"{S00}/image/0/0_0.jpg").status_code == 422


def test_our_own_faults_show_no_traceback(study, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("secret")

    monkeypatch.setattr(explained, "explain_bag", broken)
    broken_app = create_app([study.psa])
    with TestClient(broken_app, base_url="http://localhost", raise_server_exceptions=False) as client:
        answer = client.get(S00)
    assert answer.status_code == 500
    assert json.loads(answer.text) == {"error": "the viewer failed; see the output of psamil serve"}
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_many_tiles(study, monkeypatch):
    """200,000 tiles and 8 heads are sent in less than 8 MB."""
    n = 200_000
    whole = explained.Explainer.explain

    def enlarged(self, slide, run):
        small = whole(self, slide, run)
        rng = torch.Generator().manual_seed(0)
        heads = [explained.replace(head, received=torch.rand(n, generator=rng)) for head in small.explanation.heads * 4]
        explanation = explained.replace(
            small.explanation, tile_scores=torch.randn(n, generator=rng), evidence=None, heads=tuple(heads)
        )
        corners = np.stack(np.divmod(np.arange(n), 500), axis=1) * 256.0
        return explained.replace(
            small, explanation=explanation, places=explained.replace(small.places, corners=corners)
        )

    monkeypatch.setattr(explained.Explainer, "explain", enlarged)
    with TestClient(create_app([study.psa]), base_url="http://localhost") as client:
        packed = client.get(f"{S00}/overlay.bin", headers={"accept-encoding": "identity"}).content
    header, _, _ = unpack(packed)
    assert (header["n"], len(header["layers"])) == (n, 9)
    assert len(packed) < 8e6
