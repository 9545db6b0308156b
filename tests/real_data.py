"""Where the real cohorts are, which are not in the repository: beside it, or where ``PSAMIL_DATA`` says."""

import os
from pathlib import Path

DATA = Path(os.environ.get("PSAMIL_DATA", Path(__file__).parents[2] / "shared" / "data"))
