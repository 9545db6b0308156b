"""Kills a training again and again, lets it go on, and compares it byte for byte with one that was left alone.

`psamil train` runs on a simulated cohort, once without a disturbance and once more in another folder and with an empty
cache of its own. There it gets SIGKILL, which no program can prepare for: at a random moment of its start or of its
training, in the middle of writing a file, or as soon as a fold is finished. What it was doing is read off its files.
Then it is started again. Ten kills take about two minutes. If a file differs at the end, the exit code is 1.

    python examples/kill_and_resume.py --kills 10 --out kill-and-resume
"""

import argparse
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from psamil.cohort import simulate
from psamil.training.timing import TIMING_FILE

FOLDS = 3
POLL_S = 0.0005
STARTING, TRAINING, WRITING, BETWEEN = "while it starts", "in training", "a file half written", "a fold finished"
AIMS = (TRAINING, WRITING, TRAINING, STARTING, WRITING, TRAINING, BETWEEN, TRAINING, WRITING, STARTING)


@dataclass(frozen=True)
class Kill:
    """One line of the table."""

    aim: str
    after_s: float
    fold: str
    epochs: int  # finished, of this fold
    doing: str
    half_written: str  # temporary files that were there when the process died


class Job:
    """One command in its folder: it can be started as often as one likes."""

    def __init__(self, cohort: Path, folder: Path, epochs: int) -> None:
        self.run, self.cache = folder / "run", folder / "cache"
        options: dict[str, object] = {"target": "label", "folds": FOLDS, "cache": self.cache, "training.epochs": epochs}
        options |= {"seeds": 1, "training.patience": "null"}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        paths = [cohort, cohort / "labels.csv", self.run]
        self.command = [sys.executable, "-m", "psamil", "train", *map(str, paths), *words]

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def temporaries(self) -> set[Path]:
        """Files that are being written, or were when a process died."""
        places = ((self.run, ".*.tmp"), (self.run, "folds/*/*/.*.tmp"), (self.cache, "*/*/.*.tmp"))
        return {file for folder, pattern in places for file in folder.glob(pattern)}

    def finished_folds(self) -> set[Path]:
        return set(self.run.glob("folds/*/*/metrics.json"))

    def is_trained_by(self, pid: int) -> bool:
        """A fold is locked by who works on it; locks of the dead are still there."""
        return any(f'"pid": {pid},' in lock.read_text() for lock in self.run.glob("folds/*/*/lock"))


def finish(process: subprocess.Popen[str]) -> None:
    _, told = process.communicate()
    if process.returncode != 0:
        sys.exit(f"psamil train ended with code {process.returncode}:\n{told}")


def kill_when(job: Job, is_time: Callable[[int], bool], aim: str) -> Kill | None:
    """Starts the job and kills it at the right moment; None if it came to its end before."""
    left_by_others = job.temporaries()
    began = time.monotonic()
    process = job.start()
    try:
        while not is_time(process.pid):
            if process.poll() is not None:
                return None
            time.sleep(POLL_S)
    finally:
        process.kill()
        process.communicate()
    return look(job, aim, time.monotonic() - began, left_by_others)


def look(job: Job, aim: str, after_s: float, left_by_others: set[Path]) -> Kill:
    """What the dead process was doing, as far as its files tell."""
    new = sorted(job.temporaries() - left_by_others)
    half_written = [
        file.name[1:].rsplit(".", 2)[0] if file.is_relative_to(job.run) else "entry of the cache" for file in new
    ]
    folders = sorted(job.run.glob("folds/*/*"))
    last = folders[-1] if folders else None
    history = last / "history.jsonl" if last else None
    epochs = len(history.read_text().splitlines()) if history and history.exists() else 0
    if last is None:
        doing = "starting, reading slides" if not (job.run / "run.json").exists() else "before the first fold"
    elif (last / "metrics.json").exists():
        doing = "between folds" if len(folders) < FOLDS else "summing up"
    elif (last / "model.safetensors").exists():
        doing = "testing"
    else:
        doing = f"epoch {epochs + 1}"
    return Kill(aim, after_s, last.parent.name if last else "-", epochs, doing, ", ".join(half_written) or "-")


