import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_learn_radius(tmp_path, capsys):
    """The loss falls, and the head nearest to the planted range comes nearer and orders with it."""
    example = runpy.run_path(str(EXAMPLES / "learn_radius.py"))
    runs = {r: example["train"](r, steps=220) for r in (2.0, 4.0)}
    nearest = {}
    for r, (losses, radii) in runs.items():
        assert sum(losses[:20]) / 20 > 0.6
        assert sum(losses[-20:]) / 20 < 0.4
        first, last = (min(radii[i], key=lambda k: abs(k - r)) for i in (0, -1))
        assert abs(last - r) < abs(first - r) - 0.5
        nearest[r] = last
    assert nearest[2.0] < nearest[4.0] - 1
    example["report"](runs, tmp_path)
    assert (tmp_path / "learn_radius.png").stat().st_size > 10_000
    assert "K = " in capsys.readouterr().out
