"""Settings for all tests."""

import logging
import os

# Some virtual machines announce AMX and then trap on it: bfloat16 products would end the run. Read when torch loads.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

torch.set_num_threads(1)  # tensors are small; threads that wait for each other on a busy machine take most of the time


@pytest.fixture(autouse=True)
def logs_as_at_the_start():
    """The command line silences readers for the rest of its process, which here is that of other tests too."""
    logging.getLogger("psamil.readers").setLevel(logging.NOTSET)
