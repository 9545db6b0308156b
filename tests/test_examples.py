import runpy
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_learn_radius(tmp_path, capsys):
    """The loss falls, and the radii move from 7 towards the planted range and order with it."""
    example = runpy.run_path(str(EXAMPLES / "learn_radius.py"))
    runs = {r: example["train"](r, steps=220) for r in (2.0, 4.0)}
    final = {}
    for r, (losses, radii) in runs.items():
        assert sum(losses[:20]) / 20 > 0.6
        assert sum(losses[-20:]) / 20 < 0.4
        final[r] = torch.tensor(radii[-1])
        assert (final[r] - r).abs().mean() < (torch.tensor(radii[0]) - r).abs().mean() - 0.5  # closer by half a step
    assert final[2.0].mean() < final[4.0].mean() - 1
    example["report"](runs, tmp_path)
    assert (tmp_path / "learn_radius.png").stat().st_size > 10_000
    assert "K = " in capsys.readouterr().out
