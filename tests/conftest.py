"""Settings that must be made before torch is imported."""

import os

# Some virtual machines announce AMX and then trap on it; bfloat16 products would end the test run.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
