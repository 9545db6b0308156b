"""A real Ray cluster of two nodes on this computer, one of which is killed in the middle of the work."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from rich.console import Console

from psamil.cli import main
from psamil.cli.study import Study
from psamil.cluster import engine
from psamil.cluster.engine import Job, run_jobs
from psamil.cluster.extraction import SlideWork, extract_as_jobs
from psamil.cohort import simulate
from psamil.errors import DataError, MissingExtraError, OptionError, PsamilError
from psamil.files import read_json
from psamil.slides.encoders import load_encoder
from psamil.slides.extraction_record import FAILURES, QUALITY
from psamil.slides.slide import find_slides
from psamil.slides.tiling import TileGrid
from tests.cluster.lossy import end_worker, end_worker_once, fail, lines, lossy, note
from tests.slides.made_slides import draw

pytest.importorskip("ray")

LIMIT_S = 300  # of a test: whatever happens to a cluster, the tests end
STORE_BYTES = 80 << 20
# A node counts as lost within seconds; by default it takes half a minute.
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
CLOCK = ("timing.jsonl",)  # files that tell times
STUDY = """
features: {home}/cohort
labels: {home}/cohort/labels.csv
target: label
tile_labels: {home}/cohort/tiles
folds: 3
seeds: 2
cache: {home}/cache
training: {{epochs: 2, lr: 1e-3}}
models:
  psa: {{model_options: {{heads: 2, head_dim: 4}}}}
  abmil: {{model_options: {{hidden: 4}}}}
  mean: {{}}
  max: {{}}
"""
ENCODER = "python:tests.cluster.lossy:hanging_encoder"


@pytest.fixture(autouse=True)
def limit():
    def end(*_):
        raise TimeoutError(f"a test of the cluster took more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def cluster():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False, "_system_config": QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def doomed(cluster):
    """A second node."""
    return cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)


def kill_when_hung(cluster, node, log: Path) -> threading.Thread:
    """Kills a node once the log says that one of its jobs is in the middle of its work."""

    def kill() -> None:
        while not lines(log, "hung"):
            time.sleep(0.1)
        cluster.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


def content(folder: Path) -> dict[str, bytes]:
    """All files but those that tell times; there must be none that is half-written or locked."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    assert not [name for name in files if name.endswith((".tmp", "lock"))]
    return {name: path.read_bytes() for name, path in files.items() if path.name not in CLOCK}


def differing(one: dict[str, bytes], two: dict[str, bytes]) -> list[str]:
    return [name for name in {**one, **two} if one.get(name) != two.get(name)]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    home = tmp_path_factory.mktemp("study")
    simulate(home / "cohort", slides=18, tiles=60, dim=4)
    (home / "study.yaml").write_text(STUDY.format(home=home))
    return home


def test_a_study_whose_node_is_lost_ends_as_on_one_machine(study, cluster, doomed, tmp_path):
    console, log, told = Console(stderr=True), tmp_path / "log", []
    chosen = Study.read(study / "study.yaml")
    here, _ = chosen.run(tmp_path / "here", console)
    jobs = chosen.jobs(tmp_path / "there", console)
    assert len({job.name for job in jobs}) == len(jobs) == 24
    killer = kill_when_hung(cluster, doomed, log)
    run_jobs(lossy(jobs, log, doomed.node_id, after=6), tell=told.append)
    killer.join()
    there = chosen.runs(tmp_path / "there")

    (hung,) = lines(log, "hung")
    assert sorted(lines(log, "done")) == sorted(job.name for job in jobs)  # each once
    assert sorted(lines(log, "begun")) == sorted([*(job.name for job in jobs), hung])
    assert [line.split()[0] for line in told] == [f"{i + 1}/24" for i in range(24)]
    assert [run.summary for run in there] == [run.summary for run in here]
    found, expected = content(tmp_path / "there"), content(tmp_path / "here")
    assert len(expected) > 24 * 4
    assert differing(found, expected) == []
    assert chosen.jobs(tmp_path / "there", console)  # with labels of tiles; they do nothing
    assert differing(content(tmp_path / "there"), expected) == []


