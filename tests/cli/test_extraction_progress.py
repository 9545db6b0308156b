import io

import pytest
from rich.console import Console

from psamil.cli import extraction_progress
from psamil.cli.extraction_progress import ExtractionProgress
from psamil.slides.extraction import Step


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(extraction_progress.time, "monotonic", lambda: now[0])
    return now


def shown(steps, clock, interactive=False):
    """What is printed when each step takes ten seconds."""
    console = Console(file=io.StringIO(), force_terminal=interactive, force_interactive=interactive, width=120)
    with ExtractionProgress(console) as progress:
        for step in steps:
            clock[0] += 10
            progress.report(step)
            if interactive:
                progress._bars.refresh()
    return console.file.getvalue()


STEPS = [
    Step("a", 1, 5, 70, 70, "finished before"),
    Step("b", 1, 5, 0, 200),
    Step("b", 1, 5, 100, 200),
    Step("b", 2, 5, 200, 200, "done"),
    Step("c", 3, 5, 0, 0, "failed", "is no slide"),
    Step("d", 4, 5, 0, 0, "empty"),
]


def test_lines(clock):
    assert shown(STEPS, clock).splitlines() == [
        "2/5 b: 200 tiles, 5 per second, about 0:02:00 left",  # 3 slides to go at 40 s each
        "3/5 c: failed: is no slide",
        "4/5 d: no tile has enough tissue",
    ]


def test_bars(clock):
    told = shown(STEPS[:3], clock, interactive=True)
    assert "100/200" in told
    assert "1/5" in told
    assert "about 0:03:30 left" in told  # 30 s for half a slide, 3.5 to go
    assert "3 per second" in told
