"""What training shows: live on a terminal, one line per epoch elsewhere."""

import io
from contextlib import suppress
from itertools import count

import pytest
from rich.console import Console

from psamil.cli import progress
from psamil.cli.progress import TrainingProgress

EPOCH = {
    "loss": 0.5,
    "lr": 1e-3,
    "validation auc": 0.75,
    "validation loss": 0.6,
    "radii_steps": [[2.0, 3.25], [4.0, 1]],
}


@pytest.fixture
def seconds(monkeypatch):
    """Ten seconds pass between any two looks at the clock."""
    clock = count(100.0, 10.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))


def train(shown, epochs=2, steps=3, jobs=("fold 0", "fold 1")):
    for i, job in enumerate(jobs):
        for epoch in range(epochs):
            for step in range(steps):
                left = len(jobs) - 1 - i
                shown.on_step(job, left, {"epoch": epoch, "step": step, "steps": steps, "loss": 0.25})
            shown.report(job, {"epoch": epoch, **EPOCH})


def test_plain_lines(seconds):
    console = Console(file=io.StringIO(), width=60)
    with TrainingProgress(console, 2) as shown:
        train(shown)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 4
    numbers = "loss 0.5000  validation auc 0.750  validation loss 0.600  K 2.0 3.2 / 4.0 1.0"
    # the clock is looked at in the first step and in each estimate: 10 s for 2 steps, of which 9 are left
    assert lines[0] == f"fold 0  epoch 1/2  {numbers}  at most 0:00:45 left"
    assert lines[1] == f"fold 0  epoch 2/2  {numbers}  at most 0:00:24 left"  # 20 s for 5 steps, 6 left
    assert lines[3] == f"fold 1  epoch 2/2  {numbers}  at most 0:00:00 left"


def test_a_terminal_keeps_one_line_per_job_and_shows_the_step():
    console = Console(file=io.StringIO(), width=100, force_terminal=True, force_interactive=True, color_system=None)
    with TrainingProgress(console, 2) as shown:
        train(shown, jobs=("fold 0, seed 1", "fold 0, seed 2"))
        shown._live.refresh()
    written = console.file.getvalue()
    assert written.count("fold 0, seed 1  epoch 2/2  loss 0.5000  validation auc 0.750") == 1
    assert "fold 0, seed 1  epoch 1/2  loss 0.5000" not in written
    assert "step 3/3  loss 0.2500" in written
    assert "epoch 2:  loss 0.5000  validation auc 0.750" in written
    assert written.rstrip().endswith("K 2.0 3.2 / 4.0 1.0")  # the last job stays, the display is gone
    assert not shown._live.is_started


def test_the_display_ends_with_an_error():
    console = Console(file=io.StringIO(), width=100, force_terminal=True, force_interactive=True)
    shown = TrainingProgress(console, 2)
    with suppress(KeyboardInterrupt), shown:
        shown.on_step("fold 0", 0, {"epoch": 0, "step": 0, "steps": 3, "loss": 0.25})
        assert shown._live.is_started
        raise KeyboardInterrupt
    assert not shown._live.is_started
    assert "\x1b[?25h" in console.file.getvalue()  # the cursor is back


def test_nothing_is_shown_for_a_run_that_is_finished():
    console = Console(file=io.StringIO())
    with TrainingProgress(console, 2):
        pass
    assert console.file.getvalue() == ""
