"""Finds out whether this machine's bf16 matrix products run at all, without dying of the answer.

Some virtual machines announce AMX and do not have it: every bf16 product then ends the process with SIGILL. oneDNN
reads `ONEDNN_MAX_CPU_ISA` when it is loaded, so the variable has to be set before torch is imported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

VARIABLE = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_FP16"
"""The largest instruction set of oneDNN that leaves AMX out."""

_PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); (a @ a).sum().item()"


def bf16_products_run() -> bool:
    """Return False if a bf16 matrix product is killed by SIGILL in a child process with this environment."""
    child = subprocess.run([sys.executable, "-c", _PRODUCT], capture_output=True, env=dict(os.environ))
    return child.returncode != -signal.SIGILL
