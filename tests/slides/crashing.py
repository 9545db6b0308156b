"""What a decoder can do to a reading process. Imported there, so without torch."""

from __future__ import annotations

import os
import signal

from psamil.errors import OptionError
from psamil.slides import reading


def plan_slide(job, grid):
    if job.name == "kills":
        os.kill(os.getpid(), signal.SIGKILL)
    return reading.plan_slide(job, grid)


def read_tiles(job, coords_px0, size_px, mpp):
    if job.name == "crashes" and coords_px0[0].tolist() != [64, 64]:  # after its first chunk
        os.kill(os.getpid(), signal.SIGSEGV)
    if job.name == "raises":
        raise RuntimeError("codec")
    return reading.read_tiles(job, coords_px0, size_px, mpp)


def refuse():
    raise OptionError("no slide can be read")