def test_an_extraction_whose_node_is_lost_ends_as_on_one_machine(cluster, doomed, tmp_path, capsys):
    slides, log = tmp_path / "slides", tmp_path / "log"
    for i in range(8):
        draw(slides / f"s{i}.tif", side_px=384, seed=i)
    draw(slides / "white.tif", margin_px=256)
    (slides / "broken.tif").write_bytes(b"II*\0 no slide")
    words = ["--encoder", ENCODER, "--tile-px", "64", "--workers", "1", "--batch", "8"]
    with pytest.raises(SystemExit) as ended:
        main(["extract", str(slides), "--out", str(tmp_path / "here"), *words])
    assert ended.value.code == 1
    torch.set_num_threads(1)  # which the verb has changed

    work = SlideWork(tmp_path / "there", ENCODER, TileGrid(0.5, 64), batch=8)
    work.claim(load_encoder(ENCODER))
    killer = kill_when_hung(cluster, doomed, log)
    run = lambda jobs: run_jobs(lossy(jobs, log, doomed.node_id, after=2))  # noqa: E731
    outcome = extract_as_jobs(find_slides(slides), work, run)
    killer.join()

    assert sorted(lines(log, "done")) == sorted(path.stem for path in slides.iterdir())
    assert sorted(outcome.done) == [f"s{i}" for i in range(8)]
    assert (outcome.empty, list(outcome.failed)) == (["white"], ["broken"])
    found, expected = content(tmp_path / "there"), content(tmp_path / "here")
    assert {FAILURES, QUALITY, "extraction.json"} < set(expected)
    assert differing(found, expected) == []


def test_the_command_line(study, cluster, tmp_path, capsys):
    """On the same cluster, which it is connected to."""
    words = [str(study / "cohort"), str(study / "cohort" / "labels.csv"), str(tmp_path / "run"), "--target", "label"]
    words += ["--folds", "2", "--seeds", "1", "--training.model", "mean", "--training.epochs", "1"]
    words += ["--cache", str(study / "cache")]
    with pytest.raises(SystemExit) as ended:
        main(["train", *words, "--engine", "ray"])
    assert ended.value.code == 0
    told = capsys.readouterr()
    assert "2 of 2 folds" in told.out
    assert {"1/2", "2/2"} < set(told.err.split())
    assert read_json(tmp_path / "run" / "run.json")["threads"] == 1
    small = STUDY.format(home=study).split("  psa:")[0].replace("seeds: 2", "seeds: 1").replace("folds: 3", "folds: 2")
    (tmp_path / "study.yaml").write_text(f"{small}  mean: {{}}\n  max: {{}}\n")
    with pytest.raises(SystemExit) as ended:
        main(["compare", "--study", str(tmp_path / "study.yaml"), "--out", str(tmp_path / "study"), "--engine", "ray"])
    assert ended.value.code == 0
    assert "4/4" in capsys.readouterr().err
    assert pd.read_csv(tmp_path / "study" / "table.csv")["run"].tolist() == ["mean", "max"]
    draw(tmp_path / "slides" / "a.tif", side_px=384)
    how = ["--encoder", ENCODER, "--tile-px", "64", "--engine", "ray"]
    with pytest.raises(SystemExit) as ended:
        main(["extract", str(tmp_path / "slides"), "--out", str(tmp_path / "features"), *how])
    assert ended.value.code == 0
    assert "done: 1 slides, 16 tiles" in capsys.readouterr().out


def test_a_table_of_the_paper_is_the_same_on_the_cluster(study, cluster, tmp_path, capsys):
    home = study / "cohort"
    words = ["--features", f"crc={home}", "--labels", f"crc={home / 'labels.csv'}", "--models", "abmil", "dtfd"]
    small = ["study.classes=[negative, positive]", "study.folds=2", f"study.cache={study / 'cache'}"]
    small += ["training.epochs=1", "abmil.model_options.hidden=4", "dtfd.model_options.hidden=4"]
    for name, where in (("here", "local"), ("there", "ray")):
        out = ["--out", str(tmp_path / name), "--engine", where]
        with pytest.raises(SystemExit) as ended:
            main(["reproduce", "table1", *words, *out, "--options", *small])
        assert not ended.value.code
        told = capsys.readouterr()
        assert ("4/4" in told.err) == (where == "ray")
        assert "DTFD-MIL" in told.out
    torch.set_num_threads(1)  # which the verb has changed
    found, expected = content(tmp_path / "there"), content(tmp_path / "here")
    table = "table1/crc/table.csv"  # names the folders of the runs
    expected[table] = expected[table].replace(b"/here/", b"/there/")
    assert differing(found, expected) == []


