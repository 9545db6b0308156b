"""Settings for all tests."""

import os

# Some virtual machines announce AMX and then trap on it: bfloat16 products would end the run. Read when torch loads.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

torch.set_num_threads(1)  # tensors are small; threads that wait for each other on a busy machine take most of the time