def moment_of(
    aim: str, job: Job, start_up_s: float, training_s: float, moments: random.Random
) -> Callable[[int], bool]:
    """Says when it is time to kill the process of this id. Within a training, a tenth of it passes at most."""
    seen, folds = job.temporaries(), job.finished_folds()
    files = len(seen) + moments.randint(1, 4)
    if aim == STARTING:
        deadline = time.monotonic() + moments.uniform(0.2, 0.9) * start_up_s
        return lambda pid: time.monotonic() > deadline
    if aim == BETWEEN:
        return lambda pid: job.finished_folds() > folds
    pause_s, begun = moments.uniform(0, 0.1) * training_s, list[float]()

    def is_writing(pid: int) -> bool:
        seen.update(job.temporaries())
        return len(seen) >= files

    def is_late(pid: int) -> bool:
        if not begun and job.is_trained_by(pid):
            begun.append(time.monotonic())
        return bool(begun) and time.monotonic() > begun[0] + pause_s

    return is_writing if aim == WRITING else is_late


def kill_again_and_again(job: Job, kills: int, start_up_s: float, training_s: float, seed: int) -> list[Kill]:
    """Kills of all kinds in random order; fewer if the training is over before."""
    moments = random.Random(seed)
    aims = [AIMS[i % len(AIMS)] for i in range(kills)]
    moments.shuffle(aims)
    done: list[Kill] = []
    for aim in aims:
        kill = kill_when(job, moment_of(aim, job, start_up_s, training_s, moments), aim)
        if kill is None:
            break
        done.append(kill)
        tell(len(done), kill)
    return done


def tell(number: int, kill: Kill) -> None:
    columns = (number, kill.aim, f"{kill.after_s:.1f} s", kill.fold, kill.epochs, kill.doing, kill.half_written)
    print("{:>4}  {:<23}{:>8}  {:<5}{:>6}  {:<26}{}".format(*columns), flush=True)


def differences(left_alone: Path, killed: Path) -> list[str]:
    """Names of files that only one of the runs has, or whose content is not the same.

    The seconds that epochs took are never the same: they have a file of their own, which is not compared.
    """
    runs = [
        {file.relative_to(run): file for file in run.rglob("*") if file.is_file() and file.name != TIMING_FILE}
        for run in (left_alone, killed)
    ]
    for files in runs:
        for name in [name for name in files if name.name.startswith(".") and name.suffix == ".tmp"]:
            print(f"left behind by a killed process: {files.pop(name)}")
    names = sorted(runs[0].keys() | runs[1].keys())
    same = [name for name in names if all(name in files for files in runs)]
    same = [name for name in same if runs[0][name].read_bytes() == runs[1][name].read_bytes()]
    print(f"{len(same)} of {len(names)} files are the same, byte for byte")
    return [str(name) for name in names if name not in same]


def main(kills: int, out: Path, *, slides: int = 24, tiles: int = 300, epochs: int = 8, seed: int = 0) -> list[str]:
    """The files that differ, or a word on what else went wrong."""
    cohort = out / "cohort"
    simulate(cohort, slides=slides, tiles=tiles)
    whole, broken = (Job(cohort, out / name, epochs) for name in ("left-alone", "killed"))
    began = time.monotonic()
    process = whole.start()
    while process.poll() is None and not (whole.run / "run.json").exists():
        time.sleep(POLL_S)
    start_up_s = time.monotonic() - began
    finish(process)
    training_s = time.monotonic() - began - start_up_s
    print(f"left alone: {start_up_s:.1f} s until training begins, {training_s:.1f} s for the rest\n")
    print("kill  when                       after  fold epochs  doing                     half-written files")
    done = kill_again_and_again(broken, kills, start_up_s, training_s, seed)
    finish(broken.start())
    print()
    wrong = differences(whole.run, broken.run)
    if len(done) < kills:
        wrong.append(f"only {len(done)} kills: the training was over too early")
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument(
        "--out", type=Path, default=Path("kill-and-resume"), help="new folder; removed if all went well"
    )
    arguments = parser.parse_args()
    wrong = main(arguments.kills, arguments.out, seed=arguments.seed)
    if wrong:
        sys.exit(f"not the same: {', '.join(wrong)}")
    shutil.rmtree(arguments.out)
    print("a killed training ends as one that was left alone")