def test_a_cluster_of_this_computer_is_started_and_ended(tmp_path):
    """In a process of its own, which is not connected yet, and which is stopped in the end."""
    code = """
import faulthandler, os, signal, threading, time
from functools import partial
from pathlib import Path
from psamil.cluster.engine import Job, run_jobs
from psamil.errors import OptionError
from tests.cluster.lossy import hold, note

faulthandler.dump_traceback_later(200)  # should it hang
signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored in what a shell runs in the background
told = []

def stop():
    while not Path("marker").exists() or not told:
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)

def tell(line):
    print(line, flush=True)
    told.append(line)

try:
    run_jobs([Job("a", int)], address="127.0.0.1:1")
except OptionError as error:
    print(error, flush=True)
threading.Thread(target=stop, daemon=True).start()
jobs = [Job("a", partial(note, Path("."), "a")), Job("hold", partial(hold, Path("lock"), Path("marker")))]
run_jobs(jobs, tell=tell)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code]
    within = {"timeout": LIMIT_S - 60, "capture_output": True, "text": True}
    try:
        ended = subprocess.run(command, cwd=tmp_path, env=environment, **within)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"it hangs, after {error.stdout}: {error.stderr}")
    assert ended.returncode != 0
    refused, *rest = ended.stdout.splitlines()
    assert refused.startswith("no Ray cluster at 127.0.0.1:1: ")
    assert rest == ["1/2 a"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "marker"]  # and no lock


def test_errors_of_jobs_are_told_when_the_others_are_done(cluster, tmp_path):
    told = []
    bad = Job("bad", partial(fail, DataError("a.h5", "is damaged", "copy it again")))
    jobs = [bad, *(Job(name, partial(note, tmp_path, name)) for name in "abc")]
    with pytest.raises(PsamilError, match=r"^1 of 4 jobs failed.*: bad: a\.h5: is damaged; copy it again$"):
        run_jobs(jobs, tell=told.append)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
    assert any(line.endswith("bad: failed: a.h5: is damaged; copy it again") for line in told)
    assert run_jobs(jobs[1:]) == ["a", "b", "c"]
    with pytest.raises(ZeroDivisionError):  # a bug
        run_jobs([Job("bug", partial(fail, ZeroDivisionError("x"))), jobs[1]])


def test_a_lost_worker_costs_its_job_alone(cluster, tmp_path, monkeypatch):
    assert run_jobs([Job("crash", partial(end_worker_once, tmp_path / "marker"))]) == ["at last"]
    monkeypatch.setattr(engine, "LOSSES", 1)
    with pytest.raises(PsamilError, match=r"1 of 2 jobs failed.*crash: its worker was lost again and again"):
        run_jobs([Job("crash", end_worker), Job("a", partial(note, tmp_path, "a"))])
    assert (tmp_path / "a").exists()


def test_what_no_cluster_can_do_is_refused(cluster, monkeypatch, capsys):
    with pytest.raises(OptionError, match="asks for 64 CPUs and 0 GPUs, which no node"):
        run_jobs([Job("a", int)], cpus_per_job=64)
    with pytest.raises(OptionError, match=r"asks for 1 CPUs and 0\.5 GPUs"):
        run_jobs([Job("a", int)], gpus_per_job=0.5)
    with pytest.raises(OptionError, match="at least 1 CPU"):
        run_jobs([Job("a", int)], cpus_per_job=0)
    assert run_jobs([]) == []
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"psamil\[cluster\]"):
        run_jobs([Job("a", int)])


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--engine", "spark"], "unknown engine 'spark'; known: 'local', 'ray'"),
        (["--address", "auto"], "are for --engine ray"),
        (["--cpus-per-job", "2"], "are for --engine ray"),
    ],
    ids=["unknown", "address", "cpus"],
)
def test_options_of_engines_that_do_not_fit(words, cause, tmp_path, capsys):
    draw(tmp_path / "a.tif")
    with pytest.raises(SystemExit) as ended:
        main(["extract", str(tmp_path), *words])
    assert ended.value.code == 2
    assert cause in capsys.readouterr().err
